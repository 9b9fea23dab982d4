"""The units whose parameters are gathered together, or with the root: the granularity of sharding (`parallel/fsdp/strategy.py`).

[Note: Experts]
If `fsdp` is larger than `ep`, the ranks with the same experts shard them. With `fsdp=4 ep=2`, ranks 0 and 2 have the same half of
the experts. Each keeps a shard of every tensor of them, and a shard, over all four ranks, of the rest of the model. In FSDP2 both
are in the same unit, as separate groups: they are gathered, freed and reduced at the same time, over other ranks. If `ep` is a
multiple of `fsdp` (`fsdp=2 ep=4`), no two ranks of an `fsdp` group have the same experts, and they are not sharded.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.model.experts import MoELayer
from plait.model.meter import OUTPUT
from plait.model.sketch import Sketch
from plait.parallel.fsdp.runtime import ShardGroup
from plait.parallel.mesh import to_expert_axes
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import is_shardable
from plait.tensors.torch_private import fsdp_placement

TINY_BYTES = 8 << 20
"""A model with at most this number of bytes in its units is gathered as one, because each collective has a fixed cost (docs/log.md)."""
GROUP_BYTES = 1 << 20
"""Consecutive units of a larger model share a group of up to this number of bytes."""
MIN_INVERSE_FRACTION = 50
"""A unit with less than 1/50 of the model's bytes is gathered with the root, unless it is a repeated block."""


def group_units(sketch: Sketch) -> list[list[str]]:
    """Group the units that are gathered together, in the order of their calls. All others are gathered with the root.

    Small consecutive units share a group, because each collective has a fixed cost. A model with branches may skip a unit on one
    rank only, and a gather would then hang. So everything belongs to the root in such a model. The exception are units with
    experts (`ep`), which no rank can skip alone. Everything belongs to the root also if the forward pass runs a backward of its
    own, after which a unit's parameters would be freed too early.
    """
    if sketch.differentiates:
        return []
    branches = sketch.needs_real_tensors or sketch.host_random
    weights = {u.name: u.weights + u.experts for u in sketch.units}
    total = sum(weights.values()) or 1
    calls = [c.unit for c in sketch.calls]
    fit = {u.name for u in sketch.units if u.closed and (u.repeated or weights[u.name] * MIN_INVERSE_FRACTION >= total)}
    fit -= {c.unit for c in sketch.calls if c.writes}  # its input would be a view, which cannot be changed in place
    fit -= {u.name for u in sketch.units if branches and not u.experts}
    fit -= {u for u in fit for m in sketch.moe_layers if u.startswith(f"{m.name}.".lstrip("."))}  # its code may run twice
    trained, owned = {name: dtype for name, _, dtype in sketch.parameters}, {u.name: u.parameters for u in sketch.units}
    formats = lambda unit: {trained[p] for p in owned[unit] if p in trained}  # noqa: E731
    joined = list_differentiated(sketch)  # in backward, a group is gathered before its last unit
    found: list[list[str]] = []
    after: set[int] = set()
    for i, call in enumerate(sketch.calls):
        if after.intersection(call.needs):
            after.add(i)  # it depends on the last unit of the open group
        if call.unit not in fit or calls.count(call.unit) > 1:
            continue
        small = found and sum(weights[u] for u in found[-1]) < GROUP_BYTES
        alike = small and formats(found[-1][0]) == formats(call.unit)
        if alike and i in after and joined.issuperset([*found[-1], call.unit]):
            found[-1].append(call.unit)
        else:
            found.append([call.unit])
        after = {i}
    tiny = sum(weights[u] for names in found for u in names) < TINY_BYTES and len(set(trained.values())) == 1
    return [] if tiny else found


def list_differentiated(sketch: Sketch) -> set[str]:
    """List the units that backward reaches: they are gathered again there."""
    reached = set(sketch.needs)
    for i in reversed(range(len(sketch.calls))):
        reached |= set(sketch.calls[i].needs) if i in reached else set()
    return {call.unit for i, call in enumerate(sketch.calls) if i in reached and call.backward}


def check_formats(sketch: Sketch, mixtures: Iterable[MoELayer] = ()) -> None:
    """Raise P029 if one group would reduce gradients of several formats in one collective. `mixtures`: those with sharded experts."""
    formats = {name: dtype for name, _, dtype in sketch.parameters}
    together = [(group, {formats[n] for n in names if n in formats}) for group, names in list_members(sketch).items()]
    for group, inside in group_mixtures(sketch, mixtures).items():
        together.append((group, {d for m in inside for rows in m.parameters for n, _, d in rows if n in m.trained}))
    for group, dtypes in together:
        found = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if len(found) > 1:
            what = f"trained parameters of several formats are gathered together: {', '.join(found)}"
            fix = ("use one format for all trained parameters", "freeze the parameters of the other format", '--plan "dp=…"')
            raise PlaitError(Problem("P029", what, why=f"in {group or 'the root'}, of fsdp's groups", fix=fix))


def list_members(sketch: Sketch) -> dict[str, list[str]]:
    """List the names of the parameters of each group, by its first unit; the root's key is the empty name."""
    units = {u.name: u for u in sketch.units}
    found = {names[0]: [p for name in names for p in units[name].parameters] for names in group_units(sketch)}
    taken = {p for names in found.values() for p in names}
    everything = [name for name, _, _ in (*sketch.parameters, *sketch.frozen)]
    return found | {"": [name for name in everything if name not in taken]}


def group_mixtures(sketch: Sketch, mixtures: Iterable[MoELayer]) -> dict[str, list[MoELayer]]:
    """Return the mixtures of each group, with the keys of `list_members`: experts are gathered with the unit that contains them."""
    first = {name: names[0] for names in group_units(sketch) for name in names}
    found: dict[str, list[MoELayer]] = {}
    for mixture in mixtures:
        around = (group for unit, group in first.items() if f"{mixture.name}.".startswith(f"{unit}."))
        found.setdefault(next(around, ""), []).append(mixture)
    return found


def has_one_backward_start(sketch: Sketch) -> bool:
    """Whether backward starts in one place only.

    The model may also return the output of an earlier unit (encoder states, router choices). FSDP2 takes each gradient of such an
    output for the start of backward, and would gather the last group again. So the model's return values matter here, not the
    inputs of its loss.
    """
    return len(sketch.needs) < 2 and not any(OUTPUT in call.aside for call in sketch.calls)


def is_expert_sharded(plan: Plan, shape: tuple[int, ...]) -> bool:
    """Whether ranks with the same expert shard its tensor of this shape. Scalars are not sharded."""
    return plan.ep > 1 and plan.expert_shards > 1 and is_shardable(shape)


def is_placement_known() -> bool:
    """Whether the installed torch supports parameters of a sharded unit on a separate mesh."""
    return hasattr(fsdp_placement(), "ShardPlacementResult")


def find_expert_shards(split: SplitModel) -> dict[str, ShardGroup]:
    """Find the ranks and the dim of each sharded parameter of this rank's experts."""
    if (shards := split.mesh.group_or_none(*to_expert_axes(split.plan.shard_axes))) is None:
        return {}
    replicas = split.mesh.group_or_none(*to_expert_axes(split.plan.replica_axes))
    found = {name: split.shard_plan.specs[name].find_scatter(split.mesh.coordinates) for name in split.list_expert_params()}
    return {name: ShardGroup(shards, replicas, shard[1]) for name, shard in found.items() if shard is not None}


def make_expert_placement(split: SplitModel, where: dict[str, ShardGroup], device: torch.device) -> Callable[[nn.Parameter], Any] | None:
    """Make the function that gives `fully_shard` the mesh and the dim of these parameters; None if there are none."""
    if not where:
        return None
    from torch.distributed.tensor import Shard

    torch_has = fsdp_placement()
    mesh = torch_has.FSDPMeshInfo(DeviceMesh.from_group(split.mesh.group(*to_expert_axes(split.plan.shard_axes)), device.type), shard_mesh_dim=0)
    dims = {id(split.params[n]): one.dim for n, one in where.items()}
    return lambda p: torch_has.ShardPlacementResult(Shard(dims[id(p)]), mesh) if id(p) in dims else None
