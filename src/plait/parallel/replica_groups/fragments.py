"""Which part of the model is synchronised when: one fragment, all of it, or several in turn (streaming DiLoCo).

Blocks are dealt out one by one, so that each fragment has some from every depth of the model; what is not in a block
(embeddings, the head, norms between blocks) is a fragment of its own, the last. Fragments are due at equal distances:

    every=6 fragments=3      step  1  2  3  4  5  6  7  8  9 10 11 12
                             fragment 0     1     2     0     1     2
"""

from collections.abc import Iterable

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch


def fragments_of(plan: Plan, sketch: Sketch) -> list[set[str]]:
    """The parameters of each fragment, by name. P064 when the model has too few units for so many fragments."""
    names = {name for name, _, _ in sketch.parameters}
    if plan.fragments == 1:
        return [names]
    dealt = plan.fragments - 1
    units = [unit for unit in sketch.units if unit.repeated]
    if len(units) < dealt:
        units = [unit for unit in sketch.units if unit.parameters]
    if len(units) < dealt:
        what = f"the model cannot be synchronised in {plan.fragments} fragments"
        why = f"it has {len(units)} units, and one fragment is for what is outside of blocks"
        raise PlaitError(Problem("P064", what, why=why, fix=(f"fragments={len(units) + 1}",)))
    found = [{n for unit in units[p::dealt] for n in unit.parameters} & names for p in range(dealt)]
    taken = set[str]()
    for fragment in found:  # a parameter that two blocks share belongs to the first
        fragment -= taken
        taken |= fragment
    return [*found, names - taken]


def due(plan: Plan, step: int) -> Iterable[int]:
    """Fragments that are sent after this step (counted from 1)."""
    since = step - plan.start_local
    if since <= 0:
        return []
    return [
        p for p in range(plan.fragments) if since % plan.every == (p + 1) * plan.every // plan.fragments % plan.every
    ]
