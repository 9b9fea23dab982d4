"""What `plait train` was asked for."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from plait.config.command_options import RunOptions
from plait.config.job import Job, optimized
from plait.config.plan import Plan
from plait.data.loaders import with_batch
from plait.engine.callbacks import Callback
from plait.engine.metrics import MetricsFollower


@dataclass(frozen=True)
class Request(RunOptions):
    """What `plait train` was asked for: options as they are given, and what others of them name."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    _: KW_ONLY
    device: str = "auto"
    trackers: tuple[MetricsFollower, ...] = ()
    """Experiment trackers, which also get the metrics (see `integrations/trackers/`)."""
    shown: tuple[int, ...] = (0,)
    """Ranks whose output is shown."""
    verbose: bool = False
    notes: tuple[str, ...] = ()
    callbacks: Callable[[], list[Callback]] | None = None
    """What makes the callbacks, on each rank."""
    group_norms: bool = False
    """Record the gradient norm of each parameter group."""
    python: bool = False
    """It was asked for in Python, by `plait.train`: what is said of going on is in its words."""

    @property
    def onward(self) -> bool:
        """Whether the number of steps is given: then the run goes on also after an early end."""
        return self.steps is not None

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
