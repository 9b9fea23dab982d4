"""A job for a Ray cluster: a script that submits it. On the cluster `plait.ray` starts the ranks by Ray Train."""

import re

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import Scheduler, Submission, format_comment, join_shell_words

OPTION = re.compile(r"[a-z][a-z0-9-]*")


def write_ray_script(submission: Submission) -> str:
    return "\n".join([
        "#!/bin/bash",
        format_comment(f"{submission.job}: {submission.description}. Written by plait submit ray; start it with  bash FILE"),
        *_warn_quoting(submission),
        f"exec ray job submit {join_shell_words(_format_ray_options(submission))} -- \\\n  {join_shell_words(build_entrypoint(submission))}",
        "",
    ])  # fmt: skip


def build_entrypoint(submission: Submission) -> list[str]:
    """Build the command that Ray runs on its head node."""
    return ["python", "-m", "plait.ray", *submission.build_train_words()[len(submission.plait) + 1 :]]


def _warn_quoting(submission: Submission) -> list[str]:
    if not re.search(r'[$`"\\]', " ".join(build_entrypoint(submission))):
        return []
    return ["# Versions of ray before June 2026 do not quote $, ` and \\ in these words for the shell of the head node."]


def _format_ray_options(submission: Submission) -> list[str]:
    said = {"working-dir": submission.folder or "."} | dict(submission.options)
    for name in said:
        if not OPTION.fullmatch(name):
            what = f"--option {name[:60]} is not an option of `ray job submit`"
            raise PlaitError(Problem("S002", what, why="it must be a long name, without dashes", fix=("--option no-wait",)))
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in said.items()]


SCHEDULER = Scheduler("Ray", write_ray_script, "bash FILE", frozenset(("chdir", "option")))
