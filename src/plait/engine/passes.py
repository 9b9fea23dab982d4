"""The forward and backward passes of one step on one rank.

They run micro-batch by micro-batch, in threads, or by a pipeline schedule. Every loss is weighted by its weight over that of the
global batch, on any rank and in any order.

[Note: Phases of a step]
A job with one loss has one phase per step; a job with phases runs each phase that is due (`config/phases.py`).

In a phase the model runs that phase alone. Backward computes the gradients of its parameters only, the reducer sums those, and only
its optimizer takes a step. Nothing of other phases is computed, sent or kept, except tensors in one bucket with this phase's (under
`fsdp`, in one group with them), which are dropped.
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
from plait.config.keys import DATA_AXES
from plait.config.phases import Phase, PhaseOptimizers
from plait.data.batch import Batch, BatchShare, weigh_micro_batch
from plait.engine.build import check_loss
from plait.engine.step import Spans
from plait.engine.step_log import StepLog, make_thread_recorder, use_recorder
from plait.losses.global_batch import make_zero_loss
from plait.model.build_model import run_model
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.loss_scale import scale_loss
from plait.parallel.pipeline.runtime import PipelineRuntime, WeightedMicroBatch
from plait.parallel.precision import make_forward_context
from plait.parallel.rank_model import RankModel
from plait.tensors import opaque_code
from plait.tensors.collectives import choose_exchange_device
from plait.tensors.torch_private import dataclass_leaves
from plait.tensors.transfers import move_tree


class SplitBatchTraining(Training, Protocol):
    """A training in which every rank computes its part of the batch."""

    @property
    def batch_share(self) -> BatchShare:
        ...


def get_micro_weights(job: Job, batch: Batch) -> list[float]:
    """Return the weight of each of this rank's micro-batches: its number of samples, or the result of `Job.weight`."""
    return [weigh_micro_batch(job.weight, micro) for micro in batch.micro_batches]


def select_micro_batches(share: BatchShare, batch: Batch, weights: list[float]) -> list[int]:
    """Return the numbers of the micro-batches that this rank runs: as many as the rank with most samples runs.

    A forward pass may communicate, change buffers or count its calls. A rank without samples for a micro-batch runs one of another
    rank's, with weight zero.
    """
    most = batch.max_share or max(share.compute_sizes(batch.size))  # the first parts have one sample each
    return [i for i, w in enumerate(weights) if w or i < most]


def sum_batch_weight(training: SplitBatchTraining, batch: Batch, weights: list[float]) -> float:
    """Return the weight of the global batch. Without `Job.weight` it is the number of samples, and nothing is sent. J009 if it is not
    positive.

    In a step local to replica groups, the weight is scaled so that the mean of the groups' losses equals that of the batch, if all
    samples have equal weight: a group's weight × size / (groups × its samples). No message between groups is needed. It is 0 without
    a sample.
    """
    plan, rare, size = training.plan, training.rank_model.techniques.replica_groups, training.batch_share.locate_group(batch.size)[1]
    on_its_own = rare is not None and not rare.is_warmup_step(batch.next_position.step)
    if training.job.weight is None:
        return batch.size / (plan.replica_groups if on_its_own else 1) if size else 0.0
    total = torch.tensor(sum(weights), dtype=torch.float64)
    if plan.ranks > 1:
        peers = training.rank_model.mesh.group(*DATA_AXES)
        total = total.to(choose_exchange_device(training.rank_model.device, peers))
        dist.all_reduce(total, group=peers)
    if on_its_own:
        return float(total) * batch.size / (plan.replica_groups * size) if size else 0.0
    if rare is not None:
        rare.sum_weight(total)
    if not 0 < float(total) < math.inf:
        raise PlaitError(Problem("J009", f"the weights of step {batch.position.step + 1} sum to {float(total)}",
                                 why="Job.weight is 0 for the full batch, so its mean loss is 0 / 0"))  # fmt: skip
    return float(total)


class ActivePhase:
    """The active phase of one rank in a step."""

    def __init__(self, rank_model: RankModel):
        self.rank_model = rank_model
        self.phase: Phase | None = None
        self.is_first = self.is_last = True
        """Whether the phase is the first of its step."""
        self.name = ""
        """Name of the phase; "" in a job without phases, and between steps."""

    def iterate_phases(self, step: int) -> Iterator[Phase | None]:
        """Activate each due phase of a step in turn; steps count from 1. Step 0 activates all phases."""
        phases = self.rank_model.job.phases
        if phases is None:
            yield None
            return
        due = [phase for phase in phases if phase.due(step)]
        try:
            for phase in due:
                self.is_first, self.is_last = phase is due[0], phase is due[-1]
                self._activate(phase)
                yield phase
        finally:
            self._activate(None)

    def _activate(self, phase: Phase | None) -> None:
        rank_model, self.phase = self.rank_model, phase
        rank_model.module.turn = None if phase is None else phase.name  # type: ignore[assignment]
        self.name = "" if phase is None else phase.name
        if isinstance(rank_model.optimizer, PhaseOptimizers):
            rank_model.optimizer.turn = self.name
        if phase is not None and rank_model.techniques.shards is not None:
            rank_model.techniques.shards.select_trained(phase.has)

    @property
    def reducer(self) -> GradientReducer:
        """The reducer of the phase's gradients."""
        return self.rank_model.reducers[self.name]

    def get_backward_inputs(self) -> list[Tensor] | None:
        """Return the tensors for which the phase's backward computes gradients; None: all."""
        rank_model, phase = self.rank_model, self.phase
        if phase is None:
            return None
        if rank_model.techniques.shards is not None:
            return rank_model.techniques.shards.list_gathered(phase.has)
        return [p for n, p in rank_model.params.items() if p.requires_grad and phase.has(n)]

    def drop_other_gradients(self) -> None:
        """Drop gradients of parameters that this phase does not train: zeros that were reduced with its own."""
        phase = self.phase
        for name, parameter in self.rank_model.params.items() if phase is not None else ():
            if phase is not None and not phase.has(name):
                parameter.grad = None

    def get_clip(self, job: Job) -> float | None:
        """Return the maximum gradient norm."""
        return job.clip if self.phase is None or self.phase.clip is None else self.phase.clip

    def end_update(self) -> None:
        """Reshard after the phase's update, so that later phases gather the new parameters."""
        if self.phase is not None and self.rank_model.techniques.shards is not None:
            self.rank_model.techniques.shards.reshard()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of the phase's optimizer."""
        optimizer = self.rank_model.optimizer
        if isinstance(optimizer, PhaseOptimizers) and self.phase is not None:
            optimizer = optimizer.each[self.phase.name]
        return float(optimizer.param_groups[0]["lr"])


class Passes:
    """Computes the gradients of this rank's samples in the parameters' `.grad`."""

    def __init__(self, rank_model: RankModel, spans: Spans, turns: ActivePhase):
        self.rank_model, self.spans, self.turns = rank_model, spans, turns
        self.call, self.loss = run_model, rank_model.job.loss
        self.output_bytes = 0
        """Bytes of outputs that processes=one gathers on its first device."""
        self.losses: list[tuple[int, Tensor]] = []
        """(micro-batch number, loss) of the last step, on ranks that compute losses."""
        self.number = 0
        self.logged = StepLog(rank_model.device)

    def make_micro_batches(self, batch: Batch, runs: dict[int, float]) -> list[WeightedMicroBatch]:
        """Return the micro-batches to run, on the device. `runs`: number -> its weight relative to the global batch."""
        rank_model, found = self.rank_model, list[WeightedMicroBatch]()
        loss_scale = rank_model.techniques.loss_scale
        for i, weight in runs.items():
            micro = batch.micro_batches[i]
            pair = rank_model.setup.device_copies.take_tree((micro.inputs, micro.targets))
            inputs, targets = move_tree(pair, rank_model.device, rank_model.setup.cast)
            scale = weight if loss_scale is None else weight * loss_scale.factor
            found.append(WeightedMicroBatch(inputs, targets, micro.first, micro.count or 1, weight, scale, micro.count == 0, i))
        return found

    def run(self, micro_batches: list[WeightedMicroBatch], step: int, ready: Callable[[list[Tensor]], None]) -> None:
        """Run forward and backward of all micro-batches. `ready` is called with the weighted losses before the last backward."""
        self.logged.begin()
        idle = bool(micro_batches) and all(piece.idle for piece in micro_batches)
        with self.rank_model.batch_peers.activate(), opaque_code.hide_higher_order():
            if self.rank_model.techniques.pipeline is None:
                self._run_sequential(micro_batches, step, ready, idle)
            else:
                self._run_pipeline(self.rank_model.techniques.pipeline, micro_batches, step, ready, idle)
        self.losses = [(piece.index, piece.loss) for piece in micro_batches if piece.loss is not None]

    @property
    def current_micro_batch(self) -> int:
        """Number of the micro-batch whose forward or backward is running."""
        return self.number if self.rank_model.techniques.pipeline is None else self.rank_model.techniques.pipeline.micro_index

    def _run_sequential(self, micro_batches: list[WeightedMicroBatch], step: int, ready: Callable[[list[Tensor]], None], idle: bool) -> None:
        rank_model, losses = self.rank_model, list[Tensor]()
        for piece in micro_batches:
            last, self.number = piece is micro_batches[-1], piece.index
            self.turns.reducer.begin(last, idle)
            loss, backward = self.forward(piece, step) if rank_model.techniques.replicas is None else self._forward_in_threads(piece, step)
            if piece.weight:
                piece.loss = loss
                losses.append(loss.double() * piece.weight)
            if last:
                ready(losses)
            self.spans.begin("backward")
            backward()
            self.spans.end("backward")
        if not micro_batches:
            ready(losses)

    def forward(self, piece: WeightedMicroBatch, step: int) -> tuple[Tensor, Callable[[], None]]:
        """Return (loss, function that runs its backward pass) of one micro-batch."""
        rank_model = self.rank_model
        self.spans.begin("forward")
        with rank_model.randomness.forward_pass(step, piece.first, piece.samples, turn=self.turns.name):
            loss = self._compute_loss(self._run_model(piece), piece)
        self.spans.end("forward")
        larger = scale_loss(loss, piece.scale)

        def backward() -> None:
            rank_model.batch_peers.idle = piece.idle
            with rank_model.randomness.replay():
                larger.backward(inputs=self.turns.get_backward_inputs())

        return loss.detach(), backward

    def _run_model(self, micro_batch: WeightedMicroBatch) -> Any:
        self.rank_model.batch_peers.begin(micro_batch.idle)
        with self._use_format(), self.logged.record_weighted(micro_batch.weight):
            return self.call(self.rank_model.module, micro_batch.inputs)

    def _compute_loss(self, outputs: object, micro_batch: WeightedMicroBatch) -> Tensor:
        """Compute the job's loss, or zero for a micro-batch of weight zero, whose rank still takes part in collectives."""
        with self._use_format(), self.logged.record_weighted(micro_batch.weight):
            whole = lambda: self.loss(outputs, micro_batch.targets)  # noqa: E731
            loss = whole() if micro_batch.weight else make_zero_loss(whole, outputs, self.rank_model.batch_peers.exchanged)
        check_loss(loss)
        return loss

    def _use_format(self) -> AbstractContextManager[Any]:
        """Use the number format of the forward pass and the loss."""
        return make_forward_context(self.rank_model.plan, self.rank_model.setup.cast, self.rank_model.device.type)

    @contextmanager
    def _use_thread(self) -> Iterator[None]:
        """Set up the context of a forward pass in a separate thread."""
        with self.rank_model.batch_peers.activate_thread(), self._use_format(), use_recorder(make_thread_recorder()):
            yield

    def _run_pipeline(
        self, pipeline: PipelineRuntime, micro_batches: list[WeightedMicroBatch], step: int, ready: Callable[[list[Tensor]], None], idle: bool
    ) -> None:
        reducer = self.turns.reducer
        pipeline.step_number = step
        pipeline.clock.report_phase = self.spans.beat
        if self.spans.clock is not None:
            pipeline.clock.now = self.spans.now
        reducer.begin(False, idle)
        losses = pipeline.step(micro_batches, self._run_model, self._compute_loss)
        self.spans.marks += pipeline.clock.spans
        ready(losses)
        reducer.begin(True, idle)

    def _forward_in_threads(self, micro_batch: WeightedMicroBatch, step: int) -> tuple[Tensor, Callable[[], None]]:
        replicas = self.rank_model.techniques.replicas
        assert replicas is not None
        self.spans.begin("replicate")
        replicas.send_weights()
        self.spans.end("replicate")
        self.spans.begin("forward")
        outputs, back = replicas.forward(self.call, self._use_thread, micro_batch.inputs, step, micro_batch.first, micro_batch.samples)
        self.spans.end("forward")
        self.spans.begin("loss")
        loss = self._compute_loss(outputs, micro_batch)
        gathered = dataclass_leaves(outputs)
        self.output_bytes = sum(o.nbytes for o in gathered if isinstance(o, Tensor))
        scale_loss(loss, micro_batch.scale).backward()
        self.spans.end("loss")

        def backward() -> None:
            back([o.grad if isinstance(o, Tensor) else None for o in gathered])
            self.spans.begin("collect")
            replicas.collect_gradients()
            self.spans.end("collect")

        return loss.detach(), backward
