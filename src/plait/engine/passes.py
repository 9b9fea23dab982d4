"""The forward and backward passes of one step on one rank, and what the step did and where its time went.

They go micro-batch by micro-batch, in threads, or by a pipeline's table. Every loss enters with its weight over the weight of
the global batch, whoever computes it and in whatever order.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import Problem
from plait.config.phases import Phase
from plait.data.batch import Batch
from plait.engine.build import check_loss, move
from plait.engine.logged import StepLog, recording, refused_in_threads
from plait.engine.turns import Turns
from plait.losses.global_batch import zero_loss
from plait.model.make import call
from plait.parallel.built import Built
from plait.parallel.pipeline.runtime import MicroBatch
from plait.parallel.precision import forward_format
from plait.tensors import higher_order
from plait.tensors.torch_private import leaves, tree_leaves

SPANS = ("data", "receive", "send", "replicate", "forward", "loss", "backward", "collect", "reduce", "optimizer")


@dataclass
class Step:
    """What one optimizer step did. `samples`: seen after it, over all ranks."""

    step: int
    loss: float
    """Weighted mean over the global batch."""
    norm: float
    """Gradient norm over all parameters, before clipping."""
    lr: float
    """Learning rate of the first parameter group."""
    samples: int
    size: int
    """Samples in this step over all ranks."""
    tokens: int
    """Elements of integer inputs of rank 2 or more on this rank; 0 when the inputs are no tokens."""
    skipped: bool
    """Nothing was updated, on any rank: an fp16 overflow, or a step that was not finite and was to be left out."""
    stop: bool
    """Some rank was asked to stop: all ranks see it in the same step."""
    spans: list[tuple[str, float, float]]
    """(name, start, seconds) of what took time on this rank; starts are `time.perf_counter`. Names are those of `SPANS`,
    and under `pp` those of actions, `receive F1.3`, `F1.3` and `send F1.3`: see `sort_of`."""
    by_rank: list[tuple[int, float]]
    """(samples of this step, seconds computing in the step before) of each share; where ranks have the same, of the slowest."""
    data_by_rank: list[float] = field(default_factory=list)
    """Seconds that each rank waited for this step's samples."""
    note: str = ""
    """What is to be said of shares of the batch that change."""
    trouble: Problem | None = None
    """What was not finite in a step that was left out, and where it began."""
    logged: dict[str, float] = field(default_factory=dict)
    """What the job recorded with `plait.log`: means over the global batch; and a callback with `Engine.log`."""
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each parameter group."""
    norms: dict[str, float] = field(default_factory=dict)
    """With `group_norms`, the gradient norm of each parameter group over all ranks, before clipping: by its number, or its "name"."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Loss, norm and lr of each phase that was due, in a job that has phases; those above are of the first with every=1."""


def told(steps: list[tuple[Phase | None, Step]]) -> Step:
    """What a step did, from what each of its turns did. Loss, norm and learning rate are those of the first phase that is due in
    every step, so that they are of one phase throughout a run; those of all are in `phases`."""
    last = steps[-1][1]
    if steps[-1][0] is None:
        return last
    main = next(step for phase, step in steps if phase is not None and phase.every == 1)
    trouble = next((step.trouble for _, step in steps if step.trouble is not None), None)
    norms, logged = dict[str, float](), dict[str, float]()
    for _, step in steps:
        norms, logged = norms | step.norms, logged | step.logged
    return replace(
        last, loss=main.loss, norm=main.norm, lr=main.lr, trouble=trouble, norms=norms, logged=logged,
        skipped=any(step.skipped for _, step in steps), spans=[span for _, step in steps for span in step.spans],
        phases={phase.name: {"loss": step.loss, "norm": step.norm, "lr": step.lr} for phase, step in steps if phase},
    )  # fmt: skip


def sort_of(name: str) -> str:
    """Which of `SPANS` a span counts as: F1.3 is forward, B, I and W are backward, `receive F1.3` is receive."""
    return _SORTS.get(name[0]) or name.partition(" ")[0]


class Spans:
    """(name, start, seconds) of what takes time in a step; spans may nest. `beat` is told of each beginning."""

    def __init__(self, beat: Callable[[str], None]):
        self.beat = beat
        self.open: list[tuple[str, float, float]] = []

    def begin(self, name: str) -> None:
        """Something begins."""
        self.beat(name if name in _PHASES else "forward")
        self.open.append((name, perf_counter(), 0.0))

    def end(self, name: str) -> None:
        """The innermost open span of this name ends."""
        now = perf_counter()
        for i in range(len(self.open) - 1, -1, -1):
            if self.open[i][0] == name and self.open[i][2] == 0.0:
                self.open[i] = (name, self.open[i][1], now - self.open[i][1])
                return

    def taken(self) -> list[tuple[str, float, float]]:
        """The spans of the step, which is over."""
        spans, self.open = self.open, []
        return spans


_SORTS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def tokens(batch: Batch) -> int:
    """Elements of the first integer input with a sequence dim."""
    count = 0
    for micro in batch.micro:
        first = next((t for t in tree_leaves(micro.inputs) if isinstance(t, Tensor)), None)
        if first is not None and first.dim() == 2 and not first.is_floating_point():
            count += first.numel() if micro.count else 0
    return count


class Passes:
    """Leaves the gradients of this rank's samples in the parameters' `.grad`."""

    def __init__(self, built: Built, spans: Spans, turns: Turns):
        self.built, self.spans, self.turns = built, spans, turns
        self.output_bytes = 0
        """Of the outputs that processes=one gathers on its first device."""
        self.losses: list[tuple[int, Tensor]] = []
        """Of the last step: number of a micro-batch, its loss; where losses are computed."""
        self.number = 0
        self.logged = StepLog(built.device)

    def pieces(self, batch: Batch, runs: dict[int, float]) -> list[MicroBatch]:
        """The micro-batches to run, on the device. `runs`: number -> its weight over the global batch's."""
        built, found = self.built, []
        for i, weight in runs.items():
            micro = batch.micro[i]
            pair = micro.spare if micro.spare and built.together == "sample" else (micro.inputs, micro.targets)
            inputs, targets = move(pair, built.device, built.cast)
            samples = micro.count or int(built.together == "sample")
            scale = weight * (built.scaler.value if built.scaler else 1.0)
            found.append(MicroBatch(inputs, targets, micro.first, samples, weight, scale, micro.count == 0, i))
        if built.reducer is not None:
            built.reducer.idle = bool(found) and all(piece.idle for piece in found)
        return found

    def run(self, pieces: list[MicroBatch], step: int, arm: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Forward and backward of all. `arm` is given the weighted losses when the last backward is about to begin."""
        self.logged.begin()
        with self.built.sharers.here(), higher_order.apart():
            step_row = self._all(pieces, step, arm)
        self.losses = [(piece.number, piece.loss) for piece in pieces if piece.loss is not None]
        return step_row

    @property
    def at(self) -> int:
        """Number of the micro-batch whose forward or backward runs."""
        return self.number if self.built.pipe is None else self.built.pipe.at

    def _all(self, pieces: list[MicroBatch], step: int, arm: Callable[[list[Tensor]], Tensor]) -> Tensor:
        built, losses, step_row = self.built, list[Tensor](), torch.empty(0)
        if built.pipe is not None:
            return self._pipelined(pieces, step, arm)
        for piece in pieces:
            last, self.number = piece is pieces[-1], piece.number
            if built.reducer is not None:
                built.reducer.before(last)
            loss, backward = self.forward(piece, step) if built.replicas is None else self._in_threads(piece, step)
            if piece.weight:
                piece.loss = loss
                losses.append(loss.double() * piece.weight)
            if last:
                step_row = arm(losses)
            self.spans.begin("backward")
            backward()
            if built.reducer is not None and not last:
                built.reducer.after()
            self.spans.end("backward")
        return step_row if pieces else arm(losses)

    def forward(self, piece: MicroBatch, step: int) -> tuple[Tensor, Callable[[], None]]:
        """(loss, what runs its backward pass) of one micro-batch."""
        built = self.built
        self.spans.begin("forward")
        with built.randomness.at(step, piece.first, piece.samples, turn=built.turn):
            loss = self._loss(self._model(piece), piece)
        self.spans.end("forward")
        scaled = loss if piece.scale == 1.0 else loss * piece.scale

        def backward() -> None:
            built.sharers.idle = piece.idle
            with built.randomness.replay():
                scaled.backward(inputs=self.turns.backward_to())

        return loss.detach(), backward

    def _model(self, piece: MicroBatch) -> Any:
        self.built.sharers.begin(piece.idle)
        with self._format(), self.logged.at(piece.weight):
            return self.built.run(self.built.model, piece.inputs)

    def _loss(self, outputs: object, piece: MicroBatch) -> Tensor:
        """The job's loss, or zero for an empty share in a model that communicates: it takes part and adds nothing."""
        with self._format(), self.logged.at(piece.weight):
            whole = lambda: self.built.job.loss(outputs, piece.targets)  # noqa: E731
            loss = whole() if piece.weight else zero_loss(whole, outputs, self.built.sharers.made)
        check_loss(loss)
        return loss

    def _format(self) -> AbstractContextManager[Any]:
        """The number format of the forward pass and the loss."""
        return forward_format(self.built.plan, self.built.cast, self.built.device.type)

    @contextmanager
    def _threaded(self) -> Iterator[None]:
        """Around the forward pass of a part of the samples, in a thread of its own."""
        with self.built.sharers.thread(), self._format(), recording(refused_in_threads()):
            yield

    def _pipelined(self, pieces: list[MicroBatch], step: int, arm: Callable[[list[Tensor]], Tensor]) -> Tensor:
        pipe, reducer = self.built.pipe, self.built.reducer
        assert pipe is not None and reducer is not None
        pipe.number = step
        pipe.clock.beat = self.spans.beat
        reducer.before(False)
        losses = pipe.step(pieces, self._model, self._loss)
        self.spans.open += pipe.clock.spans
        step_row = arm(losses)
        reducer.before(True)
        return step_row

    def _in_threads(self, piece: MicroBatch, step: int) -> tuple[Tensor, Callable[[], None]]:
        replicas = self.built.replicas
        assert replicas is not None
        self.spans.begin("replicate")
        replicas.send_weights()
        self.spans.end("replicate")
        self.spans.begin("forward")
        outputs, back = replicas.forward(call, self._threaded, piece.inputs, step, piece.first, piece.samples)
        self.spans.end("forward")
        self.spans.begin("loss")
        loss = self._loss(outputs, piece)
        gathered = leaves(outputs)
        self.output_bytes = sum(o.nbytes for o in gathered if isinstance(o, Tensor))
        (loss * piece.scale).backward()
        self.spans.end("loss")

        def backward() -> None:
            back([o.grad if isinstance(o, Tensor) else None for o in gathered])
            self.spans.begin("collect")
            replicas.collect()
            self.spans.end("collect")

        return loss.detach(), backward
