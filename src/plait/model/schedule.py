"""A learning rate schedule of torch, or of a library that makes torch's, as the function of samples seen that `Job.schedule` is.

torch's schedulers are objects that change an optimizer step by step. What they do to a learning rate of 1 is the factor of a
step: it is found on an optimizer of no parameters that matter, as far as it is asked for, and kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from plait.config.errors import PlaitError, Problem, in_a_line


@dataclass(eq=False)
class SampleSchedule:
    """Samples seen → the factor that a scheduler has at that step."""

    make: Callable[[Any], Any]
    batch: int

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        before = _others(self._optimizer)
        try:
            self._scheduler = self.make(self._optimizer)
        except Exception as error:  # it is the user's code, or torch's refusal of what they gave
            why = f"made for an optimizer with one parameter group, it raised {in_a_line(error)}"
            raise _refused("the schedule cannot be made", why) from error
        if isinstance(self._scheduler, ReduceLROnPlateau):
            why = "it looks at a metric, and Job.schedule is a function of the samples seen alone"
            raise _refused("ReduceLROnPlateau cannot be Job.schedule", why)
        if not hasattr(self._scheduler, "step"):
            why = f"it made a {type(self._scheduler).__name__}: expected optimizer -> a scheduler of torch.optim.lr_scheduler"
            raise _refused("the schedule is none", why)
        changed = [k for k, value in before.items() if _others(self._optimizer).get(k) != value]
        if changed:
            why = f"it also sets {', '.join(changed)}, and Job.schedule is a factor on learning rates"
            raise _refused(f"{type(self._scheduler).__name__} cannot be Job.schedule as it is", why)
        self._factors = [self._rate()]

    def __call__(self, samples: int) -> float:
        """The factor of the step before which so many samples were seen."""
        step = samples // self.batch
        while len(self._factors) <= step:
            self._optimizer.step()
            self._scheduler.step()
            self._factors.append(self._rate())
        return self._factors[step]

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def schedule_of(make: Callable[[Any], Any], batch: int) -> SampleSchedule:
    """`Job.schedule` of a scheduler of `torch.optim.lr_scheduler`, or of a function that makes one, such as transformers'
    `get_cosine_schedule_with_warmup`.

    `make`: optimizer -> scheduler. Its optimizer has a learning rate of 1, so what it sets is the factor. `batch`: samples of a
    step of it, as a rule `Job.batch`. Its clock stays the samples seen: its k-th step is made once k × `batch` samples were seen. So
    with another `Job.batch` it has the same factor after the same samples, and the short last batch of an epoch is a part of a step.

    >>> schedule=plait.schedule_of(lambda o: get_cosine_schedule_with_warmup(o, 100, 1000), batch=64)     # doctest: +SKIP

    J042 for one that looks at a metric, has a factor for each parameter group, or sets something besides the learning rate.
    """
    return SampleSchedule(make, batch)


def _others(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {key: value for key, value in group.items() if key not in ("lr", "initial_lr", "params")}


def _refused(what: str, why: str) -> PlaitError:
    fix = ("schedule=lambda samples: …    any function from samples seen to a factor",)
    return PlaitError(Problem("J042", what, why=why, fix=fix))
