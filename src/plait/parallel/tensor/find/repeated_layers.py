"""Slices of a large model with many equal layers: a few layers are searched, and the others get the same slices.

Layers are equal if they ran the same operators on the same shapes and have the same structure
(`model/equal_layers.py`). Of each sequence of equal layers, the first two and the last one stay in the model for the
search. If the last one's groups are those of the second, all others get them too. Otherwise, the search runs on the
full model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from plait.model.equal_layers import LayerRows, is_inside, remove_equal_layers
from plait.model.slices import ColumnRowPair, Slices
from plait.parallel.tensor.find.finder import move_group


def find_in_shortened(model: nn.Module, rows: LayerRows, find: Callable[[], Slices]) -> Slices | None:
    """Return the result of `find` on the shortened model, extended to all layers; None if layers differ."""
    if not rows:
        return None
    try:
        with remove_equal_layers(model, rows):
            found, size = find(), sum(p.numel() for p in model.parameters())
    except Exception:  # for example, code that counts its layers; errors of the model itself appear again on the full model
        return None
    groups, reasons = list(found.groups), {name: (share, why) for name, share, why in found.unsliced}
    for row in rows:
        like, last = row[1], row[-1]
        own = {name: [g for g in groups if is_inside(g.container, name)] for name in (like, last)}
        mine = {name[len(like) :]: of for name, of in reasons.items() if is_inside(name, like)}
        crossing = any(is_inside(layer, g.container) for g in groups for layer in row)
        named = any(row[0].rpartition(".")[0] in why for _, why in mine.values())  # reasons that name other layers
        if crossing or named or own[last] != [_move_to_layer(g, like, last) for g in own[like]]:
            return None
        at = groups.index(own[last][0]) if own[last] else 0
        groups[at:at] = [_move_to_layer(g, like, name) for name in row[2:-1] for g in own[like]]
        reasons |= {name + inner: of for name in row[2:-1] for inner, of in mine.items()}
    return replace(found, groups=tuple(groups), unsliced=_rescale_reasons(model, reasons, size))


def _move_to_layer(group: ColumnRowPair, layer: str, other: str) -> ColumnRowPair:
    return move_group(group, other + group.container[len(layer) :])


def _rescale_reasons(model: nn.Module, reasons: Mapping[str, tuple[float, str]], size: int) -> tuple[tuple[str, float, str], ...]:
    """Convert the fractions in `Slices.unsliced` from a model with `size` elements to the full model."""
    total = sum(p.numel() for p in model.parameters())
    rows = [(name, round(reasons[name][0] * size) / total, reasons[name][1]) for name, _ in model.named_modules() if name in reasons]
    return tuple(sorted(rows, key=lambda row: -row[1]))
