"""All schedulers by the name that `plait submit` takes, which is that of their file. It is read when it is asked for: --help needs none."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.integrations.submit.scheduler import Scheduler

KINDS = ("slurm", "trainjob", "jobset", "skypilot", "ray", "ssh")


def scheduler(kind: str) -> "Scheduler":
    """The `SCHEDULER` of a file."""
    return import_module(f"plait.integrations.submit.{kind}").SCHEDULER
