"""What `plait sketch` prints: the units of a sketch in the order of the forward pass, blocks that are alike as one line.

Bytes and operations are those of one forward pass of a batch; `saved` is what stays until its backward.
"""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from plait.model.operations import Unit, UnitCall
from plait.model.sketch import Sketch

SCALES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
COLUMNS = ("unit", "kind", "calls", "parameters", "flops", "saved", "output", "needs")


@dataclass(frozen=True)
class UnitRow:
    """One unit, or several alike in a row; figures are those of all of them together, except `output`, of one call."""

    unit: str
    kind: str
    units: int
    calls: int
    parameters: int
    flops: float
    saved: float
    output: float
    needs: tuple[str, ...]
    """Units or rows whose outputs it uses, not counting the unit before it in the same row."""
    closed: bool
    """Its parameters are used in its own calls only."""


@dataclass(frozen=True)
class Outline:
    """The rows of a sketch and what does not belong to any unit, for a batch of so many samples."""

    batch: int
    rows: tuple[UnitRow, ...]
    output_needs: tuple[str, ...]
    rest: tuple[str, ...]
    rest_parameters: int
    parameters: int
    flops: float
    saved: float
    flops_between: float
    saved_between: float
    unmeasured: str
    opaque: tuple[tuple[str, str], ...] = ()
    """Modules that call operators of higher order, and these: what they compute is not counted."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def outline(sketch: Sketch, batch: int) -> Outline:
    """Collapse a sketch into rows; the figures are for a batch of so many samples."""
    counts = {name: prod(shape) for name, shape, _ in (*sketch.parameters, *sketch.frozen)}
    calls: dict[str, list[UnitCall]] = {unit.name: [] for unit in sketch.units}
    for call in sketch.calls:
        calls[call.unit].append(call)
    groups: list[list[Unit]] = []
    for unit in sketch.units:
        if groups and _alike(groups[-1], unit, calls):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    labels = {unit.name: _label(group) for group in groups for unit in group}
    rows = tuple(_row(group, calls, labels, sketch, counts, batch=batch) for group in groups)
    between, kept = sketch.flops_between.of(batch), sketch.saved_between.of(batch)
    return Outline(
        batch,
        rows,
        _names(sketch.needs, sketch, labels),
        sketch.rest,
        sum(counts[name] for name in sketch.rest),
        sum(counts.values()),
        sum(row.flops for row in rows) + between,
        sum(row.saved for row in rows) + kept,
        between,
        kept,
        sketch.unmeasured,
        sketch.opaque,
    )


def _alike(group: list[Unit], unit: Unit, calls: dict[str, list[UnitCall]]) -> bool:
    """Whether the unit continues a row: the next sister by its number, of equal cost.

    The first of them may keep more for backward: what all of them use, such as a table of positions, counts once.
    """
    last = group[-1]
    (stem, number), (other, before) = _numbered(unit.name), _numbered(last.name)
    if number is None or before is None or stem != other or number != before + 1:
        return False

    costs = [(u.kind, u.weights, u.closed, [(c.flops, c.output) for c in calls[u.name]]) for u in (unit, last)]
    return costs[0] == costs[1]


def _numbered(name: str) -> tuple[str, int | None]:
    """`layers.3` -> ("layers.", 3)."""
    match = re.fullmatch(r"(.*\.|)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _label(group: list[Unit]) -> str:
    first, last = group[0].name, group[-1].name
    return first if first == last else f"{first}-{_numbered(last)[1]}"


def _names(needs: Iterable[int], sketch: Sketch, labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(labels[sketch.calls[i].unit] for i in needs))


def _row(
    group: list[Unit], calls: dict[str, list[UnitCall]], labels: dict[str, str], sketch: Sketch, counts: dict[str, int],
    *, batch: int,
) -> UnitRow:  # fmt: skip
    label = _label(group)
    mine = [call for unit in group for call in calls[unit.name]]
    needs = dict.fromkeys(name for call in mine for name in _names(call.needs, sketch, labels))
    needs.pop(label, None)
    return UnitRow(
        label,
        group[0].kind,
        len(group),
        len(mine),
        sum(counts[name] for unit in group for name in unit.parameters),
        sum(call.flops.of(batch) for call in mine),
        sum(call.saved.of(batch) for call in mine),
        mine[-1].output.of(batch),
        tuple(needs),
        all(unit.closed for unit in group),
    )


def table(outlined: Outline, job: str) -> str:
    """What `plait sketch` prints."""
    lines = [COLUMNS]
    for row in outlined.rows:
        name = row.unit if row.closed else f"{row.unit} *"
        lines.append((name, row.kind, str(row.calls), short(row.parameters), short(row.flops), size(row.saved),
                      size(row.output), ", ".join(row.needs) or "the input"))  # fmt: skip
    if outlined.rest or outlined.flops_between or outlined.saved_between:
        lines.append(("between units", "", "", short(outlined.rest_parameters), short(outlined.flops_between),
                      size(outlined.saved_between), "", ", ".join(outlined.rest[:3])))  # fmt: skip
    calls = str(sum(row.calls for row in outlined.rows))
    total = (short(outlined.parameters), short(outlined.flops), size(outlined.saved))
    lines.append(("together", "", calls, *total, "", ", ".join(outlined.output_needs)))
    samples = "one sample" if outlined.batch == 1 else f"a batch of {outlined.batch}"
    text = [f"job     {job}, the forward pass of {samples}"]
    text += aligned(lines, right=range(2, 7))
    if any(not row.closed for row in outlined.rows):
        text.append("* its parameters are also used outside of its own calls; shared ones count once in the total")
    if outlined.unmeasured:
        text.append(f"units could not be measured: {outlined.unmeasured}")
    if outlined.opaque:
        names = ", ".join(dict.fromkeys(name for _, name in outlined.opaque))
        inside = ", ".join(dict.fromkeys(module or "the model" for module, _ in outlined.opaque))
        text.append(f"not counted: what {names} computes, in {inside}")
    return "\n".join(text)


def aligned(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Rows of a table as lines, columns as wide as their widest cell; those in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def short(number: float) -> str:
    """A number with three digits and a letter for thousands: 70.6G."""
    for letter, scale in SCALES:
        if number >= scale * 0.9995:
            return f"{number / scale:.3g}{letter}" if number < scale * 999.5 else f"{number / scale:.0f}{letter}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """So many bytes, with three digits: 1.23 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale * 0.9995:
            return f"{number / scale:.3g} {unit}" if number < scale * 999.5 else f"{number / scale:.0f} {unit}"
    return f"{number:.0f} B"


def speed(bits: float) -> str:
    """Bits a second as text: 2.5 Gbit/s."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def duration(seconds: float) -> str:
    """Seconds as text: 1.5 s, 20 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def span_of(numbers: list[int]) -> str:
    """`0-3` for consecutive numbers, else nothing."""
    return f"{numbers[0]}-{numbers[-1]}" if numbers == list(range(numbers[0], numbers[-1] + 1)) else ""


def form_of(name: str) -> str:
    """A name, or a text with names, in which members of lists have no number.

    >>> form_of("layers.3.mlp reaches layers.4, not 2")
    'layers.*.mlp reaches layers.*, not 2'
    """
    return re.sub(r"(?<=\.)\d+\b", "*", name)


def label(names: list[str]) -> str:
    """One name for several of a form: `layers.0-3.mlp` when one number tells them apart, else `layers.*.mlp`."""
    if len(names) == 1:
        return names[0] or "the model"
    split = [re.split(r"(?<=\.)(\d+)\b", name) for name in names]
    differing = [i for i, parts in enumerate(zip(*split)) if len(set(parts)) > 1]
    span = span_of(sorted(int(parts[differing[0]]) for parts in split)) if len(differing) == 1 else ""
    if span:
        split[0][differing[0]] = span
        return "".join(split[0])
    return form_of(names[0]) or "the model"
