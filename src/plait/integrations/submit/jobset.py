"""A JobSet of Kubernetes: an indexed Job with a pod on each machine, and names by which the pods find each other.

Exit codes say what becomes of it. 75 means *saved, run me again*: the pods are made anew, as often as it takes. 2 means that the
command or the plan is wrong: it ends, as it does when its time is over. Anything else makes all pods anew, `--max-restarts` times, and
they go on from the newest checkpoint.

What all kinds of Kubernetes have in common: a container on each machine, with its devices, volumes and the shared secret.

Kubernetes reads $(NAME) in a command as a variable, and $$ as $: so every $ of a user's word is doubled.

Values as YAML that a person can read. A string is bare only where no reader can take it for anything else, and quoted as in JSON
everywhere else; several lines of plain text are a block. (A template of text would not do: `--option` sets any key of a document.)
"""

import re

from plait import PlaitError
from plait.config.errors import RESUMABLE, USAGE, Problem
from plait.integrations.submit.submission import Scheduler, Submission, comment

Value = str | int | bool | None | list["Value"] | dict[str, "Value"]

BARE = re.compile(r"-{0,2}[A-Za-z/](?:[A-Za-z0-9_./=-]|:(?=[A-Za-z0-9/]))*")
"""Words and options: what begins with a letter or a slash, and has no mark of YAML in it, is no number and no date."""
WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))
"""Which YAML 1.1 takes for something else than text."""
NAMED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
BLOCK = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\n)(?:(?:[\x20-\x7e]*[\x21-\x7e])?\n)*(?<!\n\n)")
"""Printable lines of which the first does not begin with a space, none ends with one, and the last is not empty."""


def dump(value: dict[str, Value]) -> str:
    return "".join(f"{row}\n" for row in _rows(value))


def _rows(value: "list[Value] | dict[str, Value]") -> list[str]:
    """The lines of a list or a table that is not empty."""
    rows: list[str] = []
    heads = [(f"{_text(key)}:", one) for key, one in value.items()] if isinstance(value, dict) else [("-", one) for one in value]
    for head, one in heads:
        first, *rest = _value(one)
        if head == "-" and not first:
            first, *rest = rest
        rows += [f"{head} {first}" if first else head]
        rows += rest if head != "-" and isinstance(one, list) else [f"  {row}" if row else "" for row in rest]
    return rows


def _value(value: Value) -> list[str]:
    """What stands behind a key, and the lines below it."""
    if isinstance(value, (dict, list)):
        return ["", *_rows(value)] if value else ["{}" if isinstance(value, dict) else "[]"]
    if isinstance(value, str):
        return ["|", *value.splitlines()] if value.count("\n") > 1 and BLOCK.fullmatch(value) else [_text(value)]
    return ["null" if value is None else str(value).lower()]


def _text(text: str) -> str:
    if BARE.fullmatch(text) and text.lower() not in WORDS:
        return text
    return '"' + "".join(map(_letter, text)) + '"'


def _letter(letter: str) -> str:
    if letter in NAMED:
        return NAMED[letter]
    if letter.isprintable() and letter != "\ufeff":
        return letter
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


GRACE = 120
"""Seconds that a pod has to save before it is removed."""
KEY = "secret"
"""Of the Secret, the entry in which the secret is."""


def command(asked: Submission, words: list[str], folder: str | None = None) -> list[Value]:
    """The words of a container's command. Setup comes first, in a shell that becomes the command; also `folder`, to which it goes."""
    if asked.setup or folder is not None:
        lines = [*(['cd -- "$1"', "shift"] if folder is not None else []), *asked.setup]
        shell = ["/bin/sh", "-c", "\n".join(["set -e", *lines, 'exec "$@"', ""]), "sh"]
        words = [*shell, *([folder] if folder is not None else []), *words]
    return [word.replace("$", "$$") for word in words]


def environment(asked: Submission) -> list[Value]:
    """The secret that the machines share."""
    reference: Value = {"secretKeyRef": {"name": asked.secret, "key": KEY}}
    return [{"name": "PLAIT_SECRET", "valueFrom": reference}] if asked.together else []


def resources(asked: Submission) -> dict[str, Value]:
    """What a machine must have."""
    found: dict[str, Value] = {}
    if asked.gpus:
        found["limits"] = {asked.gpu or "nvidia.com/gpu": str(asked.each)}
    if asked.cpus:
        found["requests"] = {"cpu": str(asked.cpus)}
    return found


def volumes(asked: Submission) -> list[Value]:
    """Claims, and as much shared memory as the machine has: the 64 MiB of a pod are too small for NCCL."""
    claims: list[Value] = [
        {"name": f"volume-{k}", "persistentVolumeClaim": {"claimName": claim}}
        for k, (claim, _) in enumerate(asked.volumes)
    ]
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims]


def mounts(asked: Submission) -> list[Value]:
    seen: list[Value] = [{"name": f"volume-{k}", "mountPath": path} for k, (_, path) in enumerate(asked.volumes)]
    return [{"name": "shm", "mountPath": "/dev/shm"}, *seen]


def notes(asked: Submission) -> list[str]:
    """What must be there before it is started."""
    if not asked.together:
        return []
    make = f'kubectl create secret generic {asked.secret} --from-literal={KEY}="$(openssl rand -hex 32)"'
    shared = [] if asked.volumes else [f"All machines must see one file system at {asked.runs}: --volume CLAIM:/path"]
    return [f"The machines know each other by a secret:  {make}", *shared]


def overlaid(document: dict[str, Value], asked: Submission, kind: str) -> dict[str, Value]:
    """The document with what the user says of it: `metadata.namespace=team`, `spec.suspend=true`."""
    for path, said in asked.options:
        *folders, last = path.split(".")
        here = document
        for folder in folders:
            inner = here.setdefault(folder, {})
            if not isinstance(inner, dict):
                what = f"--option {path[:80]}: {folder} is no table of {kind}"
                raise PlaitError(Problem("S002", what, fix=("--option metadata.namespace=team",)))
            here = inner
        here[last] = value_of(said)
    return document


def value_of(said: str | None) -> Value:
    """true, false and whole numbers are such; all else is text. A name alone is true."""
    if said is None or said in ("true", "false"):
        return said != "false"
    return int(said) if said.isascii() and said.removeprefix("-").isdecimal() and len(said) < 18 else said


FINAL: list[Value] = ["PodFailurePolicy", "DeadlineExceeded"]
"""Why a Job ended that is not made anew: the command was refused, or its time is over."""
GROUP, PORT = "node", 29500
"""The name of the one group of pods, and where number 0 listens."""


def write(asked: Submission) -> str:
    head = [f"{asked.job}: {asked.told}. Written by plait submit jobset; start it with  kubectl apply -f FILE"]
    return "".join(f"{comment(text)}\n" for text in head + notes(asked)) + dump(_document(asked))


def _document(asked: Submission) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": asked.name},
        "failurePolicy": {
            "maxRestarts": asked.restarts,
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": FINAL}],
        },
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": _job(asked)}}],
    }
    document: dict[str, Value] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": asked.name}, "spec": spec,
    }  # fmt: skip
    return overlaid(document, asked, "the JobSet")


def _job(asked: Submission) -> dict[str, Value]:
    def rule(action: str, code: int) -> Value:
        return {"action": action, "onExitCodes": {"containerName": "plait", "operator": "In", "values": [code]}}

    limit: dict[str, Value] = {} if asked.seconds is None else {"activeDeadlineSeconds": asked.seconds}
    return {
        "completionMode": "Indexed",
        "completions": asked.nodes,
        "parallelism": asked.nodes,
        "backoffLimit": 0,
        **limit,
        "podFailurePolicy": {"rules": [rule("Ignore", RESUMABLE), rule("FailJob", USAGE)]},
        "template": {"spec": _pod(asked)},
    }


def _pod(asked: Submission) -> dict[str, Value]:
    words = [*asked.train(), asked.counted]
    if asked.together:
        words.append(f"--master={asked.name}-{GROUP}-0-0.{asked.name}:{PORT}")
    container: dict[str, Value] = {"name": "plait", "image": asked.image, "command": command(asked, words)}
    container |= {"workingDir": asked.folder} if asked.folder is not None else {}
    container |= {"env": environment(asked)} if asked.together else {}
    container |= {"resources": resources(asked), "volumeMounts": mounts(asked)}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        "volumes": volumes(asked),
    }


SCHEDULER = Scheduler(
    "a JobSet", write, "kubectl apply -f FILE",
    frozenset(("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "secret", "option", "launch_cmd")), ("image",),
)  # fmt: skip
