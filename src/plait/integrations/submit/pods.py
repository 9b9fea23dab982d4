"""What all kinds of Kubernetes have in common: a container on each machine, with its devices, volumes and the shared secret.

Kubernetes reads $(NAME) in a command as a variable, and $$ as $: so every $ of a user's word is doubled.
"""

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import Submission
from plait.integrations.submit.yaml import Value

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
