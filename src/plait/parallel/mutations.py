"""What a plan needs of a model whose forward pass was followed: what it writes into itself, and its units.

What a plan would lose or multiply of what a forward pass writes into the model itself (`model/mutations.py`).

Plans that need the units of a model, for a model whose units could not be measured (`model/sketch.py`).
"""

from collections.abc import Collection, Iterator

from plait.config.errors import PlaitError, Problem
from plait.config.keys import SAME_SLICES
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.fsdp.groups import groups


def refused(plan: Plan, sketch: Sketch, cut: Collection[str]) -> Problem | None:
    """P031 when the plan would lose or multiply what the forward pass writes into weights. `cut`: those that tp cuts."""
    for name in sketch.rewritten:
        if plan.is_sharded:
            why = "a rank has the whole weight only while its unit runs, and drops it with what was written"
        elif plan.offload == "optimizer":
            why = "the optimizer's copy on the host would take its place"
        elif plan.processes == "one":
            why = "threads share the weight, and each would write it"
        elif name in cut:
            why = f"tp={plan.tp} gives every rank a slice of it"
        elif name in _differing(plan, sketch) and plan.along(SAME_SLICES) > 1:
            why = f"what is written comes from the samples, and {plan.along(SAME_SLICES)} copies see different ones"
        else:
            continue
        what = f"the forward pass changes the weight {name}, which does not work with {plan}"
        copies = 1 if name in sketch.unshared else plan.world
        fix = (f'--plan "dp={copies}"', "pp, when one unit holds it and changes it")
        return Problem("P031", what, why=why, fix=fix)
    return _followed(plan, sketch, cut)


def _followed(plan: Plan, sketch: Sketch, cut: Collection[str]) -> Problem | None:
    """P031 when a tensor outside of the model follows a weight that is not whole on each rank where the code that writes it runs."""
    gathered = {name: units for units in [[], *groups(sketch)] for name in _weights(sketch, units)} if sketch.followed else {}
    for name, modules in sketch.followed.items():
        units = gathered.get(name, [])
        inside = all(any(f"{module}.".startswith(f"{unit}.") for unit in units) for module in modules)
        if plan.is_sharded and units and not inside:
            why = f"a rank has a shard of the weight, and the whole only while {units[0]} runs"
        elif plan.processes == "one":
            why = "threads share the tensor, and each would write it"
        elif name in cut:
            why = f"tp={plan.tp} gives every rank a slice of the weight"
        elif plan.pp > 1 and not _own(sketch, name, modules):
            why = f"pp={plan.pp} gives the weight to the ranks of one stage"
        else:
            continue
        what = f"the forward pass writes the weight {name} into a tensor outside of the model, which does not work with {plan}"
        return Problem("P031", what, why=why, fix=(f'--plan "dp={plan.world}"',))
    return None


def _weights(sketch: Sketch, units: list[str]) -> list[str]:
    """The parameters of some units."""
    return [name for unit in sketch.units if unit.name in units for name in unit.parameters]


def _own(sketch: Sketch, name: str, modules: Collection[str]) -> bool:
    """Whether the code of the unit that has a weight alone writes it."""
    unit = next((unit.name for unit in sketch.units if name in unit.parameters), None)
    return unit is not None and all(f"{module}.".startswith(f"{unit}.") for module in modules)


def check(plan: Plan, sketch: Sketch) -> None:
    """Raise what is `refused`."""
    if problem := refused(plan, sketch, {cut.parameter for cut in sketch.cuts}):
        raise PlaitError(problem)


def _differing(plan: Plan, sketch: Sketch) -> tuple[str, ...]:
    """What copies write differently: what is made of a rank's own samples. `global_mean` and `global_batch` are of all ranks with other
    samples, but of one thread's part under `processes=one`, and of a shard of the sequences under `cp`."""
    return sketch.sampled if plan.processes == "one" or plan.cp > 1 else sketch.unshared


def apart(plan: Plan, sketch: Sketch, ranks: int) -> Iterator[str]:
    """What cannot equal one device when so many ranks see different samples: buffers made from them."""
    for name in _differing(plan, sketch):
        if name not in sketch.rewritten:
            yield f"buffer {name} is made from the samples that a rank sees: each of {ranks} ranks has its own"


AXES = ("pp", "cp", "tp", "ep")
"""Axes that split the model by its units, or what these compute."""


def refused_unmeasured(plan: Plan, sketch: Sketch) -> Problem | None:
    """P073 if the plan splits or recomputes units, and the model has none that were measured."""
    needs = [f"{axis}={getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1]
    needs += [f"activation_checkpointing={plan.activation_checkpointing}"] if plan.activation_checkpointing != "none" else []
    if not sketch.unmeasured or not needs:
        return None
    what = f"plait cannot follow the model's forward pass, which {needs[0]} requires"
    why = f"following it raised {sketch.unmeasured}"
    fix = (f'--plan "dp={plan.devices}"', f'--plan "fsdp={plan.devices}"')
    return Problem("P073", what, why=why, where=sketch.unmeasured_at, fix=fix)
