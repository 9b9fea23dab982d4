"""The row of a step: numbers that all ranks must know, summed beside the gradients in one message, and read by the host in one copy.

What is in it, in this order (`numbers_of_step_row` counts them):
loss · wish to stop · samples of each share of the batch · by rank, seconds computing, seconds waiting for data, and where shares
follow speeds what fits into its memory · saving, to the disk and to memory · wish to end · what the job logged.
Behind the sums stand what every rank finds alike: the gradient norm, the loss scale, and norms of parameter groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from plait.config.errors import Problem
from plait.config.keys import SAME_LOSS
from plait.config.plan import Plan
from plait.data.batch import Batch
from plait.engine.logged import Logged, StepLog
from plait.engine.spans import Span
from plait.engine.speed import by_share
from plait.engine.step import StepNumbers
from plait.launch.place import Place
from plait.parallel.built import Built
from plait.parallel.data.strategy import numbers_of_step_row
from plait.tensors.transfers import HostCopy, upload


@dataclass
class RankNumbers:
    """What this rank has to say in a step, beside its losses."""

    busy: float
    waited: float
    room: int
    saving: Sequence[float]
    """How far it is with what it saves: to the disk, and to memory."""
    end: bool
    """It wants to end the run."""


def row_of(built: Built, place: Place, batch: Batch, losses: list[Tensor], log: StepLog, own: RankNumbers) -> Tensor:
    """This rank's row of a step, on its device: float64 of shape [numbers]."""
    plan, rank = built.plan, place.rank
    by_rank = [own.busy, own.waited] + ([float(own.room)] if built.balance is not None else [])
    row = [0.0] * (2 + plan.ranks + len(by_rank) * plan.world) + [*own.saving, float(own.end)]
    row[2 + plan.ranks + rank : -3 : plan.world] = by_rank
    alike = plan.along(SAME_LOSS)
    row[1] = float(place.stopping())
    row[2 + plan.share(rank)] = batch.count / (plan.pp * alike)
    logged = log.row()
    if built.device.type == "cpu":
        row[0] = sum(float(loss) for loss in losses) / alike
        return torch.tensor([*row, *map(float, logged)], dtype=torch.float64)
    step_row = upload([*row, *(0.0 if isinstance(n, Tensor) else n for n in logged)], built.device)
    for i, number in enumerate(logged, len(row)):
        if isinstance(number, Tensor):
            step_row[i].copy_(number)
    if losses:
        step_row[0].copy_(torch.stack(losses).sum() / alike)
    return step_row


@dataclass
class Unread:
    """A step whose numbers are on their way to the host."""

    plan: Plan
    batch: Batch
    width: int
    """Numbers of the summed row; those that every rank finds alike follow."""
    groups: list[str]
    """Names of the parameter groups whose norms are asked for."""
    logged: Logged
    losses: list[tuple[int, Tensor]]
    """Of this rank's micro-batches, by number."""
    skips_nonfinite: bool
    """A step that is not finite is left out."""
    factor: float | None
    """The loss scale, where the host has it; it is 1 where there is none, and None where it is on the device."""
    scaled: bool
    """There is a loss scale."""
    loss_factor: float
    """What the summed loss is multiplied by: a replica group's is a part of the batch's mean."""
    to_average: bool = False
    """A moving average of the weights is to take those of this step, and has not yet."""
    copy: HostCopy = field(init=False)
    spans: Callable[[], list[Span]] = field(init=False)
    judged: bool = False
    """Whether it is finite was looked at, and what follows from that was done."""
    trouble: Problem | None = None
    """What was not finite in it, where it was left out."""
    told: bool = False
    """What goes by its numbers is done."""

    @cached_property
    def sums(self) -> list[float]:
        """The summed row."""
        return self.copy.read()[: self.width]

    @property
    def loss(self) -> float:
        return self.sums[0] * self.loss_factor

    @property
    def norm(self) -> float:
        """Of the gradients, without the loss scale."""
        return self.copy.read()[self.width]

    @property
    def scale(self) -> float:
        """The factor on the losses of this step; 1 without one."""
        return self.copy.read()[self.width + 1] if self.factor is None else self.factor

    @property
    def words(self) -> list[float]:
        """What all ranks said together: the wish to stop, how far they are with what they save, and the wish to end."""
        stop, (*_, saved, kept, end) = self.sums[1], self._before_logged
        return [stop, saved, kept, end]

    @property
    def by_share(self) -> tuple[list[int], list[float], list[float], list[int]]:
        """As `speed.by_share`."""
        return by_share(self.plan, self._before_logged[2:-3])

    @property
    def _before_logged(self) -> list[float]:
        return self.sums[: numbers_of_step_row(self.plan) - 1]

    @property
    def news(self) -> bool:
        """Some rank logged a name that was not known to all."""
        return self.sums[numbers_of_step_row(self.plan) - 1] > 0

    @property
    def finite(self) -> bool:
        """Whether the update was made: all ranks see the same."""
        if not self.skips_nonfinite:
            return not self.scaled or math.isfinite(self.norm)
        return math.isfinite(self.norm) and math.isfinite(self.sums[0])

    @property
    def known(self) -> bool:
        """Whether its numbers are on the host, and complete."""
        return self.told

    @cached_property
    def numbers(self) -> StepNumbers:
        """What the step did, as far as this rank knows alone. Waits for the device."""
        samples, busy, waited, _ = self.by_share
        rest = self.copy.read()[self.width + 2 :]
        made = StepNumbers(self.loss, self.norm, not self.finite, self.spans(), list(zip(samples, busy)), waited)
        made.loss_scale = self.scale if self.scaled else None
        made.norms = dict(zip(self.groups, rest))
        made.logged = self.logged.known(self.sums[numbers_of_step_row(self.plan) - 1 :])
        return made
