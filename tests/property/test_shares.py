"""Every sample is in exactly one share, for any parts and sizes, also where parts change while loaders read ahead."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.batch import BatchShare, Course, InTurn, Position, ahead, sizes
from plait.data.loading import batches
from plait.parallel.shares.balance import MOST, Balance, Cost, balanced, slowest
from plait.tensors.rows import split
from property.test_data import Ids, Iterates, Stateful

PARTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=9)


@given(st.integers(0, 3000), PARTS, st.integers(1, 9))
def test_sizes_are_the_whole_and_near_the_parts(size: int, parts: list[int], least: int) -> None:
    found = sizes(size, parts, least)
    assert sum(found) == size and sizes(size, parts, least) == found
    floor = min(least, size // len(parts))
    assert min(found) >= floor
    if size >= len(parts) and all(size * p >= floor * sum(parts) for p in parts):
        assert all(abs(n - size * p / sum(parts)) < 1 for n, p in zip(found, parts))


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 9), st.integers(1, 1000))
def test_equal_parts_are_equal_shares(size: int, ranks: int, least: int, part: int) -> None:
    assert sizes(size, (part,) * ranks, least) == tuple(split(size, ranks, i)[1] for i in range(ranks))


@given(PARTS, st.integers(1, 400), st.integers(1, 5))
def test_a_short_batch_has_no_larger_share_than_a_full_one(parts: list[int], batch: int, least: int) -> None:
    full = sizes(batch, parts, least)
    assert all(max(sizes(size, full, least)) <= max(full) for size in range(0, batch + 1, 1 + batch // 7))


@given(PARTS, st.integers(1, 200), st.integers(1, 4), st.integers(1, 3))
def test_micro_batches_of_all_shares_are_the_batch(parts: list[int], size: int, micro: int, groups: int) -> None:
    size = max(size, groups)
    shares = [
        BatchShare(rank, len(parts), micro, group, groups, tuple(parts))
        for group in range(groups)
        for rank in range(len(parts))
    ]
    held = [i for share in shares for first, n in share.parts(size) for i in range(first, first + n)]
    assert held == list(range(size))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-4, 1)), min_size=1, max_size=6), st.integers(6, 300), st.data())
def test_balanced_shares_are_the_best_within_their_limits(
    costs: list[tuple[float, float]], batch: int, data: Any
) -> None:
    found, count = [Cost(*c) for c in costs], len(costs)
    now = sizes(batch, (1,) * count)
    most = [min(batch, data.draw(st.integers(n, 4 * n))) for n in now]
    best = balanced(found, batch, 1, most)
    assert sum(best) == batch and all(1 <= n <= limit for n, limit in zip(best, most))
    assert slowest(found, best) <= slowest(found, now) * (1 + 1e-9)
    for a in range(count):  # no move of a sample helps
        for b in range(count):
            if a != b and best[a] > 1 and best[b] < most[b]:
                moved = [n - (i == a) + (i == b) for i, n in enumerate(best)]
                assert slowest(found, best) <= slowest(found, moved) * (1 + 1e-9)


def read(make: Callable[[], Any], share: BatchShare, steps: int, begin: Position, workers: int = 0) -> list[Any]:
    return list(islice(batches(make(), 9, 3, share, begin, workers=workers), steps))


@pytest.mark.parametrize(
    "make", (lambda: Ids(41), lambda: Stateful(41), lambda: Iterates(41)), ids=("map", "state", "plain")
)
@pytest.mark.parametrize("workers", (0, 2))
def test_parts_change_while_loaders_read_ahead(make: Callable[[], Any], workers: int) -> None:
    """A change in the middle: no sample lost, none doubled, and in the order that one rank has."""
    courses = [Course(3) for _ in range(3)]
    sources = [
        batches(make(), 9, 3, BatchShare(rank, 3, 2, course=course), Position(), workers=workers)
        for rank, course in enumerate(courses)
    ]
    alone, held, most = read(make, BatchShare(), 14, Position()), [], []
    for step in range(14):
        together = [next(source) for source in sources]
        held.append([tuple(i for m in batch.micro for i in m.ids) for batch in together])
        most.append({batch.most for batch in together})
        if step == 3:
            for course in courses:
                course.change(step + 1 + ahead(workers), (4, 1, 1))
    change = 4 + ahead(workers)
    for step, (rows, one) in enumerate(zip(held, alone)):
        assert sum(rows, ()) == one.micro[0].ids
        wanted = sizes(one.size, (4, 1, 1) if step >= change else (1, 1, 1), 2)
        assert tuple(map(len, rows)) == wanted and most[step] == {max(wanted)}


def test_shares_in_turn_begin_alike() -> None:
    turn = InTurn(3)
    assert [turn.at(step) for step in range(4)] == [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3)]


@given(st.integers(2, 6), st.integers(8, 200), st.integers(0, 3), st.data())
def test_no_share_outgrows_its_bound(ranks: int, batch: int, slow: int, data: Any) -> None:
    """Whatever is measured, and whatever room is known."""
    balance, seconds = Balance(batch, ranks), data.draw(st.lists(st.floats(1e-3, 10), min_size=ranks, max_size=ranks))
    room = data.draw(st.lists(st.integers(0, batch), min_size=ranks, max_size=ranks))
    equal = sizes(batch, (1,) * ranks)
    for step in range(1, 80):
        held = balance.sizes(balance.course.at(step - 1))
        balance.heard(step, held, [s * n for s, n in zip(seconds, held)], room, 2)
        assert sum(held) == batch and max(held) <= MOST * -(-batch // ranks)
        assert all(not fits or n <= max(fits, equal[i]) for i, (n, fits) in enumerate(zip(held, room)))
