"""Rows of equal layers in a large model, represented by their first two layers and their last one.

Layers are equal if they ran the same operators on the same shapes (`units.find_equal_rows`), and if their modules have the same classes, attribute
values and parameter shapes. One run has all layers and shows which are equal. Later runs have a few of them (`remove_equal_layers`), and
their records are extended to all layers (`extend_trace`). The extension fails if the first run differs by more than the removed layers.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace

from torch import nn

from plait.model import units
from plait.model.meter import MeteredCall, MeteredRun
from plait.model.trace import RunTrace
from plait.tensors.module_state import MODULE_ATTRIBUTES

PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None))
LayerRows = tuple[tuple[str, ...], ...]
LARGE_MODEL = 1 << 26
"""Minimum elements of a model for which equal layers are removed."""
COUNTER_NAMES = re.compile(r"(^|_)(idx|index|id|number|layer|block|depth|i)$")
"""Names of attributes that count layers."""


def is_inside(name: str, layer: str) -> bool:
    """Whether a module is a layer or lies in it."""
    return f"{name}.".startswith(f"{layer}.")


def find_layer_rows(model: nn.Module, alike: LayerRows) -> LayerRows:
    """Return the rows of a large model whose layers are members of one list and have equal modules."""
    if sum(p.numel() for p in model.parameters()) <= LARGE_MODEL:
        return ()
    found = []
    for row in alike:
        lists = {name.rpartition(".")[0] for name in row}
        forms = {_make_form_key(model.get_submodule(name)) for name in row}
        if len(lists) == len(forms) == 1 and type(model.get_submodule(min(lists))) is nn.ModuleList:
            found.append(row)
    return tuple(found)


def _make_form_key(module: nn.Module) -> tuple[object, ...]:
    """Return a key that equal modules share. It excludes attributes that count layers."""
    rows = []
    for name, inner in module.named_modules():
        own = tuple((k, _make_value_key(v)) for k, v in vars(inner).items() if k not in MODULE_ATTRIBUTES and not COUNTER_NAMES.search(k))
        hooks = tuple(id(v) for k in MODULE_ATTRIBUTES if "hook" in k and isinstance(t := vars(inner).get(k), dict) for v in t.values())
        parameters = tuple((k, tuple(p.shape), p.dtype, p.requires_grad) for k, p in inner.named_parameters(recurse=False))
        buffers = tuple(id(b) for b in inner.buffers(recurse=False))
        rows.append((name, type(inner), inner.training, own, hooks, parameters, buffers))
    return tuple(rows)


def _make_value_key(value: object) -> object:
    """Return a key of an attribute's value: the value of plain types, the identity of other objects."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_make_value_key, value))
    return (type(value), value) if isinstance(value, PLAIN_TYPES) else id(value)


@contextmanager
def remove_equal_layers(model: nn.Module, rows: LayerRows) -> Iterator[None]:
    """Remove all layers of each row but the first two and the last, inside this context. Names stay."""
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


INDEX_FIELDS = ("needs", "leaks", "aside", "shared", "grad_fns")
"""Fields of a call with indices of other calls."""


def extend_trace(full: RunTrace, short: RunTrace, other: RunTrace, rows: LayerRows) -> RunTrace | None:
    """Extend a trace of the shortened model to all layers: calls, and shapes of random draws.

    `other` ran the shortened model on another batch; `full` and `short` ran both models on one batch. Returns None if these two differ by more than
    the
    removed layers.
    """
    second = {name: row[1] for row in rows for name in row[2:-1]}
    if not _is_same_between(full.metered, short.metered) or not units.has_same_calls(short.metered, other.metered):
        return None
    calls = {call.unit: (call, found) for call, found in zip(short.metered.calls, other.metered.calls)}
    remaining = sum(call.unit not in second for call in full.metered.calls)
    if not len(calls) == len(short.metered.calls) == remaining:
        return None
    made = list[MeteredCall]()
    for call in full.metered.calls:
        like, found = calls[second.get(call.unit, call.unit)]
        if not _is_same_call(call, like):
            return None
        shared = tuple(replace(one, calls=held.calls) for one, held in zip(found.shared, call.shared))
        kept = {"needs": call.needs, "leaks": call.leaks, "aside": call.aside, "shared": shared}
        made.append(replace(found, unit=call.unit, **kept))
    places = {place: _map_place(place, second) for place in full.drawn}
    if {source: full.drawn[place] for place, source in places.items()} != short.drawn:
        return None
    drawn = {place: other.drawn[source] for place, source in places.items() if source in other.drawn}
    return replace(other, drawn=drawn, metered=replace(other.metered, calls=made))


def _is_same_between(full: MeteredRun, short: MeteredRun) -> bool:
    """Whether both runs computed and saved the same between units, and opened the same units."""
    between = ("flops", "effort", "saved", "opened", "differentiates")
    return all(getattr(full, name) == getattr(short, name) for name in between)


def _is_same_call(call: MeteredCall, other: MeteredCall) -> bool:
    """Whether a call equals its representative, except for its position and the names in it."""
    plain = (f.name for f in fields(call) if f.name not in (*INDEX_FIELDS, "unit", "effort"))
    sizes = [[(one.size, one.kept) for one in shared] for shared in (call.shared, other.shared)]
    work = [(e.moved, e.operators, e.keys, [replace(p, weight="") for p in e.products]) for e in (call.effort, other.effort)]
    return sizes[0] == sizes[1] and work[0] == work[1] and all(getattr(call, n) == getattr(other, n) for n in plain)


def _map_place(place: str, second: Mapping[str, str]) -> str:
    """Return the corresponding random place in the layer that represents this one."""
    name = next((name for name in second if is_inside(place.split("#")[0], name)), None)
    return place if name is None else second[name] + place[len(name) :]
