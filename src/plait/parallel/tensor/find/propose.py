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

from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, Ranges, RegionArgument
from plait.parallel.tensor.find.check import ReplayedModule, taken
from plait.parallel.tensor.find.linear_maps import Map
from plait.tensors.rows import Rows
from plait.tensors.trees import nodes_behind

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
    divisors = set[int]()
    for column in columns:
        ranges = _column(column, needs.columns[column.name])
        divisors.add(divisor := column.weight.shape[column.out] // sum(length for _, length in ranges[0]))
        cuts += [ParameterSlice(f"{column.name}.weight", column.out, ranges)]
        cuts += [ParameterSlice(f"{column.name}.bias", 0, ranges)] if column.bias is not None else []
        integers += _own(column, "out", divisor)
    if divisors == {1}:
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


def _column(column: Map, masks: list[Tensor]) -> tuple[Ranges, ...]:
    """What each rank holds of a column."""
    sets = _along(masks, 0)
    size = column.weight.shape[column.out]
    if len(frozenset().union(*sets)) < size:
        raise Refused(f"not all features of {column.name} make a difference on the job's inputs")
    return _shared_out(sets, size, column.name)


def _shared_out(sets: Sets, size: int, name: str) -> tuple[Ranges, ...]:
    """What each rank holds of a dim. `Refused` unless all of it is held, by each rank as much, and any two hold the same or
    nothing in common: then gradients are summed over those that hold the same."""
    whole = len(frozenset().union(*sets)) == size
    if not whole or len({len(s) for s in sets}) > 1 or size % len(sets[0]):
        counts = ", ".join(str(len(s)) for s in sets)
        raise Refused(f"ranks would need {counts} of the {size} features of {name}")
    for (i, a), (j, b) in itertools.combinations(enumerate(sets), 2):
        if a != b and a & b:
            part = f"{len(a & b)} of {len(a)} features of {name}"
            raise Refused(f"processes {i} and {j} would share {part} and not the others: too few heads of keys")
    return tuple(map(ranges_of, sets))


def ranges_of(indices: Iterable[int]) -> Ranges:
    """Stretches of a set of indices, ascending."""
    ranges: list[list[int]] = []
    for i in sorted(indices):
        if ranges and i == ranges[-1][0] + ranges[-1][1]:
            ranges[-1][1] += 1
        else:
            ranges.append([i, 1])
    return tuple((first, length) for first, length in ranges)


def _divided(masks: list[Tensor], name: str) -> tuple[int, tuple[Ranges, ...]] | None:
    """(dim, ranges) when ranks need different parts of a tensor, None when they all need the same."""
    for dim in range(masks[0].dim()):
        sets = _along(masks, dim)
        if len(set(sets)) > 1:
            return dim, _shared_out(sets, masks[0].shape[dim], name)
    return None


def _along(masks: list[Tensor], dim: int) -> Sets:
    """The indices of one dim at which anything is needed."""
    return [frozenset(_features_of(m, dim).nonzero().flatten().tolist()) for m in masks]


def _arguments(container: ReplayedModule, needs: Needs, n: int) -> tuple[RegionArgument, ...]:
    """Tensors the container is given that the code between columns and row uses directly."""
    values = dict(enumerate(container.frame.args)) | container.frame.kwargs
    arguments = []
    for key, masks in needs.arguments.items():
        if not any(mask.any() for mask in masks):
            continue
        trained = values[key].requires_grad
        if trained and key in needs.elsewhere:
            raise Refused(
                f"the argument {key!r} of {container.name or 'the model'} is used between the layers and beside them"
            )
        cut = _divided(masks, f"the argument {key!r}")
        if cut is not None:
            if cut[1] != Rows.even(values[key].shape[cut[0]], n).ranks:
                raise Refused(f"ranks would need parts of the argument {key!r} that are no slices")
            arguments.append(RegionArgument(container.name, key, cut[0]))
        elif trained:
            arguments.append(RegionArgument(container.name, key, None))
    return tuple(arguments)


# — gradients —


def _needs(container: ReplayedModule, columns: list[Map], row: Map, rows: tuple[Ranges, ...]) -> Needs:
    needs = Needs({}, {}, {}, set())
    for number in range(ROUNDS[1]):
        _add_round(needs, container, columns, row, rows, seed=100 + number)
        complete = all(torch.stack(masks).any(0).all() for masks in needs.columns.values())
        if number + 1 >= ROUNDS[0] and complete:
            break
    return needs


def _add_round(
    needs: Needs, container: ReplayedModule, columns: list[Map], row: Map, rows: tuple[Ranges, ...], *, seed: int
) -> None:
    """Add what gradients of a whole run on other random numbers show."""
    values = container.values(seed)
    outputs: dict[str, list[Tensor]] = {c.name: [] for c in columns}
    for (name, _), value in values.items():
        if name in outputs:
            outputs[name].append(value.requires_grad_())
    leaf = {name: p.detach().clone().requires_grad_() for name, p in container.parameters.items()}
    run = container.run(values, leaf=leaf)
    inputs = [x for name, _, x in run.given if name == row.name]
    if not all(torch.isfinite(x).all() for x in inputs):
        raise Refused(f"on random numbers {row.name} is given infinite ones, which proves nothing")
    direct: dict[int | str, Tensor] = {k: t for k, t in run.arguments.items() if t.requires_grad}
    known = [*itertools.chain(*outputs.values()), *leaf.values()]
    _no_strangers(inputs, known, list(direct.values()), container)
    for rank, ranges in enumerate(rows):
        grads = iter(_gradients([taken(x, row.feature, ranges) for x in inputs], [*known, *direct.values()]))
        for column in columns:
            masks = [_features_of(next(grads), column.feature) for _ in outputs[column.name]]
            _add(needs.columns, column.name, rank, torch.stack(masks).any(0))
        for name in leaf:
            _add(needs.parameters, name, rank, next(grads))
        for key in direct:
            _add(needs.arguments, key, rank, next(grads))
    others = [x for name, _, x in run.given if name != row.name and isinstance(x, Tensor)]
    others += [t for i in container.frame.live if isinstance(t := run.output[i], Tensor)]
    used = _gradients(others, [*leaf.values(), *direct.values()])
    needs.elsewhere |= {name for name, mask in zip([*leaf, *direct], used) if mask.any()}


def _add(masks: dict[Any, list[Tensor]], key: int | str, rank: int, mask: Tensor) -> None:
    """Add to what a rank needs of a tensor; ranks come in order."""
    known = masks.setdefault(key, [])
    if rank < len(known):
        known[rank] |= mask
    else:
        known.append(mask)


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


def _no_strangers(inputs: list[Tensor], known: list[Tensor], direct: list[Tensor], container: ReplayedModule) -> None:
    """Refuse when what the row is given depends on a trained tensor that came by no way we know."""
    leaves = {id(t) for t in known}
    nodes = {t.grad_fn for t in (*known, *direct) if t.grad_fn is not None}
    for node in nodes_behind((x.grad_fn for x in inputs), nodes):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            where = container.name or "the model"
            raise Refused(f"a trained tensor reaches the code of {where} by another way than its arguments")
