"""The options of each command, with their help, in the order in which `plait COMMAND --help` shows them.

`--job.NAME`, the arguments of the job, are `arguments` of each of them.

An option of a command, as a field of a dataclass: its name, its help, its values, and where it can be given.

A command's options are one frozen dataclass. From its fields come the parser of the command line
(`cli/main.py`), the keyword arguments in Python (`api.py`), the words that `plait submit` hands on, and what is out of range.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TextIO, get_args, get_origin

from plait.config.errors import PlaitError, Problem, too_small
from plait.config.hardware import KINDS, NOT_YET

REQUIRED = MISSING
"""The default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str
    """In Python, and of the field."""
    kind: type
    """Of its value, or of each value where it is given `many` times: bool, int, float, str or Path."""
    many: bool
    default: object
    help: str | None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    """The smallest number that it takes."""
    words: tuple[str, ...] = ()
    """On the command line, if these are not --name."""
    by_place: bool = False
    """No word stands before its value on the command line."""
    bare: str | None = None
    """Its value when it is given without one, if it can be."""
    listed: bool = False
    """A text of values with commas between them, for which Python also takes a list."""
    python: bool = True
    """It is a keyword argument in Python too."""
    handed_on: bool = True
    """`plait submit` hands it on, as it is given, to the `plait train` that the scheduler starts."""

    @property
    def flag(self) -> str:
        """Its word on the command line, such as --save-every."""
        return self.words[-1] if self.words else f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of a command."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Of the job's function: --job.NAME on the command line."""
    output: TextIO | None = None
    """Standard output, for the result alone, while sys.stdout is standard error (`cli/result.py`). None: sys.stdout."""


def option(default: object, help: str | None, **facts: Any) -> Any:
    """A field that is an option; `facts` are those of `Option`."""
    return field(default=default, metadata={"help": help, **facts})


@cache
def options_of(command: type[CommandOptions]) -> dict[str, Option]:
    """The options of a command by name, in the order of its help."""
    return {each.name: _of(each) for each in fields(command) if "help" in each.metadata}


def _of(source: Field[Any]) -> Option:
    """The option that a field is: `int | None` takes a number, `tuple[str, ...]` many texts."""
    kind, *_ = [kind for kind in get_args(source.type) if kind is not NoneType] or [source.type]
    return Option(source.name, kind, get_origin(source.type) is tuple, source.default, **source.metadata)


def words_of(given: CommandOptions, options: Iterable[Option] | None = None) -> list[str]:
    """The words of a command line that give its options these values; `options`: these alone. What has its default is left out."""
    words = list[str]()
    for each in options_of(type(given)).values() if options is None else options:
        value = getattr(given, each.name)
        if value != each.default:
            named = "" if each.by_place else f"{each.flag}="
            words += [each.flag] if value is True else [f"{named}{one}" for one in (value if each.many else (value,))]
    return [*words, *(f"--job.{name}={value}" for name, value in given.arguments.items())]


def with_options(command: type[CommandOptions], words: Sequence[str], changed: Sequence[str]) -> list[str]:
    """The words of a command line without some options, such as `--json`, and with other values of some, such as `--workers=2`.

    >>> with_options(TrainOptions, ["job.py", "--workers", "4", "--json"], ["--workers=2", "--json"])
    ['job.py', '--workers=2']
    """
    takes = {flag: each for each in options_of(command).values() for flag in (each.flag, *each.words)}
    out, rest, kept = {word.partition("=")[0] for word in changed}, list(words), list[str]()
    while rest:
        word = rest.pop(0)
        option = takes.get(word)  # a word with = has its value in it
        value = rest[:1] if option and option.kind is not bool and rest and not rest[0].startswith("-") else []
        del rest[: len(value)]
        kept += [] if word.partition("=")[0] in out else [word, *value]
    return [*kept, *(word for word in changed if "=" in word)]


def check_range(given: CommandOptions) -> None:
    """Raise what is out of range."""
    if problems := out_of_range(given):
        raise PlaitError(problems)


def out_of_range(given: CommandOptions) -> list[Problem]:
    """U002 for numbers that are too small."""
    found = list[Problem]()
    for name, each in options_of(type(given)).items():
        value = getattr(given, name)
        if each.least is not None and value is not None and value < each.least:
            found.append(too_small(each.flag, value, each.least))
    return found


if TYPE_CHECKING:
    from plait.config.job import Job

CHECKS = ("none", "quick", "full")
SCHEDULERS = ("slurm", "trainjob", "jobset", "skypilot", "ray", "ssh")
"""What `plait submit` writes for."""
SHELL: dict[str, Any] = {"python": False, "handed_on": False}
"""Of options that say how a command of the shell prints its result, or which machine this is."""


def json_option() -> Any:
    return option(False, "print the result as JSON on standard output", **SHELL)


def verbose_option() -> Any:
    return option(False, "show tracebacks", words=("-v", "--verbose"), **SHELL)


def device_option() -> Any:
    return option("auto", "cuda: also ROCm's (auto)", choices=(*KINDS, *NOT_YET), metavar=f"{{{','.join(KINDS)}}}")


@dataclass(frozen=True, kw_only=True)
class JobOptions(CommandOptions):
    """The job, and how results are printed."""

    job: str = option(
        REQUIRED, "path/to/job.py, path/to/job.py:function, or hf:FOLDER of a Hugging Face config; its arguments are --job.name value",
        by_place=True, metavar="JOB", **SHELL,
    )  # fmt: skip
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class SplitOptions(JobOptions):
    """The job, the plan, and where it runs."""

    plan: str | None = option(
        None, 'one line such as "dp=2 microbatches=4", a TOML file, or auto: the best here', handed_on=False
    )
    nproc: int | None = option(None, "processes to start on this machine; fills dp=*", least=1, handed_on=False)
    device: str = device_option()
    loaded: "Job | None" = None
    """The job, if it does not lie in a file, or was read before."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommandOptions):
    """Of `plait train`: how a run goes."""

    restarts: int = option(2, "go on when a rank is lost, N times in a row at one step; 0: never", metavar="N", least=0)
    fewer: bool = option(False, "go on with fewer ranks when one is lost, instead of starting it again")
    nnodes: str | None = option(
        None, "machines, or 1:2 for one to two; the same command is started on each, and --nproc ranks there",
        metavar="N", **SHELL,
    )  # fmt: skip
    node_rank: int | None = option(
        None, "which of them this is, from 0, where no launcher says it", metavar="N", **SHELL
    )
    master: str | None = option(
        None, "where machine 0 is reached, where no launcher says it", metavar="HOST:PORT", **SHELL
    )
    steps: int | None = option(None, "optimizer steps, instead of the job's", least=1)
    batch: int | None = option(None, "global batch, instead of the job's", least=1)
    scale_lr: str | None = option(
        None, "change the learning rate with --batch, by this rule", choices=("linear", "sqrt")
    )
    resume: str | None = option(
        None, "continue this job's newest run, or this run or checkpoint; auto: the newest, or begin where there is none",
        metavar="RUN", bare="", handed_on=False,
    )  # fmt: skip
    allow_changes: bool = option(False, "with --resume: also with other data or another seed (K010)")
    weights: str | None = option(
        None, "start from these: a safetensors file, a Hugging Face folder or a checkpoint", metavar="PATH"
    )
    save_every: int = option(100, "steps between checkpoints (100)", metavar="N", least=1)
    save: str = option(
        "trained", "checkpoints leave out frozen parameters that are in --weights or Job.weights (trained), or hold all",
        choices=("trained", "all"),
    )  # fmt: skip
    keep: int = option(3, "checkpoints to keep (3)", metavar="N", least=1)
    on_nan: str = option("stop", "a step with a loss or gradient that is not finite", choices=("stop", "skip"))
    check: str = option("quick", "how to check that the plan can cut the job's batches (quick)", choices=CHECKS)
    allow_inexact: bool = option(False, "train although the check found that the plan is another training")
    workers: int = option(0, "loader processes per rank (0)", metavar="N", least=0)
    ranks: str = option("0", "ranks whose output to show, such as 0,3 (0); logs/ has all", listed=True)
    to: tuple[str, ...] = option(
        (), "also give the metrics to these: tensorboard, wandb, mlflow, trackio", metavar="TRACKERS"
    )
    export_every: int | None = option(
        None, "write the weights as a Hugging Face folder every N steps, while it trains; a multiple of --save-every",
        metavar="N", least=1,
    )  # fmt: skip
    export_to: Path | None = option(None, "where these folders go (export in the run directory)", metavar="DIR")
    runs: Path = option(Path("runs"), "where run directories go (runs)", handed_on=False)
    patience: float | None = option(
        None, "end the run when a rank makes no progress for so long (by what it does, from 10 s to an hour)",
        metavar="SECONDS",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions, SplitOptions):
    """Of `plait train`."""

    callbacks: str | None = option(
        None, "what is called after steps, evaluations and saves: a function that returns a list of plait.Callback",
        metavar="FILE:FUNCTION",
    )  # fmt: skip
    best: str | None = option(
        None, "keep the best checkpoint by a metric of the evaluation in RUN/best, such as max:accuracy or min:loss",
        metavar="MODE:METRIC",
    )  # fmt: skip
    early_stop: int | None = option(None, "end the run after N evaluations without a better --best metric", metavar="N")
    profile: str | None = option(
        None, "trace these steps on every rank, into RUN/profile, such as 10:13", metavar="FIRST:LAST"
    )
    group_norms: bool = option(False, "record the gradient norm of each parameter group")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SplitOptions):
    """Of `plait verify`."""

    steps: int = option(4, "optimizer steps to compare, at least 3 (4)")
    full: bool = option(False, "also batches of the job's own size that take long on one device")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(SplitOptions):
    """Of `plait check`."""

    full: bool = option(False, "more batches and points, for up to some minutes")


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(SplitOptions):
    """Of `plait chaos`."""

    steps: int = option(9, "optimizer steps of each run (9)", least=9)
    batch: int | None = option(None, "global batch of each run (small)", least=1)
    only: tuple[str, ...] = option(
        (), "this fault alone, or those whose name begins so; again for more", metavar="NAME"
    )
    list: bool = option(False, "list the faults and what is promised, and run none")
    seed: int = option(0, "chooses ranks, steps and moments (0)")
    to: Path | None = option(None, "also write the table there, as Markdown", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class MeasuredJobOptions(JobOptions):
    """The job, and the length of its sequences."""

    seq: int | None = option(
        None, "tokens of each sequence, as --job.seq (hf: what the config allows, at most 8192)", metavar="N", least=1, python=False
    )

    def __post_init__(self) -> None:
        if self.seq is not None:
            object.__setattr__(self, "arguments", self.arguments | {"seq": str(self.seq)})


@dataclass(frozen=True, kw_only=True)
class SketchOptions(MeasuredJobOptions):
    """Of `plait sketch`."""

    batch: int = option(1, "samples to show the figures of (1)", least=1)
    plan: str | None = option(None, "also the memory that each rank needs under this plan, at the job's batch")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(MeasuredJobOptions):
    """Of `plait plan`. What Python does not take makes another answer than a table of plans."""

    machine: str = option(
        "here", "what to train on: here, a name such as h100x8 or h100x8x16 (16 nodes of 8), or a TOML file (here)"
    )
    gpus: int | None = option(None, "so many devices of the machine, instead of all", metavar="N", least=1)
    batch: int | None = option(None, "global batch, instead of the job's", least=1)
    memory: str | None = option(None, "memory of a device, such as 80GiB, instead of the machine's", metavar="SIZE")
    plan: str | None = option(None, "keys that are given, as one line; with --show or --dry-run the plan to look at")
    pin: tuple[str, ...] = option((), "the same, one key at a time", metavar="KEY=VALUE")
    learn: str | None = option(
        None, "run directories of this machine whose measured steps correct the predictions; none: no correction (runs)", metavar="DIR"
    )
    fresh: bool = option(False, "sketch the job again, although an earlier plan's sketch is kept and the files it read are the same", python=False)
    top: int = option(5, "how many of the best plans to show (5)", metavar="N")
    all: bool = option(False, "show the best plan of every mesh, and what does not fit")
    out: Path | None = option(None, "write the choice there, as a plan file", metavar="FILE", python=False)
    objective: str = option(
        "fastest", "fastest step; cheapest or fewest devices; largest batch that fits (fastest)",
        choices=("fastest", "cheapest", "fewest", "largest"), python=False,
    )  # fmt: skip
    vary: str | None = option(
        None, "largest: not the batch but this argument of the job, such as length", metavar="NAME", python=False
    )
    deadline: str | None = option(
        None, "the whole job must end within it, such as 24h (fewest)", metavar="TIME", python=False
    )
    scale: str | None = option(
        None, "the best plan at each number of devices, and its efficiency", metavar="N,N,…", python=False
    )
    allow_inexact: bool = option(False, "also plans that are another training: rare or compressed synchronisation")
    map: bool = option(
        False, "which way to synchronise is fastest, by link speed and spread; --out map.svg draws it", python=False
    )
    tries: int = option(0, "run the first K for a few steps, here", words=("--try",), metavar="K", python=False)
    show: str | None = option(
        None, "of --plan: which layers tp cuts, how, what stays whole and why; or what each rank has of each parameter",
        choices=("tensor", "parameters"), python=False,
    )  # fmt: skip
    dry_run: bool = option(False, "make a step of --plan, of one rank of each kind, without processes", python=False)


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(CommandOptions):
    """Who starts the run."""

    kind: str = option(REQUIRED, "who starts it", by_place=True, choices=SCHEDULERS)


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(TrainOptions, SchedulerOptions):
    """Of `plait submit`: those of `plait train`, which it hands on, and its own."""

    machine: str | None = option(
        None, "such as h100x8x2: gives --nnodes and --nproc, as in plait plan", metavar="NAME"
    )
    name: str | None = option(None, "of the job, and of the folder of its runs (from the job's path)")
    out: Path | None = option(None, "write it there, instead of printing it", metavar="FILE")
    cpus: int | None = option(None, "cores of each machine (slurm: the whole machine)", metavar="N", least=1)
    gpu: str | None = option(None, "what the scheduler calls the GPU: H100, nvidia.com/gpu", metavar="KIND")
    time: str | None = option(None, "how long it may run, such as 24h or 1d12h", metavar="TIME")
    image: str | None = option(None, "image of the container")
    volume: tuple[str, ...] = option((), "a volume that all machines see", metavar="NAME:/PATH")
    chdir: str | None = option(None, "where plait is started; the job's path begins there", metavar="FOLDER")
    setup: tuple[str, ...] = option((), "a line of shell that comes before", metavar="LINE")
    hosts: str | None = option(None, "ssh: the machines, the first is number 0", metavar="A,B")
    secret: str | None = option(None, "Kubernetes: the Secret that the machines share (plait)", metavar="NAME")
    call: str | None = option(
        None, 'how plait is called there (plait), such as "python -m plait"', metavar="WORDS"
    )
    option: tuple[str, ...] = option((), "passed on to the scheduler as it is", metavar="NAME=VALUE")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommandOptions):
    """Of `plait bench`."""

    what: str = option("all", None, by_place=True, choices=("compute", "comm", "data", "all"))
    job: str | None = option(None, "the job whose data is read (data, all)", by_place=True, metavar="JOB")
    out: Path = option(Path("machine.toml"), "file to write (machine.toml)")
    nproc: int | None = option(None, "processes that measure at once (one per device or core)", least=1)
    device: str = device_option()
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandOptions):
    """Of `plait report`."""

    paths: tuple[str, ...] = option(("runs/latest",), "run directories (runs/latest); of several, the first in detail", by_place=True, metavar="RUN")
    svg: str | None = option(None, "print one picture for a paper instead", choices=("loss", "timeline", "memory", "scaling"))
    follow: bool = option(False, "serve the page on this machine while the run trains, until it ends")
    timeline: bool = option(False, "also write RUN/trace.json, for Perfetto")
    memory: bool = option(False, "what the fullest rank's memory was used for, beside the plan's bill")
    step: int | None = option(None, "which step the timeline shows (one that took the median time)", metavar="N")
    tries: int = option(
        0, "run the first K pieces of advice for some steps here, in turn with the run's plan: predicted and measured gain", words=("--try",),
        metavar="K", least=0,
    )  # fmt: skip
    open: bool = option(False, "open the page in a browser")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class ProveOptions(CommandOptions):
    """Of `plait prove`."""

    reference: str = option(REQUIRED, "the command that trains on one device, as one text", by_place=True, metavar="REFERENCE")
    candidate: str = option(REQUIRED, "the command that trains on several", by_place=True, metavar="CANDIDATE")
    steps: int = option(6, "optimizer steps to compare (6)", metavar="N", least=2)
    float64: bool = option(False, "compute in float64 on both sides, as far as the scripts allow it")
    limit: float = option(120.0, "seconds without a new step after which a command is ended (120)", metavar="SECONDS", least=1)
    room: float = option(8.0, "GiB of tensors that a process may write to disk (8)", metavar="GIB")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(CommandOptions):
    """Of `plait replay`."""

    path: str = option("runs/latest", "a run directory (runs/latest)", by_place=True, metavar="RUN")
    step: int = option(REQUIRED, "the step to compute again", metavar="N", least=1)
    plan: str | None = option(None, "the plan to compute it under, as one line or a TOML file (one process)")
    device: str = option("cpu", "cuda: also ROCm's (cpu)", choices=("auto", *KINDS), metavar=f"{{{','.join(KINDS)}}}")
    bisect: bool = option(False, "also name the first module with an output that is not finite, or far larger than usual")
    top: int = option(10, "how many samples to print (10)", metavar="N", least=1)
    allow_changes: bool = option(False, "replay with the job as it is now, although it was another in the run (R011)")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(CommandOptions):
    """Of `plait checkpoint`."""

    action: str = option(REQUIRED, None, by_place=True, choices=("list", "info", "verify", "export"))
    path: str = option(REQUIRED, "a run directory, its checkpoints, or one checkpoint", by_place=True, metavar="PATH")
    step: int | None = option(None, "the checkpoint of this step, instead of all or the newest")
    to: str | None = option(None, "export: a folder, or a file that ends in .safetensors", metavar="PATH")
    shard: str = option("5GB", "export: largest file in a folder (5GB)", metavar="SIZE")
    dtype: str | None = option(None, "export: number format of the weights", choices=("fp32", "fp16", "bf16", "fp64"))
    ema: bool = option(False, "export: the moving average of the weights (Job.ema) instead of the last ones")
    adapter: bool = option(False, "export: the adapter of a model of peft, alone")
    merge: bool = option(False, "export: the model with its adapter merged into it, held whole here")
    base: str | None = option(None, "export: where the weights are now that the run started from", metavar="PATH")
    json: bool = json_option()
    verbose: bool = verbose_option()


@dataclass(frozen=True, kw_only=True)
class HelpOptions(CommandOptions):
    """Of `plait help`."""

    word: str | None = option(None, None, by_place=True, metavar="CODE | KEY | COMMAND")
    json: bool = option(False, None)
