"""Every sample is in exactly one local batch, for any parts and sizes, and if parts change while loaders prefetch."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.batch import (
    BatchShare,
    Position,
    RotatingSplit,
    SplitSchedule,
    count_prefetched_steps,
    split_by_weights,
)
from plait.data.loading import iter_batches
from plait.parallel.batch_split.batch_balancer import (
    MAX_RATIO,
    BatchBalancer,
    BatchCost,
    balance_samples,
    find_slowest_seconds,
)
from plait.tensors.rows import split_evenly
from property.test_data import Ids, Iterates, Stateful

PARTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=9)


@given(st.integers(0, 3000), PARTS, st.integers(1, 9))
def test_sizes_are_the_whole_and_near_the_parts(size: int, parts: list[int], least: int) -> None:
    found = split_by_weights(size, parts, least)
    assert sum(found) == size and split_by_weights(size, parts, least) == found
    floor = min(least, size // len(parts))
    assert min(found) >= floor
    if size >= len(parts) and all(size * p >= floor * sum(parts) for p in parts):
        assert all(abs(n - size * p / sum(parts)) < 1 for n, p in zip(found, parts))


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 9), st.integers(1, 1000))
def test_equal_parts_are_equal_shares(size: int, ranks: int, least: int, part: int) -> None:
    assert split_by_weights(size, (part,) * ranks, least) == tuple(split_evenly(size, ranks, i)[1] for i in range(ranks))


@given(PARTS, st.integers(1, 400), st.integers(1, 5))
def test_a_short_batch_has_no_larger_share_than_a_full_one(parts: list[int], batch: int, least: int) -> None:
    full = split_by_weights(batch, parts, least)
    assert all(max(split_by_weights(size, full, least)) <= max(full) for size in range(0, batch + 1, 1 + batch // 7))


@given(PARTS, st.integers(1, 200), st.integers(1, 4), st.integers(1, 3))
def test_micro_batches_of_all_shares_are_the_batch(parts: list[int], size: int, micro: int, groups: int) -> None:
    size = max(size, groups)
    shares = [
        BatchShare(rank, len(parts), micro, group, groups, tuple(parts))
        for group in range(groups)
        for rank in range(len(parts))
    ]
    held = [i for share in shares for first, n in share.locate_micro_batches(size) for i in range(first, first + n)]
    assert held == list(range(size))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-4, 1)), min_size=1, max_size=6), st.integers(6, 300), st.data())
def test_balanced_shares_are_the_best_within_their_limits(
    costs: list[tuple[float, float]], batch: int, data: Any
) -> None:
    found, count = [BatchCost(*c) for c in costs], len(costs)
    now = split_by_weights(batch, (1,) * count)
    most = [min(batch, data.draw(st.integers(n, 4 * n))) for n in now]
    best = balance_samples(found, batch, 1, most)
    assert sum(best) == batch and all(1 <= n <= limit for n, limit in zip(best, most))
    assert find_slowest_seconds(found, best) <= find_slowest_seconds(found, now) * (1 + 1e-9)
    for a in range(count):  # moving a sample does not help
        for b in range(count):
            if a != b and best[a] > 1 and best[b] < most[b]:
                moved = [n - (i == a) + (i == b) for i, n in enumerate(best)]
                assert find_slowest_seconds(found, best) <= find_slowest_seconds(found, moved) * (1 + 1e-9)


def read(make: Callable[[], Any], share: BatchShare, steps: int, begin: Position, workers: int = 0) -> list[Any]:
    return list(islice(iter_batches(make(), 9, 3, share, begin, workers=workers), steps))


@pytest.mark.parametrize(
    "make", (lambda: Ids(41), lambda: Stateful(41), lambda: Iterates(41)), ids=("map", "state", "plain")
)
@pytest.mark.parametrize("workers", (0, 2))
def test_parts_change_while_loaders_read_ahead(make: Callable[[], Any], workers: int) -> None:
    """After a change in the middle no sample is lost or repeated, and the order is that of one rank."""
    courses = [SplitSchedule(3) for _ in range(3)]
    sources = [
        iter_batches(make(), 9, 3, BatchShare(rank, 3, 2, schedule=course), Position(), workers=workers)
        for rank, course in enumerate(courses)
    ]
    alone, held, most = read(make, BatchShare(), 14, Position()), [], []
    for step in range(14):
        together = [next(source) for source in sources]
        held.append([tuple(i for m in batch.micro_batches for i in m.ids) for batch in together])
        most.append({batch.max_share for batch in together})
        if step == 3:
            for course in courses:
                course.change(step + 1 + count_prefetched_steps(workers), (4, 1, 1))
    change = 4 + count_prefetched_steps(workers)
    for step, (rows, one) in enumerate(zip(held, alone)):
        assert sum(rows, ()) == one.micro_batches[0].ids
        wanted = split_by_weights(one.size, (4, 1, 1) if step >= change else (1, 1, 1), 2)
        assert tuple(map(len, rows)) == wanted and most[step] == {max(wanted)}


def test_shares_in_turn_begin_alike() -> None:
    turn = RotatingSplit(3)
    assert [turn.weights_at(step) for step in range(4)] == [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3)]


@given(st.integers(2, 6), st.integers(8, 200), st.integers(0, 3), st.data())
def test_no_share_outgrows_its_bound(ranks: int, batch: int, slow: int, data: Any) -> None:
    """For any measured times and any known limits."""
    balance, seconds = BatchBalancer(batch, ranks), data.draw(st.lists(st.floats(1e-3, 10), min_size=ranks, max_size=ranks))
    room = data.draw(st.lists(st.integers(0, batch), min_size=ranks, max_size=ranks))
    equal = split_by_weights(batch, (1,) * ranks)
    for step in range(1, 80):
        held = balance.split_batch(balance.course.weights_at(step - 1))
        balance.update_parts(step, held, [s * n for s, n in zip(seconds, held)], room, 2)
        assert sum(held) == batch and max(held) <= MAX_RATIO * -(-batch // ranks)
        assert all(not fits or n <= max(fits, equal[i]) for i, (n, fits) in enumerate(zip(held, room)))
