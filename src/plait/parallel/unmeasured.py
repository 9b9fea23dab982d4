"""Plans that need the units of a model, for a model whose units could not be measured (`model/sketch.py`)."""

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch

AXES = ("pp", "cp", "tp", "ep")
"""Axes that split the model by its units, or what these compute."""


def refused(plan: Plan, sketch: Sketch) -> Problem | None:
    """P073 if the plan splits or recomputes units, and the model has none that were measured."""
    needs = [f"{axis}={getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1]
    needs += [f"recompute={plan.recompute}"] if plan.recompute != "none" else []
    if not sketch.unmeasured or not needs:
        return None
    what = f"plait cannot follow the model's forward pass, which {needs[0]} requires"
    why = f"following it raised {sketch.unmeasured}"
    fix = (f'--plan "dp={plan.devices}"', f'--plan "fsdp={plan.devices}"')
    return Problem("P073", what, why=why, where=sketch.unmeasured_at, fix=fix)
