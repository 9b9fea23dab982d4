"""The forward and backward passes of one step on one rank.

They go micro-batch by micro-batch, in threads, or by a pipeline's table. Every loss enters with its weight over the weight of
the global batch, whoever computes it and in whatever order.

[Note: Turns]
The turns of a step: one for a job with one loss, one for each phase that is due for a job with phases (`config/phases.py`).

In a phase's turn the model runs that phase alone, backward leads to the parameters that it trains and to no others, what sums
gradients over the ranks sums theirs, and its optimizer alone takes a step. Nothing of the other phases is computed, sent or kept
but the tensors that lie in one message with this phase's (under `fsdp`, in one group with them), which are dropped.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.checkpoint.carried_state import Training
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.keys import OTHER_SAMPLES
from plait.config.phases import Phase, PhaseOptimizers
from plait.data.batch import Batch, BatchShare, weigh
from plait.engine.build import check_loss
from plait.engine.logged import StepLog, recording, refused_in_threads
from plait.engine.step import Spans
from plait.losses.global_batch import zero_loss
from plait.model.make import call
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.loss_scale import scaled
from plait.parallel.pipeline.runtime import MicroBatch, PipelineRuntime
from plait.parallel.precision import forward_format
from plait.parallel.rank_model import RankModel
from plait.tensors import opaque_code
from plait.tensors.collectives import host_or
from plait.tensors.torch_private import leaves
from plait.tensors.transfers import move


class SharesBatch(Training, Protocol):
    """A training of which every rank computes a share of the batch."""

    @property
    def share(self) -> BatchShare:
        ...


def weights_of(job: Job, batch: Batch) -> list[float]:
    """The weight of each of this rank's micro-batches: its number of samples, or what `Job.weight` counts in it."""
    return [weigh(job.weight, micro) for micro in batch.micro]


def run_here(share: BatchShare, batch: Batch, weights: list[float]) -> list[int]:
    """Numbers of the micro-batches that this rank runs: as many as the rank with most samples, because a forward pass may
    communicate, change buffers or count its calls. A rank without samples for one runs another rank's, with weight zero."""
    most = batch.most or max(share.sizes(batch.size))  # of so many samples, the first parts have one each
    return [i for i, w in enumerate(weights) if w or i < most]


def total_weight(training: SharesBatch, batch: Batch, weights: list[float]) -> float:
    """Weight of the global batch. Without `Job.weight` it is its number of samples, and nothing is sent. J009 if it is not positive.

    In a step that replica groups make on their own: what makes the mean of the groups' losses that of the batch, when all samples
    weigh the same, without a message between groups: a group's weight × size / (groups × its samples). It is 0 without a sample.
    """
    plan, rare, size = training.plan, training.rank_model.techniques.replica_groups, training.share.of_group(batch.size)[1]
    on_its_own = rare is not None and not rare.sums(batch.after.step)
    if training.job.weight is None:
        return batch.size / (plan.replica_groups if on_its_own else 1) if size else 0.0
    total = torch.tensor(sum(weights), dtype=torch.float64)
    if plan.ranks > 1:
        peers = training.rank_model.mesh.group(*OTHER_SAMPLES)
        total = total.to(host_or(training.rank_model.device, peers))
        dist.all_reduce(total, group=peers)
    if on_its_own:
        return float(total) * batch.size / (plan.replica_groups * size) if size else 0.0
    if rare is not None:
        rare.total(total)
    if not 0 < float(total) < math.inf:
        raise PlaitError(Problem("J009", f"the weights of step {batch.position.step + 1} sum to {float(total)}",
                                 why="Job.weight counts nothing in the whole batch, so its mean loss is 0 / 0"))  # fmt: skip
    return float(total)


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


class Passes:
    """Leaves the gradients of this rank's samples in the parameters' `.grad`."""

    def __init__(self, rank_model: RankModel, spans: Spans, turns: Turns):
        self.rank_model, self.spans, self.turns = rank_model, spans, turns
        self.call, self.loss = call, rank_model.job.loss
        self.output_bytes = 0
        """Of the outputs that processes=one gathers on its first device."""
        self.losses: list[tuple[int, Tensor]] = []
        """Of the last step: number of a micro-batch, its loss; where losses are computed."""
        self.number = 0
        self.logged = StepLog(rank_model.device)

    def pieces(self, batch: Batch, runs: dict[int, float]) -> list[MicroBatch]:
        """The micro-batches to run, on the device. `runs`: number -> its weight over the global batch's."""
        rank_model, found = self.rank_model, list[MicroBatch]()
        loss_scale = rank_model.techniques.loss_scale
        for i, weight in runs.items():
            micro = batch.micro[i]
            pair = rank_model.setup.inputs.take((micro.inputs, micro.targets))
            inputs, targets = move(pair, rank_model.device, rank_model.setup.cast)
            scale = weight if loss_scale is None else weight * loss_scale.factor
            found.append(MicroBatch(inputs, targets, micro.first, micro.count or 1, weight, scale, micro.count == 0, i))
        return found

    def run(self, pieces: list[MicroBatch], step: int, ready: Callable[[list[Tensor]], None]) -> None:
        """Forward and backward of all. `ready` is given the weighted losses when the last backward is about to begin."""
        self.logged.begin()
        idle = bool(pieces) and all(piece.idle for piece in pieces)
        with self.rank_model.batch_peers.here(), opaque_code.opaque():
            if self.rank_model.techniques.pipeline is None:
                self._one_by_one(pieces, step, ready, idle)
            else:
                self._pipelined(self.rank_model.techniques.pipeline, pieces, step, ready, idle)
        self.losses = [(piece.number, piece.loss) for piece in pieces if piece.loss is not None]

    @property
    def at(self) -> int:
        """Number of the micro-batch whose forward or backward runs."""
        return self.number if self.rank_model.techniques.pipeline is None else self.rank_model.techniques.pipeline.at

    def _one_by_one(self, pieces: list[MicroBatch], step: int, ready: Callable[[list[Tensor]], None], idle: bool) -> None:
        rank_model, losses = self.rank_model, list[Tensor]()
        for piece in pieces:
            last, self.number = piece is pieces[-1], piece.number
            self.turns.reducer.begin(last, idle)
            loss, backward = self.forward(piece, step) if rank_model.techniques.replicas is None else self._in_threads(piece, step)
            if piece.weight:
                piece.loss = loss
                losses.append(loss.double() * piece.weight)
            if last:
                ready(losses)
            self.spans.begin("backward")
            backward()
            self.spans.end("backward")
        if not pieces:
            ready(losses)

    def forward(self, piece: MicroBatch, step: int) -> tuple[Tensor, Callable[[], None]]:
        """(loss, what runs its backward pass) of one micro-batch."""
        rank_model = self.rank_model
        self.spans.begin("forward")
        with rank_model.randomness.at(step, piece.first, piece.samples, turn=self.turns.name):
            loss = self._loss(self._model(piece), piece)
        self.spans.end("forward")
        larger = scaled(loss, piece.scale)

        def backward() -> None:
            rank_model.batch_peers.idle = piece.idle
            with rank_model.randomness.replay():
                larger.backward(inputs=self.turns.backward_to())

        return loss.detach(), backward

    def _model(self, piece: MicroBatch) -> Any:
        self.rank_model.batch_peers.begin(piece.idle)
        with self._format(), self.logged.at(piece.weight):
            return self.call(self.rank_model.module, piece.inputs)

    def _loss(self, outputs: object, piece: MicroBatch) -> Tensor:
        """The job's loss, or zero for a micro-batch that weighs nothing: its rank takes part in what ranks communicate."""
        with self._format(), self.logged.at(piece.weight):
            whole = lambda: self.loss(outputs, piece.targets)  # noqa: E731
            loss = whole() if piece.weight else zero_loss(whole, outputs, self.rank_model.batch_peers.made)
        check_loss(loss)
        return loss

    def _format(self) -> AbstractContextManager[Any]:
        """The number format of the forward pass and the loss."""
        return forward_format(self.rank_model.plan, self.rank_model.setup.cast, self.rank_model.device.type)

    @contextmanager
    def _threaded(self) -> Iterator[None]:
        """Around the forward pass of a part of the samples, in a thread of its own."""
        with self.rank_model.batch_peers.thread(), self._format(), recording(refused_in_threads()):
            yield

    def _pipelined(
        self, pipe: PipelineRuntime, pieces: list[MicroBatch], step: int, ready: Callable[[list[Tensor]], None], idle: bool
    ) -> None:
        reducer = self.turns.reducer
        pipe.number = step
        pipe.clock.beat = self.spans.beat
        if self.spans.clock is not None:
            pipe.clock.now = self.spans.now
        reducer.begin(False, idle)
        losses = pipe.step(pieces, self._model, self._loss)
        self.spans.open += pipe.clock.spans
        ready(losses)
        reducer.begin(True, idle)

    def _in_threads(self, piece: MicroBatch, step: int) -> tuple[Tensor, Callable[[], None]]:
        replicas = self.rank_model.techniques.replicas
        assert replicas is not None
        self.spans.begin("replicate")
        replicas.send_weights()
        self.spans.end("replicate")
        self.spans.begin("forward")
        outputs, back = replicas.forward(self.call, self._threaded, piece.inputs, step, piece.first, piece.samples)
        self.spans.end("forward")
        self.spans.begin("loss")
        loss = self._loss(outputs, piece)
        gathered = leaves(outputs)
        self.output_bytes = sum(o.nbytes for o in gathered if isinstance(o, Tensor))
        scaled(loss, piece.scale).backward()
        self.spans.end("loss")

        def backward() -> None:
            back([o.grad if isinstance(o, Tensor) else None for o in gathered])
            self.spans.begin("collect")
            replicas.collect()
            self.spans.end("collect")

        return loss.detach(), backward
