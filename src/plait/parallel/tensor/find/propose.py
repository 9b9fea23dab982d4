"""From the row backwards: which features of the columns, and what else, each rank needs for its slice.

Nothing is guessed about layouts. The row's input is cut into n slices; autograd says which features of each column a
slice depends on: those with a gradient that is not zero. A fused q, k, v in any order, keys that several heads share, a
convolution's filter for each channel, a bias for each head, a norm that mixes everything: all are read off alike. Where
random numbers happen to leave a feature without gradient (a ReLU), more of them are drawn.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, Ranges, RegionArgument
from plait.parallel.tensor.find.check import ReplayedModule, ReplayedRun
from plait.parallel.tensor.find.linear_maps import Map

ROUNDS = (2, 24)
"""At least and at most so many draws of random numbers."""
Sets = list[frozenset[int]]
"""Indices along one dim, for each rank."""


class Refused(Exception):
    """A group stays whole; the message says why."""


@dataclass
class Needs:
    """What each rank's slice of the row's input depends on: for each tensor and rank, which of its elements."""

    columns: dict[str, list[Tensor]]
    """(name of a column) -> for each rank [features], true where needed."""
    parameters: dict[str, list[Tensor]]
    arguments: dict[int | str, list[Tensor]]
    elsewhere: set[int | str]
    """Parameters and arguments that something else in the container depends on too."""


def proposals(container: ReplayedModule, columns: list[Map], row: Map, n: int) -> Iterator[ColumnRowPair]:
    """Groups in which every rank has what it needs; integers are not divided yet. Raises `Refused`."""
    size = row.weight.shape[row.into]
    if size % n:
        raise Refused(f"{row.name} has {size} input features, which {n} does not divide")
    reasons = []
    for rows in _partitions(size, n):
        try:
            yield _proposal(container, columns, row, rows)
        except Refused as refused:
            reasons.append(str(refused))
    if reasons:
        raise Refused(reasons[0])


def _partitions(size: int, n: int) -> Iterator[tuple[Ranges, ...]]:
    """Ways to cut the row's input: in a piece, inside each of a few equal parts, every n-th feature."""
    for parts in (1, 2, 3, 4):
        if size % (n * parts) == 0:
            step = size // parts
            yield tuple(tuple((p * step + r * step // n, step // n) for p in range(parts)) for r in range(n))
    if 4 < size // n <= 64:
        yield tuple(tuple((i, 1) for i in range(r, size, n)) for r in range(n))


def _proposal(container: ReplayedModule, columns: list[Map], row: Map, rows: tuple[Ranges, ...]) -> ColumnRowPair:
    needs = _needs(container, columns, row, rows)
    n = len(rows)
    cuts: list[ParameterSlice] = []
    integers: list[DividedNumber] = []
    for column in columns:
        ranges, divisor = _column(column, needs.columns[column.name])
        cuts += [ParameterSlice(f"{column.name}.weight", column.out, ranges)]
        cuts += [ParameterSlice(f"{column.name}.bias", 0, ranges)] if column.bias is not None else []
        integers += _own(column, "out", divisor)
    if all(
        cut.ranges[0] == ((0, _features(c)),) for c in columns for cut in cuts if cut.parameter == f"{c.name}.weight"
    ):
        names = " and ".join(c.name for c in columns)
        raise Refused(f"every part of what {row.name} is given depends on all features of {names}")
    cuts.append(ParameterSlice(f"{row.name}.weight", row.into, rows))
    integers += _own(row, "into", n)
    partial = []
    for name, masks in needs.parameters.items():
        if not any(mask.any() for mask in masks):
            continue
        if name in needs.elsewhere:
            raise Refused(f"{name} is used between the layers and beside them")
        cut = _divided(masks, name)
        cuts += [ParameterSlice(name, cut[0], cut[1])] if cut else []
        partial += [] if cut else [name]
    arguments = _arguments(container, needs, n)
    names = tuple(c.name for c in columns)
    return ColumnRowPair(
        container.name, names, row.name, tuple(cuts), tuple(integers), partial=tuple(partial), arguments=arguments
    )


def _own(map_: Map, role: str, divisor: int) -> list[DividedNumber]:
    names = map_.integers(role, divisor) if divisor > 1 else ()
    if names is None:
        raise Refused(f"{map_.name} cannot run with a part of its features")
    return [DividedNumber(map_.name, name, divisor) for name in names]


def _features(column: Map) -> int:
    return column.weight.shape[column.out]


def _column(column: Map, masks: list[Tensor]) -> tuple[tuple[Ranges, ...], int]:
    """What each rank holds of a column, and by what the number of its features is divided."""
    sets = [frozenset(m.nonzero().flatten().tolist()) for m in masks]
    size = _features(column)
    if len(frozenset().union(*sets)) < size:
        raise Refused(f"not all features of {column.name} make a difference on the job's inputs")
    if len({len(s) for s in sets}) > 1 or size % len(sets[0]):
        raise Refused(f"ranks would need {_counts(sets)} of the {size} features of {column.name}")
    _apart(sets, column.name)
    return tuple(ranges_of(s) for s in sets), size // len(sets[0])


def _counts(sets: Sets) -> str:
    return ", ".join(str(len(s)) for s in sets)


def _apart(sets: Sets, name: str) -> None:
    """Ranks hold the same or nothing in common: then gradients are summed over those that hold the same."""
    for (i, a), (j, b) in itertools.combinations(enumerate(sets), 2):
        if a != b and a & b:
            part = f"{len(a & b)} of {len(a)} features of {name}"
            raise Refused(f"processes {i} and {j} would share {part} and not the others: too few heads of keys")


def ranges_of(indices: Iterable[int]) -> Ranges:
    """Stretches of a set of indices, ascending."""
    found: list[list[int]] = []
    for i in sorted(indices):
        if found and i == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([i, 1])
    return tuple((first, length) for first, length in found)


def _divided(masks: list[Tensor], name: str) -> tuple[int, tuple[Ranges, ...]] | None:
    """(dim, ranges) when ranks need different parts of a tensor, None when they all need the same."""
    for dim in range(masks[0].dim()):
        sets = _along(masks, dim)
        if len(set(sets)) > 1:
            size = masks[0].shape[dim]
            whole = len(frozenset().union(*sets)) == size
            if not whole or len({len(s) for s in sets}) > 1 or size % len(sets[0]):
                raise Refused(f"ranks would need {_counts(sets)} of the {size} features of {name}")
            _apart(sets, name)
            return dim, tuple(ranges_of(s) for s in sets)
    return None


def _along(masks: list[Tensor], dim: int) -> Sets:
    """The indices of one dim at which anything is needed."""
    return [frozenset(_features_of(m, dim).nonzero().flatten().tolist()) for m in masks]


def _arguments(container: ReplayedModule, needs: Needs, n: int) -> tuple[RegionArgument, ...]:
    """Tensors the container is given that the code between columns and row uses directly."""
    given = dict(enumerate(container.frame.args)) | container.frame.kwargs
    found = []
    for key, masks in needs.arguments.items():
        if not any(mask.any() for mask in masks):
            continue
        trained = given[key].requires_grad
        if trained and key in needs.elsewhere:
            raise Refused(
                f"the argument {key!r} of {container.name or 'the model'} is used between the layers and beside them"
            )
        cut = _divided(masks, f"the argument {key!r}")
        if cut is not None:
            step = given[key].shape[cut[0]] // n
            if cut[1] != tuple(((r * step, step),) for r in range(n)):
                raise Refused(f"ranks would need parts of the argument {key!r} that are no slices")
            found.append(RegionArgument(container.name, key, cut[0]))
        elif trained:
            found.append(RegionArgument(container.name, key, None))
    return tuple(found)


# — gradients —


def _needs(container: ReplayedModule, columns: list[Map], row: Map, rows: tuple[Ranges, ...]) -> Needs:
    found: Needs | None = None
    for number in range(ROUNDS[1]):
        seen, leaf, made = _traced(container, columns, 100 + number)
        found = _added(found, _round(container, row, rows, (seen, leaf, made)))
        complete = all(torch.stack(m).any(0).all() for m in found.columns.values())
        if number + 1 >= ROUNDS[0] and complete:
            break
    assert found is not None
    return found


def _traced(
    container: ReplayedModule, columns: list[Map], seed: int
) -> tuple[ReplayedRun, dict[str, Tensor], dict[str, list[Tensor]]]:
    """A whole run in which gradients of what columns return, of parameters and of arguments can be asked for."""
    values = container.values(seed)
    made: dict[str, list[Tensor]] = {c.name: [] for c in columns}
    for (name, _), value in values.items():
        if name in made:
            made[name].append(value.requires_grad_())
    leaf = {name: p.detach().clone().requires_grad_() for name, p in container.parameters.items()}
    return container.run(values, leaf=leaf), leaf, made


def _round(
    container: ReplayedModule,
    row: Map,
    rows: tuple[Ranges, ...],
    traced: tuple[ReplayedRun, dict[str, Tensor], dict[str, list[Tensor]]],
) -> Needs:
    seen, leaf, made = traced
    inputs = [x for name, _, x in seen.given if name == row.name]
    if not all(torch.isfinite(x).all() for x in inputs):
        raise Refused(f"on random numbers {row.name} is given infinite ones, which proves nothing")
    direct: dict[int | str, Tensor] = {k: t for k, t in seen.arguments.items() if t.requires_grad}
    flat = [*itertools.chain(*made.values()), *leaf.values(), *direct.values()]
    known = {id(t) for t in (*itertools.chain(*made.values()), *leaf.values())}
    _no_strangers(inputs, known, container, flat)
    needs = Needs({c: [] for c in made}, {}, {}, set())
    features = {name: container.maps[name].feature for name in made}
    for ranges in rows:
        picked = [_picked(x, row.feature, ranges) for x in inputs]
        grads = iter(_gradients(picked, flat))
        for name, tensors in made.items():
            masks = [next(grads) for _ in tensors]
            needs.columns[name].append(torch.stack([_features_of(m, features[name]) for m in masks]).any(0))
        for name in leaf:
            needs.parameters.setdefault(name, []).append(next(grads))
        for key in direct:
            needs.arguments.setdefault(key, []).append(next(grads))
    others = [x for name, _, x in seen.given if name != row.name and isinstance(x, Tensor)]
    others += [t for i in container.frame.live if isinstance(t := seen.output[i], Tensor)]
    names = [*leaf, *direct]
    used = _gradients(others, [*leaf.values(), *direct.values()])
    needs.elsewhere = {name for name, mask in zip(names, used) if mask.any()}
    return needs


def _picked(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    return torch.cat([x.narrow(dim, first, length) for first, length in ranges], dim)


def _features_of(mask: Tensor, dim: int) -> Tensor:
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1)


def _gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Where random sums of the outputs have a gradient with respect to each of the inputs."""
    wanted = [t for t in outputs if t.requires_grad]
    if not wanted or not inputs:
        return [torch.zeros_like(t, dtype=torch.bool) for t in inputs]
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=g, dtype=t.dtype) for t in wanted]
    grads = torch.autograd.grad(wanted, inputs, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t, dtype=torch.bool) if d is None else d != 0 for t, d in zip(inputs, grads)]


def _no_strangers(inputs: list[Tensor], known: set[int], container: ReplayedModule, flat: list[Tensor]) -> None:
    """Refuse when what the row is given depends on a trained tensor that came by no way we know."""
    nodes = {t.grad_fn for t in flat if t.grad_fn is not None}
    met: set[Node] = set()
    stack = [x.grad_fn for x in inputs if x.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in met or node in nodes:
            continue
        met.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            where = container.name or "the model"
            raise Refused(f"a trained tensor reaches the code of {where} by another way than its arguments")
        stack += [k for k, _ in node.next_functions if k is not None]


def _added(a: Needs | None, b: Needs) -> Needs:
    if a is None:
        return b

    def either(x: dict[Any, list[Tensor]], y: dict[Any, list[Tensor]]) -> dict[Any, list[Tensor]]:
        return {k: [m | o for m, o in zip(x[k], y[k])] for k in x}

    return Needs(
        either(a.columns, b.columns),
        either(a.parameters, b.parameters),
        either(a.arguments, b.arguments),
        a.elsewhere | b.elsewhere,
    )
