"""Slices of a large model with rows of alike layers: a few of each row are followed, and the others have the same.

Alike are layers that ran the same operators on the same shapes (`Sketch.alike`), whose modules have the same classes, the same values as
attributes and parameters of the same shapes. The first two and the last of a row stay in the model while it is followed. The others
take the groups of the second, if the last one's are the same. What is known of no layer that stayed is not guessed: then
the model is followed with all of its layers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from plait.model.slices import ColumnRowPair, Slices
from plait.parallel.tensor.find.finder import COUNTS, renamed
from plait.parallel.tensor.find.linear_maps import LARGE_MODEL
from plait.tensors.modules import STRUCTURE

PLAIN = (int, float, complex, str, bytes, bool, type(None))
Rows = tuple[tuple[str, ...], ...]


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


def found_of(model: nn.Module, rows: Rows, find: Callable[[], Slices]) -> Slices | None:
    """What `find` finds in the shortened model, for all of its layers. None if that cannot be said."""
    if not rows:
        return None
    try:
        with shortened(model, rows):
            found, size = find(), sum(p.numel() for p in model.parameters())
    except Exception:  # code that counts its layers, for example; what is wrong with the model, the full one shows too
        return None
    groups, reasons = list(found.groups), {name: (share, why) for name, share, why in found.whole}
    for row in rows:
        like, last = row[1], row[-1]
        own = {name: [g for g in groups if _in(g.container, name)] for name in (like, last)}
        mine = {name[len(like) :]: of for name, of in reasons.items() if _in(name, like)}
        crossing = any(_in(layer, g.container) for g in groups for layer in row)
        named = any(row[0].rpartition(".")[0] in why for _, why in mine.values())  # other layers, whose numbers are those of the second
        if crossing or named or own[last] != [_moved(g, like, last) for g in own[like]]:
            return None
        at = groups.index(own[last][0]) if own[last] else 0
        groups[at:at] = [_moved(g, like, name) for name in row[2:-1] for g in own[like]]
        reasons |= {name + inner: of for name in row[2:-1] for inner, of in mine.items()}
    return replace(found, groups=tuple(groups), whole=_whole(model, reasons, size))


def _in(name: str, layer: str) -> bool:
    return f"{name}.".startswith(f"{layer}.")


def _moved(group: ColumnRowPair, layer: str, other: str) -> ColumnRowPair:
    return renamed(group, other + group.container[len(layer) :])


def _whole(model: nn.Module, reasons: Mapping[str, tuple[float, str]], size: int) -> tuple[tuple[str, float, str], ...]:
    """The rows of `Slices.whole`, whose shares were those of a model with `size` numbers."""
    total = sum(p.numel() for p in model.parameters())
    rows = [(name, round(reasons[name][0] * size) / total, reasons[name][1]) for name, _ in model.named_modules() if name in reasons]
    return tuple(sorted(rows, key=lambda row: -row[1]))
