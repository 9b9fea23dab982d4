"""Read a step's statistics on the host, and act on them.

[Note: Reading late]
On a CPU the host reads loss and norm, and then makes the update. On a GPU that would leave the device idle, since the host that
queues its work would wait in every step. So the host runs ahead:

    host     passes of N │ read N-1 │ update of N │ passes of N+1 │ read N │ update of N+1 │ …
    device          passes of N         │  update of N  │         passes of N+1         │ …

The host queues the update, which the device skips if loss or norm are not finite (`train_step.py`). The row of statistics is copied
to the host while the host queues the passes of the next step. The host reads it before that step's update. If step N-1 was skipped,
the passes just made of step N started from buffers that the skipped step had written. They are undone, the source is located, and the
run stops, or repeats the passes of step N. So the result is that of a CPU, one step later.

A moving average of the weights includes a step once the step is confirmed, which is before the next update.

Updates are not queued ahead for an optimizer that is not fused, for the first update (in which optimizers make their state), and if
phases, replica groups or a batch split by speed depend on the statistics. Then the host waits once in the step.

The row has the totals of all ranks, followed by values that are equal on every rank.
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
from plait.engine.nonfinite import NonFiniteGuard, RepeatableTraining
from plait.engine.step import Span, StepNumbers, get_slowest_by_share
from plait.engine.step_log import LoggedSums
from plait.parallel.gradient_reducer import StepStats
from plait.parallel.weight_average import use_eval_mode
from plait.tensors.transfers import HostCopy


@dataclass
class PendingStats:
    """A step whose statistics are being copied to the host.

    They are one row on the device, which `pack` makes and one copy transfers: the packed `StepStats`, the gradient norm without the
    loss scale, that scale, and the norm of each parameter group.
    """

    plan: Plan
    batch: Batch
    groups: list[str]
    """Names of the parameter groups whose norms are recorded."""
    logged: LoggedSums
    losses: list[tuple[int, Tensor]]
    """(micro-batch number, loss) of this rank."""
    skips_nonfinite: bool
    """Whether a non-finite step is skipped."""
    has_loss_scale: bool
    """Whether there is a loss scale."""
    loss_factor: float
    """Factor on the summed loss: a replica group's loss is a part of the batch's mean."""
    needs_average: bool = False
    """Whether a moving average of the weights still has to include this step."""
    width: int = 0
    """Elements of the packed stats."""
    copy: HostCopy = field(init=False)
    spans: Callable[[], list[Span]] = field(init=False)
    is_judged: bool = False
    """Whether the step was checked for non-finite values, and skipped if needed."""
    trouble: Problem | None = None
    """The problem of a skipped step."""
    is_handled: bool = False
    """Whether all actions that depend on the statistics are done."""

    def pack(self, step_row: Tensor, norm: Tensor, scale: Tensor, group_norms: Tensor | None) -> Tensor:
        """Pack the row for the host, float64 on the device. `norm` and `group_norms` include the loss scale."""
        self.width = len(step_row)
        alike = [norm.reshape(1) / scale, scale, *([group_norms / scale] if group_norms is not None else [])]
        return torch.cat([step_row.double(), *alike])

    @cached_property
    def totals(self) -> StepStats:
        """Sums over all ranks. Waits for the device."""
        return StepStats.unpack(self.copy.read()[: self.width], self.plan)

    @property
    def _shared_values(self) -> tuple[float, float, list[float]]:
        norm, scale, *group_norms = self.copy.read()[self.width :]
        return norm, scale, group_norms

    @property
    def loss(self) -> float:
        return float(self.totals.loss) * self.loss_factor

    @property
    def norm(self) -> float:
        """Gradient norm, without the loss scale."""
        return self._shared_values[0]

    @property
    def scale(self) -> float:
        """Factor on the losses of this step; 1 without a loss scale."""
        return self._shared_values[1]

    @property
    def is_finite(self) -> bool:
        """Whether the update was made: the same on all ranks."""
        if not self.skips_nonfinite:
            return not self.has_loss_scale or math.isfinite(self.norm)
        return math.isfinite(self.norm) and math.isfinite(float(self.totals.loss))

    @property
    def known(self) -> bool:
        """Whether the statistics are on the host and complete."""
        return self.is_handled

    @cached_property
    def numbers(self) -> StepNumbers:
        """Results of the step, as far as this rank has them alone. Waits for the device."""
        totals, plan = self.totals, self.plan
        samples = [round(count) for count in totals.samples]
        by_share = list(zip(samples, get_slowest_by_share(plan, totals.busy)))
        made = StepNumbers(self.loss, self.norm, not self.is_finite, self.spans(), by_share, totals.waited)
        made.loss_scale = self.scale if self.has_loss_scale else None
        made.norms = dict(zip(self.groups, self._shared_values[2]))
        made.logged = self.logged.compute_known_means(totals.logged)
        return made


class StatsTraining(RepeatableTraining, Protocol):
    """A training whose step statistics `StatsReader` reads."""

    guard: NonFiniteGuard

    def apply_stats(self, pending: PendingStats) -> None:
        """Act on the statistics of a step, which are on the host."""
        ...


class StatsReader:
    """Reads the step statistics of one rank. All ranks read at the same points."""

    def __init__(self, training: StatsTraining):
        self.training = training
        self.pending: PendingStats | None = None
        """The last step, until all actions that depend on its statistics are done."""

    @property
    def is_judged(self) -> bool:
        """Whether nothing can undo the last step any more."""
        return self.pending is None or self.pending.is_judged

    @property
    def is_skipped(self) -> bool:
        """Whether the device skipped the last step and the host has not acted on it. Waits for its statistics."""
        return self.pending is not None and not self.pending.is_judged and bool(self._describe_nonfinite(self.pending))

    def settle(self, *, within_next: bool = False) -> bool:
        """Read the statistics of the last step, unless done, and act on them. Returns whether the step was skipped.

        `within_next`: the passes of the next step were made, and are undone if the step was skipped. N001 to N003 as in
        `NonFiniteGuard`: the position is then the step before.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        was_skipped = False
        if not pending.is_judged:
            if within_next and self._describe_nonfinite(pending):
                self.training.guard.undo()
            try:
                was_skipped = self.judge(pending)
            except PlaitError:
                self.training.position = pending.batch.position
                raise
        self.average(pending)
        pending.numbers.trouble = pending.trouble
        self.training.apply_stats(pending)
        pending.is_handled = True
        return was_skipped

    def judge(self, pending: PendingStats) -> bool:
        """Return whether a step is skipped because it is not finite, after a search for the source."""
        training, pending.is_judged = self.training, True
        if what := self._describe_nonfinite(pending):
            training.passes.losses = pending.losses
            pending.trouble = training.guard.handle(training, pending.batch, what)
        elif pending.is_finite:
            training.guard.skipped_steps = 0
        return bool(what)

    def average(self, pending: PendingStats | None = None) -> None:
        """Add the weights of a step, by default the last, to their moving average, unless it has them or the step was skipped."""
        pending, average = pending or self.pending, self.training.rank_model.techniques.average
        if average is not None and pending is not None and pending.needs_average and pending.is_finite:
            pending.needs_average = False
            with use_eval_mode(self.training.rank_model):
                average.update()

    def _describe_nonfinite(self, pending: PendingStats) -> str:
        """Describe the non-finite value of a step, as `NonFiniteGuard.describe_nonfinite`; "" if only fp16's loss scale is too large.

        Then the step updates nothing, but its forward passes count.
        """
        return self.training.guard.describe_nonfinite(pending.loss, pending.norm, pending.scale if pending.has_loss_scale else None)
