"""Rejects plans by the measured forward pass of a model: its writes (`model/mutations.py`), and units that were not measured
(`model/sketch.py`).

A plan may lose or repeat the writes of a forward pass into the model itself. Other plans need the units of a model.
"""

from collections.abc import Collection, Iterator

from plait.config.errors import PlaitError, Problem
from plait.config.keys import SAME_SLICES
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.fsdp.groups import group_units


def find_lost_write(plan: Plan, sketch: Sketch, cut: Collection[str]) -> Problem | None:
    """Return P031 if the plan would lose or repeat writes of the forward pass into weights. `cut`: the weights that tp shards."""
    for name in sketch.rewritten:
        if plan.is_sharded:
            why = "a rank has the full weight only while its unit runs, and drops it together with the written values"
        elif plan.offload == "optimizer":
            why = "the optimizer's copy on the host would overwrite it"
        elif plan.processes == "one":
            why = "threads share the weight, and each would write it"
        elif name in cut:
            why = f"tp={plan.tp} gives every rank a slice of it"
        elif name in _list_differing(plan, sketch) and plan.along(SAME_SLICES) > 1:
            why = f"the written values depend on the samples, and {plan.along(SAME_SLICES)} replicas have different samples"
        else:
            continue
        what = f"the forward pass changes the weight {name}, which does not work with {plan}"
        copies = 1 if name in sketch.rank_dependent else plan.world
        fix = (f'--plan "dp={copies}"', "pp, if one unit contains the weight and changes it")
        return Problem("P031", what, why=why, fix=fix)
    return _find_followed_write(plan, sketch, cut)


def _find_followed_write(plan: Plan, sketch: Sketch, cut: Collection[str]) -> Problem | None:
    """Return P031 if a tensor outside the model receives a weight that is not full on each rank where the writing code runs."""
    gathered = {name: units for units in [[], *group_units(sketch)] for name in _list_weights(sketch, units)} if sketch.outside_writes else {}
    for name, modules in sketch.outside_writes.items():
        units = gathered.get(name, [])
        inside = all(any(f"{module}.".startswith(f"{unit}.") for unit in units) for module in modules)
        if plan.is_sharded and units and not inside:
            why = f"a rank has a shard of the weight, and the full weight only while {units[0]} runs"
        elif plan.processes == "one":
            why = "threads share the tensor, and each would write it"
        elif name in cut:
            why = f"tp={plan.tp} gives every rank a slice of the weight"
        elif plan.pp > 1 and not _is_own_write(sketch, name, modules):
            why = f"pp={plan.pp} gives the weight to the ranks of one stage"
        else:
            continue
        what = f"the forward pass writes the weight {name} into a tensor outside of the model, which does not work with {plan}"
        return Problem("P031", what, why=why, fix=(f'--plan "dp={plan.world}"',))
    return None


def _list_weights(sketch: Sketch, units: list[str]) -> list[str]:
    """List the parameters of some units."""
    return [name for unit in sketch.units if unit.name in units for name in unit.parameters]


def _is_own_write(sketch: Sketch, name: str, modules: Collection[str]) -> bool:
    """Whether only the code of the unit with this weight writes it."""
    unit = next((unit.name for unit in sketch.units if name in unit.parameters), None)
    return unit is not None and all(f"{module}.".startswith(f"{unit}.") for module in modules)


def check_writes(plan: Plan, sketch: Sketch) -> None:
    """Raise P031 if the plan would lose writes of the forward pass."""
    if problem := find_lost_write(plan, sketch, {cut.parameter for cut in sketch.tp_shards}):
        raise PlaitError(problem)


def _list_differing(plan: Plan, sketch: Sketch) -> tuple[str, ...]:
    """List the writes that differ between replicas: those that depend on a rank's own samples.

    `global_mean` and `global_batch` cover all ranks with other samples. Under `processes=one` they cover only one thread's part,
    and under `cp` one sequence shard.
    """
    return sketch.from_samples if plan.processes == "one" or plan.cp > 1 else sketch.rank_dependent


def list_inexact_buffers(plan: Plan, sketch: Sketch, ranks: int) -> Iterator[str]:
    """List the buffers that cannot equal those of one device, because `ranks` ranks have different samples."""
    for name in _list_differing(plan, sketch):
        if name not in sketch.rewritten:
            yield f"buffer {name} is computed from the samples of a rank: each of {ranks} ranks has its own"


UNIT_AXES = ("pp", "cp", "tp", "ep")
"""Axes that split the model by its units, or the computation of units."""


def find_unmeasured(plan: Plan, sketch: Sketch) -> Problem | None:
    """Return P073 if the plan splits or recomputes units, and the model's units could not be measured."""
    needs = [f"{axis}={getattr(plan, axis)}" for axis in UNIT_AXES if getattr(plan, axis) > 1]
    needs += [f"activation_checkpointing={plan.activation_checkpointing}"] if plan.activation_checkpointing != "none" else []
    if not sketch.unmeasured or not needs:
        return None
    what = f"plait cannot follow the model's forward pass, which {needs[0]} requires"
    why = f"following it raised {sketch.unmeasured}"
    fix = (f'--plan "dp={plan.devices}"', f'--plan "fsdp={plan.devices}"')
    return Problem("P073", what, why=why, where=sketch.unmeasured_at, fix=fix)
