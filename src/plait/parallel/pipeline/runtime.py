"""Executing a pipeline table on one rank: forwards, backwards, and the tensors that cross between stages.

A rank goes through its row of the table in order. Before an action it waits for what the neighbours send for it; after
it, it sends on without waiting, so a table without a deadlock has none here. Messages go and are received in one order,
which both ends read off the table: so it is right on NCCL too, which knows no tags. Receives are posted ahead of time, and
what was sent is let go as soon as the table says it has arrived; `plait.parallel.pipeline.p2p` does both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.config.errors import FAILED, PlaitError, Problem
from plait.losses.global_batch import BatchPeers
from plait.parallel.loss_scale import scaled
from plait.parallel.pipeline.p2p import AHEAD, PointToPoint, Routes, StageMessage, empty, packed, routes, unpacked
from plait.parallel.pipeline.partition import Forward, ForwardPath
from plait.parallel.pipeline.schedules import Action, Table
from plait.parallel.pipeline.stage import PipelineStages, StageForward, halves
from plait.randomness.keyed import Randomness
from plait.tensors.collectives import directly
from plait.tensors.trees import Slot, tensors


@dataclass
class MicroBatch:
    """One micro-batch of this rank's share: what the stages run on, and how much it weighs."""

    inputs: object
    targets: object
    first: int
    samples: int
    weight: float
    """Its weight over the global batch's. 0 when it only takes part."""
    scale: float | Tensor
    """Factor on its loss before backward; with a loss scale that is on the device, a scalar there."""
    idle: bool = False
    """Its sample is another rank's: it only makes up the number."""
    number: int = 0
    """Which micro-batch of this rank's share it is."""
    loss: Tensor | None = None
    """Once it was computed, where it is."""


@dataclass
class _Open:
    """A stage's forward pass that waits for its backward."""

    leaves: list[Tensor]
    """Received tensors that gradients are sent back for."""
    outputs: list[Tensor]
    """Tensors that gradients will come back for."""
    loss: Tensor | None
    run: StageForward
    weights: Callable[[], None] = lambda: None
    """The second half of a split backward."""


class Clock:
    """(name, begin, end) of what takes time in a step, in order: `receive F1.0`, `F1.0`, `send F1.0`, `F1.1`, ….

    The times are the host's, from `time.perf_counter` unless `now` is another clock: on a GPU its moments are events.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []
        self.now: Callable[[], Any] = perf_counter
        self.name, self.open = "", False
        self.last: object = 0.0
        self.beat: Callable[[str], None] = lambda phase: None
        """Told whether an action that begins belongs to the forward or the backward pass."""

    def begin(self, action: Action) -> None:
        """An action begins; it may receive first."""
        self.beat("forward" if action.kind == "F" else "backward")
        self.name, self.open, self.last = str(action), True, self.now()

    def lap(self, what: str) -> None:
        """What ends now took all the time since the last one ended; the same twice on end is one span."""
        now, name, start = self.now(), what + self.name, self.last
        if self.spans and self.spans[-1][0] == name:
            start = self.spans.pop()[1]
        self.spans.append((name, start, now))
        self.last = now

    def computed(self) -> None:
        """What the action computes is done, if that was not said before."""
        if self.open:
            self.lap("")
            self.open = False


class PipelineRuntime:
    """This rank's stages, its neighbours and its row of the table."""

    def __init__(self, stages: PipelineStages, group: ProcessGroup, table: Callable[[int], Table]):
        self.stages, self.group, self.table = stages, group, table
        self.rank = group.rank()
        self.ahead = AHEAD if directly(stages.device) else 0  # NCCL would make sends wait behind receives that are posted before them
        self.routes = cache(self._routes)
        self.randomness: Randomness
        self.peers = BatchPeers()
        """Told in backward passes whether the micro-batch counts, as `forward` tells it in its own."""
        self.number = 0
        """The step, which random numbers are keyed by."""
        self.clock = Clock()
        """What took time in the last step."""
        self.at = 0
        """Number of the micro-batch of the action that runs."""

    def step(
        self, pieces: list[MicroBatch], forward: Callable[[MicroBatch], Any], loss: Callable[[Any, MicroBatch], Tensor]
    ) -> list[Tensor]:
        """Forward and backward of all pieces by the table; the losses, on the rank of the last stage."""
        self.back: dict[tuple[int, int], list[Tensor | None]] = {}
        self.open: dict[tuple[int, int], _Open] = {}
        self.losses: list[Tensor] = []
        self.clock.spans = []
        if not pieces:
            return []
        table = self._begin([Forward(p.inputs, p.samples, p.first, self.number) for p in pieces], len(pieces))
        for action in table.rows[self.rank]:
            self.clock.begin(action)
            piece = pieces[action.micro]
            self.at = piece.number
            if action.kind == "F":
                self._forward(action, piece, forward, loss)
            else:
                self.peers.idle = piece.idle
                with self.randomness.replay():
                    self._backward(action)
            self.clock.computed()
        self.post.close()
        if self.open:
            why = f"ran {' '.join(map(str, table.rows[self.rank]))}"
            raise PlaitError(Problem("P026", "the pipeline did not run its table", why=why), FAILED)
        return self.losses

    def forward_only(self, inputs: object, samples: int, call: Callable[[], Any]) -> tuple[Any, bool]:
        """(the model's output, True) on the rank of the last stage; elsewhere the output is unknown. No gradients."""
        self._begin([Forward(inputs, samples)], 0)
        output = None
        for stage in range(self.stages.cut.stages):
            if self.owner[stage] == self.rank:
                received, _ = self._received(stage, 0, grad=False)
                output, run = self.stages.forward(stage, samples, self.paths[0], received, call)
                self._pass_on(stage, 0, run.kept)
        self.post.close()
        return output, self.owner[-1] == self.rank

    def _begin(self, forwards: list[Forward], microbatches: int) -> Table:
        """Find the paths of forward passes and post receives; `microbatches` is 0 when nothing goes back."""
        self.handed: dict[tuple[int, int], dict[int, Any]] = {}
        self.clock.spans, self.paths = [], [self.stages.paths.of(forward) for forward in forwards]
        table = self.table(len(forwards))
        self.owner = table.owner

        def make(message: StageMessage) -> list[Tensor]:
            samples = forwards[message.micro].samples
            return empty(self._slots(message), samples, self.stages.device, forward=message.forward)

        self.post = PointToPoint(self.group, self.routes(microbatches, _messages(self.paths)), make, self.ahead)
        return table

    # — one action —

    def _forward(
        self,
        action: Action,
        piece: MicroBatch,
        forward: Callable[[MicroBatch], Any],
        loss_of: Callable[[Any, MicroBatch], Tensor],
    ) -> None:
        stage, micro = action.stage, action.micro
        received, leaves = self._received(stage, micro, grad=True)
        last = stage == self.stages.cut.stages - 1
        with self.randomness.at(self.number, piece.first, piece.samples, stage):
            path = self.paths[micro]
            output, run = self.stages.forward(stage, piece.samples, path, received, lambda: forward(piece))
            loss = loss_of(output, piece) if last else None
        self.stages.look(loss, "loss")
        if loss is not None and piece.weight:
            piece.loss = loss.detach()
            self.losses.append(piece.loss.double() * piece.weight)
        outputs = self._pass_on(stage, micro, run.kept)
        self.open[stage, micro] = _Open(leaves, outputs, None if loss is None else scaled(loss, piece.scale), run)

    def _backward(self, action: Action) -> None:
        stage, micro = action.stage, action.micro
        was = self.open[stage, micro]
        self.stages.again = was.run
        if action.kind == "W":
            was.weights()
        else:
            outputs, grads = self._ends(was, stage, micro)
            if action.kind == "I" and was.leaves:
                was.weights = halves(outputs, grads, was.leaves)
            elif action.kind == "I":  # nobody waits for gradients of the first stage's inputs
                was.weights = lambda: _run(outputs, grads)
            else:
                _run(outputs, grads)
            self._send_back(was, stage, micro)
        if action.kind != "I":
            del self.open[stage, micro]

    def _ends(self, was: _Open, stage: int, micro: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """What backward starts from: the loss, or what went to the next stage and the gradients that came back for it."""
        if was.loss is not None:
            return ([was.loss], [None]) if was.loss.requires_grad else ([], [])
        came = self._gradients(stage, micro, was.outputs)
        pairs = [(t, g) for t, g in zip(was.outputs, came) if g is not None and t.requires_grad]
        for t, g in pairs:
            if t.is_leaf:  # a value that only passes through
                torch.autograd.backward(t, g)  # which adds it up in the layout of `t`
        pairs = [(t, g) for t, g in pairs if not t.is_leaf]
        return [t for t, _ in pairs], [g for _, g in pairs]

    def _send_back(self, was: _Open, stage: int, micro: int) -> None:
        if not stage:
            return
        back = [t.grad for t in was.leaves]
        if self.owner[stage - 1] == self.rank:
            self.back[stage - 1, micro] = back
        elif back:
            self._send(StageMessage(False, stage - 1, micro), self.owner[stage - 1], packed(was.leaves, back))

    # — what crosses —

    def _routes(self, microbatches: int, messages: tuple[Any, ...]) -> Routes:
        """All ranks' messages of a step, by which there are; of a forward pass alone when there are no micro-batches."""
        table = self.table(max(1, microbatches))
        rows: Iterable[Iterable[Action]] = table.rows
        if not microbatches:
            rows = [[Action("F", s, 0) for s, r in enumerate(table.owner) if r == rank] for rank in range(table.ranks)]
        return routes(rows, table.owner, lambda message: bool(self._slots(message)))

    def _slots(self, message: StageMessage) -> list[Slot]:
        """The tensors of a message; for gradients, those of their tensors."""
        slots = self.paths[message.micro].slots(message.stage + (not message.forward))
        return [s for s in slots if s.grad or message.forward]

    def _received(self, stage: int, micro: int, grad: bool) -> tuple[dict[int, Any], list[Tensor]]:
        """Outputs of earlier stages' calls that cross into this one, as leaves; and those that take gradients."""
        path = self.paths[micro]
        calls = path.cut.crossing[stage]
        if not calls:
            return {}, []
        message = StageMessage(True, stage, micro)
        slots = self._slots(message)
        if self.owner[stage - 1] == self.rank:
            outputs = self.handed.pop((stage, micro))
            values = [t.detach() for call in calls for t in tensors(outputs[call])]
        else:
            values = self._receive(message) if slots else []
        values = [t.requires_grad_(slot.grad and grad) for t, slot in zip(values, slots)]
        source = iter(values)
        received = {call: path.calls[call].template.fill(source) for call in calls}
        return received, [t for t in values if t.requires_grad]

    def _pass_on(self, stage: int, micro: int, kept: dict[int, Any]) -> list[Tensor]:
        """Send what crosses out of a stage; the tensors that gradients will come back for."""
        if stage + 1 == self.stages.cut.stages:
            return []
        message, to = StageMessage(True, stage + 1, micro), self.owner[stage + 1]
        values = [t for call in self.paths[micro].cut.crossing[stage + 1] for t in tensors(kept[call])]
        if to == self.rank:
            self.handed[stage + 1, micro] = kept
        elif values:
            self._send(message, to, [slot.as_sent(t.detach()) for t, slot in zip(values, self._slots(message))])
        return [t for t, slot in zip(values, self._slots(message)) if slot.grad]

    def _gradients(self, stage: int, micro: int, outputs: list[Tensor]) -> list[Tensor | None]:
        if self.owner[stage + 1] == self.rank:
            return self.back.pop((stage, micro))
        message = StageMessage(False, stage, micro)
        if not self._slots(message):
            return []
        return unpacked(self._receive(message), outputs)

    def _send(self, message: StageMessage, to: int, values: list[Tensor]) -> None:
        self.clock.computed()
        self.post.send(message, to, values)
        self.clock.lap("send ")

    def _receive(self, message: StageMessage) -> list[Tensor]:
        values = self.post.receive(message)
        self.clock.lap("receive ")
        return values


def _messages(paths: list[ForwardPath]) -> tuple[Any, ...]:
    """For each micro-batch and stage whether tensors cross into it, and gradients back."""
    crossing = [[path.slots(stage) for stage in range(path.cut.stages)] for path in paths]
    return tuple(tuple((bool(slots), any(s.grad for s in slots)) for slots in row) for row in crossing)


def _run(outputs: list[Tensor], grads: list[Tensor | None]) -> None:
    if outputs:
        torch.autograd.backward(outputs, grads)
