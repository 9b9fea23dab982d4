"""Execution of a pipeline table on one rank: forwards, backwards, and the tensors that cross between stages.

A rank executes its row of the table in order. Before an action it waits for the messages that the action needs. After
an action it sends without waiting, so a table without a deadlock cannot deadlock here. Both ends send and receive in
the order of the table, which is also correct on NCCL, which has no tags. Receives are posted in advance, and sent
tensors are released when the table implies their arrival (`plait.parallel.pipeline.p2p`).
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
from plait.parallel.loss_scale import scale_loss
from plait.parallel.pipeline.p2p import (
    PREPOSTED_RECEIVES,
    PointToPoint,
    Routes,
    StageMessage,
    allocate_buffers,
    pack_gradients,
    plan_routes,
    unpack_gradients,
)
from plait.parallel.pipeline.partition import ForwardPath, ForwardRequest
from plait.parallel.pipeline.schedules import Action, ScheduleTable
from plait.parallel.pipeline.stage import PipelineStages, StageForward, split_backward
from plait.randomness.keyed import Randomness
from plait.tensors.collectives import is_direct_exchange
from plait.tensors.trees import TensorSlot, list_slot_tensors


@dataclass
class WeightedMicroBatch:
    """One micro-batch of this rank's local batch: its inputs, and its weight in the loss."""

    inputs: object
    targets: object
    first: int
    samples: int
    weight: float
    """Its weight, divided by that of the global batch. 0 if the micro-batch does not count."""
    scale: float | Tensor
    """Factor on its loss before backward. It is a scalar on the device if the loss scale is there."""
    idle: bool = False
    """Padding: its sample belongs to another rank, so that all ranks run the same number of micro-batches."""
    index: int = 0
    """Index of the micro-batch in this rank's local batch."""
    loss: Tensor | None = None
    """The loss after the forward pass, on the rank that computes it."""


@dataclass
class _PendingBackward:
    """A stage's forward pass whose backward pass has not run yet."""

    leaves: list[Tensor]
    """Received tensors whose gradients are sent back."""
    outputs: list[Tensor]
    """Tensors whose gradients will be received."""
    loss: Tensor | None
    run: StageForward
    weight_backward: Callable[[], None] = lambda: None
    """The second half of a split backward pass, for the weights."""


class StepClock:
    """Records (name, begin, end) of the spans of a step, in order: `receive F1.0`, `F1.0`, `send F1.0`, `F1.1`, ….

    Times are host times from `time.perf_counter` by default. On a GPU, `now` records CUDA events instead.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []
        self.now: Callable[[], Any] = perf_counter
        self.name, self.open = "", False
        self.last: object = 0.0
        self.report_phase: Callable[[str], None] = lambda phase: None
        """Called with "forward" or "backward" when an action begins."""

    def begin(self, action: Action) -> None:
        """Start an action. It may receive before it computes."""
        self.report_phase("forward" if action.kind == "F" else "backward")
        self.name, self.open, self.last = str(action), True, self.now()

    def end_span(self, what: str) -> None:
        """End a span that began when the previous one ended. Consecutive spans of the same name are merged."""
        now, name, start = self.now(), what + self.name, self.last
        if self.spans and self.spans[-1][0] == name:
            start = self.spans.pop()[1]
        self.spans.append((name, start, now))
        self.last = now

    def end_compute(self) -> None:
        """End the compute span of the current action, if it is still open."""
        if self.open:
            self.end_span("")
            self.open = False


class PipelineRuntime:
    """This rank's stages, with its row of the pipeline table and its messages."""

    def __init__(self, stages: PipelineStages, group: ProcessGroup, table: Callable[[int], ScheduleTable]):
        self.stages, self.group, self.table = stages, group, table
        self.rank = group.rank()
        self.ahead = (
            PREPOSTED_RECEIVES if is_direct_exchange(stages.device) else 0
        )  # on NCCL, a send would wait behind receives that were posted before it
        self.routes = cache(self._plan_routes)
        self.randomness: Randomness
        self.peers = BatchPeers()
        """Receives in each backward pass whether the micro-batch counts, as `forward` sets it in forward passes."""
        self.step_number = 0
        """The step, by which random numbers are keyed."""
        self.clock = StepClock()
        """The spans of the last step."""
        self.micro_index = 0
        """Index of the micro-batch of the current action."""

    def step(
        self, micro_batches: list[WeightedMicroBatch], forward: Callable[[WeightedMicroBatch], Any], loss: Callable[[Any, WeightedMicroBatch], Tensor]
    ) -> list[Tensor]:
        """Run forward and backward of all micro-batches by the table. Return the losses on the rank of the last stage."""
        self.local_grads: dict[tuple[int, int], list[Tensor | None]] = {}
        self.pending: dict[tuple[int, int], _PendingBackward] = {}
        self.losses: list[Tensor] = []
        self.clock.spans = []
        if not micro_batches:
            return []
        table = self._begin([ForwardRequest(p.inputs, p.samples, p.first, self.step_number) for p in micro_batches], len(micro_batches))
        for action in table.rows[self.rank]:
            self.clock.begin(action)
            piece = micro_batches[action.micro]
            self.micro_index = piece.index
            if action.kind == "F":
                self._forward(action, piece, forward, loss)
            else:
                self.peers.idle = piece.idle
                with self.randomness.replay():
                    self._backward(action)
            self.clock.end_compute()
        self.messages.close()
        if self.pending:
            why = f"ran {' '.join(map(str, table.rows[self.rank]))}"
            raise PlaitError(Problem("P026", "the pipeline did not execute its planned schedule", why=why), FAILED)
        return self.losses

    def forward_only(self, inputs: object, samples: int, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Run a forward pass without gradients. Return (output, True) on the rank of the last stage, else (placeholder,
        False)."""
        self._begin([ForwardRequest(inputs, samples)], 0)
        output = None
        for stage in range(self.stages.partition.stages):
            if self.owner[stage] == self.rank:
                received, _ = self._receive_inputs(stage, 0, grad=False)
                output, run = self.stages.forward(stage, samples, self.paths[0], received, call)
                self._send_outputs(stage, 0, run.kept)
        self.messages.close()
        return output, self.owner[-1] == self.rank

    def _begin(self, forwards: list[ForwardRequest], microbatches: int) -> ScheduleTable:
        """Find the forward paths and post receives. `microbatches` is 0 if there is no backward pass."""
        self.local_outputs: dict[tuple[int, int], dict[int, Any]] = {}
        self.clock.spans, self.paths = [], [self.stages.paths.find_path(forward) for forward in forwards]
        table = self.table(len(forwards))
        self.owner = table.owner

        def make(message: StageMessage) -> list[Tensor]:
            samples = forwards[message.micro].samples
            return allocate_buffers(self._find_slots(message), samples, self.stages.device, forward=message.forward)

        self.messages = PointToPoint(self.group, self.routes(microbatches, _list_crossings(self.paths)), make, self.ahead)
        return table

    # — one action —

    def _forward(
        self,
        action: Action,
        piece: WeightedMicroBatch,
        forward: Callable[[WeightedMicroBatch], Any],
        loss_of: Callable[[Any, WeightedMicroBatch], Tensor],
    ) -> None:
        stage, micro = action.stage, action.micro
        received, leaves = self._receive_inputs(stage, micro, grad=True)
        last = stage == self.stages.partition.stages - 1
        with self.randomness.forward_pass(self.step_number, piece.first, piece.samples, stage):
            path = self.paths[micro]
            output, run = self.stages.forward(stage, piece.samples, path, received, lambda: forward(piece))
            loss = loss_of(output, piece) if last else None
        self.stages.check_job_result(loss, "loss")
        if loss is not None and piece.weight:
            piece.loss = loss.detach()
            self.losses.append(piece.loss.double() * piece.weight)
        outputs = self._send_outputs(stage, micro, run.kept)
        self.pending[stage, micro] = _PendingBackward(leaves, outputs, None if loss is None else scale_loss(loss, piece.scale), run)

    def _backward(self, action: Action) -> None:
        stage, micro = action.stage, action.micro
        was = self.pending[stage, micro]
        self.stages.recomputed_run = was.run
        if action.kind == "W":
            was.weight_backward()
        else:
            outputs, grads = self._find_backward_ends(was, stage, micro)
            if action.kind == "I" and was.leaves:
                was.weight_backward = split_backward(outputs, grads, was.leaves)
            elif action.kind == "I":  # the gradients of the first stage's inputs are sent to no rank
                was.weight_backward = lambda: _run_backward(outputs, grads)
            else:
                _run_backward(outputs, grads)
            self._send_grads(was, stage, micro)
        if action.kind != "I":
            del self.pending[stage, micro]

    def _find_backward_ends(self, was: _PendingBackward, stage: int, micro: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tensors and gradients from which backward starts: the loss, or the sent outputs and their received
        gradients."""
        if was.loss is not None:
            return ([was.loss], [None]) if was.loss.requires_grad else ([], [])
        came = self._receive_grads(stage, micro, was.outputs)
        pairs = [(t, g) for t, g in zip(was.outputs, came) if g is not None and t.requires_grad]
        for t, g in pairs:
            if t.is_leaf:  # a value that only passes through this stage
                torch.autograd.backward(t, g)  # accumulates in the layout of `t`
        pairs = [(t, g) for t, g in pairs if not t.is_leaf]
        return [t for t, _ in pairs], [g for _, g in pairs]

    def _send_grads(self, was: _PendingBackward, stage: int, micro: int) -> None:
        if not stage:
            return
        back = [t.grad for t in was.leaves]
        if self.owner[stage - 1] == self.rank:
            self.local_grads[stage - 1, micro] = back
        elif back:
            self._send(StageMessage(False, stage - 1, micro), self.owner[stage - 1], pack_gradients(was.leaves, back))

    # — what crosses —

    def _plan_routes(self, microbatches: int, messages: tuple[Any, ...]) -> Routes:
        """Plan all ranks' messages of a step, or of a forward pass alone if `microbatches` is 0. `messages`: which of
        them exist."""
        table = self.table(max(1, microbatches))
        rows: Iterable[Iterable[Action]] = table.rows
        if not microbatches:
            rows = [[Action("F", s, 0) for s, r in enumerate(table.owner) if r == rank] for rank in range(table.ranks)]
        return plan_routes(rows, table.owner, lambda message: bool(self._find_slots(message)))

    def _find_slots(self, message: StageMessage) -> list[TensorSlot]:
        """Return the slots of a message's tensors. For gradients: the slots that require a gradient."""
        slots = self.paths[message.micro].crossing_slots(message.stage + (not message.forward))
        return [s for s in slots if s.grad or message.forward]

    def _receive_inputs(self, stage: int, micro: int, grad: bool) -> tuple[dict[int, Any], list[Tensor]]:
        """Receive the outputs of earlier stages as leaves. Return them by call, and the tensors that require gradients."""
        path = self.paths[micro]
        calls = path.partition.crossing[stage]
        if not calls:
            return {}, []
        message = StageMessage(True, stage, micro)
        slots = self._find_slots(message)
        if self.owner[stage - 1] == self.rank:
            outputs = self.local_outputs.pop((stage, micro))
            values = [t.detach() for call in calls for t in list_slot_tensors(outputs[call])]
        else:
            values = self._receive(message) if slots else []
        values = [t.requires_grad_(slot.grad and grad) for t, slot in zip(values, slots)]
        source = iter(values)
        received = {call: path.calls[call].template.fill(source) for call in calls}
        return received, [t for t in values if t.requires_grad]

    def _send_outputs(self, stage: int, micro: int, kept: dict[int, Any]) -> list[Tensor]:
        """Send the outputs that cross into the next stage. Return the tensors whose gradients will be received."""
        if stage + 1 == self.stages.partition.stages:
            return []
        message, to = StageMessage(True, stage + 1, micro), self.owner[stage + 1]
        values = [t for call in self.paths[micro].partition.crossing[stage + 1] for t in list_slot_tensors(kept[call])]
        if to == self.rank:
            self.local_outputs[stage + 1, micro] = kept
        elif values:
            self._send(message, to, [slot.to_memory_order(t.detach()) for t, slot in zip(values, self._find_slots(message))])
        return [t for t, slot in zip(values, self._find_slots(message)) if slot.grad]

    def _receive_grads(self, stage: int, micro: int, outputs: list[Tensor]) -> list[Tensor | None]:
        if self.owner[stage + 1] == self.rank:
            return self.local_grads.pop((stage, micro))
        message = StageMessage(False, stage, micro)
        if not self._find_slots(message):
            return []
        return unpack_gradients(self._receive(message), outputs)

    def _send(self, message: StageMessage, to: int, values: list[Tensor]) -> None:
        self.clock.end_compute()
        self.messages.send(message, to, values)
        self.clock.end_span("send ")

    def _receive(self, message: StageMessage) -> list[Tensor]:
        values = self.messages.receive(message)
        self.clock.end_span("receive ")
        return values


def _list_crossings(paths: list[ForwardPath]) -> tuple[Any, ...]:
    """Return for each micro-batch and stage whether tensors cross into it, and whether gradients are sent back."""
    crossing = [[path.crossing_slots(stage) for stage in range(path.partition.stages)] for path in paths]
    return tuple(tuple((bool(slots), any(s.grad for s in slots)) for slots in row) for row in crossing)


def _run_backward(outputs: list[Tensor], grads: list[Tensor | None]) -> None:
    if outputs:
        torch.autograd.backward(outputs, grads)
