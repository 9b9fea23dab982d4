"""A JobSet of Kubernetes: an indexed Job with one pod per node, and DNS names by which the pods find each other.

The exit code selects the reaction. After 75 (*saved, run me again*) the pods are recreated, without a limit. After 2 (the command or the
plan is wrong) the JobSet ends, as it does at its time limit. After other codes all pods are recreated, up to `--max-restarts` times, and
they continue from the newest checkpoint.

Common to all kinds of Kubernetes are a container per node, with its devices, volumes and the shared secret.

Kubernetes expands $(NAME) in a command as a variable, and $$ to $, so every $ in a user's argument is doubled.

Values are written as readable YAML. A string is unquoted only if every YAML reader takes it for a string, and otherwise quoted as in JSON;
plain text of several lines is a block. (A text template is not enough, since `--option` sets any key of a document.)
"""

import re

from plait import PlaitError
from plait.config.errors import RESUMABLE, USAGE, Problem
from plait.integrations.submit.submission import Scheduler, Submission, format_comment

Value = str | int | bool | None | list["Value"] | dict[str, "Value"]

BARE_WORD = re.compile(r"-{0,2}[A-Za-z/](?:[A-Za-z0-9_./=-]|:(?=[A-Za-z0-9/]))*")
"""Words and options that need no quotes: they begin with a letter or slash, and are no YAML syntax, number or date."""
RESERVED_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))
"""Words that YAML 1.1 does not read as text."""
ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
BLOCK = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\n)(?:(?:[\x20-\x7e]*[\x21-\x7e])?\n)*(?<!\n\n)")
"""Printable lines: the first does not begin with a space, none ends with one, and the last is not empty."""


def dump_yaml(value: dict[str, Value]) -> str:
    return "".join(f"{row}\n" for row in _format_rows(value))


def _format_rows(value: "list[Value] | dict[str, Value]") -> list[str]:
    """Format the lines of a non-empty list or table."""
    rows: list[str] = []
    heads = [(f"{_quote_text(key)}:", one) for key, one in value.items()] if isinstance(value, dict) else [("-", one) for one in value]
    for head, one in heads:
        first, *rest = _format_value(one)
        if head == "-" and not first:
            first, *rest = rest
        rows += [f"{head} {first}" if first else head]
        rows += rest if head != "-" and isinstance(one, list) else [f"  {row}" if row else "" for row in rest]
    return rows


def _format_value(value: Value) -> list[str]:
    """Format the text after a key, and the lines below it."""
    if isinstance(value, (dict, list)):
        return ["", *_format_rows(value)] if value else ["{}" if isinstance(value, dict) else "[]"]
    if isinstance(value, str):
        return ["|", *value.splitlines()] if value.count("\n") > 1 and BLOCK.fullmatch(value) else [_quote_text(value)]
    return ["null" if value is None else str(value).lower()]


def _quote_text(text: str) -> str:
    if BARE_WORD.fullmatch(text) and text.lower() not in RESERVED_WORDS:
        return text
    return '"' + "".join(map(_escape_letter, text)) + '"'


def _escape_letter(letter: str) -> str:
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isprintable() and letter != "\ufeff":
        return letter
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


GRACE_S = 120
"""Seconds that a pod has to save before it is removed."""
SECRET_KEY = "secret"
"""Key of the secret in the Secret object."""


def build_command(submission: Submission, words: list[str], folder: str | None = None) -> list[Value]:
    """Build a container's command. Setup lines run first, in a shell that changes to `folder` and then executes the command."""
    if submission.setup or folder is not None:
        lines = [*(['cd -- "$1"', "shift"] if folder is not None else []), *submission.setup]
        shell = ["/bin/sh", "-c", "\n".join(["set -e", *lines, 'exec "$@"', ""]), "sh"]
        words = [*shell, *([folder] if folder is not None else []), *words]
    return [word.replace("$", "$$") for word in words]


def build_environment(submission: Submission) -> list[Value]:
    """Build the environment with the nodes' shared secret."""
    reference: Value = {"secretKeyRef": {"name": submission.secret, "key": SECRET_KEY}}
    return [{"name": "PLAIT_SECRET", "valueFrom": reference}] if submission.is_multi_node else []


def build_resources(submission: Submission) -> dict[str, Value]:
    """Build a node's resource limits and requests."""
    found: dict[str, Value] = {}
    if submission.gpus:
        found["limits"] = {submission.gpu or "nvidia.com/gpu": str(submission.per_node)}
    if submission.cpus:
        found["requests"] = {"cpu": str(submission.cpus)}
    return found


def build_volumes(submission: Submission) -> list[Value]:
    """Build volume claims, and shared memory without a limit, since a pod's 64 MiB are too small for NCCL."""
    claims: list[Value] = [
        {"name": f"volume-{k}", "persistentVolumeClaim": {"claimName": claim}}
        for k, (claim, _) in enumerate(submission.volumes)
    ]
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims]


def build_mounts(submission: Submission) -> list[Value]:
    seen: list[Value] = [{"name": f"volume-{k}", "mountPath": path} for k, (_, path) in enumerate(submission.volumes)]
    return [{"name": "shm", "mountPath": "/dev/shm"}, *seen]


def list_notes(submission: Submission) -> list[str]:
    """List the prerequisites of a start."""
    if not submission.is_multi_node:
        return []
    make = f'kubectl create secret generic {submission.secret} --from-literal={SECRET_KEY}="$(openssl rand -hex 32)"'
    shared = [] if submission.volumes else [f"All machines must see one file system at {submission.runs}: --volume CLAIM:/path"]
    return [f"The machines authenticate each other by a secret:  {make}", *shared]


def apply_options(document: dict[str, Value], submission: Submission, kind: str) -> dict[str, Value]:
    """Apply the user's options to the document: `metadata.namespace=team`, `spec.suspend=true`."""
    for path, said in submission.options:
        *folders, last = path.split(".")
        here = document
        for folder in folders:
            inner = here.setdefault(folder, {})
            if not isinstance(inner, dict):
                what = f"--option {path[:80]}: {folder} is not a table of {kind}"
                raise PlaitError(Problem("S002", what, fix=("--option metadata.namespace=team",)))
            here = inner
        here[last] = parse_value(said)
    return document


def parse_value(said: str | None) -> Value:
    """Parse true, false and integers; other text stays text. A name without a value is true."""
    if said is None or said in ("true", "false"):
        return said != "false"
    return int(said) if said.isascii() and said.removeprefix("-").isdecimal() and len(said) < 18 else said


FINAL_REASONS: list[Value] = ["PodFailurePolicy", "DeadlineExceeded"]
"""Reasons after which a Job is not recreated: the command was rejected, or its time is over."""
GROUP, PORT = "node", 29500
"""Name of the only group of pods, and port of node 0."""


def write_jobset(submission: Submission) -> str:
    head = [f"{submission.job}: {submission.description}. Written by plait submit jobset; start it with  kubectl apply -f FILE"]
    return "".join(f"{format_comment(text)}\n" for text in head + list_notes(submission)) + dump_yaml(_build_jobset(submission))


def _build_jobset(submission: Submission) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": submission.name},
        "failurePolicy": {
            "maxRestarts": submission.restarts,
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": FINAL_REASONS}],
        },
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": _build_job_spec(submission)}}],
    }
    document: dict[str, Value] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": submission.name}, "spec": spec,
    }  # fmt: skip
    return apply_options(document, submission, "the JobSet")


def _build_job_spec(submission: Submission) -> dict[str, Value]:
    def rule(action: str, code: int) -> Value:
        return {"action": action, "onExitCodes": {"containerName": "plait", "operator": "In", "values": [code]}}

    limit: dict[str, Value] = {} if submission.seconds is None else {"activeDeadlineSeconds": submission.seconds}
    return {
        "completionMode": "Indexed",
        "completions": submission.nodes,
        "parallelism": submission.nodes,
        "backoffLimit": 0,
        **limit,
        "podFailurePolicy": {"rules": [rule("Ignore", RESUMABLE), rule("FailJob", USAGE)]},
        "template": {"spec": _build_pod(submission)},
    }


def _build_pod(submission: Submission) -> dict[str, Value]:
    words = [*submission.build_train_words(), submission.nnodes_flag]
    if submission.is_multi_node:
        words.append(f"--master={submission.name}-{GROUP}-0-0.{submission.name}:{PORT}")
    container: dict[str, Value] = {"name": "plait", "image": submission.image, "command": build_command(submission, words)}
    container |= {"workingDir": submission.folder} if submission.folder is not None else {}
    container |= {"env": build_environment(submission)} if submission.is_multi_node else {}
    container |= {"resources": build_resources(submission), "volumeMounts": build_mounts(submission)}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": build_volumes(submission),
    }


SCHEDULER = Scheduler(
    "a JobSet", write_jobset, "kubectl apply -f FILE",
    frozenset(("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "secret", "option", "launch_cmd")), ("image",),
)  # fmt: skip
