"""The options of each command, in the order of `plait COMMAND --help`.

The options of a command are a frozen dataclass. Each field is an option: its name, help, values, and where it can be given. The fields
define the parser of the command line (`cli/main.py`), the keyword arguments in Python (`api.py`), the words that `plait submit` forwards,
and the valid ranges. The job's arguments (`--job.NAME`) are the field `arguments` of every command.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, get_args, get_origin

from plait.config import former_names
from plait.config.errors import PlaitError, Problem, too_small_problem
from plait.config.hardware import DEVICE_KINDS, UNSUPPORTED_DEVICES

T = TypeVar("T")
REQUIRED = MISSING
"""The default of a required option."""


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str
    """Name in Python, and of the field."""
    kind: type
    """Type of the value, or of each value if `many`: bool, int, float, str or Path."""
    many: bool
    default: object
    help: str | None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    """Minimum of a number."""
    words: tuple[str, ...] = ()
    """Names on the command line, if they differ from --name."""
    by_place: bool = False
    """A positional argument."""
    bare: str | None = None
    """Value if the option is given without one; None if a value is required."""
    listed: bool = False
    """Comma-separated values, for which Python also accepts a list."""
    python: bool = True
    """Also a keyword argument in Python."""
    handed_on: bool = True
    """`plait submit` forwards it unchanged to `plait train` on the nodes."""
    former: str = ""
    """Name in the previous version, which is accepted with a warning."""
    former_values: Mapping[str, str] = field(default_factory=dict)
    """Values of the previous version, which are accepted with a warning, and their present names."""

    @property
    def flag(self) -> str:
        """The flag on the command line, such as --save-every."""
        return self.words[-1] if self.words else format_flag(self.name)

    def replace_former(self, value: T) -> T | str:
        """Replace a former value by its present name, with a warning."""
        if not isinstance(value, str) or value not in self.former_values:
            return value
        former_names.warn_renamed("value", f"{self.flag} {value}", now := self.former_values[value])
        return now


def format_flag(name: str) -> str:
    """Return the flag of an option.

    >>> format_flag("save_every")
    '--save-every'
    """
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Base of the options of every command: parsed words of the command line, or keywords of the Python API."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Arguments of the job's function: --job.NAME on the command line."""
    stdout: TextIO | None = None
    """Standard output for the result, while sys.stdout is standard error (`cli/result.py`). None: sys.stdout."""


def option(default: object, help: str | None, **facts: Any) -> Any:
    """Define a field that is an option; `facts` are fields of `Option`."""
    return field(default=default, metadata={"help": help, **facts})


@cache
def list_options(command: type[CommandOptions]) -> dict[str, Option]:
    """Return the options of a command by name, in the order of its help."""
    return {each.name: _parse_field(each) for each in fields(command) if "help" in each.metadata}


def _parse_field(source: Field[Any]) -> Option:
    """Build the option of a field: `int | None` accepts a number, `tuple[str, ...]` repeated strings."""
    kind, *_ = [kind for kind in get_args(source.type) if kind is not NoneType] or [source.type]
    return Option(source.name, kind, get_origin(source.type) is tuple, source.default, **source.metadata)


def format_words(given: CommandOptions, options: Iterable[Option] | None = None) -> list[str]:
    """Format values that differ from the default as words of a command line. `options`: only these."""
    words = list[str]()
    for each in list_options(type(given)).values() if options is None else options:
        value = getattr(given, each.name)
        if value != each.default:
            named = "" if each.by_place else f"{each.flag}="
            words += [each.flag] if value is True else [f"{named}{one}" for one in (value if each.many else (value,))]
    return [*words, *(f"--job.{name}={value}" for name, value in given.arguments.items())]


def replace_options(command: type[CommandOptions], words: Sequence[str], changed: Sequence[str]) -> list[str]:
    """Remove options such as `--json` from a command line, and replace others, such as `--workers=2`.

    >>> replace_options(TrainOptions, ["job.py", "--workers", "4", "--json"], ["--workers=2", "--json"])
    ['job.py', '--workers=2']
    """
    takes = {flag: each for each in list_options(command).values() for flag in (each.flag, *each.words)}
    out, rest, kept = {word.partition("=")[0] for word in changed}, list(words), list[str]()
    while rest:
        word = rest.pop(0)
        option = takes.get(word)  # a word with = contains its value
        value = rest[:1] if option and option.kind is not bool and rest and not rest[0].startswith("-") else []
        del rest[: len(value)]
        kept += [] if word.partition("=")[0] in out else [word, *value]
    return [*kept, *(word for word in changed if "=" in word)]


def check_range(options: CommandOptions) -> None:
    """Raise U002 for numbers below their minimum."""
    if problems := find_out_of_range(options):
        raise PlaitError(problems)


def find_out_of_range(options: CommandOptions) -> list[Problem]:
    """Return U002 for each number below its minimum."""
    found = list[Problem]()
    for name, each in list_options(type(options)).items():
        value = getattr(options, name)
        if each.least is not None and value is not None and value < each.least:
            found.append(too_small_problem(each.flag, value, each.least))
    return found


if TYPE_CHECKING:
    from plait.config.job import Job

CHECKS = ("none", "quick", "full")
SCHEDULERS = ("slurm", "trainjob", "jobset", "skypilot", "ray", "ssh")
"""The schedulers of `plait submit`."""
SHELL_ONLY: dict[str, Any] = {"python": False, "handed_on": False}
"""For options that print the result in a shell, or identify this node."""


def json_option() -> Any:
    return option(False, "print the result as JSON on standard output", **SHELL_ONLY)


def verbose_option() -> Any:
    return option(False, "show tracebacks", words=("-v", "--verbose"), **SHELL_ONLY)


def device_option() -> Any:
    return option(
        "auto",
        "device type; cuda includes ROCm (default: auto)",
        choices=(*DEVICE_KINDS, *UNSUPPORTED_DEVICES),
        metavar=f"{{{','.join(DEVICE_KINDS)}}}",
    )


@dataclass(frozen=True, kw_only=True)
class JobOptions(CommandOptions):
    """The job, and the output format."""

    job: str = option(
        REQUIRED, "path/to/job.py, path/to/job.py:function, or hf:FOLDER of a Hugging Face config; arguments of the job: --job.NAME VALUE",
        by_place=True, metavar="JOB", **SHELL_ONLY,
    )  # fmt: skip
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class SplitOptions(JobOptions):
    """The job, the plan, and the device."""

    plan: str | None = option(
        None, 'a line such as "dp=2 microbatches=4", a TOML file, or auto for the fastest plan on this machine (default: dp=*)', handed_on=False
    )
    nproc: int | None = option(None, "processes to start on this machine; dp=* uses all of them (default: as many as the plan needs)", least=1,
        handed_on=False)
    device: str = device_option()
    loaded: "Job | None" = None
    """The job, if it is a Python object or already loaded."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommandOptions):
    """Options of a training run."""

    max_restarts: int = option(
        2, "restart after a rank failure, up to N times in a row at one step; 0 disables (default: 2)", metavar="N", least=0, former="restarts"
    )
    allow_shrink: bool = option(False, "continue with fewer ranks after a rank failure, instead of restarting all ranks", former="fewer")
    nnodes: str | None = option(
        None, "number of nodes, or a range such as 1:2; run the same command on each, with --nproc ranks there (default: 1)",
        metavar="N", **SHELL_ONLY,
    )  # fmt: skip
    node_rank: int | None = option(
        None, "rank of this node, starting at 0 (default: set by the launcher)", metavar="N", **SHELL_ONLY
    )
    master: str | None = option(
        None, "address and port of node 0 (default: set by the launcher)", metavar="HOST:PORT", **SHELL_ONLY
    )
    steps: int | None = option(None, "number of optimizer steps (default: the job's)", least=1)
    batch: int | None = option(None, "global batch size (default: the job's)", least=1)
    scale_lr: str | None = option(
        None, "scale the learning rate with --batch by this rule (default: do not scale)", choices=("linear", "sqrt")
    )
    resume: str | None = option(
        None, "continue this run or checkpoint; without a value, the job's newest run; auto: the newest run, or a new one if there is none",
        metavar="RUN", bare="", handed_on=False,
    )  # fmt: skip
    allow_changes: bool = option(False, "with --resume: accept changed data or another seed (K010)")
    weights: str | None = option(
        None, "initial weights: a safetensors file, a Hugging Face folder or a checkpoint", metavar="PATH"
    )
    save_every: int = option(100, "steps between checkpoints (default: 100)", metavar="N", least=1)
    checkpoint_params: str = option(
        "trained", "parameters in checkpoints: all, or trained to leave out frozen ones that --weights or Job.weights has (default: trained)",
        choices=("trained", "all"), former="save",
    )  # fmt: skip
    keep: int = option(3, "number of checkpoints to keep (default: 3)", metavar="N", least=1)
    on_nan: str = option("stop", "reaction to a loss or gradient that is not finite (default: stop)", choices=("stop", "skip"))
    check: str = option("quick", "effort of the check before training that the plan is exact for this job (default: quick)", choices=CHECKS)
    allow_inexact: bool = option(False, "train even if that check finds that the plan changes the training result")
    workers: int = option(0, "DataLoader worker processes per rank (default: 0)", metavar="N", least=0)
    log_ranks: str = option("0", "ranks whose output is printed, such as 0,3; logs/ has all (default: 0)", listed=True, former="ranks")
    tracker: tuple[str, ...] = option(
        (), "send metrics to an experiment tracker: tensorboard, wandb, mlflow, trackio", metavar="TRACKERS", former="to"
    )
    export_every: int | None = option(
        None, "export the weights as a Hugging Face folder every N steps, a multiple of --save-every (default: never)",
        metavar="N", least=1,
    )  # fmt: skip
    export_dir: Path | None = option(None, "folder for these exports (default: RUN/export)", metavar="DIR", former="export_to")
    runs: Path = option(Path("runs"), "folder for run directories (default: runs)", handed_on=False)
    hang_timeout: float | None = option(
        None, "end the run if a rank makes no progress for this long (default: 10 s to an hour, depending on its phase)",
        metavar="SECONDS", former="patience",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions, SplitOptions):
    """Options of `plait train`."""

    callbacks: str | None = option(
        None, "function that returns a list of plait.Callback objects",
        metavar="FILE:FUNCTION",
    )  # fmt: skip
    best: str | None = option(
        None, "keep the checkpoint with the best evaluation metric in RUN/best, such as max:accuracy or min:loss",
        metavar="MODE:METRIC",
    )  # fmt: skip
    early_stop: int | None = option(None, "end the run after N evaluations without a better --best metric (default: never)", metavar="N")
    profile: str | None = option(
        None, "profile these steps on every rank, such as 10:13, into RUN/profile", metavar="FIRST:LAST"
    )
    group_norms: bool = option(False, "record the gradient norm of each parameter group")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SplitOptions):
    """Options of `plait verify`."""

    steps: int = option(4, "optimizer steps to compare, at least 3 (default: 4)")
    full: bool = option(False, "also compare batches of the job's own size that take long on one device")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(SplitOptions):
    """Options of `plait check`."""

    full: bool = option(False, "check more batches and positions, for up to some minutes")


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(SplitOptions):
    """Options of `plait chaos`."""

    steps: int = option(9, "optimizer steps of each run (default: 9)", least=9)
    batch: int | None = option(None, "global batch size of each run (default: a small one)", least=1)
    only: tuple[str, ...] = option(
        (), "inject only faults whose name starts with NAME; may be repeated (default: all)", metavar="NAME"
    )
    list: bool = option(False, "list the faults and the expected recovery, and run none")
    seed: int = option(0, "seed of the choice of ranks, steps and moments (default: 0)")
    output: Path | None = option(None, "Markdown file to write the table to (default: none)", metavar="FILE", former="to")


@dataclass(frozen=True, kw_only=True)
class MeasuredJobOptions(JobOptions):
    """The job, and the length of its sequences."""

    seq: int | None = option(
        None, "sequence length in tokens, the same as --job.seq (default for hf: the config's limit, at most 8192)", metavar="N", least=1,
        python=False,
    )

    def __post_init__(self) -> None:
        if self.seq is not None:
            object.__setattr__(self, "arguments", self.arguments | {"seq": str(self.seq)})


@dataclass(frozen=True, kw_only=True)
class SketchOptions(MeasuredJobOptions):
    """Options of `plait sketch`."""

    batch: int = option(1, "number of samples that the figures are for (default: 1)", least=1)
    plan: str | None = option(None, "also show the memory of each rank under this plan, at the job's batch size")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(MeasuredJobOptions):
    """Options of `plait plan`. Options that are not in Python change the answer from a table of plans to another report."""

    machine: str = option(
        "here", "machine to plan for: a name such as h100x8 or h100x8x16 (16 nodes of 8), a TOML file, or here (default: here)"
    )
    gpus: int | None = option(None, "use N of the machine's devices (default: all)", metavar="N", least=1)
    batch: int | None = option(None, "global batch size (default: the job's)", least=1)
    memory: str | None = option(None, "memory of a device, such as 80GiB (default: the machine's)", metavar="SIZE")
    plan: str | None = option(None, "fixed plan keys, as one line; with --show or --dry-run, the plan to examine")
    set: tuple[str, ...] = option((), "fix one plan key; may be repeated", metavar="KEY=VALUE", former="pin")
    learn: str | None = option(
        None, "folder of runs on this machine whose measured steps correct the predictions, or none (default: runs)", metavar="DIR"
    )
    fresh: bool = option(False, "sketch the job again instead of using the cached sketch", python=False)
    top: int = option(5, "number of plans to show (default: 5)", metavar="N")
    all: bool = option(False, "show the best plan of every mesh, and plans that do not fit")
    output: Path | None = option(None, "plan file to write the choice to (default: none)", metavar="FILE", python=False, former="out")
    objective: str = option(
        "fastest", "what to optimize: step time, cost, number of devices, or batch size (default: fastest)",
        choices=("fastest", "min-cost", "min-devices", "max-batch"), python=False,
        former_values={"cheapest": "min-cost", "fewest": "min-devices", "largest": "max-batch"},
    )  # fmt: skip
    maximize: str | None = option(
        None, "with --objective max-batch: maximize this job argument instead of the batch size", metavar="NAME", python=False, former="vary"
    )
    deadline: str | None = option(
        None, "with --objective min-devices: time limit of the job, such as 24h", metavar="TIME", python=False
    )
    scale: str | None = option(
        None, "show the best plan and its efficiency for each of these numbers of devices", metavar="N,N,…", python=False
    )
    allow_inexact: bool = option(False, "include plans that change the training result (infrequent sync, compressed gradients)")
    map: bool = option(
        False, "show the fastest way to synchronize by link speed and spread of device speeds; --output map.svg draws it", python=False
    )
    tries: int = option(0, "run the first K plans for a few steps on this machine", words=("--try",), metavar="K", python=False)
    show: str | None = option(
        None, "explain --plan: how tp shards each layer, and why not; or which shard of each parameter each rank has",
        choices=("tensor", "parameters"), python=False,
    )  # fmt: skip
    dry_run: bool = option(
        False, "simulate one step of --plan in this process, on fake tensors, for each distinct rank", python=False
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(CommandOptions):
    """The scheduler that starts the run."""

    kind: str = option(REQUIRED, "scheduler that starts the run", by_place=True, choices=SCHEDULERS)


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(TrainOptions, SchedulerOptions):
    """Options of `plait submit`: those of `plait train`, which it forwards, and its own."""

    machine: str | None = option(
        None, "machine, such as h100x8x2: sets --nnodes and --nproc, as in plait plan", metavar="NAME"
    )
    name: str | None = option(None, "name of the scheduler's job and of the folder of its runs (default: from the job's path)")
    output: Path | None = option(None, "file to write (default: print it)", metavar="FILE", former="out")
    cpus: int | None = option(None, "cores of each node (default for slurm: all)", metavar="N", least=1)
    gpu: str | None = option(None, "the scheduler's name of the GPU, such as H100 or nvidia.com/gpu", metavar="KIND")
    time: str | None = option(None, "time limit, such as 24h or 1d12h", metavar="TIME")
    image: str | None = option(None, "container image")
    volume: tuple[str, ...] = option((), "volume that all nodes mount; may be repeated", metavar="NAME:/PATH")
    chdir: str | None = option(None, "working directory on the nodes; the job's path is relative to it", metavar="FOLDER")
    setup: tuple[str, ...] = option((), "shell command to run before training; may be repeated", metavar="LINE")
    hosts: str | None = option(None, "ssh: the hosts; the first is node 0", metavar="A,B")
    secret: str | None = option(None, "Kubernetes: Secret that authenticates the nodes to each other (default: plait)", metavar="NAME")
    launch_cmd: str | None = option(
        None, 'command that starts plait on the nodes, such as "python -m plait" (default: plait)', metavar="WORDS", former="call"
    )
    option: tuple[str, ...] = option((), "option passed to the scheduler unchanged; may be repeated", metavar="NAME=VALUE")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommandOptions):
    """Options of `plait bench`."""

    what: str = option("all", None, by_place=True, choices=("compute", "comm", "data", "all"))
    job: str | None = option(None, "job whose dataset is read (for data and all)", by_place=True, metavar="JOB")
    output: Path = option(Path("machine.toml"), "machine file to write (default: machine.toml)", former="out")
    nproc: int | None = option(None, "processes that measure at once (default: one per device or core)", least=1)
    device: str = device_option()
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandOptions):
    """Options of `plait report`."""

    paths: tuple[str, ...] = option(("runs/latest",), "run directories, the first in detail (default: runs/latest)", by_place=True, metavar="RUN")
    svg: str | None = option(None, "print one figure as SVG instead of writing the page", choices=("loss", "timeline", "memory", "scaling"))
    follow: bool = option(False, "serve the page on this machine while the run trains")
    timeline: bool = option(False, "also write RUN/trace.json for Perfetto")
    memory: bool = option(False, "show what memory of the fullest rank was used for, measured and predicted")
    step: int | None = option(None, "step that the timeline shows (default: one of median duration)", metavar="N")
    tries: int = option(
        0, "try the first K pieces of advice for some steps here, and compare the measured with the predicted gain", words=("--try",),
        metavar="K", least=0,
    )  # fmt: skip
    open: bool = option(False, "open the page in a browser")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class ProveOptions(CommandOptions):
    """Options of `plait prove`."""

    reference: str = option(REQUIRED, "command that trains on one device, as one argument", by_place=True, metavar="REFERENCE")
    candidate: str = option(REQUIRED, "command that trains on several devices, as one argument", by_place=True, metavar="CANDIDATE")
    steps: int = option(6, "optimizer steps to compare (default: 6)", metavar="N", least=2)
    float64: bool = option(False, "compute in float64 on both sides, if the scripts allow it")
    hang_timeout: float = option(
        120.0, "end a command that makes no step for this long (default: 120)", metavar="SECONDS", least=1, former="limit"
    )
    disk_limit: float = option(8.0, "limit of the tensors that a process writes to disk, in GiB (default: 8)", metavar="GIB", former="room")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(CommandOptions):
    """Options of `plait replay`."""

    path: str = option("runs/latest", "run directory (default: runs/latest)", by_place=True, metavar="RUN")
    step: int = option(REQUIRED, "step to compute again", metavar="N", least=1)
    plan: str | None = option(None, "plan to compute it under, as one line or a TOML file (default: one process)")
    device: str = option(
        "cpu",
        "device type; cuda includes ROCm (default: cpu)",
        choices=("auto", *DEVICE_KINDS),
        metavar=f"{{{','.join(DEVICE_KINDS)}}}",
    )
    bisect: bool = option(False, "also find the first module whose output is not finite or unusually large")
    top: int = option(10, "number of samples to print (default: 10)", metavar="N", least=1)
    allow_changes: bool = option(False, "replay with the job's present code even if it has changed since the run (R011)")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(CommandOptions):
    """Options of `plait checkpoint`."""

    action: str = option(REQUIRED, None, by_place=True, choices=("list", "info", "verify", "export"))
    path: str = option(REQUIRED, "run directory, folder of checkpoints, or one checkpoint", by_place=True, metavar="PATH")
    step: int | None = option(None, "step of the checkpoint (default: all, or the newest)")
    output: str | None = option(None, "export: folder, or .safetensors file, to write", metavar="PATH", former="to")
    shard: str = option("5GB", "export: size limit of each file (default: 5GB)", metavar="SIZE")
    dtype: str | None = option(None, "export: dtype of the weights (default: that of the checkpoint)", choices=("fp32", "fp16", "bf16", "fp64"))
    ema: bool = option(False, "export: the exponential moving average of the weights (Job.ema) instead of the last ones")
    adapter: bool = option(False, "export: only the adapter of a PEFT model")
    merge: bool = option(False, "export: merge the adapter into the base model (loads the full model into memory)")
    base: str | None = option(None, "export: path to the base weights, if they have moved since the run started", metavar="PATH")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class HelpOptions(CommandOptions):
    """Options of `plait help`."""

    word: str | None = option(None, None, by_place=True, metavar="CODE | KEY | COMMAND")
    json: bool = option(False, None)
