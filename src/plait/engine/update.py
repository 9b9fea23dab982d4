"""The end of a step: the norm, clipping and the optimizer's step, and when the host reads what came of it.

On a CPU the host reads loss and norm and then makes the update. On a GPU that would leave the device idle: whoever queues its work would
wait for it in every step. So the host runs ahead: it queues the update, the device skips it where loss or norm are not finite
(`device_update.py`), and the row of numbers travels to the host while it queues the passes of the next step. It is read before that
step's update. If it says that the step was left out, the passes just made are undone and made again after what a CPU would have done:
buffers are put back, the place where it began is searched for, and the run stops or goes on.

A moving average of the weights takes something of them when the step is known to have been made, which is before the next update.

What cannot be queued ahead is an update by an optimizer that is not fused, the first one (in which optimizers make their state), and
one that phases, replica groups or shares that follow speeds go by. There the host waits in the step, once.
"""

from typing import Protocol

import torch
from torch import Tensor

from plait.config.errors import PlaitError
from plait.data.batch import Batch
from plait.engine import device_update
from plait.engine.group_norms import group_names, group_norms
from plait.engine.nonfinite import Guard, Repeatable
from plait.engine.pending_stats import PendingStats
from plait.engine.spans import Spans
from plait.engine.turns import Turns
from plait.parallel.average import in_eval_mode
from plait.parallel.loss_scale import DeviceLossScale
from plait.parallel.step_stats import StepStats
from plait.tensors.torch_private import scale_
from plait.tensors.transfers import HostCopy


class Updated(Repeatable, Protocol):
    """A training whose steps are ended here."""

    guard: Guard
    turns: Turns

    def backward(self, batch: Batch) -> Tensor:
        """The passes of a step, and the sums of gradients."""
        ...

    def total_norm(self) -> Tensor:
        """The norm of the gradients, a float64 scalar on the device."""
        ...

    def tell(self, pending: PendingStats) -> None:
        """Do what goes by the numbers of a step, which are on the host."""
        ...


class Updater:
    """Ends the steps of one rank. `norms`: the norm of each parameter group is asked for."""

    def __init__(self, training: Updated, spans: Spans, norms: bool):
        self.training, self.spans, self.norms = training, spans, norms
        built = training.built
        self.runs_ahead = device_update.may_run_ahead(built, training.guard.skips_nonfinite)
        """Updates are queued before their numbers are read."""
        if self.runs_ahead and built.scaler is not None:
            built.scaler = DeviceLossScale(built.scaler, built.device)
        self.at_once = not device_update.told_late(built)
        """What goes by a step's numbers is done in the step."""
        self.begun = False
        """The optimizer has made its state."""
        self.within = False
        """Weights may be half of one step and half of the next."""
        self.unread: PendingStats | None = None
        """The last step, as long as not all that goes by its numbers is done."""

    @property
    def skipped(self) -> bool:
        """Whether the last step is one to skip, and nothing was done about it yet. Waits for its numbers."""
        return self.unread is not None and not self.unread.judged and bool(self._wrong(self.unread))

    def update(self, batch: Batch, step_row: Tensor) -> PendingStats:
        """Clip, take the optimizer's step, and forget the gradients that `backward` left."""
        training, ahead = self.training, self.runs_ahead and self.begun
        if self.unread is not None and (ahead or not self.unread.judged) and self.settle(within_next=True):
            step_row = training.backward(batch)
        self.spans.begin("optimizer")
        unread = self._unread(batch)
        row = self._row(unread, step_row, norm := training.total_norm())
        unread.to_average = training.built.average is not None and training.turns.last
        if ahead:
            self._queue(step_row, norm)
        else:
            unread.copy = HostCopy(row)
            self._judge(unread)
            self.settle()
            self._make(unread)
        for parameter in training.built.own.values():
            parameter.grad = None
        self.spans.end("optimizer")
        if ahead:
            unread.copy = HostCopy(row)
        unread.spans, self.unread, self.within = self.spans.taken(), unread, False
        return unread

    def _row(self, unread: PendingStats, step_row: Tensor, norm: Tensor) -> Tensor:
        """The numbers of the step for the host: a tensor on the device."""
        built = self.training.built
        factor = 1.0 if built.scaler is None else built.scaler.factor
        scale = factor.reshape(1) if isinstance(factor, Tensor) else torch.full_like(norm.reshape(1), factor)
        return unread.pack(step_row, norm, scale, group_norms(built) if self.norms else None)

    def _unread(self, batch: Batch) -> PendingStats:
        training, built = self.training, self.training.built
        scale = 1.0 if built.scaler is None else built.scaler.value
        summed = built.rare is not None and built.rare.sums(batch.after.step)
        return PendingStats(
            training.plan, batch, group_names(built) if self.norms else [], training.passes.logged.sent, training.passes.losses,
            training.guard.skips_nonfinite, factor=None if isinstance(built.scaler, DeviceLossScale) else scale,
            scaled=built.scaler is not None, loss_factor=training.plan.replica_groups if summed else 1.0,
        )  # fmt: skip

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.training.built.own.values() if p.grad is not None]

    def _make(self, unread: PendingStats) -> None:
        """The update, by numbers that the host has read."""
        training, built = self.training, self.training.built
        if unread.finite:
            factor = clip_factor(unread.norm, training.turns.clip(training.job)) / unread.scale
            gradients = self._gradients()
            if gradients and factor != 1.0:
                scale_(gradients, factor)
            self.within = self.begun = True
            training.optimizer.step()
            training.turns.updated()
            self.average(unread)
        if built.scaler is not None and unread.trouble is None:
            built.scaler.update(unread.finite)

    def _queue(self, step_row: Tensor, norm: Tensor) -> None:
        """The update, ahead of its numbers: the device skips it where loss or norm are not finite."""
        training, scaler = self.training, self.training.built.scaler
        finite = norm.isfinite() if scaler is not None or training.guard.skips_nonfinite else None
        if finite is not None and training.guard.skips_nonfinite:
            finite = finite & StepStats.loss_in(step_row).isfinite()
        scale = scaler.factor if isinstance(scaler, DeviceLossScale) else None
        device_update.clip(self._gradients(), norm, training.job.clip, scale)
        self.within = True
        device_update.step(training.optimizer, finite)
        if isinstance(scaler, DeviceLossScale) and finite is not None:
            scaler.update(finite)

    def average(self, unread: PendingStats | None = None) -> None:
        """Have the average of the weights take those of a step, of the last one if none is given: unless it did, or the step was left out."""
        unread, average = unread or self.unread, self.training.built.average
        if average is not None and unread is not None and unread.to_average and unread.finite:
            unread.to_average = False
            with in_eval_mode(self.training.built):
                average.stepped()

    def settle(self, within_next: bool = False) -> bool:
        """Read the numbers of the last step, if that was not done, and do what goes by them; whether the step was found to be left out.

        `within_next`: the passes of the step that follows were made; they are undone if it was. All ranks call it at the same
        points. N001 to N003 as `nonfinite.Guard` has them: the run is then at the step before.
        """
        unread, self.unread = self.unread, None
        if unread is None:
            return False
        found = False
        if not unread.judged:
            if within_next and self._wrong(unread):
                self.training.guard.undo()
            try:
                found = self._judge(unread)
            except PlaitError:
                self.training.position = unread.batch.position
                raise
        self.average(unread)
        unread.numbers.trouble = unread.trouble
        self.training.tell(unread)
        unread.told = True
        return found

    def _judge(self, unread: PendingStats) -> bool:
        """Whether a step is left out because something in it is not finite, after a search for where that began."""
        training, unread.judged = self.training, True
        if what := self._wrong(unread):
            training.passes.losses = unread.losses
            unread.trouble = training.guard.handle(training, unread.batch, what)
        elif unread.finite:
            training.guard.skipped = 0
        return bool(what)

    def _wrong(self, unread: PendingStats) -> str:
        """What is not finite in a step, as `Guard.wrong` says it: nothing where fp16's loss scale is too large, which is no fault of the
        step. It updates nothing, but its forward passes count."""
        return self.training.guard.wrong(unread.loss, unread.norm, unread.scale if unread.scaled else None)


def clip_factor(norm: float, most: float | None) -> float:
    """As `torch.nn.utils.clip_grad_norm_`: most / (norm + 1e-6), at most 1; NaN stays NaN."""
    return 1.0 if most is None else min(most / (norm + 1e-6), 1.0)
