"""The forward and backward passes of one step on one rank.

They go micro-batch by micro-batch, in threads, or by a pipeline's table. Every loss enters with its weight over the weight of
the global batch, whoever computes it and in whatever order.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from plait.data.batch import Batch
from plait.engine.build import check_loss
from plait.engine.logged import StepLog, recording, refused_in_threads
from plait.engine.spans import Spans
from plait.engine.turns import Turns
from plait.losses.global_batch import zero_loss
from plait.model.make import call
from plait.parallel.loss_scale import scaled
from plait.parallel.pipeline.runtime import MicroBatch, PipelineRuntime
from plait.parallel.precision import forward_format
from plait.parallel.rank_model import RankModel
from plait.tensors import opaque_code
from plait.tensors.torch_private import leaves
from plait.tensors.transfers import move


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
