"""How a scheduler is described: the text that is written for it, and which of the options it can do something with."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from plait import PlaitError
from plait.config.errors import Problem
from plait.integrations.submit.submission import Submission


@dataclass(frozen=True)
class Scheduler:
    """A kind of file that `plait submit` writes."""

    name: str
    """As a user would say it: Slurm."""
    write: Callable[[Submission], str]
    start: str
    """The command that starts what was written; FILE is the file."""
    takes: frozenset[str]
    """Options of `plait submit`, of those that not every scheduler has, without their dashes."""
    needs: tuple[str, ...] = ()
    """Those of them without which it cannot be written."""


OWN = ("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "hosts", "secret", "option", "call", "master")
"""Options that not every scheduler has."""
INSTEAD = {
    "image": '--call "apptainer exec --nv image.sif plait"    runs it in an image',
    "time": "leave out --time; Ctrl-C or SIGTERM saves and stops",
    "volume": "--runs FOLDER    on a file system that all machines see",
    "hosts": "leave out --hosts: the scheduler chooses them",
    "secret": "leave out --secret",
    "master": "leave out --master: the scheduler says where number 0 is",
}
"""What to say where a scheduler has no such option."""
EXAMPLE = {"image": "--image registry/team/train:1", "hosts": "--hosts node1,node2", "gpu": "--gpu H100"}


def scheduler(kind: str) -> Scheduler:
    """The scheduler of this name, one of `SCHEDULERS`: that of its file."""
    return import_module(f"plait.integrations.submit.{kind}").SCHEDULER


def check(kind: str, scheduler: Scheduler, given: set[str], gpus: bool) -> None:
    """S002 for options that the scheduler can do nothing with, and for those that it needs. `gpus`: whether it gives away GPUs."""
    problems = [
        Problem("S002", f"{scheduler.name} has no --{name}", fix=(INSTEAD.get(name, f"leave out --{name}"),))
        for name in OWN
        if name in given and name not in scheduler.takes
    ]
    missing = [name for name in scheduler.needs if name not in given and (gpus or name != "gpu")]
    problems += [
        Problem("S002", f"plait submit {kind} needs --{name}", fix=(EXAMPLE.get(name, f"--{name}"),))
        for name in missing
    ]
    if problems:
        raise PlaitError(problems)
