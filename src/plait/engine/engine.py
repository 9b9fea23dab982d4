"""One rank's training under a plan, as an object that a loop drives: that of `plait train` (`train.py`), or your own.

>>> with Engine(job(), Plan.parse("dp=2")) as engine:          # doctest: +SKIP
...     for batch in engine.batches():
...         step = engine.step(batch)

A step is forward, backward, reduce, clip, update (`train_step.py`). The loss of each micro-batch enters with its weight over the weight
of the global batch, so what is optimised is the weighted mean over the batch, however it was split.
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
from plait.checkpoint.manifest import Base
from plait.checkpoint.opening import load_weights
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.keys import WITHIN
from plait.config.plan import Plan
from plait.data.batch import Batch, BatchShare, Position, ahead, is_map, opened, whole
from plait.data.iterables import Merge, agree, every_nth, read_apart
from plait.data.loading import batches
from plait.data.padding import LOOSE, Padding, fetching
from plait.data.sampling import Sampling
from plait.engine.build import build, check_copies, inexact, pick_device
from plait.engine.callbacks import Callback, Callbacks
from plait.engine.evaluate import evaluate
from plait.engine.generate import TokenSampling, generate
from plait.engine.nonfinite import Guard
from plait.engine.passes import Passes, Turns, run_here, weights_of
from plait.engine.stats_reader import PendingStats
from plait.engine.step import Spans, SpeedMeter, Step, room_of_share
from plait.engine.train_step import TrainedParameters, TrainStep
from plait.launch.place import Place, current
from plait.model.make import BuiltModel
from plait.model.sketch import Sketch
from plait.parallel.average import evaluated_weights
from plait.parallel.gradient_reducer import RunSignals, StepStats
from plait.tensors.norm import Rule
from plait.tensors.torch_private import leaves
from plait.tensors.transfers import HostCopy


class Engine:
    """Trains one rank of `job` under `plan`. Joins the processes a launcher started (RANK set), or runs alone.

    `device` is auto, cpu or cuda. `directory` is where checkpoints live. `workers` loader processes fetch ahead.
    `on_nan`: what to do in a step whose loss or gradient norm is not finite: stop (N001), skip (leave it out), or ignore.
    `callbacks` are called at points of the run; with `group_norms` a step has the gradient norm of each parameter group.
    `cast`, `made` and `sketch` are those of `build`. `read_weights`: read `Job.weights` now, unless the model is `made` already.
    Raises `PlaitError` for whatever is wrong with the job, the plan or the machine.
    """

    def __init__(
        self, job: Job, plan: Plan | str = "dp=*", *, device: str = "auto", directory: str | Path = "checkpoints",
        workers: int = 0, place: Place | None = None, cast: torch.dtype | None = None, on_nan: str = "stop",
        made: BuiltModel | None = None, sketch: Sketch | None = None, read_weights: bool = True, callbacks: Sequence[Callback] = (),
        group_norms: bool = False,
    ):  # fmt: skip
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self.place = current() if place is None else place
        plan = plan.fill(self.place.world)
        self.rank_model = build(job, plan, self.place, pick_device(device, self.place), cast, made=made, sketch=sketch)
        self.job, self.plan, self.workers, self.data = job, plan, workers, self.rank_model.setup.data
        self._closing = [*self.rank_model.hooks.close]
        self.unlike: tuple[str, ...] = ()
        """What differs from rank to rank in what an iterable gives."""
        built = self.rank_model
        self.carried = CarriedState(
            built.module, job.loss, built.optimizer, built.device, sampled=built.whole_sketch.sampled,
            process_flags=built.whole_sketch.process_flags, watch=not plan.compile,
        )  # fmt: skip
        """What the model, the loss and the optimizer carry from step to step outside of parameters, buffers and `optimizer.state`."""
        self.position = Position()
        self.checkpoints = Checkpoints(Path(directory))
        self.memory: Checkpoints | None = None
        """Snapshots in shared memory, for when a rank is lost (see `engine/elastic.py`)."""
        self.arguments: dict[str, str] = {}
        """What the job was called with on the command line: kept in checkpoints."""
        self._stop = False
        self._saved = 0
        """The step in which this rank last heard, or began, something of a save."""
        self.spans = Spans(lambda phase: self.place.beat(self.position.step, phase), self.rank_model.device)
        self.turns = Turns(self.rank_model)
        self.passes = Passes(self.rank_model, self.spans, self.turns)
        self.trained = TrainedParameters(self.rank_model)
        self.meter = SpeedMeter(self.rank_model)
        self.guard = Guard(self.rank_model, on_nan)
        self.steps = TrainStep(self, self.spans, group_norms)
        self.base: Base | None = None
        """Where frozen parameters are that checkpoints do not hold."""
        self.callbacks = Callbacks(callbacks)
        self.checkpoints.told = self.callbacks.published
        if job.weights is not None and made is None and read_weights:
            self.load_weights(job.weights)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if this engine joined one for itself, and put back settings of the process."""
        self.carried.close()
        while self._closing:
            self._closing.pop()()
        if self.rank_model.techniques.replica_groups is not None:
            self.rank_model.techniques.replica_groups.end()
        if self.place.joined and not self.place.guest and dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(0.2)  # gloo's threads may abort a correct program that ends at once

    @property
    def model(self) -> torch.nn.Module:
        return self.rank_model.module

    @property
    def rule(self) -> Rule:
        """Which tensors are to be finite."""
        return self.guard.rule

    @property
    def inexact(self) -> list[str]:
        """What cannot equal one device under this plan, by nature, a sentence each."""
        found = inexact(self.rank_model.plan, self.rank_model.whole_sketch, self.model, self.rank_model.device)
        return [*found, *self.rank_model.batch_peers.inexact, *self.unlike]

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What the training depends on, for checkpoints (see `checkpoint/fingerprint.py`)."""
        return fingerprint.of(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.rank_model.optimizer

    @property
    def output_bytes(self) -> int:
        """Bytes of outputs gathered on the first device by processes=one; else 0."""
        return self.passes.output_bytes

    @property
    def share(self) -> BatchShare:
        plan, balance = self.plan, self.rank_model.techniques.balance
        share = BatchShare.of(plan, plan.share(self.place.rank), self.rank_model.mesh.at["replica_groups"])
        return share if balance is None else replace(share, course=balance.course)

    def batches(self) -> Iterator[Batch]:
        """This rank's share of each step's batch, from where the run is to the job's last step (or a stop)."""
        job = self.job
        reads = self.place.reads
        data, workers = self.data, self.workers
        if self.plan.rarely:
            data = whole(data)
        sampling = Sampling.of(job, len(data)) if is_map(data) else None
        source = batches(
            data, job.batch, job.seed, self.share, self.position, workers=workers, reads=reads, sampling=sampling
        )
        if read_apart(data, self.share):
            source = self._merged(source)
        source = self.place.waiting_for(source)
        padding = None  # a data set without a `collate` has samples of one shape only
        if self.share.ranks * self.share.microbatches > 1 and hasattr(data, "collate"):
            padding = Padding(data, self.rank_model.mesh.group_or_none(*WITHIN))
        self.trained.begin()
        self.callbacks.start(self)
        self.trained.check(self.position.step)
        while self.position.step < job.steps and not self._stop and not self.callbacks.ended:
            self.spans.begin("data")
            batch = next(source)
            self._compare(batch)
            if padding is not None:
                batch = padding.batch(batch, fetching(data, job.seed, batch, self.share))
                if padding.loose and self.rank_model.whole_sketch.places and LOOSE not in self.unlike:
                    self.unlike = (*self.unlike, LOOSE)
            self.rank_model.setup.inputs.begin((micro.inputs, micro.targets) for micro in batch.micro)
            self.spans.end("data")
            yield batch
        self.settle()
        self.callbacks.end(self)

    def _merged(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of an iterable of which every rank reads its share."""
        job, rank_model, share = self.job, self.rank_model, self.share
        nth = every_nth(opened(job.data), job.seed, share, self.place.rank, rank_model.mesh.everyone)
        if not nth:
            self.unlike = (f"the order of samples is that of {share.ranks} shares of the iterable",)
        elif rank_model.whole_sketch.places:
            self.unlike = (f"random numbers of a forward pass go by a sample's place in {share.ranks} shares",)
        length = len(self.data) if isinstance(self.data, Sized) else None
        return Merge(share, job.batch, rank_model.mesh.everyone, nth, length).batches(source, self.position)

    def _compare(self, batch: Batch) -> None:
        """What ranks read of an iterable is the same; what only some of it is has a name."""
        if not batch.seen or self.place.world == 1:
            return
        if not agree(batch.size, batch.seen, self.rank_model.mesh.group_or_none(*WITHIN), "Job(data=…)"):
            self.unlike = ("noise in the iterable's samples is another on every rank: its generator has no seed",)

    def step(self, batch: Batch) -> Step:
        """Forward, backward, reduce, clip, update. All ranks must take the same steps. On a GPU the work is queued: whoever looks at the
        step's loss waits for it, and `settle` waits on all ranks."""
        with self.spans.around("step"):
            step = self.steps.run(batch)
            self.place.beat(self.position.step, "optimizer")  # from now on there is a step to save
            with self.spans.around("callbacks"):
                self.callbacks.step(self, step)
            self.trained.check(step.step)
        return step

    @property
    def stopping(self) -> bool:
        """Whether some rank was asked to stop: there are no more batches."""
        return self._stop

    def stop(self, reason: str) -> None:
        """End the run: after this step's evaluation where that is what calls it, else after the next step. Any rank may call it."""
        self.callbacks.wish = self.callbacks.wish or reason

    def log(self, name: str, value: float) -> None:
        """Add a number to the metrics of the step: for callbacks, which all ranks call alike; rank 0's is written."""
        self.callbacks.logged[name] = float(value)

    def backward(self, batch: Batch) -> Tensor:
        """Leave the gradient of the global batch in every parameter's `.grad`; return the summed row of the step (`parallel/gradient_reducer.py`)."""
        return self.steps.backward(batch)

    def again(self, batch: Batch) -> None:
        """Forward and backward of a step once more, for those who watch: gradients are left, and nothing is told of it."""
        spans, self.spans.open = self.spans.open, []
        self.norm(self.backward(batch))
        self.spans.open = spans

    def runs(self, batch: Batch, weights: list[float]) -> list[int]:
        """Numbers of the micro-batches that this rank runs: as many as the rank with most samples, because a forward pass may
        communicate, change buffers or count its calls. A rank without samples for one runs another rank's, with weight zero."""
        return run_here(self.share, batch, weights)

    def sizes_run(self, batch: Batch) -> list[tuple[int, str]]:
        """Of each micro-batch of a step that this rank runs: its samples (1 for one without samples, which runs on another rank's), and
        the shapes of its tensors."""
        run = self.runs(batch, weights_of(self.job, batch))
        shape = lambda t: list(t.shape) if isinstance(t, Tensor) else ""  # noqa: E731
        found = [batch.micro[i] for i in run]
        counts = [micro.count or 1 for micro in found]
        return [(n, str([shape(t) for t in leaves((m.inputs, m.targets))])) for n, m in zip(counts, found)]

    def signals(self) -> RunSignals:
        """What this rank tells the others of the run."""
        world, memory = self.place.world, self.memory
        return RunSignals(
            stop=float(self.place.stopping()), disk_save=self.checkpoints.word(world),
            memory_save=0.0 if memory is None else memory.word(world), end=float(bool(self.callbacks.wish)),
        )  # fmt: skip

    def norm(self, step_row: Tensor) -> tuple[float, StepStats]:
        """The norm of the gradients that `backward` left, over all ranks, and the totals in its row. Waits for the device."""
        norm, *row = HostCopy(torch.cat([self.total_norm().reshape(1), step_row.double()])).read()
        return norm, StepStats.unpack(row, self.plan)

    def total_norm(self) -> Tensor:
        """The norm of the gradients that `backward` left, over all ranks: a float64 scalar on the device."""
        return self.turns.reducer.norm()

    def update(self, batch: Batch, step_row: Tensor) -> Step:
        """Clip by the global norm, take the optimizer step, advance the clock.

        A step whose loss or norm is not finite changes nothing, on any rank. When the host reads them is in `stats_reader.py`.
        """
        return self.steps.update(batch, step_row)

    def settle(self) -> None:
        """Wait until the numbers of the last step are on the host, and do what goes by them. On a GPU that is otherwise done in the
        next step. All ranks call it. N001 to N003 if that step was not finite."""
        self.steps.reader.settle()

    def tell(self, pending: PendingStats) -> None:
        """Do what goes by the numbers of a step: all ranks have the same, and do it after the same step."""
        rank_model, done, known = self.rank_model, pending.batch.after.step, self.passes.logged
        numbers, totals = pending.numbers, pending.totals
        if totals.new_names:
            numbers.logged |= known.agreed(pending.logged, rank_model.mesh.group_or_none(*WITHIN))
        if rank_model.techniques.replica_groups is None:
            self._heard(totals.signals)
        else:
            for sent, word in rank_model.techniques.replica_groups.after(done, list(astuple(totals.signals))):
                if sent > self._saved:  # else it tells of how far saves were before the last news of them
                    stage = self.checkpoints.stage
                    self._heard(RunSignals(*word))
                    self._saved = self._saved if self.checkpoints.stage == stage else done
        self.meter.read(numbers.spans, pending.batch.count)
        if rank_model.techniques.balance is not None:
            samples, busy = zip(*numbers.by_rank)
            numbers.note = rank_model.techniques.balance.heard(
                done, samples, busy, room_of_share(self.plan, totals.room), ahead(self.workers)
            )

    def _heard(self, signals: RunSignals) -> None:
        """What all ranks said together: the wish to stop, how far they are with what they save, and the wish to end."""
        self._stop = signals.stop > 0
        self.callbacks.asked = signals.end > 0
        self.checkpoints.heard(self, signals.disk_save)
        if self.memory is not None:
            try:
                self.memory.heard(self, signals.memory_save)
            except PlaitError:  # on all ranks: there is no room, and training goes on without snapshots
                self.memory = None

    def whole(self) -> bool:
        """Whether this rank holds the state of a step, and not half of an update."""
        return not self.steps.half_updated

    def put_back(self) -> None:
        """As it was before the step that has begun, if one has."""
        self.steps.put_back()

    def evaluate(self, again: bool = False) -> dict[str, float]:
        """The job's metrics over its whole evaluation set, every sample once (see `engine/evaluate.py`). They are those of the
        average of the weights if the job has one, or of the optimizer's eval mode. `again`: callbacks know the values already."""
        self.settle()
        self.place.beat(self.position.step, "evaluate")
        self.carried.watch.forget_writes()
        with self._judged():
            values = evaluate(self.rank_model)
        if not again:
            self.callbacks.evaluation(self, values)
        return values

    def _judged(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that are judged."""
        groups = self.rank_model.techniques.replica_groups
        return evaluated_weights(self.rank_model) if groups is None else groups.global_weights()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, stop: int | None = None, seed: int = 0, length: int | None = None,
        inputs: Callable[[Tensor], Any] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Continue prompts, lists of token ids: the new tokens of each, on every rank (see `engine/generate.py`). All ranks call it.

        `temperature` 0 takes the likeliest token. `stop`: the token that ends a text. `length`: pad texts to it. `inputs`:
        tokens of shape [texts, length] -> the model's inputs; None: as in the job's data. U019.
        """
        self.settle()
        self.place.beat(self.position.step, "evaluate")
        with self._judged():
            return generate(
                self.rank_model, prompts, TokenSampling(max_new_tokens, temperature, top_k, stop, seed, length), inputs
            )

    def save(self, keep: int = 3, wait: bool = True) -> Path:
        """Write a checkpoint of this step, beside training unless `wait`; keep the newest `keep`. All ranks call it."""
        self.settle()
        self.place.beat(self.position.step, "checkpoint")
        check_copies(self.rank_model, self.position.step)
        self._saved = self.position.step
        path = self.checkpoints.save(self, keep, wait)
        self.place.beat(self.position.step, "checkpoint")
        self.callbacks.saves(self)
        return path

    def load_weights(self, path: str | Path) -> None:
        """Start from these weights: a safetensors file, a Hugging Face folder or a checkpoint. All ranks call it."""
        self.settle()
        self.place.beat(self.position.step, "checkpoint")
        load_weights(self, Path(path))

    def resume(self, missing_ok: bool = False, allow_changes: bool = False) -> Path | None:
        """Load the newest good checkpoint. K001 when there is none and `missing_ok` is false.

        What the job changed since is in `checkpoints.changed`; K010 for what cannot be meant, unless `allow_changes`.
        """
        self.settle()
        self.place.beat(self.position.step, "checkpoint")
        return self.checkpoints.resume(self, missing_ok, allow_changes)
