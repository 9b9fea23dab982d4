"""Which rank has which rows of a dim after views and slices of any shape, compared with the numbered elements themselves."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.tensors.rows import Rows, copy_ranges
from plait.tensors.sharded_views import track_dim

FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=5)


@st.composite
def rows_of(draw: Any, length: int) -> Rows:
    """A dim of that length, distributed over 1 to 3 ranks in pieces."""
    marks = sorted(draw(st.sets(st.integers(0, length), max_size=4)) | {0, length})
    pieces = draw(st.permutations([(a, b - a) for a, b in pairwise(marks)]))
    ranks = draw(st.integers(1, 3))
    owners = [draw(st.integers(0, ranks - 1)) for _ in pieces]
    return Rows(tuple(tuple(p for p, o in zip(pieces, owners) if o == rank) for rank in range(ranks)))


@st.composite
def regrouped(draw: Any, factors: list[int]) -> tuple[int, ...]:
    """Multiplies adjacent groups of the factors: a shape."""
    shape = [1] if draw(st.booleans()) else []
    for factor in factors:
        if shape and draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape.append(factor)
    return tuple(shape)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_view_of_a_part_is_the_part_of_the_view(data: Any) -> None:
    factors = data.draw(FACTORS)
    old, new = data.draw(regrouped(factors)), data.draw(regrouped(factors))
    cut = data.draw(st.integers(0, len(old) - 1))
    rows = data.draw(rows_of(old[cut]))
    found = track_dim(old, cut, new, rows)
    whole = torch.arange(math.prod(old))
    for rank in range(len(rows.ranks)):
        mine = rows.take_part(whole.view(old), cut, rank)
        if found is not None:
            dim, after = found
            shape = (*new[:dim], after.sizes[rank], *new[dim + 1 :])
            assert torch.equal(mine.reshape(shape), after.take_part(whole.view(new), dim, rank))
    if old == new or math.prod(new[:-1]) == 1:
        assert found is not None, "a view as it was, or as one row, can always be followed"


@settings(deadline=None)
@given(st.data())
def test_slices_and_merged_dims(data: Any) -> None:
    length, outer, inner = (data.draw(st.integers(1, n)) for n in (9, 3, 3))
    rows = data.draw(rows_of(length))
    first = data.draw(st.integers(0, length))
    end = data.draw(st.integers(first, length))
    whole, merged, sliced = torch.arange(outer * length * inner), rows.merge_dims(outer, inner), rows.slice_range(first, end)
    assert merged.length == len(whole) and sliced.length == end - first
    back = merged.split_dim(outer, length, inner)
    for rank in range(len(rows.ranks)):
        mine = rows.take_part(whole.view(outer, length, inner), 1, rank)
        assert torch.equal(mine.reshape(-1), merged.take_part(whole, 0, rank))
        assert back is not None and torch.equal(back.take_part(whole[:length], 0, rank), rows.take_part(whole[:length], 0, rank))
        kept = [mine[:, at + k] for at, n in rows.locate(rank, first, end) for k in range(n)]
        taken = sliced.take_part(whole.view(outer, length, inner)[:, first:end], 1, rank)
        assert torch.equal(torch.stack(kept, 1) if kept else mine[:, :0], taken)


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_dim_is_cut_as_torch_cuts_it(length: int, ranks: int) -> None:
    whole = torch.arange(length)
    for rows, parts in (
        (Rows.make_chunks(length, ranks), whole.chunk(ranks)),
        (Rows.make_even(length, ranks), whole.tensor_split(ranks)),
    ):
        parts = [*parts, *[whole[:0]] * (ranks - len(parts))]
        assert all(torch.equal(rows.take_part(whole, 0, rank), part) for rank, part in enumerate(parts))
        assert all(torch.equal(copy_ranges(whole, 0, ranges), part) for ranges, part in zip(rows.ranks, parts))
