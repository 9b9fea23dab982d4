"""Slices of a large model with rows of alike layers: a few of each row are followed, and the others have the same.

Alike are layers that ran the same operators on the same shapes and have the same form (`model/alike.py`). The first two and the last of a
row stay in the model while it is followed. The others take the groups of the second, if the last one's are the same. What is
known of no layer that stayed is not guessed: then the model is followed with all of its layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from plait.model.alike import Rows, inside, shortened
from plait.model.slices import ColumnRowPair, Slices
from plait.parallel.tensor.find.finder import renamed


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
        own = {name: [g for g in groups if inside(g.container, name)] for name in (like, last)}
        mine = {name[len(like) :]: of for name, of in reasons.items() if inside(name, like)}
        crossing = any(inside(layer, g.container) for g in groups for layer in row)
        named = any(row[0].rpartition(".")[0] in why for _, why in mine.values())  # other layers, whose numbers are those of the second
        if crossing or named or own[last] != [_moved(g, like, last) for g in own[like]]:
            return None
        at = groups.index(own[last][0]) if own[last] else 0
        groups[at:at] = [_moved(g, like, name) for name in row[2:-1] for g in own[like]]
        reasons |= {name + inner: of for name in row[2:-1] for inner, of in mine.items()}
    return replace(found, groups=tuple(groups), whole=_whole(model, reasons, size))


def _moved(group: ColumnRowPair, layer: str, other: str) -> ColumnRowPair:
    return renamed(group, other + group.container[len(layer) :])


def _whole(model: nn.Module, reasons: Mapping[str, tuple[float, str]], size: int) -> tuple[tuple[str, float, str], ...]:
    """The rows of `Slices.whole`, whose shares were those of a model with `size` numbers."""
    total = sum(p.numel() for p in model.parameters())
    rows = [(name, round(reasons[name][0] * size) / total, reasons[name][1]) for name, _ in model.named_modules() if name in reasons]
    return tuple(sorted(rows, key=lambda row: -row[1]))
