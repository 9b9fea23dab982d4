"""Where a difference begins: the rows that both sides of a proof noted, compared in the order of a training step.

First the samples, then forward, unit by unit: what a unit is given, the weights it uses, what it returns. Then backward
from the loss on, then each parameter's gradient on a rank alone, then its sum over ranks, the norm, and what the optimizer
made of it. Whatever is wrong first is where the fault is; what is wrong after it follows from it.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.config.keys import OTHER_SAMPLES, SAME_LOSS
from plait.proof.notes import key
from plait.proof.probes import FLOOR, TOLERANCE, apart, off, size_of
from plait.proof.sides import Sides, Wrong
from plait.proof.sum_faults import Sum, explained


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong. `axes`: those whose messages may have made it so."""

    kind: str
    """data, between, gather, forward, message, recompute, loss, backward, backward message, weights, reduction,
    accumulation, clip, optimizer."""
    step: int
    unit: str = ""
    name: str = ""
    """A parameter."""
    axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    micros: tuple[int, ...] = ()
    size: float = 0.0
    """The relative difference."""
    how: str = ""
    after: str = ""
    """The unit behind it in the same direction: of a message, the one that received it."""

    def to_dict(self) -> dict[str, Any]:
        """As `plait verify --json` has it; steps count from 1, ranks and micro-batches from 0."""
        return {
            "kind": self.kind, "step": self.step + 1, "unit": self.unit, "parameter": self.name, "axes": list(self.axes),
            "ranks": list(self.ranks), "micro_batches": list(self.micros), "relative": self.size, "how": self.how,
        }  # fmt: skip


def beginning(sides: Sides) -> Finding | None:
    """The first thing that is wrong; None when nothing that was noted is."""
    for step in range(len(sides.expected["rows"])):
        if _padded_apart(sides, step):
            return None
        for look in (_data, _forward, _again, _backward, _gradients, _norm, _updated):
            found = look(sides, step)
            if found is not None:
                return found
    return None


def _padded_apart(sides: Sides, step: int) -> bool:
    """Whether a rank's samples have other lengths than on one device: then no unit's values can be compared."""
    for where in sides.places(step, ("data",)):
        shape = sides.one.about["|".join((str(step), *where, "0"))][2]
        for rank, _, mine in sides.of(step, *where):
            _, _, found, cut, _ = sides.ranks[rank].about[mine]
            if cut == -1 and len(found) == len(shape) > 1 and found[1:] != shape[1:]:
                return True
    return False


def _finding(kind: str, step: int, wrong: list[Wrong], **more: Any) -> Finding:
    ranks, micros = tuple(sorted({w.rank for w in wrong})), tuple(sorted({w.micro for w in wrong}))
    return Finding(kind, step, ranks=ranks, micros=micros, size=max(w.size for w in wrong), **more)


def _data(sides: Sides, step: int) -> Finding | None:
    for where in sides.places(step, ("data",)):
        if wrong := sides.wrong(step, where):
            return _finding("data", step, wrong)
    return None


# — forward —


def _forward(sides: Sides, step: int) -> Finding | None:
    before = ""
    for where in sides.places(step, ("in", "out")):
        what, unit = where[0], where[1]
        gathered = _weights(sides, step, unit, "used") if what == "out" else None
        if gathered is not None:
            return gathered
        wrong = sides.wrong(step, where)
        if wrong and what == "in":
            return _finding("between", step, wrong, unit=unit, after=before, axes=_inside(sides, ""))
        if wrong:
            how = _how(sides, step, where, wrong)
            return _finding("forward", step, wrong, unit=unit, axes=_inside(sides, unit), how=how)
        if what == "out" and (wrong := sides.wrong(step, where, "got")):
            how = _how(sides, step, where, wrong)
            return _finding("message", step, wrong, unit=unit, axes=("pp",), how=how)
        before = unit if what == "out" else before
    return None


def _inside(sides: Sides, unit: str) -> tuple[str, ...]:
    """The axes whose messages a unit's own forward pass waits for; of the code between units, without a name."""
    norms = sides.told[0]["batch_norms"]
    found = [axis for axis in SAME_LOSS if getattr(sides.plan, axis) > 1]
    found += ["ep"] if sides.plan.ep > 1 and (not unit or _mixes(sides, unit)) else []
    if any(norm == unit or norm.startswith(f"{unit}.") for norm in norms if unit):
        found += [axis for axis in OTHER_SAMPLES if getattr(sides.plan, axis) > 1]
    return tuple(found)


def _mixes(sides: Sides, unit: str) -> bool:
    """Whether experts of a unit are shared out: its parameters are not on all ranks, or not whole."""
    names = [{n for n in r["parts"] if n.startswith(f"{unit}.")} for r in sides.told]
    cut = any(r["parts"][n][1] != sides.told[0]["parts"][n][1] for r in sides.told for n in names[0] if n in r["parts"])
    return cut or any(found != names[0] for found in names)


def _weights(sides: Sides, step: int, unit: str, what: str) -> Finding | None:
    """Whether a unit uses other weights than the ranks hold: those that were gathered."""
    for (at, kind, name, *_), rows in sides.index.items():
        if (at, kind) != (str(step), what) or not f"{name}.".startswith(f"{unit}."):
            continue
        wrong = list[Wrong]()
        for rank, micro, mine in rows:
            held, used = _held(sides, step, name, rank), sides.ranks[rank].rows[mine]
            if held is not None and (size := apart(held, used, size_of(held))) > TOLERANCE:
                wrong.append(Wrong(rank, micro, size, held, used))
        if wrong:
            axes = tuple(axis for axis in sides.plan.shard_axes if getattr(sides.plan, axis) > 1)
            return _finding("gather", step, wrong, unit=unit, name=name, axes=axes)
    return None


def _held(sides: Sides, step: int, name: str, rank: int) -> Tensor | None:
    """The row of what a rank gathers of a weight, from the parts that it and others hold of it before a step; None where that
    is not known: of initial weights, where they are cut by another way than into shards."""
    if step == 0:
        return sides.one.rows.get(key(0, "initial", name)) if sides.plan.tp * sides.plan.ep == 1 else None
    known, found = key(step - 1, "weight", name), dict[str, Tensor]()
    for notes, told in zip(sides.ranks, sides.told):
        if (
            known in notes.rows
            and name in told["parts"]
            and told["given"].get(name) == sides.told[rank]["given"].get(name)
        ):
            found.setdefault(str(told["parts"][name][1]), notes.rows[known])
    return torch.stack(list(found.values())).sum(0) if found else None


def _how(sides: Sides, step: int, where: tuple[str, ...], wrong: list[Wrong]) -> str:
    """What the wrong value is in relation to the right one, or to another that was there."""
    one = wrong[0]
    if (factor := _factor(one.expected, one.actual)) is not None:
        return "it is zero" if factor == 0 else f"it is {factor:.7g} times what it should be"
    for what, other in product((where[0], "got"), (step, step - 1)):
        for rank, micro, known in sides.of(other, what, *where[1:]):
            row = sides.ranks[rank].rows[known]
            rows = min(len(row), len(one.actual))
            if (other, micro) == (step, one.micro) or row.shape[1:] != one.actual.shape[1:] or not rows:
                continue
            if apart(row[:rows], one.actual[:rows], size_of(row)) <= TOLERANCE:
                return f"it is that of micro-batch {micro}" if other == step else "it is that of the step before"
    return ""


def _factor(expected: Tensor, actual: Tensor) -> float | None:
    """actual / expected where that is one number."""
    squares = float((expected * expected).sum())
    if not squares:
        return None
    factor = float((expected * actual).sum()) / squares
    scale = max(float(actual.abs().max()), float(expected.abs().max()))
    same = float((actual - factor * expected).abs().max()) <= 1e-8 * scale
    return (round(factor, 9) + 0.0) if same else None


def _again(sides: Sides, step: int) -> Finding | None:
    """A unit that computed something else when its forward ran again."""
    rows = {known[2]: rows for known, rows in sides.index.items() if known[:2] == (str(step), "again")}
    if not rows:
        return None
    ranks, micros, _ = (tuple(sorted({*column})) for column in zip(*(row for unit in rows.values() for row in unit)))
    return Finding("recompute", step, next(iter(rows)), ranks=ranks, micros=micros)


# — backward —


def _backward(sides: Sides, step: int) -> Finding | None:
    places = sides.places(step, ("out",))[::-1]
    rows = [sides.one.rows.get(key(step, "back", *(p[1], int(p[2]), int(p[3])))) for p in places]
    floor = FLOOR * max((float(row.abs().max()) for row in rows if row is not None), default=0.0)
    calls = list(dict.fromkeys((where[1], where[2]) for where, row in zip(places, rows) if row is not None))
    for where, row in zip(places, rows):
        if row is None:
            continue
        back, unit = ("back", *where[1:]), where[1]
        wrong = sides.wrong(step, back, floor=floor)
        if not wrong:
            continue
        turn, how = calls.index((unit, where[2])), _how(sides, step, back, wrong)
        if turn == 0:
            return _finding("loss", step, wrong, unit=unit, how=how, axes=_inside(sides, "")[:2])
        after = calls[turn - 1][0]
        if gathered := _weights(sides, step, after, "used back"):
            return gathered
        taken = sides.of(step, "got back", *where[1:])
        if taken and not sides.wrong(step, back, "got back", floor):
            return _finding("backward message", step, wrong, unit=unit, after=after, axes=("pp",), how=how)
        axes = tuple(dict.fromkeys((*_inside(sides, after), *_inside(sides, unit))))
        return _finding("backward", step, wrong, unit=after, after=unit, axes=axes, how=how)
    return None


# — gradients of parameters —


def _gradients(sides: Sides, step: int) -> Finding | None:
    names = [where[1] for where in sides.places(step, ("sum",))]
    largest = max((float(sides.one.rows[key(step, "sum", n)].abs().max()) for n in names), default=0.0)
    found = []
    for name in names:
        one = Sum.of(sides, step, name, FLOOR * largest)
        if one is not None and one.local > TOLERANCE:
            how, ranks = one.of_one_rank()
            unit = next((u for _, u, *_ in sides.places(step, ("out",)) if name.startswith(f"{u}.")), "")
            return Finding("weights", step, unit, name, _inside(sides, unit), ranks, size=one.local, how=how)
        found.append(one)
    for name, one in zip(names, found):
        if one is not None and one.wrong:
            told = explained(one)
            return Finding(told.kind, step, "", name, told.axes, told.ranks, told.micros, told.size, told.how)
    return None


# — the update —


def _norm(sides: Sides, step: int) -> Finding | None:
    expected, *norms = [side["rows"][step]["norm"] for side in (sides.expected, *sides.told)]
    wrong = {rank: size for rank, norm in enumerate(norms) if (size := off(expected, norm)) > TOLERANCE}
    if not wrong:
        return None
    first = min(wrong)
    how = f"{norms[first]:.6g} instead of {expected:.6g}"
    return Finding("clip", step, ranks=tuple(wrong), size=wrong[first], how=how)


def _updated(sides: Sides, step: int) -> Finding | None:
    """What the optimizer made: its state first, then the weights; in the order of the parameters."""
    moved, states = _largest_move(sides, step), [w for w in sides.places(step) if w[0].startswith("state ")]
    largest = dict[str, float]()
    for kind, name, *_ in states:
        largest[kind] = max(largest.get(kind, 0.0), float(sides.one.rows[key(step, kind, name)].abs().max()))
    bad = [where for where in states if _differs(sides, step, where, FLOOR * largest[where[0]])]
    wrong_states = {where[1]: where[0] for where in reversed(bad)}
    weights = sides.places(step, ("weight",))
    wrong = {where[1]: size for where in weights if (size := _differs(sides, step, where, moved))}
    order = [where[1] for where in weights]
    name = min({*wrong, *wrong_states}, key=order.index, default=None)
    if name is None:
        return None
    ranks = _ranks_apart(sides, step, "weight" if name in wrong else wrong_states[name], name)
    how = f"{len({*wrong, *wrong_states})} of {len(order)} parameters"
    if name in wrong_states:
        how += f", beginning with its {wrong_states[name].removeprefix('state ')}"
    elif (told := _moved(sides, step, name)) is not None:
        how += told
    size = max(wrong.values(), default=0.0)
    return Finding("optimizer", step, name=name, ranks=ranks, size=size, how=how)


def _largest_move(sides: Sides, step: int) -> float:
    """The largest change of a weight's row in a step: an update is judged beside the others' updates."""
    names = [where[1] for where in sides.places(step, ("weight",))]
    rows = [(_before(sides, step, n), sides.one.rows[key(step, "weight", n)]) for n in names]
    return max((float((b - a).abs().max()) for a, b in rows if a is not None), default=0.0)


def _before(sides: Sides, step: int, name: str) -> Tensor | None:
    return sides.one.rows.get(key(step - 1, "weight", name) if step else key(0, "initial", name))


def _differs(sides: Sides, step: int, where: tuple[str, ...], floor: float) -> float:
    """The relative difference of a weight or state, as far as it is larger than rounding; else 0."""
    known, name = key(step, where[0], where[1]), where[1]
    expected = sides.one.rows[known]
    groups: dict[str, list[Tensor]] = {}
    for notes, told in zip(sides.ranks, sides.told):
        if known in notes.rows and name in told["parts"]:
            groups.setdefault(str(told["parts"][name][1]), []).append(notes.rows[known])
    if len(expected) == 1 and where[0] != "weight":  # a count of steps, the same on each part
        wholes = [row for rows in groups.values() for row in rows]
    else:
        copies = range(max(map(len, groups.values()), default=0))
        wholes = [torch.stack([rows[min(k, len(rows) - 1)] for rows in groups.values()]).sum(0) for k in copies]
    worst = max((apart(expected, whole, size_of(expected, floor)) for whole in wholes), default=0.0)
    return worst if worst > TOLERANCE else 0.0


def _ranks_apart(sides: Sides, step: int, what: str, name: str) -> tuple[int, ...]:
    """The ranks whose copy is wrong while another's is right; none when they are alike, or hold parts."""
    known, expected = key(step, what, name), sides.one.rows[key(step, what, name)]
    rows = {rank: notes.rows[known] for rank, notes in enumerate(sides.ranks) if known in notes.rows}
    bad = [rank for rank, row in rows.items() if apart(expected, row, size_of(expected)) > TOLERANCE]
    return tuple(bad) if len(bad) < len(rows) else ()


def _moved(sides: Sides, step: int, name: str) -> str | None:
    """The step's change of a weight beside the right one."""
    before, after = _before(sides, step, name), sides.one.rows[key(step, "weight", name)]
    mine = next((n.rows[key(step, "weight", name)] for n in sides.ranks if key(step, "weight", name) in n.rows), None)
    if before is None or mine is None or mine.shape != after.shape:
        return None
    factor = _factor(after - before, mine - before)
    if factor is None:
        return None
    return ", which do not move" if factor == 0 else f", whose change is {factor:.7g} times what it should be"
