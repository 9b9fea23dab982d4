"""A submission for any scheduler: a job under a plan, on a number of nodes, with the options of `plait train`.

A scheduler is described by the text that is written for it, and by the options that it supports.

A script is a template with fields. Words are quoted for a POSIX shell, so each word arrives unchanged.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from string import Template

from plait import PlaitError, Plan
from plait.config.command_options import format_flag
from plait.config.errors import Problem
from plait.config.keys import AXES

NAME_PATTERN = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Pattern of names that every scheduler accepts; Kubernetes derives host names from it."""
MAX_NAME = 40
"""Maximum length of a name: Kubernetes appends to it, and a label of a host name has at most 63 characters."""


@dataclass(frozen=True)
class Submission:
    """A job, a plan, the nodes, and the user's options for starting it."""

    job: str
    plan: Plan
    nodes: int
    per_node: int
    """Devices of the plan on each node."""
    name: str
    words: tuple[str, ...] = ()
    """Options of `plait train` as given, without those below."""
    runs: str = "runs"
    resume: str | None = None
    """The user's value of --resume; None: each start continues from the end of the previous one."""
    restarts: int = 2
    gpus: bool = True
    """Whether each rank drives a GPU; otherwise it is a CPU process."""
    gpu: str | None = None
    """The scheduler's name for the kind of GPU."""
    cpus: int | None = None
    """CPU cores of each node."""
    seconds: int | None = None
    """Time limit of the scheduler."""
    image: str | None = None
    volumes: tuple[tuple[str, str], ...] = ()
    """Names of volumes, and their mount paths."""
    folder: str | None = None
    """Working directory of the command; a job's path may be relative to it."""
    setup: tuple[str, ...] = ()
    """Shell lines that run before the command."""
    hosts: tuple[str, ...] = ()
    master: str | None = None
    secret: str = "plait"
    """Name of the shared secret in the scheduler's secret store."""
    plait: tuple[str, ...] = ("plait",)
    """Command that starts plait on the nodes."""
    options: tuple[tuple[str, str | None], ...] = ()
    """Options passed to the scheduler: names, and optional values."""
    min_nodes: int | None = None
    """Minimum number of nodes for a start or a restart, if given."""

    @property
    def path(self) -> str:
        """The job's path, in a form that is not parsed as an option."""
        return f"./{self.job}" if self.job.startswith("-") else self.job

    @property
    def nnodes_flag(self) -> str:
        """--nnodes of `plait train`."""
        return f"--nnodes={self.nodes}" if self.min_nodes is None else f"--nnodes={self.min_nodes}:{self.nodes}"

    @property
    def is_multi_node(self) -> bool:
        """Whether there are several nodes, which must connect."""
        return self.nodes > 1

    def build_train_words(self, runs: str | None = None) -> list[str]:
        """Build the words of `plait train`, without the node rank. `runs`: replaces the folder of this name.

        Each start is the same command: a restart continues from the newest checkpoint. The runs have their own folder, so that a start does not
        continue another user's run.
        """
        runs = runs or (self.own_runs if self.resume is None else self.runs)
        words = [*self.plait, "train", self.path, "--plan", str(self.plan), *self.words, f"--runs={runs}"]
        return [*words, f"--resume={'auto' if self.resume is None else self.resume}"]

    @property
    def own_runs(self) -> str:
        """Folder of the runs of this name."""
        return f"{self.runs.rstrip('/')}/{self.name}"

    @property
    def description(self) -> str:
        """Description: dp=16 on 2 machines of 8 devices."""
        return f"{self.plan} on {_format_count(self.nodes, 'machine')} of {_format_count(self.per_node, 'device')}"

    def has_option(self, *names: str) -> bool:
        """Whether the user gave one of these of the scheduler's own options."""
        return any(name in names for name, _ in self.options)


def resolve_layout(plan: Plan, nodes: int | None, each: int | None, source: str = "") -> tuple[Plan, int, int]:
    """Fill the plan's wildcard; return it with the nodes and the devices per node. Raises S001 if they are inconsistent."""
    nodes = 1 if nodes is None and each is None and not any(getattr(plan, axis) == 0 for axis in AXES) else nodes
    wild = next((axis for axis in AXES if getattr(plan, axis) == 0), None)
    if wild is not None and (nodes is None or each is None):
        what = f"{wild}=* fills the devices, and the number of devices is unknown"
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
        raise PlaitError(_layout_mismatch(plan, nodes, each, source))
    if plan.processes == "one" and nodes > 1:
        why = f"processes=one is one process, and {nodes} machines need at least {nodes}"
        raise PlaitError(Problem("S001", "the plan runs on one machine only", why=why, fix=("--nnodes 1",)))
    return plan, nodes, each


def _layout_mismatch(plan: Plan, nodes: int, each: int, source: str) -> Problem:
    there, used = nodes * each, [f"{axis}={getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1]
    what = f"the plan needs {_format_count(plan.devices, 'device')}, and {_format_count(nodes, 'machine')} of {each} are {there}"
    fix = [f"--nnodes {nodes} --nproc {plan.devices // nodes}"] if plan.devices % nodes == 0 else []
    fix += [f"--nnodes {plan.devices // each} --nproc {each}"] if plan.devices % each == 0 else []
    fix += ["plait plan JOB --machine NAME --output plan.toml    a plan for these machines"]
    return Problem("S001", what, why=f"{' × '.join(used) or 'dp=1'} = {plan.devices}", where=source, fix=tuple(fix))


def make_slug(job: str) -> str:
    """Make a name from a job's path: examples/stdlib_gpt/job.py -> stdlib-gpt."""
    path, _, function = job.partition(":")
    parts = [part for part in path.removesuffix(".py").split("/") if part not in ("", ".", "..")]
    stem = parts[-2] if parts[-1:] == ["job"] and len(parts) > 1 else parts[-1] if parts else ""
    words = re.sub(r"[^a-z0-9]+", "-", f"{stem}-{function}".lower()).strip("-")
    return re.sub(r"^(?![a-z])", "job-", words)[:MAX_NAME].strip("-")


def check_name(name: str) -> None:
    """Raise S002 for a name that some scheduler rejects."""
    if len(name) > MAX_NAME or not NAME_PATTERN.fullmatch(name):
        what = f"`{name[:60]}` is not a valid name for a scheduler"
        why = f"a name has at most {MAX_NAME} letters a-z, digits and dashes, and begins with a letter"
        raise PlaitError(Problem("S002", what, why=why, fix=(f"--name {make_slug(name) or 'job'}",)))


def check_text(said: Mapping[str, str]) -> None:
    """Raise S002 for values that cannot be written as text. `said`: values by their options."""
    for option, text in said.items():
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            what = f"{option} {text.encode('utf-8', 'backslashreplace').decode()[:80]} is not valid text"
            why = "it has bytes that are not UTF-8, and the file is UTF-8"
            raise PlaitError(Problem("S002", what, why=why, fix=("another name",)))


def _format_count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Scheduler:
    """A kind of file that `plait submit` writes."""

    name: str
    """Name for users: Slurm."""
    write: Callable[[Submission], str]
    start: str
    """Command that starts the written file; FILE stands for the file."""
    options: frozenset[str]
    """Options of `SCHEDULER_OPTIONS` that it supports, without dashes."""
    required: tuple[str, ...] = ()
    """Options of these that it requires."""


SCHEDULER_OPTIONS = ("cpus", "gpu", "time", "image", "volume", "chdir", "setup", "hosts", "secret", "option", "launch_cmd", "master")
"""Options that only some schedulers support."""
ALTERNATIVES = {
    "image": '--launch-cmd "apptainer exec --nv image.sif plait"    runs it in an image',
    "time": "leave out --time; Ctrl-C or SIGTERM saves and stops",
    "volume": "--runs FOLDER    on a file system that all machines see",
    "hosts": "leave out --hosts: the scheduler chooses them",
    "secret": "leave out --secret",
    "master": "leave out --master: the scheduler sets the address of number 0",
}
"""Fixes for unsupported options."""
EXAMPLES = {"image": "--image registry/team/train:1", "hosts": "--hosts node1,node2", "gpu": "--gpu H100"}


def load_scheduler(kind: str) -> Scheduler:
    """Load the scheduler of this name, one of `SCHEDULERS`, from its module."""
    return import_module(f"plait.integrations.submit.{kind}").SCHEDULER


def check_options(kind: str, scheduler: Scheduler, given: set[str], gpus: bool) -> None:
    """Raise S002 for options that the scheduler does not support, and for missing required ones. `gpus`: whether it allocates GPUs."""
    problems = [
        Problem("S002", f"{scheduler.name} has no {format_flag(name)}", fix=(ALTERNATIVES.get(name, f"leave out {format_flag(name)}"),))
        for name in SCHEDULER_OPTIONS
        if name in given and name not in scheduler.options
    ]
    missing = [name for name in scheduler.required if name not in given and (gpus or name != "gpu")]
    problems += [
        Problem("S002", f"plait submit {kind} needs {format_flag(name)}", fix=(EXAMPLES.get(name, format_flag(name)),))
        for name in missing
    ]
    if problems:
        raise PlaitError(problems)


SECRET = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
"""Shell command that generates a secret of 64 hexadecimal digits."""


class Script(Template):
    """A script with fields such as @{name}; each $ belongs to the shell."""

    delimiter = "@"


def join_shell_words(words: Iterable[str]) -> str:
    """Join words to a POSIX shell command. Options stay readable: --runs='my runs', not '--runs=my runs'."""
    return " ".join(map(_quote_word, words))


def _quote_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and value and shlex.quote(name) == name and name.startswith("--"):
        return f"{name}={shlex.quote(value)}"
    return shlex.quote(word)


def format_comment(text: str) -> str:
    """Format text as a comment on one line."""
    return "# " + "".join(letter if letter.isprintable() else "?" for letter in text)
