"""Find where a difference begins: compares the recorded rows of both sides in the order of a training step.

The order is: samples; forward, unit by unit (inputs, used weights, outputs); backward from the loss; each parameter's gradient on one rank;
its sum over ranks; the gradient norm; the optimizer's state and weights. The first wrong row is at the fault; later wrong rows follow from
it.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.config.keys import DATA_AXES, SAME_LOSS
from plait.proof.activation_recorder import make_row_key
from plait.proof.probes import FLOOR, TOLERANCE, measure_scale, relative_diff, relative_max_diff
from plait.proof.sum_diagnosis import GradientSum, diagnose_sum
from plait.proof.trace_pair import Mismatch, TracePair


@dataclass(frozen=True)
class Finding:
    """The first difference. `axes`: plan axes whose messages may have caused it."""

    kind: str
    """data, between, gather, forward, message, recompute, loss, backward, backward message, weights, reduction, accumulation, clip, optimizer."""
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
    """The next unit in the same direction; for a message, the unit that received it."""

    def to_dict(self) -> dict[str, Any]:
        """Values for `plait verify --json`. Steps count from 1, ranks and micro-batches from 0."""
        return {
            "kind": self.kind, "step": self.step + 1, "unit": self.unit, "parameter": self.name, "axes": list(self.axes),
            "ranks": list(self.ranks), "micro_batches": list(self.micros), "relative": self.size, "how": self.how,
        }  # fmt: skip


def locate_difference(sides: TracePair) -> Finding | None:
    """Return the first difference, or None if all recorded rows agree."""
    for step in range(len(sides.expected["rows"])):
        if _has_unequal_padding(sides, step):
            return None
        for look in (_check_data, _check_forward, _check_recompute, _check_backward, _check_gradients, _check_norm, _check_update):
            found = look(sides, step)
            if found is not None:
                return found
    return None


def _has_unequal_padding(sides: TracePair, step: int) -> bool:
    """True if samples are padded to other lengths on a rank than on one device. Then unit outputs cannot be compared."""
    for where in sides.list_places(step, ("data",)):
        shape = sides.reference.about["|".join((str(step), *where, "0"))][2]
        for rank, _, mine in sides.get_rows(step, *where):
            _, _, found, cut, _ = sides.ranks[rank].about[mine]
            if cut == -1 and len(found) == len(shape) > 1 and found[1:] != shape[1:]:
                return True
    return False


def _make_finding(kind: str, step: int, wrong: list[Mismatch], **more: Any) -> Finding:
    ranks, micros = tuple(sorted({w.rank for w in wrong})), tuple(sorted({w.micro for w in wrong}))
    return Finding(kind, step, ranks=ranks, micros=micros, size=max(w.size for w in wrong), **more)


def _check_data(sides: TracePair, step: int) -> Finding | None:
    for where in sides.list_places(step, ("data",)):
        if wrong := sides.find_mismatches(step, where):
            return _make_finding("data", step, wrong)
    return None


# — forward —


def _check_forward(sides: TracePair, step: int) -> Finding | None:
    before = ""
    for where in sides.list_places(step, ("in", "out")):
        what, unit = where[0], where[1]
        gathered = _check_gather(sides, step, unit, "used") if what == "out" else None
        if gathered is not None:
            return gathered
        wrong = sides.find_mismatches(step, where)
        if wrong and what == "in":
            return _make_finding("between", step, wrong, unit=unit, after=before, axes=_find_unit_axes(sides, ""))
        if wrong:
            how = _describe_mismatch(sides, step, where, wrong)
            return _make_finding("forward", step, wrong, unit=unit, axes=_find_unit_axes(sides, unit), how=how)
        if what == "out" and (wrong := sides.find_mismatches(step, where, "got")):
            how = _describe_mismatch(sides, step, where, wrong)
            return _make_finding("message", step, wrong, unit=unit, axes=("pp",), how=how)
        before = unit if what == "out" else before
    return None


def _find_unit_axes(sides: TracePair, unit: str) -> tuple[str, ...]:
    """Axes whose messages a unit's forward pass waits for. An empty unit name stands for the code between units."""
    norms = sides.rank_facts[0]["batch_norms"]
    found = [axis for axis in SAME_LOSS if getattr(sides.plan, axis) > 1]
    found += ["ep"] if sides.plan.ep > 1 and (not unit or _has_sharded_experts(sides, unit)) else []
    if any(norm == unit or norm.startswith(f"{unit}.") for norm in norms if unit):
        found += [axis for axis in DATA_AXES if getattr(sides.plan, axis) > 1]
    return tuple(found)


def _has_sharded_experts(sides: TracePair, unit: str) -> bool:
    """True if experts of a unit are sharded: its parameters are missing or partial on some ranks."""
    names = [{n for n in r["parts"] if n.startswith(f"{unit}.")} for r in sides.rank_facts]
    cut = any(r["parts"][n][1] != sides.rank_facts[0]["parts"][n][1] for r in sides.rank_facts for n in names[0] if n in r["parts"])
    return cut or any(found != names[0] for found in names)


def _check_gather(sides: TracePair, step: int, unit: str, what: str) -> Finding | None:
    """Find a gathered weight that differs from its shards on the ranks."""
    for (at, kind, name, *_), rows in sides.index.items():
        if (at, kind) != (str(step), what) or not f"{name}.".startswith(f"{unit}."):
            continue
        wrong = list[Mismatch]()
        for rank, micro, mine in rows:
            held, used = _gather_weight_row(sides, step, name, rank), sides.ranks[rank].rows[mine]
            if held is not None and (size := relative_max_diff(held, used, measure_scale(held))) > TOLERANCE:
                wrong.append(Mismatch(rank, micro, size, held, used))
        if wrong:
            axes = tuple(axis for axis in sides.plan.shard_axes if getattr(sides.plan, axis) > 1)
            return _make_finding("gather", step, wrong, unit=unit, name=name, axes=axes)
    return None


def _gather_weight_row(sides: TracePair, step: int, name: str, rank: int) -> Tensor | None:
    """Row of the full weight, from the ranks' parts before a step. None if unknown: initial weights have no rows of parts under tp or ep."""
    if step == 0:
        return sides.reference.rows.get(make_row_key(0, "initial", name)) if sides.plan.tp * sides.plan.ep == 1 else None
    known, found = make_row_key(step - 1, "weight", name), dict[str, Tensor]()
    for notes, told in zip(sides.ranks, sides.rank_facts):
        if (
            known in notes.rows
            and name in told["parts"]
            and told["given"].get(name) == sides.rank_facts[rank]["given"].get(name)
        ):
            found.setdefault(str(told["parts"][name][1]), notes.rows[known])
    return torch.stack(list(found.values())).sum(0) if found else None


def _describe_mismatch(sides: TracePair, step: int, where: tuple[str, ...], wrong: list[Mismatch]) -> str:
    """Describe the wrong value relative to the right one, or to a value of another micro-batch or step."""
    one = wrong[0]
    if (factor := _find_factor(one.expected, one.actual)) is not None:
        return "it is zero" if factor == 0 else f"it is {factor:.7g} times the right value"
    for what, other in product((where[0], "got"), (step, step - 1)):
        for rank, micro, known in sides.get_rows(other, what, *where[1:]):
            row = sides.ranks[rank].rows[known]
            rows = min(len(row), len(one.actual))
            if (other, micro) == (step, one.micro) or row.shape[1:] != one.actual.shape[1:] or not rows:
                continue
            if relative_max_diff(row[:rows], one.actual[:rows], measure_scale(row)) <= TOLERANCE:
                return f"it is the value of micro-batch {micro}" if other == step else "it is the value of the previous step"
    return ""


def _find_factor(expected: Tensor, actual: Tensor) -> float | None:
    """actual / expected if it is one constant, else None."""
    squares = float((expected * expected).sum())
    if not squares:
        return None
    factor = float((expected * actual).sum()) / squares
    scale = max(float(actual.abs().max()), float(expected.abs().max()))
    same = float((actual - factor * expected).abs().max()) <= 1e-8 * scale
    return (round(factor, 9) + 0.0) if same else None


def _check_recompute(sides: TracePair, step: int) -> Finding | None:
    """Find a unit whose recomputed forward differs from its first forward."""
    rows = {known[2]: rows for known, rows in sides.index.items() if known[:2] == (str(step), "again")}
    if not rows:
        return None
    ranks, micros, _ = (tuple(sorted({*column})) for column in zip(*(row for unit in rows.values() for row in unit)))
    return Finding("recompute", step, next(iter(rows)), ranks=ranks, micros=micros)


# — backward —


def _check_backward(sides: TracePair, step: int) -> Finding | None:
    places = sides.list_places(step, ("out",))[::-1]
    rows = [sides.reference.rows.get(make_row_key(step, "back", *(p[1], int(p[2]), int(p[3])))) for p in places]
    floor = FLOOR * max((float(row.abs().max()) for row in rows if row is not None), default=0.0)
    calls = list(dict.fromkeys((where[1], where[2]) for where, row in zip(places, rows) if row is not None))
    for where, row in zip(places, rows):
        if row is None:
            continue
        back, unit = ("back", *where[1:]), where[1]
        wrong = sides.find_mismatches(step, back, floor=floor)
        if not wrong:
            continue
        turn, how = calls.index((unit, where[2])), _describe_mismatch(sides, step, back, wrong)
        if turn == 0:
            return _make_finding("loss", step, wrong, unit=unit, how=how, axes=_find_unit_axes(sides, "")[:2])
        after = calls[turn - 1][0]
        if gathered := _check_gather(sides, step, after, "used back"):
            return gathered
        taken = sides.get_rows(step, "got back", *where[1:])
        if taken and not sides.find_mismatches(step, back, "got back", floor):
            return _make_finding("backward message", step, wrong, unit=unit, after=after, axes=("pp",), how=how)
        axes = tuple(dict.fromkeys((*_find_unit_axes(sides, after), *_find_unit_axes(sides, unit))))
        return _make_finding("backward", step, wrong, unit=after, after=unit, axes=axes, how=how)
    return None


# — gradients of parameters —


def _check_gradients(sides: TracePair, step: int) -> Finding | None:
    names = [where[1] for where in sides.list_places(step, ("sum",))]
    largest = max((float(sides.reference.rows[make_row_key(step, "sum", n)].abs().max()) for n in names), default=0.0)
    found = []
    for name in names:
        one = GradientSum.from_traces(sides, step, name, FLOOR * largest)
        if one is not None and one.local > TOLERANCE:
            how, ranks = one.explain_single_rank()
            unit = next((u for _, u, *_ in sides.list_places(step, ("out",)) if name.startswith(f"{u}.")), "")
            return Finding("weights", step, unit, name, _find_unit_axes(sides, unit), ranks, size=one.local, how=how)
        found.append(one)
    for name, one in zip(names, found):
        if one is not None and one.wrong_ranks:
            told = diagnose_sum(one)
            return Finding(told.kind, step, "", name, told.axes, told.ranks, told.micros, told.size, told.how)
    return None


# — the update —


def _check_norm(sides: TracePair, step: int) -> Finding | None:
    expected, *norms = [side["rows"][step]["norm"] for side in (sides.expected, *sides.rank_facts)]
    wrong = {rank: size for rank, norm in enumerate(norms) if (size := relative_diff(expected, norm)) > TOLERANCE}
    if not wrong:
        return None
    first = min(wrong)
    how = f"{norms[first]:.6g} instead of {expected:.6g}"
    return Finding("clip", step, ranks=tuple(wrong), size=wrong[first], how=how)


def _check_update(sides: TracePair, step: int) -> Finding | None:
    """Find the first wrong optimizer state, then weight, in the order of the parameters."""
    moved, states = _measure_max_move(sides, step), [w for w in sides.list_places(step) if w[0].startswith("state ")]
    largest = dict[str, float]()
    for kind, name, *_ in states:
        largest[kind] = max(largest.get(kind, 0.0), float(sides.reference.rows[make_row_key(step, kind, name)].abs().max()))
    bad = [where for where in states if _measure_difference(sides, step, where, FLOOR * largest[where[0]])]
    wrong_states = {where[1]: where[0] for where in reversed(bad)}
    weights = sides.list_places(step, ("weight",))
    wrong = {where[1]: size for where in weights if (size := _measure_difference(sides, step, where, moved))}
    order = [where[1] for where in weights]
    name = min({*wrong, *wrong_states}, key=order.index, default=None)
    if name is None:
        return None
    ranks = _find_wrong_ranks(sides, step, "weight" if name in wrong else wrong_states[name], name)
    how = f"{len({*wrong, *wrong_states})} of {len(order)} parameters"
    if name in wrong_states:
        how += f", beginning with its {wrong_states[name].removeprefix('state ')}"
    elif (told := _describe_move(sides, step, name)) is not None:
        how += told
    size = max(wrong.values(), default=0.0)
    return Finding("optimizer", step, name=name, ranks=ranks, size=size, how=how)


def _measure_max_move(sides: TracePair, step: int) -> float:
    """Largest change of any weight row in a step. Updates are compared on this scale."""
    names = [where[1] for where in sides.list_places(step, ("weight",))]
    rows = [(_get_previous_row(sides, step, n), sides.reference.rows[make_row_key(step, "weight", n)]) for n in names]
    return max((float((b - a).abs().max()) for a, b in rows if a is not None), default=0.0)


def _get_previous_row(sides: TracePair, step: int, name: str) -> Tensor | None:
    return sides.reference.rows.get(make_row_key(step - 1, "weight", name) if step else make_row_key(0, "initial", name))


def _measure_difference(sides: TracePair, step: int, where: tuple[str, ...], floor: float) -> float:
    """Relative difference of a weight or state; 0 if it is within rounding."""
    known, name = make_row_key(step, where[0], where[1]), where[1]
    expected = sides.reference.rows[known]
    groups: dict[str, list[Tensor]] = {}
    for notes, told in zip(sides.ranks, sides.rank_facts):
        if known in notes.rows and name in told["parts"]:
            groups.setdefault(str(told["parts"][name][1]), []).append(notes.rows[known])
    if len(expected) == 1 and where[0] != "weight":  # a step count, equal on all parts
        wholes = [row for rows in groups.values() for row in rows]
    else:
        copies = range(max(map(len, groups.values()), default=0))
        wholes = [torch.stack([rows[min(k, len(rows) - 1)] for rows in groups.values()]).sum(0) for k in copies]
    worst = max((relative_max_diff(expected, whole, measure_scale(expected, floor)) for whole in wholes), default=0.0)
    return worst if worst > TOLERANCE else 0.0


def _find_wrong_ranks(sides: TracePair, step: int, what: str, name: str) -> tuple[int, ...]:
    """Ranks with a wrong replica if another rank's is right; empty if all are wrong or the ranks have parts."""
    known, expected = make_row_key(step, what, name), sides.reference.rows[make_row_key(step, what, name)]
    rows = {rank: notes.rows[known] for rank, notes in enumerate(sides.ranks) if known in notes.rows}
    bad = [rank for rank, row in rows.items() if relative_max_diff(expected, row, measure_scale(expected)) > TOLERANCE]
    return tuple(bad) if len(bad) < len(rows) else ()


def _describe_move(sides: TracePair, step: int, name: str) -> str | None:
    """Describe a weight's wrong change in a step relative to the right one."""
    before, after = _get_previous_row(sides, step, name), sides.reference.rows[make_row_key(step, "weight", name)]
    mine = next((n.rows[make_row_key(step, "weight", name)] for n in sides.ranks if make_row_key(step, "weight", name) in n.rows), None)
    if before is None or mine is None or mine.shape != after.shape:
        return None
    factor = _find_factor(after - before, mine - before)
    if factor is None:
        return None
    return ", which do not move" if factor == 0 else f", whose change is {factor:.7g} times the right one"
