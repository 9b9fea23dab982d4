"""What `plait train` was asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.job import Job, optimized
from plait.config.plan import Plan
from plait.data.loaders import with_batch
from plait.engine.callbacks import Callback
from plait.engine.metrics import MetricsFollower


@dataclass(frozen=True)
class Request:
    """What `plait train` was asked for."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    arguments: dict[str, str]
    runs: Path = Path("runs")
    resume: str | None = None
    """The run or checkpoint to continue; empty: the job's newest run."""
    device: str = "auto"
    workers: int = 0
    save_every: int = 100
    keep: int = 3
    trackers: tuple[MetricsFollower, ...] = ()
    """Experiment trackers, which also get the metrics (see `integrations/trackers/`)."""
    shown: tuple[int, ...] = (0,)
    verbose: bool = False
    notes: tuple[str, ...] = ()
    allow_changes: bool = False
    """Continue although the job changed such that its place in the data means something else."""
    patience: float | None = None
    """Seconds without progress after which a rank is ended; None: chosen by what it does (see `launch/hangs.py`)."""
    on_nan: str = "stop"
    """What to do in a step whose loss or gradient norm is not finite: stop, or skip it."""
    check: str = "quick"
    """How the job is checked before the first step: none, quick, full (see `proof/job/check.py`)."""
    allow_inexact: bool = False
    """Train although the job check found that the plan makes another training of the job."""
    restarts: int = 2
    """How often in a row at one step the ranks are started again when one is lost."""
    save: str = "trained"
    """What checkpoints hold of a model with frozen parameters that were read from `Job.weights`: trained ones, or all."""
    fewer: bool = False
    """Go on with fewer ranks when one is lost, instead of starting it again."""
    callbacks: Callable[[], list[Callback]] | None = None
    """What makes the callbacks, on each rank."""
    group_norms: bool = False
    """Record the gradient norm of each parameter group."""
    onward: bool = False
    """The number of steps is given: go on also after an early end."""
    python: bool = False
    """It was asked for in Python, by `plait.train`: what is said of going on is in its words."""

    @property
    def by_file(self) -> bool:
        """Whether the name is that of a file; else the job was given as a value, and its code may change between two runs."""
        return Path(self.name.partition(":")[0]).suffix == ".py"


def scaled(job: Job, batch: int | None, rule: str | None) -> tuple[Job, tuple[str, ...]]:
    """The job with another global batch and, only when a rule is asked for, another learning rate; and the rule in words.

    linear: times batch / job.batch (Goyal et al. 2017). sqrt: times its square root (Krizhevsky 2014), the usual
    choice for Adam.
    """
    if batch is None or batch == job.batch:
        return job, ()
    ratio = batch / job.batch
    changed = with_batch(job, batch)
    if rule is None:
        told = "learning rate unchanged (--scale-lr linear or sqrt changes it)"
        return changed, (f"note  global batch {job.batch} → {batch}; {told}",)
    factor = ratio if rule == "linear" else ratio**0.5

    def scaled(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def optimizer(parameters: list[Any]) -> Any:
            made = make(parameters)
            for group in made.param_groups:
                group["lr"] = group["lr"] * factor
            return made

        return optimizer

    words = f"{rule}: batch {job.batch} → {batch}" + (", √" if rule == "sqrt" else ", ") + f"{ratio:.4g}"
    return optimized(changed, scaled), (f"note  learning rate × {factor:.4g}  ({words})",)
