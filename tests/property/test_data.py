"""The sample order is a pure function of (seed, step) for any length, batch, number of ranks and micro-batches."""

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.batch import Batch, BatchShare, Position, split_evenly
from plait.data.loading import iter_batches
from plait.randomness.keyed import make_permutation


class Ids:
    """Sample i is i. A batch is (ids as a float column, ids)."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        return i

    def collate(self, samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(samples)
        return ids[:, None].float(), ids


class Stateful:
    """An iterable whose position can be restored."""

    collate = Ids.collate

    def __init__(self, length: int):
        self.length, self.next = length, 0

    def __iter__(self):
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Iterates:
    """An iterable without a state."""

    collate = Ids.collate

    def __init__(self, length: int):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


lengths, sizes, parts = st.integers(1, 40), st.integers(1, 12), st.integers(1, 5)
seeds, sources = st.integers(0, 2**63 - 1), st.sampled_from([Ids, Stateful, Iterates])


def take(data: Any, steps: int, batch: int, seed: int, share: BatchShare, at: Position | None = None) -> list[Batch]:
    return list(islice(iter_batches(data, batch, seed, share, at or Position()), steps))


@given(st.integers(0, 200), st.integers(1, 20))
def test_split_is_a_partition_into_even_parts(size: int, parts: int) -> None:
    shares = [split_evenly(size, parts, i) for i in range(parts)]
    assert [i for first, count in shares for i in range(first, first + count)] == list(range(size))
    counts = [count for _, count in shares]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(st.integers(0, 60), parts, parts)
def test_micro_batches_are_contiguous_over_ranks(size: int, ranks: int, micro: int) -> None:
    covered = [p for rank in range(ranks) for p in BatchShare(rank, ranks, micro).locate_micro_batches(size)]
    assert [i for first, count in covered for i in range(first, first + count)] == list(range(size))


@given(seeds, st.integers(0, 1000), st.integers(0, 300))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    assert sorted(make_permutation(seed, epoch, length)) == list(range(length))


@given(sources, lengths, sizes, parts, parts, seeds)
def test_the_ranks_share_the_batch_of_one_device(
    source: Any, length: int, batch: int, ranks: int, micro: int, seed: int
) -> None:
    per_epoch = -(-length // batch)
    steps = 2 * per_epoch + 1
    alone = take(source(length), steps, batch, seed, BatchShare())
    split_up = [take(source(length), steps, batch, seed, BatchShare(rank, ranks, micro)) for rank in range(ranks)]
    for step, whole in enumerate(alone):
        (only,) = whole.micro_batches
        together = [m for rows in split_up for m in rows[step].micro_batches]
        assert tuple(i for m in together for i in m.ids) == only.ids
        assert len(together) == ranks * micro
        assert [m.first for m in together if m.count] == [
            sum(m.count for m in together[:i]) for i, m in enumerate(together) if m.count
        ]
        assert torch.equal(torch.cat([m.targets for m in together if m.count]), only.targets)
        for m in together:
            assert m.targets.tolist() == (list(m.ids) or [only.ids[0]])
            assert m.inputs.shape == (m.count or 1, 1)
            assert m.targets.dtype == torch.int64
        for rows in split_up:
            assert (rows[step].position, rows[step].next_position, rows[step].size) == (
                whole.position,
                whole.next_position,
                whole.size,
            )
    for epoch in (0, 1):
        mine = [b for b in alone if b.position.epoch == epoch]
        assert sorted(i for b in mine for i in b.micro_batches[0].ids) == list(range(length))
        assert [b.size for b in mine] == [batch] * (length // batch) + ([length % batch] if length % batch else [])
    assert [b.position.step for b in alone] == list(range(steps))
    assert [b.next_position.samples for b in alone] == [sum(b.size for b in alone[: i + 1]) for i in range(steps)]


@given(sources, lengths, sizes, parts, parts, seeds, st.data())
def test_resuming_anywhere_gives_the_same_sequence(
    source: Any, length: int, batch: int, ranks: int, micro: int, seed: int, data
) -> None:
    share = BatchShare(data.draw(st.integers(0, ranks - 1)), ranks, micro)
    steps = 2 * -(-length // batch) + 2
    whole = take(source(length), steps, batch, seed, share)
    done = data.draw(st.integers(1, steps - 1))
    last = whole[done - 1]
    again = take(source(length), steps - done, batch, seed, share, last.next_position)
    for a, b in zip(again, whole[done:], strict=True):
        assert (a.position, a.next_position, a.size) == (b.position, b.next_position, b.size)
        assert [m.ids for m in a.micro_batches] == [m.ids for m in b.micro_batches]
        assert [m.targets.tolist() for m in a.micro_batches] == [m.targets.tolist() for m in b.micro_batches]


@given(st.integers(8, 40), sizes, seeds, st.integers(0, 5))
def test_order_depends_on_seed_and_epoch(length: int, batch: int, seed: int, epoch: int) -> None:
    def first(seed: int, epoch: int) -> list[int]:
        rows = take(Ids(length), -(-length // batch), batch, seed, BatchShare(), Position(0, epoch, 0, 0))
        return [i for b in rows for i in b.micro_batches[0].ids]

    assert first(seed, epoch) == make_permutation(seed, epoch, length).tolist()
    assert first(seed, epoch) != first(seed, epoch + 1) or first(seed, epoch) != first(seed ^ 1, epoch)


class Counting(Stateful):
    """Counts its own epochs, like a data set that shuffles with its own generator."""

    epoch = 0

    def __iter__(self):
        for i in super().__iter__():
            yield 100 * self.epoch + i
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


@pytest.mark.parametrize("done", [1, pytest.param(2), 3])
def test_a_state_that_counts_epochs_resumes(done: int) -> None:
    whole = take(Counting(6), 5, 4, 0, BatchShare())
    last = whole[done - 1]
    again = take(Counting(6), 5 - done, 4, 0, BatchShare(), last.next_position)
    assert [b.micro_batches[0].targets.tolist() for b in again] == [b.micro_batches[0].targets.tolist() for b in whole[done:]]
