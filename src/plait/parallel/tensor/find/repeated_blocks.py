"""Blocks that are alike: what was found for one is tried first for the others.

Two containers are alike when their modules have the same classes, the same numbers and words as attributes and
parameters of the same shapes, and are given tensors of the same shapes. Only numbers that count blocks may differ. It
saves the search, not the proof: the check is made for each.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.model.slices import ColumnRowPair
from plait.parallel.tensor.find.check import ReplayedModule
from plait.tensors.torch_private import leaves

_COUNTS = re.compile(r"(^|_)(idx|index|id|number|layer|block|depth|i)$")


def signature(containers: Iterable[ReplayedModule], names: Iterable[str]) -> Any:
    """A value that alike containers have in common, for layers of these names in it."""
    first, *rest = containers
    modules = []
    for name, module in first.module.named_modules():
        plain = tuple(
            (k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str)) and not _COUNTS.search(k)
        )
        shapes = tuple((k, tuple(p.shape), p.requires_grad) for k, p in module.named_parameters(recurse=False))
        modules.append((name, type(module), plain, shapes))
    given = [
        (tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t)
        for t in leaves((first.frame.args, first.frame.kwargs))
    ]
    inner = tuple(name[len(first.name) :] for name in names)
    return inner, tuple(modules), tuple(given), tuple(first.frame.kwargs), len(rest)


def renamed(group: ColumnRowPair, container: str) -> ColumnRowPair:
    """The same group in another container."""

    def name(old: str) -> str:
        return container + old[len(group.container) :]

    return replace(
        group,
        container=container,
        columns=tuple(map(name, group.columns)),
        row=name(group.row),
        cuts=tuple(replace(cut, parameter=name(cut.parameter)) for cut in group.cuts),
        integers=tuple(replace(integer, module=name(integer.module)) for integer in group.integers),
        partial=tuple(map(name, group.partial)),
        arguments=tuple(replace(argument, module=name(argument.module)) for argument in group.arguments),
    )
