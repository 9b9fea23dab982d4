"""Convert a learning-rate scheduler of torch, or of a library that uses torch's, to a function of samples seen, as in `Job.schedule`.

torch's schedulers change an optimizer step by step. Their effect on a learning rate of 1 is the factor of a step. It is computed on a dummy
optimizer, up to the requested step, and cached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from plait.config.errors import PlaitError, Problem, summarize_error


@dataclass(eq=False)
class SampleSchedule:
    """A function from samples seen to the scheduler's factor at that step."""

    make: Callable[[Any], Any]
    batch: int

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        before = _list_other_options(self._optimizer)
        try:
            self._scheduler = self.make(self._optimizer)
        except Exception as error:  # the user's code, or torch rejects their arguments
            why = f"for an optimizer with one parameter group, it raised {summarize_error(error)}"
            raise _make_refusal("the schedule cannot be made", why) from error
        if isinstance(self._scheduler, ReduceLROnPlateau):
            why = "it looks at a metric, but Job.schedule is a function of the samples seen alone"
            raise _make_refusal("ReduceLROnPlateau cannot be Job.schedule", why)
        if not hasattr(self._scheduler, "step"):
            why = f"it returned a {type(self._scheduler).__name__} instead of a scheduler of torch.optim.lr_scheduler"
            raise _make_refusal("the schedule is invalid", why)
        changed = [k for k, value in before.items() if _list_other_options(self._optimizer).get(k) != value]
        if changed:
            why = f"it also sets {', '.join(changed)}, but Job.schedule is a factor on learning rates only"
            raise _make_refusal(f"{type(self._scheduler).__name__} cannot be Job.schedule as it is", why)
        self._factors = [self._get_rate()]

    def __call__(self, samples: int) -> float:
        """Return the factor of the step after `samples` samples."""
        step = samples // self.batch
        while len(self._factors) <= step:
            self._optimizer.step()
            self._scheduler.step()
            self._factors.append(self._get_rate())
        return self._factors[step]

    def _get_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def schedule_of(make: Callable[[Any], Any], batch: int) -> SampleSchedule:
    """Convert a scheduler of `torch.optim.lr_scheduler`, or a function that makes one, to a `Job.schedule`. An example is
    `get_cosine_schedule_with_warmup` of transformers.

    `make`: a function from an optimizer to a scheduler. The optimizer has a learning rate of 1, so the scheduler sets the factor. `batch`: samples
    per scheduler step, usually `Job.batch`. The clock counts samples: the k-th step happens after k × `batch` samples. So another
    `Job.batch` gives the same factor after the same samples, and the short last batch of an epoch is a fraction of a step.

    >>> schedule=plait.schedule_of(lambda o: get_cosine_schedule_with_warmup(o, 100, 1000), batch=64)     # doctest: +SKIP

    Raises J042 for a scheduler that reads a metric, has a factor for each parameter group, or sets other values than the learning rate.
    """
    return SampleSchedule(make, batch)


def _list_other_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {key: value for key, value in group.items() if key not in ("lr", "initial_lr", "params")}


def _make_refusal(what: str, why: str) -> PlaitError:
    fix = ("schedule=lambda samples: …    any function from samples seen to a factor",)
    return PlaitError(Problem("J042", what, why=why, fix=fix))
