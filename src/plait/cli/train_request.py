"""The request of a `plait train` call."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from plait.config.command_options import RunOptions
from plait.config.job import Job, replace_optimizer
from plait.config.plan import Plan
from plait.data.loaders import override_batch
from plait.engine.callbacks import Callback
from plait.engine.metrics import MetricsFollower


@dataclass(frozen=True)
class TrainRequest(RunOptions):
    """The request of a `plait train` call: its options, and the loaded job, plan and callbacks."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    _: KW_ONLY
    device: str = "auto"
    trackers: tuple[MetricsFollower, ...] = ()
    """Experiment trackers, which also receive the metrics (see `integrations/trackers/`)."""
    shown_ranks: tuple[int, ...] = (0,)
    """Ranks whose output is printed."""
    verbose: bool = False
    notes: tuple[str, ...] = ()
    callbacks: Callable[[], list[Callback]] | None = None
    """Creates the callbacks on each rank."""
    group_norms: bool = False
    """Record the gradient norm of each parameter group."""
    is_from_python: bool = False
    """`plait.train` made the request, so messages show Python code."""

    @property
    def onward(self) -> bool:
        """The number of steps is given, so the run also continues after an early end."""
        return self.steps is not None

    @property
    def has_job_file(self) -> bool:
        """The job is in a file; otherwise it is a Python object, whose code may change between two runs."""
        return Path(self.name.partition(":")[0]).suffix == ".py"


def scale_batch(job: Job, batch: int | None, rule: str | None) -> tuple[Job, tuple[str, ...]]:
    """Set the global batch and, if `rule` is given, scale the learning rate. Returns the job and notes.

    linear: times batch / job.batch (Goyal et al. 2017). sqrt: times its square root (Krizhevsky 2014), the usual choice for Adam.
    """
    if batch is None or batch == job.batch:
        return job, ()
    ratio = batch / job.batch
    changed = override_batch(job, batch)
    if rule is None:
        told = "learning rate unchanged (--scale-lr linear or sqrt changes it)"
        return changed, (f"note  global batch {job.batch} → {batch}; {told}",)
    factor = ratio if rule == "linear" else ratio**0.5

    def scale_optimizer(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def make_optimizer(parameters: list[Any]) -> Any:
            made = make(parameters)
            for group in made.param_groups:
                group["lr"] = group["lr"] * factor
            return made

        return make_optimizer

    words = f"{rule}: batch {job.batch} → {batch}" + (", √" if rule == "sqrt" else ", ") + f"{ratio:.4g}"
    return replace_optimizer(changed, scale_optimizer), (f"note  learning rate × {factor:.4g}  ({words})",)
