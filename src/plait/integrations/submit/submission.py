"""What is to be started, whoever starts it: a job under a plan, on so many machines, with these words of `plait train`.

How a scheduler is described: the text that is written for it, and which of the options it can do something with.

Scripts: a template with fields, and words as a shell reads them, each of which comes out as it went in.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from string import Template

from plait import PlaitError, Plan
from plait.config.command_options import flag_of
from plait.config.errors import Problem
from plait.config.keys import AXES

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""What every scheduler takes for a name; Kubernetes makes host names of it."""
LONGEST = 40
"""Characters of a name: Kubernetes appends to it, and a part of a host's name has 63 at most."""


@dataclass(frozen=True)
class Submission:
    """A job, a plan, the machines, and everything that was said of how to start it."""

    job: str
    plan: Plan
    nodes: int
    each: int
    """Devices of the plan on each machine."""
    name: str
    words: tuple[str, ...] = ()
    """Options of `plait train` as they were given, without those that stand below."""
    runs: str = "runs"
    resume: str | None = None
    """What the user says to start from; None: each start goes on where the last one ended."""
    restarts: int = 2
    gpus: bool = True
    """Whether each rank drives a GPU; else it is a process on cores."""
    gpu: str | None = None
    """What the scheduler calls the kind of GPU."""
    cpus: int | None = None
    """Cores of each machine."""
    seconds: int | None = None
    """How long the scheduler lets it run."""
    image: str | None = None
    volumes: tuple[tuple[str, str], ...] = ()
    """Names of volumes, and the paths at which they are seen."""
    folder: str | None = None
    """Where the command is started: a job's path may begin there."""
    setup: tuple[str, ...] = ()
    """Lines of shell that come before it."""
    hosts: tuple[str, ...] = ()
    master: str | None = None
    secret: str = "plait"
    """Where the scheduler keeps secrets by name: that of the secret which machines share."""
    plait: tuple[str, ...] = ("plait",)
    """How plait is called there."""
    options: tuple[tuple[str, str | None], ...] = ()
    """What is passed on to the scheduler: names, and values where there are any."""
    least: int | None = None
    """With so many machines the run starts and goes on, where that was said."""

    @property
    def path(self) -> str:
        """The job's path, such that nothing takes it for an option."""
        return f"./{self.job}" if self.job.startswith("-") else self.job

    @property
    def counted(self) -> str:
        """--nnodes of `plait train`."""
        return f"--nnodes={self.nodes}" if self.least is None else f"--nnodes={self.least}:{self.nodes}"

    @property
    def together(self) -> bool:
        """Whether there are several machines, which must meet."""
        return self.nodes > 1

    def train(self, runs: str | None = None) -> list[str]:
        """The words of `plait train`, without which of the machines this is. `runs`: instead of the folder of this name.

        Each start is the same command: what a scheduler starts again goes on from the newest checkpoint. So that it does not take
        up a run of somebody else's, its runs have a folder of their own.
        """
        runs = runs or (self.own_runs if self.resume is None else self.runs)
        words = [*self.plait, "train", self.path, "--plan", str(self.plan), *self.words, f"--runs={runs}"]
        return [*words, f"--resume={'auto' if self.resume is None else self.resume}"]

    @property
    def own_runs(self) -> str:
        """The folder of the runs of this name."""
        return f"{self.runs.rstrip('/')}/{self.name}"

    @property
    def told(self) -> str:
        """In words: dp=16 on 2 machines of 8 devices."""
        return f"{self.plan} on {_count(self.nodes, 'machine')} of {_count(self.each, 'device')}"

    def overrules(self, *names: str) -> bool:
        """Whether the user said one of these of the scheduler's own options."""
        return any(name in names for name, _ in self.options)


def laid_out(plan: Plan, nodes: int | None, each: int | None, source: str = "") -> tuple[Plan, int, int]:
    """The plan with its wildcard filled, the machines and the devices on each. S001 when they do not go together."""
    nodes = 1 if nodes is None and each is None and not any(getattr(plan, axis) == 0 for axis in AXES) else nodes
    wild = next((axis for axis in AXES if getattr(plan, axis) == 0), None)
    if wild is not None and (nodes is None or each is None):
        what = f"{wild}=* fills the devices, and nobody says how many there are"
        raise PlaitError(Problem("S001", what, fix=("--nnodes 2 --nproc 8", "a plan with numbers")))
    if nodes is not None and each is not None:
        if wild is not None:
            plan = plan.fill(nodes * each)
    elif nodes is None:
        assert each is not None
        nodes = max(1, plan.devices // each)
    else:
        each = max(1, plan.devices // nodes)
    assert nodes is not None
    if nodes * each != plan.devices:
        raise PlaitError(_mismatch(plan, nodes, each, source))
    if plan.processes == "one" and nodes > 1:
        why = f"processes=one is one process, and {nodes} machines are {nodes} at least"
        raise PlaitError(Problem("S001", "the plan runs on one machine only", why=why, fix=("--nnodes 1",)))
    return plan, nodes, each


def _mismatch(plan: Plan, nodes: int, each: int, source: str) -> Problem:
    there, used = nodes * each, [f"{axis}={getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1]
    what = f"the plan wants {_count(plan.devices, 'device')}, and {_count(nodes, 'machine')} of {each} are {there}"
    fix = [f"--nnodes {nodes} --nproc {plan.devices // nodes}"] if plan.devices % nodes == 0 else []
    fix += [f"--nnodes {plan.devices // each} --nproc {each}"] if plan.devices % each == 0 else []
    fix += ["plait plan JOB --machine NAME --output plan.toml    a plan for these machines"]
    return Problem("S001", what, why=f"{' × '.join(used) or 'dp=1'} = {plan.devices}", where=source, fix=tuple(fix))


def slug(job: str) -> str:
    """A name for a job's path: examples/stdlib_gpt/job.py -> stdlib-gpt."""
    path, _, function = job.partition(":")
    parts = [part for part in path.removesuffix(".py").split("/") if part not in ("", ".", "..")]
    stem = parts[-2] if parts[-1:] == ["job"] and len(parts) > 1 else parts[-1] if parts else ""
    words = re.sub(r"[^a-z0-9]+", "-", f"{stem}-{function}".lower()).strip("-")
    return re.sub(r"^(?![a-z])", "job-", words)[:LONGEST].strip("-")


def check_name(name: str) -> None:
    """S002 when not every scheduler takes it for a name."""
    if len(name) > LONGEST or not NAME.fullmatch(name):
        what = f"`{name[:60]}` is no name for a scheduler"
        why = f"it has at most {LONGEST} letters a-z, digits and dashes, and begins with a letter"
        raise PlaitError(Problem("S002", what, why=why, fix=(f"--name {slug(name) or 'job'}",)))


def check_text(said: Mapping[str, str]) -> None:
    """S002 for values that no file can hold as text, by the option that they were given to."""
    for option, text in said.items():
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            what = f"{option} {text.encode('utf-8', 'backslashreplace').decode()[:80]} is no text"
            why = "it has bytes that are not UTF-8, and the file is UTF-8"
            raise PlaitError(Problem("S002", what, why=why, fix=("another name",)))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


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


OWN = ("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "hosts", "secret", "option", "launch_cmd", "master")
"""Options that not every scheduler has."""
INSTEAD = {
    "image": '--launch-cmd "apptainer exec --nv image.sif plait"    runs it in an image',
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
        Problem("S002", f"{scheduler.name} has no {flag_of(name)}", fix=(INSTEAD.get(name, f"leave out {flag_of(name)}"),))
        for name in OWN
        if name in given and name not in scheduler.takes
    ]
    missing = [name for name in scheduler.needs if name not in given and (gpus or name != "gpu")]
    problems += [
        Problem("S002", f"plait submit {kind} needs {flag_of(name)}", fix=(EXAMPLE.get(name, flag_of(name)),))
        for name in missing
    ]
    if problems:
        raise PlaitError(problems)


SECRET = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
"""Draws a secret: 64 hexadecimal digits."""


class Script(Template):
    """A script with fields such as @{name}; each $ is the shell's."""

    delimiter = "@"


def line(words: Iterable[str]) -> str:
    """A command of a POSIX shell. A value keeps its option readable: --runs='my runs', not '--runs=my runs'."""
    return " ".join(map(_word, words))


def _word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and value and shlex.quote(name) == name and name.startswith("--"):
        return f"{name}={shlex.quote(value)}"
    return shlex.quote(word)


def comment(text: str) -> str:
    """Text in a comment: on one line, whatever is in it."""
    return "# " + "".join(letter if letter.isprintable() else "?" for letter in text)
