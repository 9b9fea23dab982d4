"""Replica groups (local SGD, DiLoCo): groups of ranks that synchronize rarely, also by post-local SGD and streaming DiLoCo.

What it does
    Each of k groups of ranks has its own model, and trains it on its own part of the global batch. A group does not
    wait for the others: gradients, clipping and optimizer state are its own. Every `sync_every` steps, H in the
    following, the groups synchronize.

    `outer_sync=local`: the weights become the mean of the groups' weights (local SGD).

    `outer_sync=diloco`: in addition to each group's weights θ, there are global weights G. The mean of G − θ is the
    gradient of an outer optimizer, SGD with Nesterov momentum. It updates G, and all groups continue from G. With
    `num_fragments`, the model is synchronized part by part, each part every H steps, so messages are small and
    frequent. With `fragment_delay`, a message may take that many steps. Its content is then mixed into the weights,
    which have changed meanwhile (streaming DiLoCo).

    The first `warmup_sync_steps` steps sum gradients over all groups, exactly as dp does (post-local SGD). Inside a
    group, every other axis works: dp, fsdp, tp, cp, ep, pp.

Picture
    group 0   step step step step ─┐        ┌─ step step step step ─┐
                                   ├─ mean ─┤                       ├─ …         sync_every=4
    group 1   step step step step ─┘        └─ step step step step ─┘

Costs
    Traffic between groups: one all-reduce of the parameters every H steps, 1/H of the traffic of dp. Memory: nothing
    for `local`; for `diloco`, one copy of the weights and one momentum, of the shards that a rank has. Exactness: the
    plan changes the training result, as described below, and more so for larger H.

Choose when
    Links between nodes or sites are so slow that summing gradients takes at least as long as computing them.

Avoid when
    Links are fast: dp is exact and as quick. Or the model trains for few steps. With about ten synchronizations, the
    published rates (0.7, 0.9) are no better than plain averaging; they need a hundred or more synchronizations.

How it stays exact
    The run is exact relative to its own algorithm. `plait verify` trains k models in one process by the following
    rules, and requires equal values. It then prints the difference from dp. The result is that of dp in the first
    `warmup_sync_steps` steps. With `outer_sync=local sync_every=1` it is that of dp in all steps, on three conditions.
    The optimizer is linear in the gradient (SGD, also with momentum), nothing is clipped, and all samples have equal
    weight.

    Batch: `Job.batch` is the global batch, as under every plan. Each group has a contiguous k-th part of it. (In the
    papers, each group has a full batch of its own, so their figures are for k times the data.)

    Loss: a group's loss is its weighted mean, times k · n / N for its n of the batch's N samples. The mean over groups
    is then the batch's mean. In a short batch, a group without a sample takes its step with gradients of zero.

    Clipping: by the norm of the group's gradients. Clock: samples of the global batch. Weight decay: in the inner step.

    State: optimizer state is never averaged. Statistics of batch normalization are the group's own between
    synchronizations, and the mean after one. Dropout is keyed by the sample, as under every plan.

    Evaluation uses the global weights: G, or the mean under `outer_sync=local`. Programs that read a checkpoint get
    these weights too. A checkpoint also contains each group's weights and optimizer state, the momentum of G, and
    messages in transfer.

Paper
    Stich 2019, Local SGD Converges Fast and Communicates Little (ICLR); Lin et al. 2020 (ICLR) for post-local SGD;
    Douillard et al. 2023, DiLoCo; Douillard et al. 2025, Streaming DiLoCo with overlapping communication.
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.compression import strategy as compression
from plait.parallel.rank_model import SplitModel
from plait.parallel.replica_groups.outer_synchronizer import OuterSynchronizer

AXIS = "replica_groups"
EXACT = False


def is_enabled(plan: Plan) -> bool:
    return plan.rarely


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    k, ranks = plan.replica_groups, plan.replica_groups * plan.shares
    if ranks > batch:
        what = f"global batch {batch} is smaller than the number of ranks with different samples ({ranks})"
        why = f"replica_groups={k} × {plan.shares} = {ranks} ranks: {ranks - batch} would never get a sample"
        yield Problem("P012", what, why=why, fix=(f"--batch {ranks}",))
    if plan.num_fragments > plan.sync_every:
        what = f"num_fragments={plan.num_fragments} exceeds sync_every={plan.sync_every}"
        why = "at most one fragment is sent after each step"
        yield Problem("P064", what, why=why, fix=(f"sync_every={plan.num_fragments}", f"num_fragments={plan.sync_every}"))
    if plan.fragment_delay >= plan.sync_every > 0 and plan.fragment_delay:
        what = f"fragment_delay={plan.fragment_delay} is not less than sync_every={plan.sync_every}"
        why = "a fragment would be sent again before it was applied"
        yield Problem("P064", what, why=why, fix=(f"fragment_delay={plan.sync_every - 1}",))


def describe_replica_groups(plan: Plan) -> str:
    """Describe the technique and its hyperparameters in a few words."""
    words = [f"{plan.replica_groups} groups", f"sync_every={plan.sync_every}"]
    if plan.warmup_sync_steps:
        words.append(f"warmup_sync_steps={plan.warmup_sync_steps}")
    if plan.outer_sync == "diloco":
        words.append(f"outer {plan.outer_lr:g}, {plan.outer_momentum:g}")
    if plan.num_fragments > 1 or plan.fragment_delay:
        words.append(f"{plan.num_fragments} fragments, delay {plan.fragment_delay}, alpha {plan.fragment_alpha:g}")
    return f"{plan.outer_sync}: {', '.join(words)}" + (f", {compression.describe_compression(plan)}" if plan.grad_compression != "none" else "")


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    k, every = plan.replica_groups, f"every {plan.sync_every} steps" if plan.sync_every > 1 else "after every step"
    how = {
        "local": f"{k} groups train separately and average their weights {every}",
        "diloco": f"{k} groups train separately, and an outer optimizer updates the global weights {every}",
    }[plan.outer_sync]
    first = f", from step {plan.warmup_sync_steps + 1} on" if plan.warmup_sync_steps else ""
    yield how + first


def apply(split: SplitModel) -> SplitModel:
    rare = OuterSynchronizer(split.setup, split.mesh, split.global_sketch, split.params, split.get_parts(), split.refresh)
    split.hooks.state_loaded.append(rare.handle_state_loaded)
    split.hooks.optimizer_created.append(lambda optimizer: rare.init_global_weights())
    return split.with_techniques(replica_groups=rare, compressor=rare.compressor)
