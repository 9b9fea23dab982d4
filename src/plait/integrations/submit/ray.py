"""A job for a cluster of Ray: the command that submits it. `plait.ray` there starts the ranks by Ray Train."""

import re

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import Scheduler, Submission, comment, line

OPTION = re.compile(r"[a-z][a-z0-9-]*")


def write(asked: Submission) -> str:
    return "\n".join([
        "#!/bin/bash",
        comment(f"{asked.job}: {asked.told}. Written by plait submit ray; start it with  bash FILE"),
        *_quoting(asked),
        f"exec ray job submit {line(_options(asked))} -- \\\n  {line(entrypoint(asked))}",
        "",
    ])  # fmt: skip


def entrypoint(asked: Submission) -> list[str]:
    """What Ray runs on its head."""
    return ["python", "-m", "plait.ray", *asked.train()[len(asked.plait) + 1 :]]


def _quoting(asked: Submission) -> list[str]:
    if not re.search(r'[$`"\\]', " ".join(entrypoint(asked))):
        return []
    return ["# A ray older than June 2026 does not protect $, ` and \\ of these words from the shell of the head."]


def _options(asked: Submission) -> list[str]:
    said = {"working-dir": asked.folder or "."} | dict(asked.options)
    for name in said:
        if not OPTION.fullmatch(name):
            what = f"--option {name[:60]} is no option of `ray job submit`"
            raise PlaitError(Problem("S002", what, why="a long name, without dashes", fix=("--option no-wait",)))
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in said.items()]


SCHEDULER = Scheduler("Ray", write, "bash FILE", frozenset(("chdir", "option")))
