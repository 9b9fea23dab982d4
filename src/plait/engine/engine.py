"""The training of one rank under a plan, driven by a loop: that of `plait train` (`train.py`), or your own.

>>> with Engine(job(), Plan.parse("dp=2")) as engine:          # doctest: +SKIP
...     for batch in engine.batches():
...         step = engine.step(batch)

A step is forward, backward, reduce, clip, update (`train_step.py`). The loss of each micro-batch is weighted by its weight over the
weight of the global batch. So the objective is the weighted mean over the batch, however it was split.
"""

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.checkpoint import fingerprint
from plait.checkpoint.carried_state import CarriedState
from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.foreign_weights import load_weights
from plait.checkpoint.manifest import BaseWeights
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.keys import INNER_AXES
from plait.config.plan import Plan
from plait.data.batch import Batch, BatchShare, Position, count_prefetched_steps, is_map, open_data, unshard_iterable
from plait.data.iterables import ShardMerger, agree_on_samples, is_every_nth, is_read_sharded
from plait.data.loading import iter_batches
from plait.data.padding import LOOSE_WARNING, BatchPadder, make_fetch
from plait.data.sampling import Sampling
from plait.engine.build import build_rank_model, check_replicas, list_inexact_reasons, pick_device
from plait.engine.callbacks import Callback, Callbacks
from plait.engine.evaluate import evaluate
from plait.engine.generate import TokenSampling, generate
from plait.engine.nonfinite import NonFiniteGuard
from plait.engine.passes import ActivePhase, Passes, get_micro_weights, select_micro_batches
from plait.engine.stats_reader import PendingStats
from plait.engine.step import Spans, SpeedMeter, Step, get_room_by_share
from plait.engine.train_step import TrainedParameters, TrainStep
from plait.launch.place import Place, find_place
from plait.model.build_model import BuiltModel
from plait.model.sketch import Sketch
from plait.parallel.gradient_reducer import RunSignals, StepStats
from plait.parallel.weight_average import use_evaluated_weights
from plait.tensors.norm import FiniteRule
from plait.tensors.torch_private import dataclass_leaves
from plait.tensors.transfers import HostCopy


class Engine:
    """Trains one rank of `job` under `plan`. Joins the processes that a launcher started (RANK set), or runs alone.

    `device` is auto, cpu or cuda. `directory` holds the checkpoints. `workers` loader processes prefetch batches. `on_nan`: the
    action if the loss or gradient norm of a step is not finite: stop (N001), skip the step, or ignore. `callbacks` are called at
    points of the run; with `group_norms` a step has the gradient norm of each parameter group. `cast`, `made` and `sketch` are those
    of `build_rank_model`. `read_weights`: read `Job.weights` now, unless the model is `made` already. Raises `PlaitError` for errors
    in the job, the plan or the machine.
    """

    def __init__(
        self, job: Job, plan: Plan | str = "dp=*", *, device: str = "auto", directory: str | Path = "checkpoints",
        workers: int = 0, place: Place | None = None, cast: torch.dtype | None = None, on_nan: str = "stop",
        made: BuiltModel | None = None, sketch: Sketch | None = None, read_weights: bool = True, callbacks: Sequence[Callback] = (),
        group_norms: bool = False,
    ):  # fmt: skip
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self.place = find_place() if place is None else place
        plan = plan.fill(self.place.world)
        self.rank_model = build_rank_model(job, plan, self.place, pick_device(device, self.place), cast, made=made, sketch=sketch)
        self.job, self.plan, self.workers, self.data = job, plan, workers, self.rank_model.setup.data
        self._close_hooks = [*self.rank_model.hooks.close]
        self.inexact_data: tuple[str, ...] = ()
        """Reasons why the data of an iterable differs between ranks."""
        built = self.rank_model
        self.carried = CarriedState(
            built.module, job.loss, built.optimizer, built.device, sampled=built.global_sketch.from_samples,
            process_flags=built.global_sketch.process_flags, watch=not plan.compile,
        )  # fmt: skip
        """State that the model, the loss and the optimizer carry across steps outside of parameters, buffers and `optimizer.state`."""
        self.position = Position()
        self.checkpoints = Checkpoints(Path(directory))
        self.memory: Checkpoints | None = None
        """Snapshots in shared memory, used after a lost rank (see `engine/elastic.py`)."""
        self.arguments: dict[str, str] = {}
        """The job's arguments on the command line: saved in checkpoints."""
        self._stop = False
        self._last_save_news = 0
        """The step in which this rank last received or started save progress."""
        self.spans = Spans(lambda phase: self.place.beat(self.position.step, phase), self.rank_model.device)
        self.active_phase = ActivePhase(self.rank_model)
        self.passes = Passes(self.rank_model, self.spans, self.active_phase)
        self.trained = TrainedParameters(self.rank_model)
        self.meter = SpeedMeter(self.rank_model)
        self.guard = NonFiniteGuard(self.rank_model, on_nan)
        self.steps = TrainStep(self, self.spans, group_norms)
        self.base: BaseWeights | None = None
        """Location of frozen parameters that checkpoints omit."""
        self.callbacks = Callbacks(callbacks)
        self.checkpoints.on_published = self.callbacks.add_published
        if job.weights is not None and made is None and read_weights:
            self.load_weights(job.weights)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group if this engine joined it, and restore settings of the process."""
        self.carried.close()
        while self._close_hooks:
            self._close_hooks.pop()()
        if self.rank_model.techniques.replica_groups is not None:
            self.rank_model.techniques.replica_groups.wait_pending()
        if self.place.joined and not self.place.is_guest and dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(0.2)  # gloo's threads may abort a correct program that exits immediately

    @property
    def model(self) -> torch.nn.Module:
        return self.rank_model.module

    @property
    def rule(self) -> FiniteRule:
        """The rule for which tensors must be finite."""
        return self.guard.rule

    @property
    def inexact(self) -> list[str]:
        """Reasons why this plan cannot match one device exactly, one sentence each."""
        found = list_inexact_reasons(self.rank_model.plan, self.rank_model.global_sketch, self.model, self.rank_model.device)
        return [*found, *self.rank_model.batch_peers.inexact_reasons, *self.inexact_data]

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything the training depends on, for checkpoints (see `checkpoint/fingerprint.py`)."""
        return fingerprint.fingerprint_training(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.rank_model.optimizer

    @property
    def output_bytes(self) -> int:
        """Bytes of outputs that processes=one gathers on the first device; else 0."""
        return self.passes.output_bytes

    @property
    def batch_share(self) -> BatchShare:
        plan, balance = self.plan, self.rank_model.techniques.balance
        share = BatchShare.from_plan(plan, plan.dp_rank(self.place.rank), self.rank_model.mesh.coordinates["replica_groups"])
        return share if balance is None else replace(share, schedule=balance.course)

    def batches(self) -> Iterator[Batch]:
        """Iterate over this rank's local batches, from the current position to the job's last step (or a stop)."""
        job = self.job
        reads = self.place.mark_read
        data, workers = self.data, self.workers
        if self.plan.rarely:
            data = unshard_iterable(data)
        sampling = Sampling.from_job(job, len(data)) if is_map(data) else None
        source = iter_batches(
            data, job.batch, job.seed, self.batch_share, self.position, workers=workers, reads=reads, sampling=sampling
        )
        if is_read_sharded(data, self.batch_share):
            source = self._merge_iterable(source)
        source = self.place.iterate_samples(source)
        padding = None  # a data set without a `collate` has samples of one shape only
        if self.batch_share.ranks * self.batch_share.microbatches > 1 and hasattr(data, "collate"):
            padding = BatchPadder(data, self.rank_model.mesh.group_or_none(*INNER_AXES))
        self.trained.begin()
        self.callbacks.start(self)
        self.trained.check(self.position.step)
        while self.position.step < job.steps and not self._stop and not self.callbacks.end_reason:
            self.spans.begin("data")
            batch = next(source)
            self._check_same_samples(batch)
            if padding is not None:
                batch = padding.pad_batch(batch, make_fetch(data, job.seed, batch, self.batch_share))
                if padding.has_loose_shapes and self.rank_model.global_sketch.places and LOOSE_WARNING not in self.inexact_data:
                    self.inexact_data = (*self.inexact_data, LOOSE_WARNING)
            self.rank_model.setup.device_copies.start_copies((micro.inputs, micro.targets) for micro in batch.micro_batches)
            self.spans.end("data")
            yield batch
        self.settle()
        self.callbacks.end(self)

    def _merge_iterable(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Merge the batches of an iterable of which every rank reads its own part."""
        job, rank_model, share = self.job, self.rank_model, self.batch_share
        nth = is_every_nth(open_data(job.data), job.seed, share, self.place.rank, rank_model.mesh.world_group)
        if not nth:
            self.inexact_data = (f"the order of samples is that of an iterable split over {share.ranks} ranks",)
        elif rank_model.global_sketch.places:
            self.inexact_data = (f"random numbers of a forward pass depend on a sample's place in an iterable split over {share.ranks} ranks",)
        length = len(self.data) if isinstance(self.data, Sized) else None
        return ShardMerger(share, job.batch, rank_model.mesh.world_group, nth, length).batches(source, self.position)

    def _check_same_samples(self, batch: Batch) -> None:
        """Check that all ranks read the same samples of an iterable; report noise that differs between ranks."""
        if not batch.digests or self.place.world == 1:
            return
        if not agree_on_samples(batch.size, batch.digests, self.rank_model.mesh.group_or_none(*INNER_AXES), "Job(data=…)"):
            self.inexact_data = ("noise in the iterable's samples differs on every rank: its generator has no seed",)

    def step(self, batch: Batch) -> Step:
        """Run forward, backward, reduce, clip and update. All ranks must take the same steps.

        On a GPU the work is queued: reading the step's loss waits for it, and `settle` waits on all ranks.
        """
        with self.spans.record_span("step"):
            step = self.steps.run(batch)
            self.place.beat(self.position.step, "optimizer")  # from here the step can be saved
            with self.spans.record_span("callbacks"):
                self.callbacks.step(self, step)
            self.trained.check(step.step)
        return step

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested on any rank: no more batches follow."""
        return self._stop

    def stop(self, reason: str) -> None:
        """End the run after this step's evaluation if called there, else after the next step. May be called on any rank."""
        self.callbacks.stop_reason = self.callbacks.stop_reason or reason

    def log(self, name: str, value: float) -> None:
        """Add a value to the metrics of the step. For callbacks, which call it on all ranks; rank 0's value is written."""
        self.callbacks.logged[name] = float(value)

    def backward(self, batch: Batch) -> Tensor:
        """Compute the gradient of the global batch in every parameter's `.grad`. Returns the summed row of the step
        (`parallel/gradient_reducer.py`)."""
        return self.steps.backward(batch)

    def repeat_passes(self, batch: Batch) -> None:
        """Repeat the forward and backward pass of a step for observers: gradients remain in `.grad`, and nothing is recorded."""
        spans, self.spans.marks = self.spans.marks, []
        self.norm(self.backward(batch))
        self.spans.marks = spans

    def list_own_micro_batches(self, batch: Batch, weights: list[float]) -> list[int]:
        """Return the numbers of the micro-batches that this rank runs: as many as the rank with most samples runs.

        A forward pass may communicate, change buffers or count its calls. A rank without samples for a micro-batch runs one of
        another rank's, with weight zero.
        """
        return select_micro_batches(self.batch_share, batch, weights)

    def list_micro_shapes(self, batch: Batch) -> list[tuple[int, str]]:
        """Return the number of samples and the tensor shapes of each micro-batch of a step that this rank runs.

        The number is 1 for a micro-batch without own samples, which runs on another rank's sample.
        """
        run = self.list_own_micro_batches(batch, get_micro_weights(self.job, batch))
        shape = lambda t: list(t.shape) if isinstance(t, Tensor) else ""  # noqa: E731
        found = [batch.micro_batches[i] for i in run]
        counts = [micro.count or 1 for micro in found]
        return [(n, str([shape(t) for t in dataclass_leaves((m.inputs, m.targets))])) for n, m in zip(counts, found)]

    def signals(self) -> RunSignals:
        """This rank's signals about the run for the other ranks."""
        world, memory = self.place.world, self.memory
        return RunSignals(
            stop=float(self.place.is_stopping()), disk_save=self.checkpoints.progress_value(world),
            memory_save=0.0 if memory is None else memory.progress_value(world), end=float(bool(self.callbacks.stop_reason)),
        )  # fmt: skip

    def norm(self, step_row: Tensor) -> tuple[float, StepStats]:
        """Return the global norm of the gradients that `backward` left, and the totals in its row. Waits for the device."""
        norm, *row = HostCopy(torch.cat([self.total_norm().reshape(1), step_row.double()])).read()
        return norm, StepStats.unpack(row, self.plan)

    def total_norm(self) -> Tensor:
        """Return the global norm of the gradients that `backward` left: a float64 scalar on the device."""
        return self.active_phase.reducer.get_norm()

    def update(self, batch: Batch, step_row: Tensor) -> Step:
        """Clip by the global norm, take the optimizer step, advance the position.

        A step whose loss or norm is not finite changes nothing, on any rank. `stats_reader.py` explains when the host reads them.
        """
        return self.steps.update(batch, step_row)

    def settle(self) -> None:
        """Wait until the statistics of the last step are on the host, and act on them. On a GPU this otherwise happens in the next step.

        All ranks call it. N001 to N003 if that step was not finite.
        """
        self.steps.reader.settle()

    def apply_stats(self, pending: PendingStats) -> None:
        """Act on the statistics of a step: all ranks have the same, and act after the same step."""
        rank_model, done, known = self.rank_model, pending.batch.next_position.step, self.passes.logged
        numbers, totals = pending.numbers, pending.totals
        if totals.new_names:
            numbers.logged |= known.exchange_new(pending.logged, rank_model.mesh.group_or_none(*INNER_AXES))
        if rank_model.techniques.replica_groups is None:
            self._apply_signals(totals.signals)
        else:
            for sent, word in rank_model.techniques.replica_groups.finish_step(done, list(astuple(totals.signals))):
                if sent > self._last_save_news:  # else the signal is older than the last save progress
                    stage = self.checkpoints.save_status
                    self._apply_signals(RunSignals(*word))
                    self._last_save_news = self._last_save_news if self.checkpoints.save_status == stage else done
        self.meter.read(numbers.spans, pending.batch.count)
        if rank_model.techniques.balance is not None:
            samples, busy = zip(*numbers.by_rank)
            numbers.note = rank_model.techniques.balance.update_parts(
                done, samples, busy, get_room_by_share(self.plan, totals.room), count_prefetched_steps(self.workers)
            )

    def _apply_signals(self, signals: RunSignals) -> None:
        """Apply the summed signals of all ranks: the stop request, the progress of saves, and the request to end."""
        self._stop = signals.stop > 0
        self.callbacks.has_stop_request = signals.end > 0
        self.checkpoints.advance_save(self, signals.disk_save)
        if self.memory is not None:
            try:
                self.memory.advance_save(self, signals.memory_save)
            except PlaitError:  # on all ranks: memory is full, and training continues without snapshots
                self.memory = None

    def has_complete_state(self) -> bool:
        """Return whether this rank has the state of a complete step, not of half an update."""
        return not self.steps.is_half_updated

    def undo_step(self) -> None:
        """Restore the state before the step in progress, if there is one."""
        self.steps.undo_passes()

    def evaluate(self, again: bool = False) -> dict[str, float]:
        """Compute the job's metrics over its full evaluation set, every sample once (see `engine/evaluate.py`).

        They use the average of the weights if the job has one, or the optimizer's eval mode. `again`: callbacks have received the
        values already.
        """
        self.settle()
        self.place.beat(self.position.step, "evaluate")
        self.carried.watch.forget_writes()
        with self._use_eval_weights():
            values = evaluate(self.rank_model)
        if not again:
            self.callbacks.notify_evaluation(self, values)
        return values

    def _use_eval_weights(self) -> AbstractContextManager[None]:
        """Use the evaluation weights within this context."""
        groups = self.rank_model.techniques.replica_groups
        return use_evaluated_weights(self.rank_model) if groups is None else groups.use_global_weights()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, stop: int | None = None, seed: int = 0, length: int | None = None,
        inputs: Callable[[Tensor], Any] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Continue prompts, lists of token ids. Returns the new tokens of each, on every rank (see `engine/generate.py`). All ranks call
        it.

        `temperature` 0 selects the likeliest token. `stop`: the token that ends a text. `length`: pad texts to it. `inputs`: tokens
        of shape [texts, length] -> the model's inputs; None: as in the job's data. U019 if a prompt or an option is invalid.
        """
        self.settle()
        self.place.beat(self.position.step, "evaluate")
        with self._use_eval_weights():
            return generate(
                self.rank_model, prompts, TokenSampling(max_new_tokens, temperature, top_k, stop, seed, length), inputs
            )

    def save(self, keep: int = 3, wait: bool = True) -> Path:
        """Write a checkpoint of this step, in the background unless `wait`; keep the newest `keep`. All ranks call it."""
        self.settle()
        self.place.beat(self.position.step, "checkpoint")
        check_replicas(self.rank_model, self.position.step)
        self._last_save_news = self.position.step
        path = self.checkpoints.save(self, keep, wait)
        self.place.beat(self.position.step, "checkpoint")
        self.callbacks.notify_saves(self)
        return path

    def load_weights(self, path: str | Path) -> None:
        """Start from these weights: a safetensors file, a Hugging Face folder or a checkpoint. All ranks call it."""
        self.settle()
        self.place.beat(self.position.step, "checkpoint")
        load_weights(self, Path(path))

    def resume(self, missing_ok: bool = False, allow_changes: bool = False) -> Path | None:
        """Load the newest valid checkpoint. K001 if there is none and `missing_ok` is false.

        `checkpoints.changed` lists the changes of the job since then; K010 for incompatible changes, unless `allow_changes`.
        """
        self.settle()
        self.place.beat(self.position.step, "checkpoint")
        return self.checkpoints.resume(self, missing_ok, allow_changes)
