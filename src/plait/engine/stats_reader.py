"""When the host reads what came of a step, and what follows from it.

[Note: Reading late]
On a CPU the host reads loss and norm, and then makes the update. On a GPU that would leave the device idle: whoever queues its work would
wait for it in every step. So the host runs ahead:

    host     passes of N │ read N-1 │ update of N │ passes of N+1 │ read N │ update of N+1 │ …
    device          passes of N         │  update of N  │         passes of N+1         │ …

It queues the update, which the device skips where loss or norm are not finite (`train_step.py`), and the row of numbers travels to the
host while it queues the passes of the next step. It is read before that step's update. If step N-1 was skipped, the passes just made of
step N began from buffers that the skipped step had written: they are undone, the place where it began is searched for, and the run stops, or
goes on and makes the passes of step N again. So all that a CPU would have done is done, one step later.

A moving average of the weights takes those of a step when the step is known to have been made, which is before the next update.

Not queued ahead are updates by an optimizer that is not fused, the first update (in which optimizers make their state), and one that
phases, replica groups or shares that follow speeds go by. There the host waits in the step, once.

On their way are the totals of all ranks, and behind them what every rank finds alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.data.batch import Batch
from plait.engine.logged import Logged
from plait.engine.nonfinite import Guard, Repeatable
from plait.engine.step import Span, StepNumbers, slowest_of_share
from plait.parallel.average import in_eval_mode
from plait.parallel.gradient_reducer import StepStats
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


class ReadTraining(Repeatable, Protocol):
    """A training whose steps' numbers are read here."""

    guard: Guard

    def tell(self, pending: PendingStats) -> None:
        """Do what goes by the numbers of a step, which are on the host."""
        ...


class StatsReader:
    """Reads the numbers of one rank's steps. All ranks read at the same points."""

    def __init__(self, training: ReadTraining):
        self.training = training
        self.pending: PendingStats | None = None
        """The last step, as long as not all that goes by its numbers is done."""

    @property
    def is_judged(self) -> bool:
        """Whether nothing can undo the last step any more."""
        return self.pending is None or self.pending.judged

    @property
    def is_skipped(self) -> bool:
        """Whether the device skipped the last step, and nothing was done about it yet. Waits for its numbers."""
        return self.pending is not None and not self.pending.judged and bool(self._wrong(self.pending))

    def settle(self, *, within_next: bool = False) -> bool:
        """Read the numbers of the last step, if that was not done, and do what goes by them. Returns whether the step was skipped.

        `within_next`: the passes of the step that follows were made; they are undone if it was. N001 to N003 as `nonfinite.Guard`
        has them: the run is then at the step before.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        was_skipped = False
        if not pending.judged:
            if within_next and self._wrong(pending):
                self.training.guard.undo()
            try:
                was_skipped = self.judge(pending)
            except PlaitError:
                self.training.position = pending.batch.position
                raise
        self.average(pending)
        pending.numbers.trouble = pending.trouble
        self.training.tell(pending)
        pending.told = True
        return was_skipped

    def judge(self, pending: PendingStats) -> bool:
        """Whether a step is skipped because something in it is not finite, after a search for where that began."""
        training, pending.judged = self.training, True
        if what := self._wrong(pending):
            training.passes.losses = pending.losses
            pending.trouble = training.guard.handle(training, pending.batch, what)
        elif pending.finite:
            training.guard.skipped = 0
        return bool(what)

    def average(self, pending: PendingStats | None = None) -> None:
        """Add the weights of a step to their moving average, those of the last step if none is given: unless that was done, or the step
        was skipped."""
        pending, average = pending or self.pending, self.training.rank_model.techniques.average
        if average is not None and pending is not None and pending.to_average and pending.finite:
            pending.to_average = False
            with in_eval_mode(self.training.rank_model):
                average.stepped()

    def _wrong(self, pending: PendingStats) -> str:
        """What is not finite in a step, as `Guard.wrong` describes it. Empty if fp16's loss scale is too large, which is no fault of the
        step: it updates nothing, but its forward passes count."""
        return self.training.guard.wrong(pending.loss, pending.norm, pending.scale if pending.scaled else None)
