"""One optimizer step of one rank, in the order in which it happens.

[Note: Timeline of a step]
Two of the four micro-batches of a step, on a rank of dp, and what it sends:

    compute   forward 3 │ backward 3 │ forward 4 │ backward 4 ▓▓▓▓▓▓▓▓ │ reduce │ norm │ clip, optimizer │ clock
    links                                             └►░░└►░░└►░░░░░░░░┘
                                                      gradients, bucket by bucket; the step row with the last

    forward    the loss of a micro-batch, times its weight over that of the global batch
    backward   gradients add up in `.grad`; that of the last micro-batch starts the sums over ranks
    reduce     the sums that are left. Now `.grad` has the gradient of the global batch, and the step row the totals of all ranks
    read       on a GPU, the numbers of the previous step: if it was skipped, this one is made again from the state before
    norm       of the gradients of the whole model, over all ranks
    finite?    whether loss and norm are; all ranks have the same, so all skip the update, or none
    clip       by the norm
    update     the optimizer's step
    clock      the step is made: the next batch is the one behind it

On a CPU the host reads loss and norm before the update; on a GPU it queues the update first, and reads them in the next step: see
[Note: Reading late] in `stats_reader.py`. A job with phases walks through all of this once for each phase that is due.

[Note: An update that the device skips]
Whether loss and norm are finite is a number on the device, and so are the factor of the clipping and the loss scale. torch's fused
optimizers take such a number (`found_inf`, as `torch.amp.GradScaler` gives it) and change nothing where it is 1: no moment, no count of
steps. With an optimizer that is not fused the host has to know first, and reads the row of the step before it queues the update.

[Note: Parameters that are trained]
Which parameters a run trains, and that it stays so.

`Job.optimizer` is given the parameters that require gradients when the model is made; strategies sum the gradients of these. A parameter
that is thawed later would be left out of all that, or would drift apart on ranks. Freezing is no more than a gradient that does not come.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config.errors import FAILED, PlaitError, Problem
from plait.data.batch import Batch
from plait.engine.passes import SharesBatch, Turns, run_here, total_weight, weights_of
from plait.engine.stats_reader import PendingStats, ReadTraining, StatsReader
from plait.engine.step import Spans, SpeedMeter, Step, merged, tokens
from plait.engine.traffic import named
from plait.model.optimizers import momentum_begins_at_zero
from plait.parallel.gradient_reducer import RunSignals, StepStats
from plait.parallel.rank_model import Hooks, RankModel
from plait.tensors.parameters import ParameterHooks
from plait.tensors.torch_private import gradient_hooks, scale_, sharded_here, takes_found_inf
from plait.tensors.transfers import HostCopy


class TrainedParameters:
    """Watches the parameters that the model's code and callbacks see on this rank."""

    def __init__(self, rank_model: RankModel):
        self.rank_model, self.live = rank_model, dict(rank_model.module.named_parameters())
        self.trained = {name for name, p in self.live.items() if p.requires_grad}
        self.names = {id(p): name for name, p in self.live.items()}
        self.hooks = set[tuple[str, int]]()
        self.alone = rank_model.plan.devices == 1 and rank_model.plan.microbatches == 1

    def begin(self) -> None:
        """Before the passes of a step: hooks that are there now were put by whoever owns the loop, and are left alone."""
        self.hooks = set(self._hooks())

    def check(self, step: int) -> None:
        """After the passes of a step, counted from 1, or a callback: P094 for a parameter that was thawed, P093 for a new hook."""
        for name, parameter in self._seen():
            if parameter.requires_grad and name not in self.trained:
                raise self._thawed(name, step)
        new = [] if self.alone else [hook for hook in self._hooks() if hook not in self.hooks]
        if new:
            raise self._hooked(new[0][0], step)

    def _hooks(self) -> Iterator[tuple[str, int]]:
        """(name of a parameter, number of a hook of the user's own code on its gradient)."""
        for name, parameter in self._seen():
            if any(gradient_hooks(parameter)):
                found = ParameterHooks.of_job(parameter)
                yield from ((name, number) for number in (*found.before, *found.after))

    def _seen(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.live.items()
        for module in self.rank_model.techniques.shards.modules if self.rank_model.techniques.shards is not None else ():
            for part, whole in sharded_here(module):
                if whole is None:
                    continue
                yield self.names[id(part)], whole
                if part.requires_grad and not whole.requires_grad and self.rank_model.job.phases is None:
                    part.requires_grad_(False)  # FSDP2 gives the whole what the part has, when it gathers again

    def _thawed(self, name: str, step: int) -> PlaitError:
        what = f"{name} was frozen when training began, and requires gradients in step {step}"
        why = "Job.optimizer was given the parameters that require gradients when the model is made, and so it never updates this one"
        fix = (
            "let it require gradients from the start, and detach what it gives until then: x = self.backbone(x).detach()",
            "train in two runs: plait.Job(weights=…) of the second starts from the weights of the first",
        )
        return PlaitError(Problem("P094", what, why=why, fix=fix), FAILED)

    def _hooked(self, name: str, step: int) -> PlaitError:
        what = f"a hook was put on the gradient of {name} while training, in step {step} or before"
        why = "autograd calls it with the gradient of a part of the batch; hooks that are there when the model is made get all of it"
        fix = ("register the hook in the model's constructor, and decide inside of it from which step on it acts",)
        return PlaitError(Problem("P093", what, why=why, fix=fix), FAILED)


def may_run_ahead(rank_model: RankModel, skips_nonfinite: bool) -> bool:
    """Whether updates may be queued before the host has read the numbers of their steps.

    `skips_nonfinite`: a step that is not finite changes nothing.
    """
    skips = not (skips_nonfinite or rank_model.techniques.loss_scale is not None)
    skips = skips or (takes_found_inf(rank_model.optimizer) and momentum_begins_at_zero(rank_model.optimizer))
    here = rank_model.techniques.masters is None and rank_model.plan.offload == "none" and rank_model.plan.grad_compression == "none"
    return skips and here and told_late(rank_model)


def told_late(rank_model: RankModel) -> bool:
    """Whether nothing that the next step does goes by the numbers of this one."""
    parts = (rank_model.techniques.replica_groups, rank_model.techniques.replicas, rank_model.techniques.balance, rank_model.job.phases)
    return rank_model.device.type == "cuda" and all(part is None for part in parts)


def clip(gradients: Sequence[Tensor], norm: Tensor, most: float | None, scale: Tensor | None) -> None:
    """Divide gradients by the loss scale, and clip them to a global norm (as `torch.nn.utils.clip_grad_norm_`), on the device.

    `norm`: of the gradients as they are, with the scale; a float64 scalar, as the scale is.
    """
    if scale is None and most is None:
        return
    factor = norm.new_ones(()) if most is None else (most / (norm / (1.0 if scale is None else scale) + 1e-6)).clamp(max=1.0)
    if scale is not None:
        factor = factor / scale
    by_format: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_format.setdefault(gradient.dtype, []).append(gradient)
    for dtype, some in by_format.items():
        if dtype.itemsize > 2:
            scale_(some, factor.to(dtype))
        else:  # a factor rounded to 16 bits would be another
            for gradient in some:
                gradient.copy_(gradient.float().mul_(factor.float()))


def step(optimizer: torch.optim.Optimizer, hooks: Hooks, finite: Tensor | None = None) -> None:
    """The optimizer's step, and what the plan's techniques do before and after it. Where `finite`, a boolean scalar on the device, is
    given, the step is queued, and made where it is true."""
    for prepare in hooks.before_update:
        prepare()
    given: dict[str, Tensor] = {} if finite is None else {"found_inf": (~finite).float()}
    vars(optimizer).update(given)
    try:
        optimizer.step()
    finally:
        for name in given:
            delattr(optimizer, name)
    for finish in hooks.after_update:
        finish()


class SteppedTraining(ReadTraining, SharesBatch, Protocol):
    """A training whose steps are made here."""

    turns: Turns
    trained: TrainedParameters
    meter: SpeedMeter

    @property
    def stopping(self) -> bool:
        """Whether some rank was asked to stop."""
        ...

    def signals(self) -> RunSignals:
        """What this rank tells the others of the run."""
        ...

    def total_norm(self) -> Tensor:
        """The norm of the gradients, a float64 scalar on the device."""
        ...


class TrainStep:
    """Makes the steps of one rank. `norms`: with the gradient norm of each parameter group."""

    def __init__(self, training: SteppedTraining, spans: Spans, norms: bool):
        self.training, self.spans, self.norms = training, spans, norms
        self.rank_model = rank_model = training.rank_model
        self.techniques, self.reader = rank_model.techniques, StatsReader(training)
        self.runs_ahead = may_run_ahead(rank_model, training.guard.skips_nonfinite)
        """Updates are queued before their numbers are read."""
        self.reads_at_once = not told_late(rank_model)
        """What goes by a step's numbers is done in the step."""
        self.axes = dict[str, str]()
        """Of process groups that were met, by their name."""
        self.has_state = False
        """The optimizer has made its state."""
        self.in_step = False
        """Passes of a step have begun, and its update is not made: buffers are those of neither step."""
        self.half_updated = False
        """Weights may be half of one step and half of the next."""

    def run(self, batch: Batch) -> Step:
        """Make a step; in a job with phases, one for each phase that is due."""
        each = []
        with self.spans.waits_of(batch.after.step, self._axes_of):
            for phase in self.training.turns.of(batch.after.step):  # the model, reducer and optimizer are this phase's meanwhile
                step_row = self.backward(batch)
                each.append((phase, self.update(batch, step_row)))
        return merged(each)

    def _axes_of(self, group: dist.ProcessGroup) -> str:
        """The axes along which the ranks of a group differ."""
        name = group.group_name
        if name not in self.axes:
            self.axes[name] = named(self.rank_model.plan, tuple(dist.get_process_group_ranks(group)))
        return self.axes[name]

    def backward(self, batch: Batch) -> Tensor:
        """Forward, backward, reduce: leaves the gradient of the global batch in every `.grad`. Returns the summed row of the step."""
        training, rank_model, passes = self.training, self.rank_model, self.training.passes
        training.carried.begin_step()

        # Each micro-batch's loss counts with its weight over that of the global batch. So the gradients add up to that of the batch's
        # weighted mean loss, however the batch is split into ranks and micro-batches.
        weights = weights_of(training.job, batch)
        total = total_weight(training, batch, weights)
        runs = {i: weights[i] / (total or 1.0) for i in run_here(training.share, batch, weights)}

        # Forward passes write buffers such as statistics. What they held is kept, because a step that is not finite is undone: of this
        # step, and of the previous one while the host does not know whether that was finite.
        training.guard.keep(again=not self.reader.is_judged)
        self.in_step, self.half_updated = True, not training.turns.first
        training.trained.begin()

        # Forward and backward, micro-batch by micro-batch or by the pipeline's schedule. In the last backward each bucket of gradients is
        # sent as soon as it is full; the row of the step, which `_ready` packs before it, travels with the last one.
        with training.meter.watching():
            passes.run(passes.pieces(batch, runs), batch.position.step, partial(self._ready, batch))

        # Reduce: what is not sent yet, then wait. The row that comes back is summed over all ranks.
        self.spans.begin("reduce")
        step_row = training.turns.reducer.finish(self._sums_over_groups(batch))

        # Gradients of other phases, which travel in the same buckets, are dropped; the job's hooks are called with sums, as on one device.
        training.turns.forget_others()
        training.trained.check(batch.after.step)
        for summed in rank_model.hooks.gradients_summed:
            summed(training.turns.reducer)
        if self.techniques.replica_groups is not None:
            self.techniques.replica_groups.given(total > 0)
        self.spans.end("reduce")
        return step_row

    def update(self, batch: Batch, step_row: Tensor) -> Step:
        """Read the previous step, then clip and update with the gradients that `backward` left, and advance the clock."""
        training, turns = self.training, self.training.turns

        # The learning rate goes by the samples seen before this step. A schedule is the job's code, which may hang: hence the beat.
        self.spans.beat("optimizer")
        self._set_rate()
        lr = turns.rate

        # The numbers of the previous step, if the host has not read them. If that step was skipped, the passes just made began from what
        # it wrote: they are undone, and made again.
        ahead, last = self.runs_ahead and self.has_state, self.reader.pending
        if last is not None and (ahead or not last.judged) and self.reader.settle(within_next=True):
            step_row = self.backward(batch)

        pending = self._clip_and_update(batch, step_row, ahead=ahead)

        # The clock: from here on the run is at the next step, and a checkpoint would say so.
        if turns.last:
            training.position, self.in_step = batch.after, False
            training.carried.end_step()
        if self.reads_at_once:
            self.reader.settle()
        lrs = [float(group["lr"]) for group in training.optimizer.param_groups]
        after = batch.after
        return Step(after.step, lr, after.samples, batch.size, tokens(batch), training.stopping, pending, lrs)

    def _clip_and_update(self, batch: Batch, step_row: Tensor, *, ahead: bool) -> PendingStats:
        """Norm, finite?, clip, optimizer. `ahead`: the update is queued before loss and norm are read."""
        self.spans.begin("optimizer")
        norm = self.training.total_norm()
        pending = self._pending(batch)
        row = pending.pack(step_row, norm, self._scale(norm), self._group_norms() if self.norms else None)

        if ahead:
            self._queue_update(step_row, norm)
        else:
            pending.copy = HostCopy(row)  # read right below: the host waits here
            self.reader.judge(pending)  # raises, or finds out why the step is skipped
            self.reader.settle()  # what was left to do of the previous step
            self._make_update(pending)

        for parameter in self.rank_model.params.values():
            parameter.grad = None
        self.spans.end("optimizer")
        if ahead:
            pending.copy = HostCopy(row)  # travels behind the update, while the next passes are queued
        pending.spans, self.reader.pending, self.half_updated = self.spans.taken(), pending, False
        return pending

    def _make_update(self, pending: PendingStats) -> None:
        """The update by numbers that the host has read: finite?, clip, optimizer."""
        training, loss_scale = self.training, self.techniques.loss_scale
        if pending.finite:
            scale = 1.0 if loss_scale is None else loss_scale.value  # a dry run reads zeros from the row
            factor = clip_factor(pending.norm, training.turns.clip(training.job)) / scale
            gradients = self._gradients()
            if gradients and factor != 1.0:
                scale_(gradients, factor)
            self.half_updated = self.has_state = True
            step(training.optimizer, self.rank_model.hooks)
            training.turns.updated()
            self.reader.average(pending)
        if loss_scale is not None and pending.trouble is None:
            loss_scale.update(pending.finite)

    def _queue_update(self, step_row: Tensor, norm: Tensor) -> None:
        """The update ahead of its numbers, all on the device: finite?, clip, optimizer, which is skipped where they are not finite."""
        training, loss_scale = self.training, self.techniques.loss_scale
        skips = training.guard.skips_nonfinite
        finite = norm.isfinite() if loss_scale is not None or skips else None
        if finite is not None and skips:
            finite = finite & StepStats.loss_in(step_row).isfinite()
        clip(self._gradients(), norm, training.job.clip, None if loss_scale is None else loss_scale.factor)
        self.half_updated = True
        step(training.optimizer, self.rank_model.hooks, finite)
        if loss_scale is not None and finite is not None:
            loss_scale.update(finite)

    def put_back(self) -> None:
        """Undo the passes of a step that was not ended, and a step that the device skipped: the state is that of a whole step then."""
        guard, in_step, self.in_step = self.training.guard, self.in_step, False
        if in_step:
            guard.before.put_back()
        if self.reader.is_skipped:
            (guard.earlier if in_step else guard.before).put_back()
        self.reader.average()
        self.rank_model.forget_gathered()

    def _group_norms(self) -> Tensor:
        """The norm of the gradients of each of the optimizer's groups, over all ranks: float64 of shape [groups] on the device."""
        names = self.rank_model.optimizer_names
        return self.training.turns.reducer.norms([names[id(p)] for p in group["params"]] for group in self.rank_model.optimizer.param_groups)

    def _ready(self, batch: Batch, losses: list[Tensor]) -> None:
        """The last backward is about to begin: the reducer sends what it fills, and the row of the step."""
        training, plan, log = self.training, self.training.plan, self.training.passes.logged
        stats, meter = StepStats.zeros(plan), training.meter
        stats.add_losses(losses, plan, self.rank_model.device)
        waited = self.spans.waited
        stats.add_rank(training.place.rank, plan, samples=batch.count, busy=meter.busy, waited=waited, room=meter.room)
        stats.signals = training.signals()
        stats.new_names, stats.logged = float(log.has_new_names), log.send()
        training.turns.reducer.ready(stats.pack(self.rank_model.device))

    def _sums_over_groups(self, batch: Batch) -> bool:
        """Whether all replica groups sum their gradients together in this step."""
        groups = self.techniques.replica_groups
        return groups is not None and groups.sums(batch.after.step)

    def _pending(self, batch: Batch) -> PendingStats:
        training, used = self.training, self.techniques
        return PendingStats(
            training.plan, batch, group_names(self.rank_model) if self.norms else [], training.passes.logged.sent, training.passes.losses,
            training.guard.skips_nonfinite, scaled=used.loss_scale is not None,
            loss_factor=training.plan.replica_groups if self._sums_over_groups(batch) else 1.0,
            to_average=used.average is not None and training.turns.last,
        )  # fmt: skip

    def _scale(self, norm: Tensor) -> Tensor:
        """The loss scale, float64 of shape [1] on the device; 1 without one."""
        loss_scale = self.techniques.loss_scale
        return torch.ones_like(norm.reshape(1)) if loss_scale is None else loss_scale.factor.reshape(1)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.rank_model.params.values() if p.grad is not None]

    def _set_rate(self) -> None:
        """By `Job.schedule`."""
        schedule, training = self.training.job.schedule, self.training
        if schedule is not None:
            rate = float(schedule(training.position.samples))
            for group in training.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate


def group_names(rank_model: RankModel) -> list[str]:
    """How each of the optimizer's groups is called: by its "name", else its number."""
    return [str(group.get("name", i)) for i, group in enumerate(rank_model.optimizer.param_groups)]


def clip_factor(norm: float, most: float | None) -> float:
    """As `torch.nn.utils.clip_grad_norm_`: most / (norm + 1e-6), at most 1; NaN stays NaN."""
    return 1.0 if most is None else min(most / (norm + 1e-6), 1.0)
