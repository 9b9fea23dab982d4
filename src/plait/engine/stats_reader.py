"""When the host reads what came of a step, and what follows from it.

[Note: Reading late]
On a CPU the host reads loss and norm, and then makes the update. On a GPU that would leave the device idle: whoever queues its work would
wait for it in every step. So the host runs ahead:

    host     passes of N │ read N-1 │ update of N │ passes of N+1 │ read N │ update of N+1 │ …
    device          passes of N         │  update of N  │         passes of N+1         │ …

It queues the update, which the device skips where loss or norm are not finite (`device_update.py`), and the row of numbers travels to the
host while it queues the passes of the next step. It is read before that step's update. If step N-1 was skipped, the passes just made of
step N began from buffers that the skipped step had written: they are undone, the place where it began is searched for, and the run stops, or
goes on and makes the passes of step N again. So all that a CPU would have done is done, one step later.

A moving average of the weights takes those of a step when the step is known to have been made, which is before the next update.

Not queued ahead are updates by an optimizer that is not fused, the first update (in which optimizers make their state), and one that
phases, replica groups or shares that follow speeds go by. There the host waits in the step, once.
"""

from typing import Protocol

from plait.config.errors import PlaitError
from plait.engine.nonfinite import Guard, Repeatable
from plait.engine.pending_stats import PendingStats
from plait.parallel.average import in_eval_mode


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
