"""Which units' parameters are gathered together, and which with the root: the grain of sharding (`parallel/fsdp/strategy.py`).

Experts kept as parts: under `ep` beside a larger `fsdp`, the ranks that hold the same experts shard them.

With `fsdp=4 ep=2` ranks 0 and 2 hold the same half of the experts. Each keeps a part of every one of their tensors,
as it keeps a part, between all four, of the rest of the model. FSDP2 has both in the same unit, each as a group of its
own: they are gathered, dropped and summed at the same moments, between other ranks. Where `ep` uses up `fsdp`
(`fsdp=2 ep=4`) no two ranks of an `fsdp` group hold the same experts, and there is nothing to shard.
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
from plait.parallel.mesh import of_experts
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import is_divisible
from plait.tensors.torch_private import fsdp_placement

TINY = 8 << 20
"""Bytes of units up to which a model is gathered as one: a collective has a price of its own (docs/log.md)."""
GROUP_BYTES = 1 << 20
"""Bytes up to which units of a larger model that follow each other share a group."""
LEAST = 50
"""A unit with less than 1/50 of the model's bytes is gathered with the root, unless it is a repeated block."""


def groups(sketch: Sketch) -> list[list[str]]:
    """Units that are gathered together, in the order of their calls. What is in no group is gathered with the root.

    Small units that follow from one another share a group: a collective has a price of its own. A model that takes
    branches may skip a unit on one rank and not on another, where a gather would wait for ever: there everything
    belongs to the root, but for units whose tokens travel to experts (`ep`), which no rank can skip alone. So it does
    where the forward pass runs a backward of its own, after which a unit's parameters would be dropped too early.
    """
    if sketch.differentiates:
        return []
    branches = sketch.by_values or sketch.host_random
    weights = {u.name: u.weights + u.experts for u in sketch.units}
    total = sum(weights.values()) or 1
    calls = [c.unit for c in sketch.calls]
    fit = {u.name for u in sketch.units if u.closed and (u.repeated or weights[u.name] * LEAST >= total)}
    fit -= {c.unit for c in sketch.calls if c.writes}  # its input would be a view, which cannot be changed
    fit -= {u.name for u in sketch.units if branches and not u.experts}
    fit -= {u for u in fit for m in sketch.mixtures if u.startswith(f"{m.name}.".lstrip("."))}  # its code may run twice
    trained, owned = {name: dtype for name, _, dtype in sketch.parameters}, {u.name: u.parameters for u in sketch.units}
    formats = lambda unit: {trained[p] for p in owned[unit] if p in trained}  # noqa: E731
    joined = differentiated(sketch)  # a group is gathered in backward when that comes to its last unit
    found: list[list[str]] = []
    after: set[int] = set()
    for i, call in enumerate(sketch.calls):
        if after.intersection(call.needs):
            after.add(i)  # it follows from the last unit of the open group
        if call.unit not in fit or calls.count(call.unit) > 1:
            continue
        small = found and sum(weights[u] for u in found[-1]) < GROUP_BYTES
        alike = small and formats(found[-1][0]) == formats(call.unit)
        if alike and i in after and joined.issuperset([*found[-1], call.unit]):
            found[-1].append(call.unit)
        else:
            found.append([call.unit])
        after = {i}
    tiny = sum(weights[u] for names in found for u in names) < TINY and len(set(trained.values())) == 1
    return [] if tiny else found


def differentiated(sketch: Sketch) -> set[str]:
    """Units that backward comes to: they are gathered again there."""
    reached = set(sketch.needs)
    for i in reversed(range(len(sketch.calls))):
        reached |= set(sketch.calls[i].needs) if i in reached else set()
    return {call.unit for i, call in enumerate(sketch.calls) if i in reached and call.backward}


def check_formats(sketch: Sketch, mixtures: Iterable[MoELayer] = ()) -> None:
    """P029 when one group would sum gradients of several number formats in one collective. `mixtures`: those kept as parts."""
    formats = {name: dtype for name, _, dtype in sketch.parameters}
    together = [(group, {formats[n] for n in names if n in formats}) for group, names in members(sketch).items()]
    for group, inside in homes(sketch, mixtures).items():
        together.append((group, {d for m in inside for rows in m.parameters for n, _, d in rows if n in m.trained}))
    for group, dtypes in together:
        found = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if len(found) > 1:
            what = f"trained parameters of several number formats are gathered together: {', '.join(found)}"
            fix = ("one format for all trained parameters", "freeze those of the other", '--plan "dp=…"')
            raise PlaitError(Problem("P029", what, why=f"in {group or 'the root'}, of fsdp's groups", fix=fix))


def members(sketch: Sketch) -> dict[str, list[str]]:
    """Names of the parameters of each group, by its first unit; the root's is the empty name."""
    units = {u.name: u for u in sketch.units}
    found = {names[0]: [p for name in names for p in units[name].parameters] for names in groups(sketch)}
    taken = {p for names in found.values() for p in names}
    everything = [name for name, _, _ in (*sketch.parameters, *sketch.frozen)]
    return found | {"": [name for name in everything if name not in taken]}


def homes(sketch: Sketch, mixtures: Iterable[MoELayer]) -> dict[str, list[MoELayer]]:
    """With which group the experts of each mixture are gathered, as `members` has it: that of the unit around them."""
    first = {name: names[0] for names in groups(sketch) for name in names}
    found: dict[str, list[MoELayer]] = {}
    for mixture in mixtures:
        around = (group for unit, group in first.items() if f"{mixture.name}.".startswith(f"{unit}."))
        found.setdefault(next(around, ""), []).append(mixture)
    return found


def begins_once(sketch: Sketch) -> bool:
    """Whether the backward pass begins in one place. Where the model also returns what an earlier unit made (an encoder's
    states, a router's choices), FSDP2 takes each gradient that comes to it, also on its way through later units, for the
    beginning, and would gather the last group again. So it matters what the model returns, not what its loss reads."""
    return len(sketch.needs) < 2 and not any(OUTPUT in call.aside for call in sketch.calls)


def is_expert_sharded(plan: Plan, shape: tuple[int, ...]) -> bool:
    """Whether ranks that hold an expert's tensor of this shape keep parts of it. A scalar stays whole."""
    return plan.ep > 1 and plan.expert_shards > 1 and is_divisible(shape)


def is_placement_known() -> bool:
    """Whether the installed torch lets parameters of a sharded unit lie on a mesh of their own."""
    return hasattr(fsdp_placement(), "ShardPlacementResult")


def expert_shard_groups(split: SplitModel) -> dict[str, ShardGroup]:
    """Which ranks hold the parts of each parameter of this rank's experts that is cut, and along which dim."""
    if (shards := split.mesh.group_or_none(*of_experts(split.plan.shard_axes))) is None:
        return {}
    replicas = split.mesh.group_or_none(*of_experts(split.plan.replica_axes))
    found = {name: split.table.specs[name].shard(split.mesh.at) for name in split.experts()}
    return {name: ShardGroup(shards, replicas, shard[1]) for name, shard in found.items() if shard is not None}


def expert_placement(split: SplitModel, where: dict[str, ShardGroup], device: torch.device) -> Callable[[nn.Parameter], Any] | None:
    """What tells `fully_shard` the ranks and the dim of each of these parameters. None: there are none."""
    if not where:
        return None
    from torch.distributed.tensor import Shard

    torch_has = fsdp_placement()
    mesh = torch_has.FSDPMeshInfo(DeviceMesh.from_group(split.mesh.group(*of_experts(split.plan.shard_axes)), device.type), shard_mesh_dim=0)
    dims = {id(split.params[n]): one.dim for n, one in where.items()}
    return lambda p: torch_has.ShardPlacementResult(Shard(dims[id(p)]), mesh) if id(p) in dims else None
