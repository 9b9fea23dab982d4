"""A step whose stats are on their way to the host: the totals of all ranks, and behind them what every rank finds alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.data.batch import Batch
from plait.engine.logged import Logged
from plait.engine.spans import Span
from plait.engine.speed import slowest_of_share
from plait.engine.step import StepNumbers
from plait.parallel.step_stats import StepStats
from plait.tensors.transfers import HostCopy


@dataclass
class PendingStats:
    """A step whose numbers are on their way to the host.

    They are one row on the device, which `pack` makes and one copy brings to the host: the packed `StepStats`, the gradient norm without
    the loss scale, that scale, and the norm of each parameter group.
    """

    plan: Plan
    batch: Batch
    groups: list[str]
    """Names of the parameter groups whose norms are asked for."""
    logged: Logged
    losses: list[tuple[int, Tensor]]
    """Of this rank's micro-batches, by number."""
    skips_nonfinite: bool
    """A step that is not finite is left out."""
    scaled: bool
    """There is a loss scale."""
    loss_factor: float
    """What the summed loss is multiplied by: a replica group's is a part of the batch's mean."""
    to_average: bool = False
    """A moving average of the weights is to take those of this step, and has not yet."""
    width: int = 0
    """Elements of the packed stats."""
    copy: HostCopy = field(init=False)
    spans: Callable[[], list[Span]] = field(init=False)
    judged: bool = False
    """Whether it is finite was looked at, and what follows from that was done."""
    trouble: Problem | None = None
    """What was not finite in it, where it was left out."""
    told: bool = False
    """What goes by its numbers is done."""

    def pack(self, step_row: Tensor, norm: Tensor, scale: Tensor, group_norms: Tensor | None) -> Tensor:
        """The row for the host, float64 on the device. `norm` and `group_norms` are of the gradients as they are, with the loss scale."""
        self.width = len(step_row)
        alike = [norm.reshape(1) / scale, scale, *([group_norms / scale] if group_norms is not None else [])]
        return torch.cat([step_row.double(), *alike])

    @cached_property
    def totals(self) -> StepStats:
        """What all ranks summed. Waits for the device."""
        return StepStats.unpack(self.copy.read()[: self.width], self.plan)

    @property
    def _alike(self) -> tuple[float, float, list[float]]:
        norm, scale, *group_norms = self.copy.read()[self.width :]
        return norm, scale, group_norms

    @property
    def loss(self) -> float:
        return float(self.totals.loss) * self.loss_factor

    @property
    def norm(self) -> float:
        """Of the gradients, without the loss scale."""
        return self._alike[0]

    @property
    def scale(self) -> float:
        """The factor on the losses of this step; 1 without one."""
        return self._alike[1]

    @property
    def finite(self) -> bool:
        """Whether the update was made: all ranks see the same."""
        if not self.skips_nonfinite:
            return not self.scaled or math.isfinite(self.norm)
        return math.isfinite(self.norm) and math.isfinite(float(self.totals.loss))

    @property
    def known(self) -> bool:
        """Whether its numbers are on the host, and complete."""
        return self.told

    @cached_property
    def numbers(self) -> StepNumbers:
        """What the step did, as far as this rank knows alone. Waits for the device."""
        totals, plan = self.totals, self.plan
        samples = [round(count) for count in totals.samples]
        by_share = list(zip(samples, slowest_of_share(plan, totals.busy)))
        made = StepNumbers(self.loss, self.norm, not self.finite, self.spans(), by_share, totals.waited)
        made.loss_scale = self.scale if self.scaled else None
        made.norms = dict(zip(self.groups, self._alike[2]))
        made.logged = self.logged.known(totals.logged)
        return made
