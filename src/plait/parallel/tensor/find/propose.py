"""Proposals of groups: the features of the columns, and other elements, that each rank needs for its slice of a row
layer.

No layout is assumed. The row's input is split into n slices. By autograd, a slice depends on the features of each
column with a nonzero gradient. This covers a fused q, k, v in any order, keys of several heads, a convolution's filter
per channel, a bias per head, and norms over all features. If random values leave a feature without a gradient (a ReLU),
more values are drawn.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.model.slices import ColumnRowPair, ParameterSlice, Ranges, RegionArgument, ScaledAttribute
from plait.parallel.tensor.find.linear_maps import LinearMap
from plait.parallel.tensor.find.replayed_module import ReplayedModule, copy_ranges
from plait.tensors.rows import Rows
from plait.tensors.trees import iter_backward_nodes

DRAW_ROUNDS = (2, 24)
"""Minimum and maximum number of draws of random values."""
IndexSets = list[frozenset[int]]
"""Per rank: indices along one dim."""


class GroupRejected(Exception):
    """Raised if a group cannot be sharded; the message is the reason."""


@dataclass
class RankNeeds:
    """The elements that each rank's slice of the row's input depends on, by tensor and rank."""

    columns: dict[str, list[Tensor]]
    """Name of a column -> per rank a mask [features], true where needed."""
    parameters: dict[str, list[Tensor]]
    arguments: dict[int | str, list[Tensor]]
    used_elsewhere: set[int | str]
    """Parameters and arguments that other results of the container depend on too."""


def propose_groups(container: ReplayedModule, columns: list[LinearMap], row: LinearMap, n: int) -> Iterator[ColumnRowPair]:
    """Iterate over groups in which every rank has the elements that it needs; integers are not divided yet. Raises `GroupRejected`."""
    size = row.weight.shape[row.in_dim]
    if size % n:
        raise GroupRejected(f"{row.name} has {size} input features, which {n} does not divide")
    reasons = []
    for rows in _iter_partitions(size, n):
        try:
            yield _propose_group(container, columns, row, rows)
        except GroupRejected as refused:
            reasons.append(str(refused))
    if reasons:
        raise GroupRejected(reasons[0])


def _iter_partitions(size: int, n: int) -> Iterator[tuple[Ranges, ...]]:
    """Iterate over ways to split the row's input: contiguous, inside each of a few equal parts, or every n-th feature."""
    for parts in (1, 2, 3, 4):
        if size % (n * parts) == 0:
            step = size // parts
            yield tuple(tuple((p * step + r * step // n, step // n) for p in range(parts)) for r in range(n))
    if 4 < size // n <= 64:
        yield tuple(tuple((i, 1) for i in range(r, size, n)) for r in range(n))


def _propose_group(container: ReplayedModule, columns: list[LinearMap], row: LinearMap, rows: tuple[Ranges, ...]) -> ColumnRowPair:
    needs = _find_needs(container, columns, row, rows)
    n = len(rows)
    cuts: list[ParameterSlice] = []
    integers: list[ScaledAttribute] = []
    divisors = set[int]()
    for column in columns:
        ranges = _find_column_ranges(column, needs.columns[column.name])
        divisors.add(divisor := column.weight.shape[column.out_dim] // sum(length for _, length in ranges[0]))
        cuts += [ParameterSlice(f"{column.name}.weight", column.out_dim, ranges)]
        cuts += [ParameterSlice(f"{column.name}.bias", 0, ranges)] if column.bias is not None else []
        integers += _divide_integers(column, "out", divisor)
    if divisors == {1}:
        names = " and ".join(c.name for c in columns)
        raise GroupRejected(f"every part of the input of {row.name} depends on all features of {names}")
    cuts.append(ParameterSlice(f"{row.name}.weight", row.in_dim, rows))
    integers += _divide_integers(row, "into", n)
    partial = []
    for name, masks in needs.parameters.items():
        if not any(mask.any() for mask in masks):
            continue
        if name in needs.used_elsewhere:
            raise GroupRejected(f"{name} is used both between the layers and outside of them")
        cut = _find_division(masks, name)
        cuts += [ParameterSlice(name, cut[0], cut[1])] if cut else []
        partial += [] if cut else [name]
    arguments = _find_arguments(container, needs, n)
    names = tuple(c.name for c in columns)
    return ColumnRowPair(
        container.name, names, row.name, tuple(cuts), tuple(integers), partial_gradients=tuple(partial), arguments=arguments
    )


def _divide_integers(map_: LinearMap, role: str, divisor: int) -> list[ScaledAttribute]:
    names = map_.find_integers(role, divisor) if divisor > 1 else ()
    if names is None:
        raise GroupRejected(f"{map_.name} cannot run with some of its features")
    return [ScaledAttribute(map_.name, name, divisor) for name in names]


def _find_column_ranges(column: LinearMap, masks: list[Tensor]) -> tuple[Ranges, ...]:
    """Return each rank's ranges of a column's features."""
    sets = _find_indices(masks, 0)
    size = column.weight.shape[column.out_dim]
    if len(frozenset().union(*sets)) < size:
        raise GroupRejected(f"some features of {column.name} have no effect on the job's inputs")
    return _assign_ranges(sets, size, column.name)


def _assign_ranges(sets: IndexSets, size: int, name: str) -> tuple[Ranges, ...]:
    """Return each rank's ranges of a dim. Raises `GroupRejected` unless they cover the dim, are equally large, and any
    two are equal or disjoint. Gradients are then summed over ranks with equal ranges."""
    whole = len(frozenset().union(*sets)) == size
    if not whole or len({len(s) for s in sets}) > 1 or size % len(sets[0]):
        counts = ", ".join(str(len(s)) for s in sets)
        raise GroupRejected(f"ranks would need {counts} of the {size} features of {name}")
    for (i, a), (j, b) in itertools.combinations(enumerate(sets), 2):
        if a != b and a & b:
            part = f"{len(a & b)} of {len(a)} features of {name}"
            raise GroupRejected(f"ranks {i} and {j} would have {part} in common but not the others: there are too few key heads for tp")
    return tuple(map(merge_indices, sets))


def merge_indices(indices: Iterable[int]) -> Ranges:
    """Merge a set of indices into ascending ranges."""
    ranges: list[list[int]] = []
    for i in sorted(indices):
        if ranges and i == ranges[-1][0] + ranges[-1][1]:
            ranges[-1][1] += 1
        else:
            ranges.append([i, 1])
    return tuple((first, length) for first, length in ranges)


def _find_division(masks: list[Tensor], name: str) -> tuple[int, tuple[Ranges, ...]] | None:
    """Return (dim, ranges) if ranks need different parts of a tensor, or None if all need the same."""
    for dim in range(masks[0].dim()):
        sets = _find_indices(masks, dim)
        if len(set(sets)) > 1:
            return dim, _assign_ranges(sets, masks[0].shape[dim], name)
    return None


def _find_indices(masks: list[Tensor], dim: int) -> IndexSets:
    """Return per rank the indices of one dim at which any element is needed."""
    return [frozenset(_any_along(m, dim).nonzero().flatten().tolist()) for m in masks]


def _find_arguments(container: ReplayedModule, needs: RankNeeds, n: int) -> tuple[RegionArgument, ...]:
    """Return the container's tensor arguments that the code between columns and row uses directly."""
    values = dict(enumerate(container.call.args)) | container.call.kwargs
    arguments = []
    for key, masks in needs.arguments.items():
        if not any(mask.any() for mask in masks):
            continue
        trained = values[key].requires_grad
        if trained and key in needs.used_elsewhere:
            raise GroupRejected(
                f"the argument {key!r} of {container.name or 'the model'} is used both between the layers and outside of them"
            )
        cut = _find_division(masks, f"the argument {key!r}")
        if cut is not None:
            if cut[1] != Rows.make_even(values[key].shape[cut[0]], n).ranks:
                raise GroupRejected(f"ranks would need parts of the argument {key!r} that are not even slices")
            arguments.append(RegionArgument(container.name, key, cut[0]))
        elif trained:
            arguments.append(RegionArgument(container.name, key, None))
    return tuple(arguments)


# — gradients —


def _find_needs(container: ReplayedModule, columns: list[LinearMap], row: LinearMap, rows: tuple[Ranges, ...]) -> RankNeeds:
    needs = RankNeeds({}, {}, {}, set())
    for number in range(DRAW_ROUNDS[1]):
        _add_round(needs, container, columns, row, rows, seed=100 + number)
        complete = all(torch.stack(masks).any(0).all() for masks in needs.columns.values())
        if number + 1 >= DRAW_ROUNDS[0] and complete:
            break
    return needs


def _add_round(
    needs: RankNeeds, container: ReplayedModule, columns: list[LinearMap], row: LinearMap, rows: tuple[Ranges, ...], *, seed: int
) -> None:
    """Add the needs that gradients of a full run on new random values show."""
    values = container.draw_values(seed)
    outputs: dict[str, list[Tensor]] = {c.name: [] for c in columns}
    for (name, _), value in values.items():
        if name in outputs:
            outputs[name].append(value.requires_grad_())
    leaf = {name: p.detach().clone().requires_grad_() for name, p in container.parameters.items()}
    run = container.run(values, leaf=leaf)
    inputs = [x for name, _, x in run.map_inputs if name == row.name]
    if not all(torch.isfinite(x).all() for x in inputs):
        raise GroupRejected(f"on random values the input of {row.name} is infinite, so the check proves nothing")
    direct: dict[int | str, Tensor] = {k: t for k, t in run.arguments.items() if t.requires_grad}
    known = [*itertools.chain(*outputs.values()), *leaf.values()]
    _reject_hidden_inputs(inputs, known, list(direct.values()), container)
    for rank, ranges in enumerate(rows):
        grads = iter(_compute_gradient_masks([copy_ranges(x, row.feature_dim, ranges) for x in inputs], [*known, *direct.values()]))
        for column in columns:
            masks = [_any_along(next(grads), column.feature_dim) for _ in outputs[column.name]]
            _add_mask(needs.columns, column.name, rank, torch.stack(masks).any(0))
        for name in leaf:
            _add_mask(needs.parameters, name, rank, next(grads))
        for key in direct:
            _add_mask(needs.arguments, key, rank, next(grads))
    others = [x for name, _, x in run.map_inputs if name != row.name and isinstance(x, Tensor)]
    others += [t for i in container.call.used_leaves if isinstance(t := run.output[i], Tensor)]
    used = _compute_gradient_masks(others, [*leaf.values(), *direct.values()])
    needs.used_elsewhere |= {name for name, mask in zip([*leaf, *direct], used) if mask.any()}


def _add_mask(masks: dict[Any, list[Tensor]], key: int | str, rank: int, mask: Tensor) -> None:
    """Add to a rank's mask of a tensor. Ranks must come in ascending order."""
    known = masks.setdefault(key, [])
    if rank < len(known):
        known[rank] |= mask
    else:
        known.append(mask)


def _any_along(mask: Tensor, dim: int) -> Tensor:
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1)


def _compute_gradient_masks(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return for each input a mask of elements with a nonzero gradient from random sums of the outputs."""
    wanted = [t for t in outputs if t.requires_grad]
    if not wanted or not inputs:
        return [torch.zeros_like(t, dtype=torch.bool) for t in inputs]
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=g, dtype=t.dtype) for t in wanted]
    grads = torch.autograd.grad(wanted, inputs, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t, dtype=torch.bool) if d is None else d != 0 for t, d in zip(inputs, grads)]


def _reject_hidden_inputs(inputs: list[Tensor], known: list[Tensor], direct: list[Tensor], container: ReplayedModule) -> None:
    """Reject a group if the row's input depends on a trained tensor that is neither a parameter nor an argument."""
    leaves = {id(t) for t in known}
    nodes = {t.grad_fn for t in (*known, *direct) if t.grad_fn is not None}
    for node in iter_backward_nodes((x.grad_fn for x in inputs), nodes):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            where = container.name or "the model"
            raise GroupRejected(f"a trained tensor reaches the code of {where} in another way than through its arguments")
