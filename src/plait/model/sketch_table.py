"""The output of `plait sketch`: the units of a sketch in the order of the forward pass, with equal blocks in one line.

Bytes and operations are those of one forward pass of a batch; `saved` is kept until its backward.
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
    """One unit, or several equal ones in a row. Figures are sums over them, except `output`, which is of one call."""

    unit: str
    kind: str
    units: int
    calls: int
    parameters: int
    flops: float
    saved: float
    output: float
    needs: tuple[str, ...]
    """Units or rows whose outputs it uses, without the previous unit in the same row."""
    closed: bool
    """Its parameters are used in its own calls only."""


@dataclass(frozen=True)
class Outline:
    """The rows of a sketch and the costs outside of units, for a batch of `batch` samples."""

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
    """(module, higher-order operator that it calls): their operations are not counted."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def outline_sketch(sketch: Sketch, batch: int) -> Outline:
    """Collapse a sketch into rows, with figures for a batch of `batch` samples."""
    counts = {name: prod(shape) for name, shape, _ in (*sketch.parameters, *sketch.frozen)}
    calls: dict[str, list[UnitCall]] = {unit.name: [] for unit in sketch.units}
    for call in sketch.calls:
        calls[call.unit].append(call)
    groups: list[list[Unit]] = []
    for unit in sketch.units:
        if groups and _is_next_sister(groups[-1], unit, calls):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    labels = {unit.name: _label_group(group) for group in groups for unit in group}
    rows = tuple(_make_row(group, calls, labels, sketch, counts, batch=batch) for group in groups)
    between, kept = sketch.flops_between.for_batch(batch), sketch.saved_between.for_batch(batch)
    return Outline(
        batch,
        rows,
        _name_needs(sketch.needs, sketch, labels),
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


def _is_next_sister(group: list[Unit], unit: Unit, calls: dict[str, list[UnitCall]]) -> bool:
    """Whether the unit continues a row: the next sibling by number, with equal cost.

    The first unit of a row may keep more for backward, because tensors shared by all, such as a table of positions, count once.
    """
    last = group[-1]
    (stem, number), (other, before) = _split_number(unit.name), _split_number(last.name)
    if number is None or before is None or stem != other or number != before + 1:
        return False

    costs = [(u.kind, u.weights, u.closed, [(c.flops, c.output) for c in calls[u.name]]) for u in (unit, last)]
    return costs[0] == costs[1]


def _split_number(name: str) -> tuple[str, int | None]:
    """Split `layers.3` into ("layers.", 3)."""
    match = re.fullmatch(r"(.*\.|)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _label_group(group: list[Unit]) -> str:
    first, last = group[0].name, group[-1].name
    return first if first == last else f"{first}-{_split_number(last)[1]}"


def _name_needs(needs: Iterable[int], sketch: Sketch, labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(labels[sketch.calls[i].unit] for i in needs))


def _make_row(
    group: list[Unit], calls: dict[str, list[UnitCall]], labels: dict[str, str], sketch: Sketch, counts: dict[str, int],
    *, batch: int,
) -> UnitRow:  # fmt: skip
    label = _label_group(group)
    mine = [call for unit in group for call in calls[unit.name]]
    needs = dict.fromkeys(name for call in mine for name in _name_needs(call.needs, sketch, labels))
    needs.pop(label, None)
    return UnitRow(
        label,
        group[0].kind,
        len(group),
        len(mine),
        sum(counts[name] for unit in group for name in unit.parameters),
        sum(call.flops.for_batch(batch) for call in mine),
        sum(call.saved.for_batch(batch) for call in mine),
        mine[-1].output.for_batch(batch),
        tuple(needs),
        all(unit.closed for unit in group),
    )


def format_sketch(outlined: Outline, job: str) -> str:
    """Format the output of `plait sketch`."""
    lines = [COLUMNS]
    for row in outlined.rows:
        name = row.unit if row.closed else f"{row.unit} *"
        lines.append((name, row.kind, str(row.calls), format_count(row.parameters), format_count(row.flops), format_size(row.saved),
                      format_size(row.output), ", ".join(row.needs) or "the input"))  # fmt: skip
    if outlined.rest or outlined.flops_between or outlined.saved_between:
        lines.append(("between units", "", "", format_count(outlined.rest_parameters), format_count(outlined.flops_between),
                      format_size(outlined.saved_between), "", ", ".join(outlined.rest[:3])))  # fmt: skip
    calls = str(sum(row.calls for row in outlined.rows))
    total = (format_count(outlined.parameters), format_count(outlined.flops), format_size(outlined.saved))
    lines.append(("together", "", calls, *total, "", ", ".join(outlined.output_needs)))
    samples = "one sample" if outlined.batch == 1 else f"a batch of {outlined.batch}"
    text = [f"job     {job}, the forward pass of {samples}"]
    text += align_rows(lines, right=range(2, 7))
    if any(not row.closed for row in outlined.rows):
        text.append("* its parameters are also used outside of its own calls; shared parameters count once in the total")
    if outlined.unmeasured:
        text.append(f"units could not be measured: {outlined.unmeasured}")
    if outlined.opaque:
        names = ", ".join(dict.fromkeys(name for _, name in outlined.opaque))
        inside = ", ".join(dict.fromkeys(module or "the model" for module, _ in outlined.opaque))
        text.append(f"not counted: operations of {names}, in {inside}")
    return "\n".join(text)


def align_rows(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Format rows of a table as lines with aligned columns. Columns in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def format_count(number: float) -> str:
    """Format a number with three digits and an SI letter: 70.6G."""
    for letter, scale in SCALES:
        if number >= scale * 0.9995:
            return f"{number / scale:.3g}{letter}" if number < scale * 999.5 else f"{number / scale:.0f}{letter}"
    return f"{number:.3g}"


def format_size(number: float) -> str:
    """Format bytes with three digits: 1.23 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale * 0.9995:
            return f"{number / scale:.3g} {unit}" if number < scale * 999.5 else f"{number / scale:.0f} {unit}"
    return f"{number:.0f} B"


def format_speed(bits: float) -> str:
    """Format bits per second: 2.5 Gbit/s."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def format_duration(seconds: float) -> str:
    """Format seconds: 1.5 s, 20 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def format_span(numbers: list[int]) -> str:
    """Format consecutive numbers as `0-3`; empty for all others."""
    return f"{numbers[0]}-{numbers[-1]}" if numbers == list(range(numbers[0], numbers[-1] + 1)) else ""


def generalize_name(name: str) -> str:
    """Replace numbers of list members by `*` in a name, or in a text with names.

    >>> generalize_name("layers.3.mlp reaches layers.4, not 2")
    'layers.*.mlp reaches layers.*, not 2'
    """
    return re.sub(r"(?<=\.)\d+\b", "*", name)


def label_names(names: list[str]) -> str:
    """Return one label for several similar names: `layers.0-3.mlp` if they differ in one number, otherwise `layers.*.mlp`."""
    if len(names) == 1:
        return names[0] or "the model"
    split = [re.split(r"(?<=\.)(\d+)\b", name) for name in names]
    differing = [i for i, parts in enumerate(zip(*split)) if len(set(parts)) > 1]
    span = format_span(sorted(int(parts[differing[0]]) for parts in split)) if len(differing) == 1 else ""
    if span:
        split[0][differing[0]] = span
        return "".join(split[0])
    return generalize_name(names[0]) or "the model"
