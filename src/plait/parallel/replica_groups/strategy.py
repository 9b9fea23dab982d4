"""Replica groups (local SGD, DiLoCo): groups of ranks that synchronize rarely, also by post-local SGD and streaming DiLoCo.

What it does
    k groups of ranks hold a model each and train it on their own part of the global batch. A group does not wait for the
    others: its gradients, its clipping and its optimizer state are its own. Every H steps (`every`) the groups
    synchronise. `outer_sync=local`: the weights become the mean of the groups' weights (local SGD). `outer_sync=diloco`: there are
    global weights G beside each group's θ; the mean of G − θ is the gradient of an outer optimizer, SGD with Nesterov momentum,
    which updates G, and all groups go on from G. With `num_fragments` the model is synchronised part by part, each every H
    steps, so that messages are small and frequent; with `fragment_delay` a message has that many steps to arrive, and what it
    brings is mixed into the weights that have moved meanwhile (streaming DiLoCo). The first `warmup_sync_steps` steps sum gradients
    over all groups, exactly as dp does (post-local SGD). Inside a group any other axis works: dp, fsdp, tp, cp, ep, pp.

Picture
    group 0   step step step step ─┐        ┌─ step step step step ─┐
                                   ├─ mean ─┤                       ├─ …         sync_every=4
    group 1   step step step step ─┘        └─ step step step step ─┘

Costs
    Traffic between groups: one all-reduce of the parameters every H steps, 1/H of what dp sends. Memory: nothing for local;
    for diloco one copy of the weights and one momentum, of the parts a rank holds. Exactness: it is another training than
    on one device, see below; more so the larger H.

Choose when
    Links between machines or sites are so slow that summing gradients takes as long as computing them, or longer.

Avoid when
    Links are fast: dp is exact and as quick. Or the model is trained for few steps: with about ten synchronisations the
    published rates (0.7, 0.9) do no better than plain averaging; they want a hundred and more.

How it stays exact
    It is exact against itself: `plait verify` trains k models in one process, by the rules below, and demands the same numbers.
    Then it says how far that is from dp. It is dp itself for outer_sync=local sync_every=1 when the optimizer is linear in the
    gradient (SGD, with momentum too), nothing is clipped and samples weigh the same; and in the steps of `warmup_sync_steps`.
    Batch: `Job.batch` is the global batch, as everywhere; each group has a contiguous k-th part of it. (In the papers each
    group has a whole one, so their numbers belong to k times the data.)
    Loss: a group's loss is its weighted mean, times k · n / N for its n of the batch's N samples: the mean over groups is the
    batch's mean. A group without a sample in a short batch takes its step with gradients of zero.
    Clipping: by the norm of the group's gradients. Clock: samples of the global batch. Weight decay: in the inner step.
    State: the optimizer's is never averaged. Statistics of batch normalisation are the group's own between synchronisations,
    and the mean after. Dropout is keyed by the sample, as everywhere.
    Evaluation, and the weights that others read from a checkpoint, are the global weights: G, or for local the mean. A
    checkpoint also holds each group's weights and optimizer state, G's momentum, and what is on its way.

Paper
    Stich 2019, Local SGD Converges Fast and Communicates Little (ICLR); Lin et al. 2020 (ICLR) for post-local SGD; Douillard
    et al. 2023, DiLoCo; Douillard et al. 2025, Streaming DiLoCo with overlapping communication.
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.compression import strategy as compression
from plait.parallel.rank_model import SplitModel
from plait.parallel.replica_groups.synchronise import RareSynchroniser

AXIS = "replica_groups"
EXACT = False


def wanted(plan: Plan) -> bool:
    return plan.rarely


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    k, ranks = plan.replica_groups, plan.replica_groups * plan.shares
    if ranks > batch:
        what = f"global batch {batch} does not split over {ranks} ranks with other samples"
        why = f"replica_groups={k} × {plan.shares} = {ranks}: {ranks - batch} would never have a sample"
        yield Problem("P012", what, why=why, fix=(f"--batch {ranks}",))
    if plan.num_fragments > plan.sync_every:
        what = f"{plan.num_fragments} fragments cannot be synchronised in turn every {plan.sync_every} steps"
        why = "one fragment at most is sent after a step"
        yield Problem("P064", what, why=why, fix=(f"sync_every={plan.num_fragments}", f"num_fragments={plan.sync_every}"))
    if plan.fragment_delay >= plan.sync_every > 0 and plan.fragment_delay:
        what = f"fragment_delay={plan.fragment_delay} is not less than sync_every={plan.sync_every}"
        why = "a fragment would be sent again before it was applied"
        yield Problem("P064", what, why=why, fix=(f"fragment_delay={plan.sync_every - 1}",))


def named(plan: Plan) -> str:
    """The technique and its numbers, in a few words."""
    words = [f"{plan.replica_groups} groups", f"sync_every={plan.sync_every}"]
    if plan.warmup_sync_steps:
        words.append(f"warmup_sync_steps={plan.warmup_sync_steps}")
    if plan.outer_sync == "diloco":
        words.append(f"outer {plan.outer_lr:g}, {plan.outer_momentum:g}")
    if plan.num_fragments > 1 or plan.fragment_delay:
        words.append(f"{plan.num_fragments} fragments, delay {plan.fragment_delay}, alpha {plan.fragment_alpha:g}")
    return f"{plan.outer_sync}: {', '.join(words)}" + (f", {compression.named(plan)}" if plan.grad_compression != "none" else "")


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    k, every = plan.replica_groups, f"every {plan.sync_every} steps" if plan.sync_every > 1 else "after every step"
    how = {
        "local": f"{k} groups train by themselves and take the mean of their weights {every}",
        "diloco": f"{k} groups train by themselves, and an outer optimizer steps on how far they moved {every}",
    }[plan.outer_sync]
    first = f", from step {plan.warmup_sync_steps + 1} on" if plan.warmup_sync_steps else ""
    yield how + first


def apply(split: SplitModel) -> SplitModel:
    rare = RareSynchroniser(split.setup, split.mesh, split.whole_sketch, split.params, split.parts(), split.refresh)
    split.hooks.state_loaded.append(rare.reloaded)
    split.hooks.optimizer_created.append(lambda optimizer: rare.begin())
    return split.using(replica_groups=rare, compressor=rare.compressor)
