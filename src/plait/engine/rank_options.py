"""The options of a rank's training, from the command line or from Python."""

from collections.abc import Callable
from dataclasses import dataclass

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.callbacks import Callback
from plait.engine.metrics import MetricsFollower


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What one rank trains, and what it saves and records meanwhile. Ranks of a run have the same."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    arguments: dict[str, str]
    """What the job was called with: kept in checkpoints."""
    device: str = "auto"
    workers: int = 0
    """Loader processes of each rank."""
    on_nan: str = "stop"
    """What to do in a step whose loss or gradient norm is not finite: stop, skip or ignore."""
    callbacks: Callable[[], list[Callback]] | None = None
    """Makes the callbacks, on each rank."""
    group_norms: bool = False
    """Record the gradient norm of each parameter group."""
    trackers: tuple[MetricsFollower, ...] = ()
    """Experiment trackers, which also get the metrics."""
    resume: str | None = None
    """The run or checkpoint to resume; empty or `auto`: the newest, if there is one; None: start anew."""
    allow_changes: bool = False
    """Resume although the job changed such that its place in the data means something else."""
    onward: bool = False
    """The number of steps is given: resume also after an early end."""
    save: str = "trained"
    """What checkpoints hold of a model with frozen parameters that were read from `Job.weights`: trained ones, or all."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept."""
