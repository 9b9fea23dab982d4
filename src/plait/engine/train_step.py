"""One optimizer step of one rank, in order of execution.

[Note: Timeline of a step]
Two of the four micro-batches of a step, on a rank of dp, and its messages:

    compute   forward 3 │ backward 3 │ forward 4 │ backward 4 ▓▓▓▓▓▓▓▓ │ reduce │ norm │ clip, optimizer │ clock
    links                                             └►░░└►░░└►░░░░░░░░┘
                                                      gradients, bucket by bucket; the step row with the last

    forward    the loss of a micro-batch, times its weight over that of the global batch
    backward   gradients add up in `.grad`; that of the last micro-batch starts the all-reduces
    reduce     the remaining all-reduces. Now `.grad` has the gradient of the global batch, and the step row the totals of all ranks
    read       on a GPU, the statistics of the previous step: if it was skipped, this one is repeated from the state before
    norm       of the gradients of the full model, over all ranks
    finite?    whether loss and norm are; all ranks have the same values, so all skip the update, or none
    clip       by the norm
    update     the optimizer's step
    clock      the step is complete: the position advances to the next batch

On a CPU the host reads loss and norm before the update; on a GPU it queues the update first, and reads them in the next step: see
[Note: Reading late] in `stats_reader.py`. A job with phases repeats all of this for each due phase.

[Note: An update that the device skips]
The finite flag is a value on the device, and so are the clipping factor and the loss scale. torch's fused optimizers take such a flag
(`found_inf`, as `torch.amp.GradScaler` passes it) and change nothing if it is 1: no moment, no step count. With an optimizer that is
not fused, the host reads the row of the step before it queues the update.

[Note: Parameters that are trained]
The set of trained parameters is fixed when the model is made, and checked in every step.

`Job.optimizer` receives the parameters that require gradients when the model is made; strategies reduce the gradients of these. A
parameter that is unfrozen later would miss both, and would differ between ranks. Freezing only means that its gradient is absent.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config.errors import FAILED, PlaitError, Problem
from plait.data.batch import Batch
from plait.engine.passes import (
    ActivePhase,
    SplitBatchTraining,
    get_micro_weights,
    select_micro_batches,
    sum_batch_weight,
)
from plait.engine.stats_reader import PendingStats, StatsReader, StatsTraining
from plait.engine.step import Spans, SpeedMeter, Step, count_tokens, merge_phase_steps
from plait.engine.traffic import describe_axes
from plait.model.optimizers import can_zero_momentum
from plait.parallel.gradient_reducer import RunSignals, StepStats
from plait.parallel.rank_model import Hooks, RankModel
from plait.tensors.parameters import ParameterHooks
from plait.tensors.torch_private import can_skip_on_inf, gradient_hooks, list_sharded_params, scale_
from plait.tensors.transfers import HostCopy


class TrainedParameters:
    """Watches the parameters that the model's code and callbacks see on this rank."""

    def __init__(self, rank_model: RankModel):
        self.rank_model, self.live = rank_model, dict(rank_model.module.named_parameters())
        self.trained = {name for name, p in self.live.items() if p.requires_grad}
        self.names = {id(p): name for name, p in self.live.items()}
        self.hooks = set[tuple[str, int]]()
        self.is_single = rank_model.plan.devices == 1 and rank_model.plan.microbatches == 1

    def begin(self) -> None:
        """Record the hooks before the passes of a step: existing ones were added by the owner of the loop, and are allowed."""
        self.hooks = set(self._list_hooks())

    def check(self, step: int) -> None:
        """Check after the passes of a step, counted from 1, or a callback: P094 for an unfrozen parameter, P093 for a new hook."""
        for name, parameter in self._iterate_parameters():
            if parameter.requires_grad and name not in self.trained:
                raise self._make_thawed_error(name, step)
        new = [] if self.is_single else [hook for hook in self._list_hooks() if hook not in self.hooks]
        if new:
            raise self._make_hook_error(new[0][0], step)

    def _list_hooks(self) -> Iterator[tuple[str, int]]:
        """Yield (parameter name, number of a user hook on its gradient)."""
        for name, parameter in self._iterate_parameters():
            if any(gradient_hooks(parameter)):
                found = ParameterHooks.find_job_hooks(parameter)
                yield from ((name, number) for number in (*found.before, *found.after))

    def _iterate_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.live.items()
        for module in self.rank_model.techniques.shards.modules if self.rank_model.techniques.shards is not None else ():
            for part, whole in list_sharded_params(module):
                if whole is None:
                    continue
                yield self.names[id(part)], whole
                if part.requires_grad and not whole.requires_grad and self.rank_model.job.phases is None:
                    part.requires_grad_(False)  # FSDP2 copies requires_grad from the shard when it gathers again

    def _make_thawed_error(self, name: str, step: int) -> PlaitError:
        what = f"{name} was frozen when training began, but requires gradients in step {step}"
        why = "Job.optimizer received the parameters that require gradients when the model is made, so it never updates this one"
        fix = (
            "let it require gradients from the start, and detach its output until then: x = self.backbone(x).detach()",
            "train in two runs: plait.Job(weights=…) of the second starts from the weights of the first",
        )
        return PlaitError(Problem("P094", what, why=why, fix=fix), FAILED)

    def _make_hook_error(self, name: str, step: int) -> PlaitError:
        what = f"a hook was added to the gradient of {name} during training, in step {step} or before"
        why = "autograd calls it with the gradient of a part of the batch; hooks added when the model is made get the full gradient"
        fix = ("register the hook in the model's constructor, and activate it inside the hook at the intended step",)
        return PlaitError(Problem("P093", what, why=why, fix=fix), FAILED)


def can_run_ahead(rank_model: RankModel, skips_nonfinite: bool) -> bool:
    """Return whether updates may be queued before the host has read the statistics of their steps.

    `skips_nonfinite`: a non-finite step changes nothing.
    """
    skips = not (skips_nonfinite or rank_model.techniques.loss_scale is not None)
    skips = skips or (can_skip_on_inf(rank_model.optimizer) and can_zero_momentum(rank_model.optimizer))
    here = rank_model.techniques.masters is None and rank_model.plan.offload == "none" and rank_model.plan.grad_compression == "none"
    return skips and here and can_read_late(rank_model)


def can_read_late(rank_model: RankModel) -> bool:
    """Return whether the next step does not depend on the statistics of this one."""
    parts = (rank_model.techniques.replica_groups, rank_model.techniques.replicas, rank_model.techniques.balance, rank_model.job.phases)
    return rank_model.device.type == "cuda" and all(part is None for part in parts)


def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, max_norm: float | None, scale: Tensor | None) -> None:
    """Divide gradients by the loss scale, and clip them to a global norm (as `torch.nn.utils.clip_grad_norm_`), on the device.

    `norm` includes the scale; both are float64 scalars.
    """
    if scale is None and max_norm is None:
        return
    factor = norm.new_ones(()) if max_norm is None else (max_norm / (norm / (1.0 if scale is None else scale) + 1e-6)).clamp(max=1.0)
    if scale is not None:
        factor = factor / scale
    by_format: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_format.setdefault(gradient.dtype, []).append(gradient)
    for dtype, some in by_format.items():
        if dtype.itemsize > 2:
            scale_(some, factor.to(dtype))
        else:  # rounding the factor to 16 bits would change it
            for gradient in some:
                gradient.copy_(gradient.float().mul_(factor.float()))


def step_optimizer(optimizer: torch.optim.Optimizer, hooks: Hooks, finite: Tensor | None = None) -> None:
    """Run the optimizer's step, with the hooks of the plan's techniques before and after it.

    `finite`: a boolean scalar on the device; the step is queued, and the device skips it if false.
    """
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


class SteppedTraining(StatsTraining, SplitBatchTraining, Protocol):
    """A training whose steps `TrainStep` makes."""

    active_phase: ActivePhase
    trained: TrainedParameters
    meter: SpeedMeter

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested on any rank."""
        ...

    def signals(self) -> RunSignals:
        """Return this rank's signals about the run for the other ranks."""
        ...

    def total_norm(self) -> Tensor:
        """Return the norm of the gradients, a float64 scalar on the device."""
        ...


class TrainStep:
    """Makes the steps of one rank. `has_group_norms`: record the gradient norm of each parameter group."""

    def __init__(self, training: SteppedTraining, spans: Spans, has_group_norms: bool):
        self.training, self.spans, self.has_group_norms = training, spans, has_group_norms
        self.rank_model = rank_model = training.rank_model
        self.techniques, self.reader = rank_model.techniques, StatsReader(training)
        self.runs_ahead = can_run_ahead(rank_model, training.guard.skips_nonfinite)
        """Whether updates are queued before their statistics are read."""
        self.reads_at_once = not can_read_late(rank_model)
        """Whether the statistics of a step are handled in that step."""
        self.axes = dict[str, str]()
        """Axes of process groups seen so far, by group name."""
        self.has_state = False
        """Whether the optimizer has made its state."""
        self.is_in_step = False
        """Whether passes of a step have started without its update: buffers belong to neither step."""
        self.is_half_updated = False
        """Whether weights may be a mix of two steps."""

    def run(self, batch: Batch) -> Step:
        """Make a step; in a job with phases, one for each due phase."""
        each = []
        with self.spans.record_waits(batch.next_position.step, self._get_axes):
            for phase in self.training.active_phase.iterate_phases(
                batch.next_position.step
            ):  # the model, reducer and optimizer are those of this phase
                step_row = self.backward(batch)
                each.append((phase, self.update(batch, step_row)))
        return merge_phase_steps(each)

    def _get_axes(self, group: dist.ProcessGroup) -> str:
        """Return the axes along which the ranks of a group differ."""
        name = group.group_name
        if name not in self.axes:
            self.axes[name] = describe_axes(self.rank_model.plan, tuple(dist.get_process_group_ranks(group)))
        return self.axes[name]

    def backward(self, batch: Batch) -> Tensor:
        """Run forward, backward and reduce: `.grad` has the gradient of the global batch. Returns the summed row of the step."""
        training, rank_model, passes = self.training, self.rank_model, self.training.passes
        training.carried.begin_step()

        # Each micro-batch's loss counts with its weight over that of the global batch. So the gradients add up to that of the batch's
        # weighted mean loss, however the batch is split into ranks and micro-batches.
        weights = get_micro_weights(training.job, batch)
        total = sum_batch_weight(training, batch, weights)
        runs = {i: weights[i] / (total or 1.0) for i in select_micro_batches(training.batch_share, batch, weights)}

        # Forward passes write buffers such as statistics. A backup is kept, since a non-finite step is undone: of this step, and of the
        # previous one until the host has confirmed that it was finite.
        training.guard.keep(keeps_last=not self.reader.is_judged)
        self.is_in_step, self.is_half_updated = True, not training.active_phase.is_first
        training.trained.begin()

        # Forward and backward, micro-batch by micro-batch or by the pipeline's schedule. In the last backward each bucket of gradients is
        # sent as soon as it is full; the row of the step, which `_send_step_row` packs before it, travels with the last one.
        with training.meter.measure_passes():
            passes.run(passes.make_micro_batches(batch, runs), batch.position.step, partial(self._send_step_row, batch))

        # Reduce: send the remaining gradients, then wait. The returned row is summed over all ranks.
        self.spans.begin("reduce")
        step_row = training.active_phase.reducer.finish(self._is_global_sum(batch))

        # Gradients of other phases in the same buckets are dropped; the job's hooks are called with sums, as on one device.
        training.active_phase.drop_other_gradients()
        training.trained.check(batch.next_position.step)
        for summed in rank_model.hooks.gradients_summed:
            summed(training.active_phase.reducer)
        if self.techniques.replica_groups is not None:
            self.techniques.replica_groups.record_gradients(total > 0)
        self.spans.end("reduce")
        return step_row

    def update(self, batch: Batch, step_row: Tensor) -> Step:
        """Read the previous step, then clip and update with the gradients that `backward` left, and advance the position."""
        training, turns = self.training, self.training.active_phase

        # The learning rate depends on the samples seen before this step. A schedule is user code, which may hang: hence the beat.
        self.spans.beat("optimizer")
        self._set_rate()
        lr = turns.learning_rate

        # The statistics of the previous step, if the host has not read them. If that step was skipped, the passes just made used the
        # buffers that it wrote: they are undone, and repeated.
        ahead, last = self.runs_ahead and self.has_state, self.reader.pending
        if last is not None and (ahead or not last.is_judged) and self.reader.settle(within_next=True):
            step_row = self.backward(batch)

        pending = self._clip_and_update(batch, step_row, ahead=ahead)

        # The clock: from here on the position is that of the next step, also in checkpoints.
        if turns.is_last:
            training.position, self.is_in_step = batch.next_position, False
            training.carried.end_step()
        if self.reads_at_once:
            self.reader.settle()
        lrs = [float(group["lr"]) for group in training.optimizer.param_groups]
        after = batch.next_position
        return Step(after.step, lr, after.samples, batch.size, count_tokens(batch), training.stopping, pending, lrs)

    def _clip_and_update(self, batch: Batch, step_row: Tensor, *, ahead: bool) -> PendingStats:
        """Compute the norm and finite flag, clip, and run the optimizer. `ahead`: queue the update before loss and norm are read."""
        self.spans.begin("optimizer")
        norm = self.training.total_norm()
        pending = self._make_pending_stats(batch)
        row = pending.pack(step_row, norm, self._get_loss_scale(norm), self._compute_group_norms() if self.has_group_norms else None)

        if ahead:
            self._queue_update(step_row, norm)
        else:
            pending.copy = HostCopy(row)  # read next: the host waits here
            self.reader.judge(pending)  # raises, or finds the reason to skip the step
            self.reader.settle()  # finishes the previous step
            self._make_update(pending)

        for parameter in self.rank_model.params.values():
            parameter.grad = None
        self.spans.end("optimizer")
        if ahead:
            pending.copy = HostCopy(row)  # copied after the update, while the next passes are queued
        pending.spans, self.reader.pending, self.is_half_updated = self.spans.take_spans(), pending, False
        return pending

    def _make_update(self, pending: PendingStats) -> None:
        """Check, clip and update with statistics that the host has read."""
        training, loss_scale = self.training, self.techniques.loss_scale
        if pending.is_finite:
            scale = 1.0 if loss_scale is None else loss_scale.value  # a dry run reads zeros from the row
            factor = compute_clip_factor(pending.norm, training.active_phase.get_clip(training.job)) / scale
            gradients = self._list_gradients()
            if gradients and factor != 1.0:
                scale_(gradients, factor)
            self.is_half_updated = self.has_state = True
            step_optimizer(training.optimizer, self.rank_model.hooks)
            training.active_phase.end_update()
            self.reader.average(pending)
        if loss_scale is not None and pending.trouble is None:
            loss_scale.update(pending.is_finite)

    def _queue_update(self, step_row: Tensor, norm: Tensor) -> None:
        """Queue the finite check, the clipping and the update on the device, which skips the update if values are not finite."""
        training, loss_scale = self.training, self.techniques.loss_scale
        skips = training.guard.skips_nonfinite
        finite = norm.isfinite() if loss_scale is not None or skips else None
        if finite is not None and skips:
            finite = finite & StepStats.loss_in(step_row).isfinite()
        clip_gradients(self._list_gradients(), norm, training.job.clip, None if loss_scale is None else loss_scale.factor)
        self.is_half_updated = True
        step_optimizer(training.optimizer, self.rank_model.hooks, finite)
        if loss_scale is not None and finite is not None:
            loss_scale.update(finite)

    def undo_passes(self) -> None:
        """Undo the passes of an unfinished step, and a step that the device skipped: the state is then that of a complete step."""
        guard, in_step, self.is_in_step = self.training.guard, self.is_in_step, False
        if in_step:
            guard.last_backup.restore()
        if self.reader.is_skipped:
            (guard.earlier_backup if in_step else guard.last_backup).restore()
        self.reader.average()
        self.rank_model.discard_gathered()

    def _compute_group_norms(self) -> Tensor:
        """Compute the gradient norm of each of the optimizer's groups, over all ranks: float64 of shape [groups] on the device."""
        names = self.rank_model.optimizer_names
        return self.training.active_phase.reducer.compute_norms(
            [names[id(p)] for p in group["params"]] for group in self.rank_model.optimizer.param_groups
        )

    def _send_step_row(self, batch: Batch, losses: list[Tensor]) -> None:
        """Pass the row of the step to the reducer before the last backward, which sends it with the last bucket."""
        training, plan, log = self.training, self.training.plan, self.training.passes.logged
        stats, meter = StepStats.zeros(plan), training.meter
        stats.add_losses(losses, plan, self.rank_model.device)
        waited = self.spans.waited
        stats.add_rank(training.place.rank, plan, samples=batch.count, busy=meter.busy, waited=waited, room=meter.sample_room)
        stats.signals = training.signals()
        stats.new_names, stats.logged = float(log.has_new_names), log.send()
        training.active_phase.reducer.arm(stats.pack(self.rank_model.device))

    def _is_global_sum(self, batch: Batch) -> bool:
        """Return whether all replica groups reduce their gradients together in this step."""
        groups = self.techniques.replica_groups
        return groups is not None and groups.is_warmup_step(batch.next_position.step)

    def _make_pending_stats(self, batch: Batch) -> PendingStats:
        training, used = self.training, self.techniques
        return PendingStats(
            training.plan, batch, get_group_names(self.rank_model) if self.has_group_norms else [], training.passes.logged.sent,
                training.passes.losses,
            training.guard.skips_nonfinite, has_loss_scale=used.loss_scale is not None,
            loss_factor=training.plan.replica_groups if self._is_global_sum(batch) else 1.0,
            needs_average=used.average is not None and training.active_phase.is_last,
        )  # fmt: skip

    def _get_loss_scale(self, norm: Tensor) -> Tensor:
        """Return the loss scale, float64 of shape [1] on the device; 1 without one."""
        loss_scale = self.techniques.loss_scale
        return torch.ones_like(norm.reshape(1)) if loss_scale is None else loss_scale.factor.reshape(1)

    def _list_gradients(self) -> list[Tensor]:
        return [p.grad for p in self.rank_model.params.values() if p.grad is not None]

    def _set_rate(self) -> None:
        """Set the learning rate from `Job.schedule`."""
        schedule, training = self.training.job.schedule, self.training
        if schedule is not None:
            rate = float(schedule(training.position.samples))
            for group in training.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate


def get_group_names(rank_model: RankModel) -> list[str]:
    """Return the names of the optimizer's groups: "name", else the number."""
    return [str(group.get("name", i)) for i, group in enumerate(rank_model.optimizer.param_groups)]


def compute_clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`: most / (norm + 1e-6), at most 1; NaN stays NaN."""
    return 1.0 if max_norm is None else min(max_norm / (norm + 1e-6), 1.0)
