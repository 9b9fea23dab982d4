"""Expert parallelism of mixtures of experts (ep): each of N ranks with different samples has 1/N of the experts of every mixture.

What it does
    In a mixture of experts, a router sends each token to a few of many experts. Experts are most of the model's
    weights, and each expert computes only a few of the tokens. Under `ep`, every rank keeps a part of each layer's
    experts, and trains them on the tokens of all ranks of its group. Tokens are sent to the ranks of their experts, and
    the results are sent back (all-to-all, with as many rows as the router decided). The rest of the model is as under
    `dp` and `fsdp`. `ep` needs no additional ranks: a group is N consecutive ranks among those with different samples.
    If `fsdp` is larger than N, several ranks of one `fsdp` group have the same experts, and shard them among themselves
    by `zero_stage`. With `fsdp=4 ep=2`, each of four ranks has half of every tensor of half of the experts. With
    `shard_over_cp=true`, the ranks of `cp` shard them too.

    plait finds mixtures by their structure, and checks each in float64 before it is used (`parallel/expert/mixture_finder.py`).
    There are two kinds. *Stacked* experts are parameters [experts, …] of one module, which gets the expert of each
    token as an argument. Its own forward runs with a rank's experts, on the rows that arrived. *Listed* experts are
    modules that a layer calls in its own code, whatever this code is. The code runs twice. The first run records the
    input of each expert. When the all-to-all has returned the experts' outputs, the second run uses them.

    With `token_dispatcher=allgather`, every rank receives all tokens of its group instead. It runs its stacked experts
    on all choices; those of other experts count zero. A reduce-scatter sums the results into each rank's tokens.

Picture
    rank 0   tokens ─ router ─┬► experts 0 1 ─┬─ Σ      rows go where their expert is, results come back
                              ╳               ╳
    rank 1   tokens ─ router ─┴► experts 2 3 ─┴─ Σ

Costs
    Memory: parameters, gradients and optimizer state of the experts / N, and / the number of `fsdp` ranks with the same
    experts. Those ranks gather a layer's experts with the unit that contains it (`parallel/fsdp/strategy.py`). Traffic:
    each layer exchanges tokens × choices rows in both directions, in forward and in backward, and nothing hides it. The
    number of rows that leave a rank depends on the data. Time: a rank with popular experts computes more rows, so an
    unbalanced router makes all ranks wait. Listed experts cost the layer's own code (without its experts) twice. On a
    GPU, the host needs the number of rows that leave, so it waits for the device once per layer. `allgather` has fixed
    sizes and does not wait. It computes N times the rows, and stores N times their activations. It sends each token N −
    1 times in both directions, however many experts the token chose.

Choose when
    The experts are most of the model and do not fit next to the activations, or their gradients are most of the
    traffic.

Avoid when
    The experts fit, links are slow, or the batch has few tokens. Replicas (`dp`) exchange no tokens, and neither do
    shards (`fsdp`).

How it stays exact
    The gradient of an expert is the sum over the tokens of all ranks. Each token's gradient arrives with its weight
    over the global batch already in it, and nothing divides it. Each expert is on dp × fsdp / N ranks, which sum its
    gradients once: a reduce-scatter between the ranks that shard it, an all-reduce between replicas of the same shard.
    An expert that no token chose has a gradient if it has one on one device. The norm counts each expert once. A sample
    that only fills a local batch sends no token. If experts drop tokens when they are full, the result depends on which
    samples are in a batch. Such layers are inexact, and plait names them. A balance loss multiplies two means over the
    batch; `plait.global_mean` computes both over the global batch.

Paper
    Lepikhin et al. 2020, GShard; Fedus et al. 2021, Switch Transformer (JMLR), for the balance loss.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.experts import MoELayer, shard_stacked
from plait.model.sketch import Sketch
from plait.parallel.expert.layers import ExpertPlacement, GatheredExperts, ListedExperts, StackedExperts, make_dispatch
from plait.parallel.fsdp import groups
from plait.parallel.mesh import SAME_EXPERTS, to_expert_axes
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import Reduce, ShardPlan, Split
from plait.randomness.keyed import get_host_state, restore_host_state
from plait.tensors.fake import replace_with_fakes
from plait.tensors.rows import Rows

AXIS = "ep"
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.ep > 1


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.shares % plan.ep:
        what = f"ep={plan.ep} does not divide the {plan.shares} ranks with different samples"
        why = f"dp={plan.dp} × fsdp={plan.fsdp} = {plan.shares}: a group of {plan.ep} consecutive ranks would be incomplete"
        yield Problem("P050", what, why=why, fix=(f'--plan "ep={plan.shares}"', f'--plan "dp={plan.ep} ep={plan.ep}"'))
    elif plan.expert_shards > 1 and not groups.is_placement_known():
        what = f"{plan.word('shard_over_cp' if plan.shard_over_cp else 'fsdp')} ep={plan.ep} needs a torch newer than 2.11"
        why = f"{plan.expert_shards} ranks would shard the same experts on a separate mesh, and torch 2.11 supports one mesh"
        fix = ("pip install 'torch>=2.13'", f'--plan "dp={plan.dp * plan.fsdp} ep={plan.ep}"')
        yield Problem("H010", what, why=why, fix=fix)


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for mixture in sketch.moe_layers:
        if mixture.coupled:
            yield f"experts of {mixture.name} drop tokens when they are full: which tokens depends on the samples in the batch"


def shard_specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Place some experts on each of `ep` ranks. If `fsdp` is larger than `ep`, ranks with the same experts shard them."""
    plan, found, homes = table.plan, dict(table.specs), dict(table.placements)
    shards = to_expert_axes(plan.shard_axes)
    scatter = Reduce(shards, "scatter", "each keeps a shard of the same experts")
    replicas = Reduce(to_expert_axes(plan.replica_axes), "sum", "replicas of the same shards of experts")
    all_of_them = Reduce(SAME_EXPERTS, "sum", "they have the same experts, and other samples")
    for mixture in sketch.moe_layers:
        rank_of = {number: rank for rank in range(plan.ep) for number in mixture.get_rank_experts(plan.ep, rank)}
        stacked = Split(("ep",), (plan.ep,), 0, Rows.make_even(mixture.experts, plan.ep).ranks)
        for number, name in ((i, name) for i, rows in enumerate(mixture.parameters) for name, _, _ in rows):
            spec = replace(found[name], expert=True)
            home = ("ep", (rank_of[number],))
            spec = spec.with_split(stacked) if mixture.is_stacked else replace(spec, placement=(*spec.placement, home))
            if sharded := groups.is_expert_sharded(plan, spec.shape):
                spec = spec.with_split(table.make_shard_split(shards, None))
            found[name] = spec.with_reductions(scatter, replicas, first=True) if sharded else spec.with_reductions(all_of_them)
        homes |= {name: ("ep", (rank_of[number],)) for number, name in enumerate(mixture.modules)}
    return replace(table, specs=found, placements=homes)


def apply(split: SplitModel) -> SplitModel:
    plan, model, params = split.plan, split.module, dict(split.params)
    sharing = split.mesh.group("ep")
    here = [m for m in split.sketch.moe_layers if m.names & split.params.keys()]
    for mixture in here:
        mine = mixture.get_rank_experts(plan.ep, split.mesh.coordinates["ep"])
        (_wire_stacked if mixture.is_stacked else _wire_listed)(split, mixture, ExpertPlacement(sharing, mixture.experts))
        held = {name for name, _, _ in mixture.list_rank_parameters(mine)}
        for name in mixture.names:
            params.pop(name)
        params |= {name: p for name, p in model.named_parameters() if name in held}
    return replace(split, params=params, sketch=_remove_experts(split.sketch, plan))


def _wire_stacked(split: SplitModel, mixture: MoELayer, way: ExpertPlacement) -> None:
    module = shard_stacked(split.module.get_submodule(mixture.name), mixture, way.mine)
    if split.plan.token_dispatcher == "allgather":
        _set_forward(split, module, GatheredExperts(module, way, split.batch_peers))
    else:
        _set_forward(split, module, StackedExperts(module, mixture.experts, make_dispatch(way), split.batch_peers))


def _wire_listed(split: SplitModel, mixture: MoELayer, way: ExpertPlacement) -> None:
    modules = [split.module.get_submodule(name) for name in mixture.modules]
    gone = [number for number in range(mixture.experts) if number not in way.mine]
    replace_with_fakes(split.module, {name for number in gone for name, _, _ in mixture.parameters[number]}, split.device)
    layer = split.module.get_submodule(mixture.name)
    listed = ListedExperts(layer, modules, way.mine, make_dispatch(way), split.batch_peers)
    listed.width = mixture.width[0]
    listed.mark_random_state = partial(_mark_random_state, split, _has_draws(mixture, split.sketch))
    _set_forward(split, layer, listed)


def _has_draws(mixture: MoELayer, sketch: Sketch) -> bool:
    """Whether the layer, or a module inside it, draws random numbers."""
    owners = (place.partition("#")[0] for place in sketch.places)
    return any(f"{owner}.".startswith(f"{mixture.name}.".lstrip(".")) for owner in owners)


def _set_forward(split: SplitModel, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a layer's forward. Under `compile` it runs between graphs, because the number of sent rows depends on the data."""
    module.forward = torch.compiler.disable(forward) if split.plan.compile else forward


def _mark_random_state(split: SplitModel, draws: bool) -> Any:
    """Return a function that restores the random state of a layer's code."""
    back = split.randomness.mark_places() if draws and split.module.training else lambda: None
    host = get_host_state() if split.sketch.host_random or split.sketch.unkeyed else None

    def restore() -> None:
        back()
        if host is not None:
            restore_host_state(host)

    return restore


def select_mixtures(mixtures: list[MoELayer], whole: list[str], plan: Plan) -> tuple[MoELayer, ...]:
    """Select the mixtures of a model for this plan. Raises P051 if there are none, or too few experts."""
    few = [m for m in mixtures if m.experts < plan.ep]
    if not mixtures:
        why = "; ".join(whole) or "no layer routes its tokens to some of several equal modules"
        raise PlaitError(Problem("P051", "the model has no experts to distribute", why=why, fix=("ep=1",)))
    if few:
        what = f"ep={plan.ep} is more than the {few[0].experts} experts of {few[0].name or 'the model'}"
        raise PlaitError(Problem("P051", what, why="each rank needs at least one expert", fix=(f"ep={few[0].experts}",)))
    lists = [m.name for m in mixtures if not m.is_stacked]
    if plan.token_dispatcher == "allgather" and lists:
        what = f"token_dispatcher=allgather does not work with the experts of {lists[0]}"
        why = "they are a list of modules, which the layer's own code calls one by one; stacked experts take all rows at once"
        raise PlaitError(Problem("P051", what, why=why, fix=("token_dispatcher=alltoall",)))
    return tuple(mixtures)


def _remove_experts(sketch: Sketch, plan: Plan) -> Sketch:
    """Remove the experts from the sketch. Units keep the size of their sharded experts."""
    names = {name for mixture in sketch.moe_layers for name in mixture.names}
    bytes_ = {n: prod(s) * d.itemsize for n, s, d in (*sketch.parameters, *sketch.frozen) if n in names}
    units = tuple(
        replace(
            unit,
            parameters=tuple(n for n in unit.parameters if n not in names),
            weights=unit.weights - sum(bytes_.get(n, 0) for n in unit.parameters),
            experts=sum(m.count_gathered_bytes(plan) for m in sketch.moe_layers if f"{m.name}.".startswith(f"{unit.name}.")),
        )
        for unit in sketch.units
    )
    return replace(
        sketch,
        parameters=tuple(row for row in sketch.parameters if row[0] not in names),
        frozen=tuple(row for row in sketch.frozen if row[0] not in names),
        rest=tuple(name for name in sketch.rest if name not in names),
        units=units,
    )
