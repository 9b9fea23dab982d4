"""Rows of alike layers in a large model, of which the first two and the last can stand for all.

Alike are layers that ran the same operators on the same shapes (`units.alike`), whose modules have the same classes, the same values as
attributes and parameters of the same shapes. One run has all layers, and shows which are alike. Later runs have a few of them
(`shortened`). What these record is extended to all layers (`lengthened`), unless the first run differs in more than the removed layers.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace

from torch import nn

from plait.model import units
from plait.model.meter import Metered, MeteredCall
from plait.model.trace import RunTrace
from plait.tensors.modules import STRUCTURE

PLAIN = (int, float, complex, str, bytes, bool, type(None))
Rows = tuple[tuple[str, ...], ...]
LARGE_MODEL = 1 << 26
"""Numbers in a model of which a few alike layers are looked at."""
COUNTS = re.compile(r"(^|_)(idx|index|id|number|layer|block|depth|i)$")
"""Names of attributes that count layers."""


def inside(name: str, layer: str) -> bool:
    """Whether a module is a layer or lies in it."""
    return f"{name}.".startswith(f"{layer}.")


def rows_of(model: nn.Module, alike: Rows) -> Rows:
    """Those of these rows, of a large model, whose layers are members of one list and have the same form."""
    if sum(p.numel() for p in model.parameters()) <= LARGE_MODEL:
        return ()
    found = []
    for row in alike:
        lists = {name.rpartition(".")[0] for name in row}
        forms = {_form(model.get_submodule(name)) for name in row}
        if len(lists) == len(forms) == 1 and type(model.get_submodule(min(lists))) is nn.ModuleList:
            found.append(row)
    return tuple(found)


def _form(module: nn.Module) -> tuple[object, ...]:
    """A value that alike modules have in common. Numbers that count layers do not belong to it."""
    rows = []
    for name, inner in module.named_modules():
        own = tuple((k, _value(v)) for k, v in vars(inner).items() if k not in STRUCTURE and not COUNTS.search(k))
        hooks = tuple(id(v) for k in STRUCTURE if "hook" in k and isinstance(t := vars(inner).get(k), dict) for v in t.values())
        parameters = tuple((k, tuple(p.shape), p.dtype, p.requires_grad) for k, p in inner.named_parameters(recurse=False))
        buffers = tuple(id(b) for b in inner.buffers(recurse=False))
        rows.append((name, type(inner), inner.training, own, hooks, parameters, buffers))
    return tuple(rows)


def _value(value: object) -> object:
    """What two attributes have in common that hold the same: of what is no plain value, that they are one object."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_value, value))
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


@contextmanager
def shortened(model: nn.Module, rows: Rows) -> Iterator[None]:
    """The model without the layers of each row but the first two and the last, which keep their names."""
    lists = {row: model.get_submodule(row[0].rpartition(".")[0]) for row in rows}
    before = {id(layers): (layers, dict(layers.named_children())) for layers in lists.values()}
    try:
        for row, layers in lists.items():
            for name in row[2:-1]:
                delattr(layers, name.rpartition(".")[2])
        yield
    finally:
        for layers, children in before.values():
            for name in [name for name, _ in layers.named_children()]:
                delattr(layers, name)
            for name, layer in children.items():
                layers.add_module(name, layer)


PLACED = ("needs", "leaks", "aside", "shared", "grad_fns")
"""Fields of a call that name others by their number."""


def lengthened(whole: RunTrace, short: RunTrace, other: RunTrace, rows: Rows) -> RunTrace | None:
    """What `other`, a run of the shortened model on another batch, would have shown with all layers: calls, and what was drawn where.
    `whole` and `short` are runs of the full and of the shortened model on one batch: None if they differ in more than the layers."""
    second = {name: row[1] for row in rows for name in row[2:-1]}
    if not _same_between(whole.metered, short.metered) or not units.same_calls(short.metered, other.metered):
        return None
    calls = {call.unit: (call, found) for call, found in zip(short.metered.calls, other.metered.calls)}
    remaining = sum(call.unit not in second for call in whole.metered.calls)
    if not len(calls) == len(short.metered.calls) == remaining:
        return None
    made = list[MeteredCall]()
    for call in whole.metered.calls:
        like, found = calls[second.get(call.unit, call.unit)]
        if not _same(call, like):
            return None
        shared = tuple(replace(one, calls=held.calls) for one, held in zip(found.shared, call.shared))
        kept = {"needs": call.needs, "leaks": call.leaks, "aside": call.aside, "shared": shared}
        made.append(replace(found, unit=call.unit, **kept))
    places = {place: _place(place, second) for place in whole.drawn}
    if {source: whole.drawn[place] for place, source in places.items()} != short.drawn:
        return None
    drawn = {place: other.drawn[source] for place, source in places.items() if source in other.drawn}
    return replace(other, drawn=drawn, metered=replace(other.metered, calls=made))


def _same_between(whole: Metered, short: Metered) -> bool:
    """Whether both runs computed and saved the same between units, and opened the same units."""
    between = ("flops", "effort", "saved", "opened", "differentiates")
    return all(getattr(whole, name) == getattr(short, name) for name in between)


def _same(call: MeteredCall, like: MeteredCall) -> bool:
    """Whether a call shows what the one that stands for it does, but for its place and the names in it."""
    plain = (f.name for f in fields(call) if f.name not in (*PLACED, "unit", "effort"))
    sizes = [[(one.size, one.kept) for one in shared] for shared in (call.shared, like.shared)]
    work = [(e.moved, e.operators, e.keys, [replace(p, weight="") for p in e.products]) for e in (call.effort, like.effort)]
    return sizes[0] == sizes[1] and work[0] == work[1] and all(getattr(call, n) == getattr(like, n) for n in plain)


def _place(place: str, second: Mapping[str, str]) -> str:
    """The place in the layer that stands for the one in which a number was drawn."""
    name = next((name for name in second if inside(place.split("#")[0], name)), None)
    return place if name is None else second[name] + place[len(name) :]
