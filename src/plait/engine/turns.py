"""The turns of a step: one for a job with one loss, one for each phase that is due for a job with phases (`config/phases.py`).

In a phase's turn the model runs that phase alone, backward leads to the parameters that it trains and to no others, what sums
gradients over the ranks sums theirs, and its optimizer alone takes a step. Nothing of the other phases is computed, sent or kept
but the tensors that lie in one message with this phase's (under `fsdp`, in one group with them), which are dropped.
"""

from collections.abc import Iterator

from torch import Tensor

from plait.config.job import Job
from plait.config.phases import Phase, PhaseOptimizers
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.rank_model import RankModel


class Turns:
    """Whose turn it is in a step of one rank."""

    def __init__(self, rank_model: RankModel):
        self.rank_model = rank_model
        self.phase: Phase | None = None
        self.first = self.last = True
        """Of the step."""
        self.name = ""
        """Of the phase; "" in a job without phases, and between steps."""

    def of(self, step: int) -> Iterator[Phase | None]:
        """The turns of a step, counted from 1; in each, the rank is as the phase wants it. Of step 0: those of all phases."""
        phases = self.rank_model.job.phases
        if phases is None:
            yield None
            return
        due = [phase for phase in phases if phase.due(step)]
        try:
            for phase in due:
                self.first, self.last = phase is due[0], phase is due[-1]
                self._begin(phase)
                yield phase
        finally:
            self._begin(None)

    def _begin(self, phase: Phase | None) -> None:
        rank_model, self.phase = self.rank_model, phase
        rank_model.module.turn = None if phase is None else phase.name  # type: ignore[assignment]
        self.name = "" if phase is None else phase.name
        if isinstance(rank_model.optimizer, PhaseOptimizers):
            rank_model.optimizer.turn = self.name
        if phase is not None and rank_model.techniques.shards is not None:
            rank_model.techniques.shards.trains(phase.has)

    @property
    def reducer(self) -> GradientReducer:
        """What sums the turn's gradients."""
        return self.rank_model.reducers[self.name]

    def backward_to(self) -> list[Tensor] | None:
        """The tensors that the turn's backward leads to; None: all there are."""
        rank_model, phase = self.rank_model, self.phase
        if phase is None:
            return None
        if rank_model.techniques.shards is not None:
            return rank_model.techniques.shards.gathered_of(phase.has)
        return [p for n, p in rank_model.params.items() if p.requires_grad and phase.has(n)]

    def forget_others(self) -> None:
        """Drop gradients of parameters that this turn does not train: zeros that were summed beside those it does."""
        phase = self.phase
        for name, parameter in self.rank_model.params.items() if phase is not None else ():
            if phase is not None and not phase.has(name):
                parameter.grad = None

    def clip(self, job: Job) -> float | None:
        """The largest gradient norm."""
        return job.clip if self.phase is None or self.phase.clip is None else self.phase.clip

    def updated(self) -> None:
        """The turn's parameters were updated: the phases that follow use the new ones."""
        if self.phase is not None and self.rank_model.techniques.shards is not None:
            self.rank_model.techniques.shards.reshard()

    @property
    def rate(self) -> float:
        """The learning rate of the first group of the turn's optimizer."""
        optimizer = self.rank_model.optimizer
        if isinstance(optimizer, PhaseOptimizers) and self.phase is not None:
            optimizer = optimizer.each[self.phase.name]
        return float(optimizer.param_groups[0]["lr"])
