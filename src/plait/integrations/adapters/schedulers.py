"""A learning-rate scheduler as what a job has: a factor on the learning rate, of the samples seen.

The scheduler is not read but played: a copy of it steps an optimizer of empty parameters, and each step's learning rate over the
first one is the factor. So it may be of any class, chained or of one's own, as long as it knows nothing but how often it stepped.
"""

import copy
import warnings
from collections.abc import Callable
from math import isclose
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from plait import PlaitError
from plait.config.errors import Problem, in_a_line

PLAYED = 256
"""Steps that are played at once, so that what cannot be meant is mostly refused before training."""
SAME = 1e-9
"""Two groups' factors that differ by less, relatively, are one."""


def factor(scheduler: object, clock: Callable[[int], int], code: str) -> Callable[[int], float]:
    """The job's schedule. `clock`: samples seen -> how often the scheduler has stepped by then.

    Raises `PlaitError` with the adapter's code for a scheduler that looks at a metric, moves anything but the learning rate, or
    moves groups' learning rates by unlike factors.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        why = "a job's schedule is a function of the samples seen, so that a resumed run and every plan have the same"
        what = "the scheduler is a ReduceLROnPlateau, which goes by a metric"
        fix = ("a scheduler that goes by steps, such as torch.optim.lr_scheduler.CosineAnnealingLR",)
        raise PlaitError(Problem(code, what, why=why, fix=fix))
    if not isinstance(scheduler, LRScheduler):
        what = f"the scheduler is a {type(scheduler).__module__}.{type(scheduler).__name__}, not one of torch"
        fix = ("give the torch.optim.lr_scheduler.LRScheduler itself, as it is before accelerator.prepare",)
        raise PlaitError(Problem(code, what, fix=fix))
    played = _Played(scheduler, code)
    played.at(PLAYED)
    return lambda samples: played.at(clock(samples))


class _Played:
    """The factors of a scheduler, by the number of its steps."""

    def __init__(self, scheduler: LRScheduler, code: str):
        self.code, self.name = code, type(scheduler).__name__
        real = scheduler.optimizer
        groups = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in real.param_groups]
        self.stub = torch.optim.SGD(groups, lr=1.0)
        try:
            self.scheduler = copy.deepcopy(scheduler, {id(real): self.stub})
        except Exception as error:  # it may hold anything
            what = f"the {self.name} cannot be copied: {in_a_line(error)}"
            fix = ("schedule=lambda samples: …    a function of the samples seen",)
            raise PlaitError(Problem(code, what, fix=fix)) from error
        self.still = self._settings()
        self.known = [self._factor()]

    def at(self, steps: int) -> float:
        """The factor after so many steps of the scheduler."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its optimizer takes no steps
            while len(self.known) <= steps:
                try:
                    self.scheduler.step()
                except ValueError:  # OneCycleLR has a last step, and training ends with it
                    self.known.append(self.known[-1])
                    continue
                self.known.append(self._factor())
        return self.known[steps]

    def _settings(self) -> list[dict[str, Any]]:
        """What else the groups have: a job's schedule leaves it as it is."""
        return [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.stub.param_groups]

    def _factor(self) -> float:
        moved = [k for now, then in zip(self._settings(), self.still) for k in now if now[k] != then[k]]
        if moved:
            what = f"the {self.name} moves {moved[0]}, and not only the learning rate"
            fix = ("cycle_momentum=False",) if moved[0] in ("momentum", "betas") else ()
            raise self._refused(what, "a job's schedule is a factor on the learning rate", fix)
        rates = [(float(g["lr"]), float(g["initial_lr"])) for g in self.stub.param_groups if float(g["initial_lr"])]
        factors = [now / first for now, first in rates] or [1.0]
        unlike = next((f for f in factors if not isclose(f, factors[0], rel_tol=SAME, abs_tol=SAME)), None)
        if unlike is not None:
            what = f"the {self.name} moves the learning rates of groups by unlike factors"
            why = f"after step {len(getattr(self, 'known', ()))} they are {factors[0]:.6g} and {unlike:.6g} of the first ones"
            raise self._refused(what, why, ("one factor for all groups; what differs goes into each group's own lr",))
        return factors[0]

    def _refused(self, what: str, why: str, fix: tuple[str, ...]) -> PlaitError:
        return PlaitError(Problem(self.code, what, why=why, fix=fix))
