"""Iterables over ranks: either every rank reads all and keeps its share, or the iterable knows shares and a rank reads its own.

Where all ranks read all, what one keeps is its share only if they read the same samples in the same order. An iterable that
cuts itself by rank, or shuffles by a generator of its own, gives every rank others: some would be trained on twice and some
never, and nothing would look wrong. So in every step ranks compare a digest of what they read. Noise that only some part of
a sample has (augmentation by a generator of its own) is no harm: the order is told by the other parts.

With `shard(num_shards, index)`, as Hugging Face's have it, a rank reads its part only. In every step it takes as many
samples of its share as it would have of the batch if shares were every Nth sample. Where they are just that, the global
batch has the very samples that one device would have, and a run can go on with another number of ranks. Other shares (of
files, say) make another order, which is named. A share that ends earlier gives fewer samples, and the epoch is over when all
have ended: nothing is dropped, nothing padded. Ranks tell each other in every step how many samples they have. That shares
are apart is seen by digests of what they read; that together they are the whole, by its first samples and, where the data
has a length, by the number read.

What reading a sample raises names the sample's number (`naming_samples`).
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import IterableDataset

from plait.config.errors import FAILED, PlaitError, Problem
from plait.data.batch import Batch, BatchShare, Data, Micro, Position, empty, is_map, pair_of, part
from plait.launch.failures import described, located, titled
from plait.randomness.keyed import host_kept, seed_host
from plait.tensors.collectives import exchange
from plait.tensors.torch_private import tree_leaves

SHOWN = 8
"""Numbers of samples that a message shows."""


@contextmanager
def naming_samples(numbers: Sequence[int], when: str, samples: Sequence[object] = ()) -> Iterator[None]:
    """Whatever the job's data raises inside names these samples. `when`: the epoch or the data set, in words. `samples`: those that
    are put together inside. A lack of memory, files or loader processes stays what it is."""
    try:
        yield
    except PlaitError as error:
        if not samples or error.codes[0] != "J007":
            raise
        first, *rest = error.problems
        odd = [n for n, sample in zip(numbers, samples) if pair_of(sample) is None] or list(numbers)
        raise PlaitError(
            [replace(first, where=f"{_named(odd)} {when}"), *rest], error.exit_code, error.trace
        ) from error
    except (Exception, SystemExit) as error:
        told = described(error)
        if told["sort"]:
            raise
        what = f"{_named(numbers)} {when} raised {titled(told)}"
        fix = ("mend the data, or leave these samples out of it", "--resume    goes on from the last checkpoint")
        why = (
            "the job's data raised it while the sample was read"
            if not samples
            else "the job's data raised it while they were put together"
        )
        raise PlaitError(Problem("C014", what, why=why, where=located(told), fix=fix), FAILED, told["trace"]) from error


def _named(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")
    return f"sample{'s' if len(numbers) > 1 else ''} {shown}"


_ENDED = object()
LOOKED_AT = 64
"""So many samples of the whole are compared with those of the shares, or two of each share."""
CPU = torch.device("cpu")
PARTS = 8
"""Of a sample's tensors and numbers, so many are compared."""


def digest(samples: list[Any]) -> tuple[int, ...]:
    """For each part of the samples a number that tells their values and order; 0 when it is the same in all of them."""
    if not samples:
        return (0,) * PARTS
    rows = [[_number(leaf) for leaf in tree_leaves(sample)[:PARTS]] for sample in samples]
    parts = list(zip(*rows)) if len({len(row) for row in rows}) == 1 else [tuple(map(hash, map(tuple, rows)))]
    numbers = [0 if len(set(part)) == 1 else zlib.crc32(repr(part).encode()) + 1 for part in parts]
    return tuple([*numbers, *[0] * PARTS][:PARTS])


def number_of(sample: object) -> int:
    """A number that tells a sample's values."""
    return zlib.crc32(repr([_number(leaf) for leaf in tree_leaves(sample)]).encode())


def _number(leaf: object) -> int:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if leaf.numel() else b""
    if isinstance(leaf, np.ndarray):
        leaf = np.ascontiguousarray(leaf).tobytes() if leaf.dtype != object else repr(leaf)
    return zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode())


def agree(read: int, digests: tuple[int, ...], group: ProcessGroup | None, where: str) -> bool:
    """Whether every rank of the group read `read` samples that are the same; all ranks call it.

    False when they differ in noise only. J022 when they are other samples.
    """
    rows = rows_of_ranks([read, *digests], group)
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if not others:
        return True
    counts, *parts = zip(*rows)
    if any(any(part) and len(set(part)) == 1 for part in parts) and set(counts) == {read}:
        return False
    raise PlaitError(_unlike(others[0], counts, where))


def rows_of_ranks(row: list[int], group: ProcessGroup | None) -> list[list[int]]:
    """The row of every rank, all of one length."""
    mine = torch.tensor(row, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [each.tolist() for each in rows]


def _unlike(rank: int, counts: tuple[int, ...], where: str) -> Problem:
    what = f"ranks 0 and {rank} read different samples from an iterable"
    if counts[0] != counts[rank]:
        what = f"an iterable ended after {counts[0]} samples on rank 0 and after {counts[rank]} on rank {rank}"
    why = "every rank reads all of an iterable and keeps its share; this one is cut by rank already, or shuffled by a generator of its own"
    fix = (
        "read all of it on every rank: without RANK, split_dataset_by_node or split_by_node",
        "shuffle with Python's, numpy's or torch's own generators, or with a seed",
        "give it  shard(num_shards, index) -> that share's samples,  and each rank reads its share only",
    )
    return Problem("J022", what, why=why, where=where, fix=fix)


class Shardable(Protocol):
    """An iterable that can give a part of itself."""

    def __iter__(self) -> Iterator[object]: ...

    def shard(self, *, num_shards: int, index: int) -> Iterable[object]:
        """Part `index` of `num_shards`."""


def known_by(data: object, ranks: int) -> TypeGuard[Shardable]:
    """Whether an iterable can give each of so many ranks its part only; Hugging Face's know into how many they can be cut."""
    most = getattr(data, "num_shards", None)
    can = callable(getattr(data, "shard", None)) and not is_map(data)
    return ranks > 1 and can and not (isinstance(most, int) and most < ranks)


def read_apart(data: object, share: BatchShare) -> TypeGuard[Shardable]:
    """Whether each rank reads its part of an iterable only. Not where shares are uneven: the parts that an iterable can give are
    equal, and a rank that takes more of its own would come to its end first."""
    return known_by(data, share.ranks) and not share.uneven


def due(start: int, batch: int, ranks: int, rank: int) -> int:
    """How many of the samples start … start + batch − 1 a share has that is every `ranks`th from `rank` on.

    >>> [due(4, 5, 2, rank) for rank in (0, 1)]
    [3, 2]
    """
    return (start + batch - rank + ranks - 1) // ranks - (start - rank + ranks - 1) // ranks


def read_before(at: Position, ranks: int) -> tuple[int, list[int]]:
    """(samples of the epoch that are due before position `at`, how many of each share were read). J026."""
    state = at.state if isinstance(at.state, dict) and "shares" in at.state else None
    if state is not None and state["shares"] == ranks:
        return state["due"], list(state["read"])
    if state is not None and not state["every_nth"]:
        what = f"the run stopped in the middle of an epoch read in {state['shares']} shares, and now there are {ranks}"
        why = "its shares are not every Nth sample of the whole: what is left of the epoch is spread over other shares now"
        fix = (
            f"resume with a plan of {state['shares']} shares of samples",
            "shard(N, i) that gives samples i, i + N, …",
        )
        raise PlaitError(Problem("J026", what, why=why, fix=fix))
    return at.start, [due(0, at.start, ranks, rank) for rank in range(ranks)]


class SeededReader:
    """Reads an iterable, or a rank's share of it, from the start of an epoch, the host generators seeded before each sample.

    `state`: where the iterable itself is to go on from.
    """

    def __init__(
        self, data: Data, seed: int, epoch: int, share: BatchShare, *, reads: Callable[[], None] = lambda: None,
        state: object = None,
    ):  # fmt: skip
        self.seed, self.epoch, self.share, self.reads = seed, epoch, share, reads
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed_host(seed, "epoch", epoch)  # an iterable may shuffle as soon as it is opened
        if state is not None and hasattr(data, "load_state_dict"):
            data.load_state_dict(state)
        if share.ranks > 1 and hasattr(data, "shard"):
            data = data.shard(num_shards=share.ranks, index=share.rank)
        self.source = iter(data)

    def number(self, i: int) -> int:
        """Of sample `i` in the whole, if the share is every Nth."""
        return i * self.share.ranks + self.share.rank

    def read(self, first: int, count: int) -> Iterator[object]:
        """The next `count` samples, as far as there are any; the first of them is number `first` of what is read."""
        for i in range(first, first + count):
            self.reads()
            seed_host(self.seed, "sample", self.epoch, self.number(i))
            with naming_samples([self.number(i)], f"of epoch {self.epoch}"):
                sample = next(self.source, _ENDED)
            if sample is _ENDED:
                return
            yield sample


def cut(
    data: Data, samples: list[Any], share: BatchShare, number: Callable[[int], int], other: object
) -> tuple[Micro, ...]:
    """A share's micro-batches of samples, which have these numbers; `other`: a sample for those that have none."""
    return tuple(
        part(data, samples[first : first + n] or [other], first, [number(k) for k in range(first, first + n)])
        for first, n in share.parts(len(samples))
    )


class OfShare(IterableDataset):
    """What this rank reads of its share, step by step; its counts and places are not yet those of the batch."""

    def __init__(self, data: Shardable, batch: int, seed: int, share: BatchShare, at: Position):
        self.data, self.batch, self.seed, self.share, self.at = data, batch, seed, share, at
        self.reads: Callable[[], None] = lambda: None
        self.last: object = None
        """A sample, for a rank that runs along without one."""

    def __iter__(self) -> Iterator[Batch]:
        start, counts = read_before(self.at, self.share.ranks)
        epoch, read = self.at.epoch, counts[self.share.rank]
        local = BatchShare(microbatches=self.share.microbatches)
        while True:
            reader, ended = SeededReader(self.data, self.seed, epoch, self.share, reads=self.reads), False
            for sample in reader.read(0, read):
                self.last = sample
            while not ended:
                count = due(start, self.batch, self.share.ranks, self.share.rank)
                samples = list(reader.read(read, count))
                ended = len(samples) < count
                self.last = samples[-1] if samples else self.last
                if self.last is None:
                    raise empty(f"share {self.share.rank} of {self.share.ranks} ended without a sample")
                number = lambda k, read=read, reader=reader: reader.number(read + k)  # noqa: E731
                idle = cut(self.data, [], local, number, self.last) if ended else ()
                micro = cut(self.data, samples, local, number, self.last)
                after = Position(0, epoch + ended)
                yield Batch(Position(0, epoch), len(samples), micro, after, digest(samples), idle=idle)
                read, start = read + len(samples), start + self.batch
            epoch, read, start = epoch + 1, 0, 0


class Merge:
    """Makes the steps' batches of what each rank of the group read. All ranks go along."""

    def __init__(self, share: BatchShare, batch: int, group: ProcessGroup | None, every_nth: bool, length: int | None):
        self.share, self.batch, self.group, self.every_nth, self.length = share, batch, group, every_nth, length

    def batches(self, source: Iterator[Batch], at: Position) -> Iterator[Batch]:
        """The batches from position `at` on."""
        start, read = read_before(at, self.share.ranks)
        local, ended = None, False
        while True:
            local = next(source) if local is None or not ended else replace(local, size=0, micro=local.idle, seen=())
            ended = ended or local.after.epoch > local.position.epoch
            counts, over = self._told(local, ended)
            read, start = [a + b for a, b in zip(read, counts)], start + self.batch
            if over:
                self._whole(read)
            state = {"shares": self.share.ranks, "every_nth": self.every_nth, "due": start, "read": read}
            now, total = (0, at.epoch + 1) if over else (at.start + sum(counts), at.epoch), sum(counts)
            after = Position(at.step + (total > 0), now[1], now[0], at.samples + total, None if over else state)
            if total:
                first = sum(counts[: self.share.rank])
                micro = tuple(replace(m, first=m.first + first) for m in local.micro)
                yield Batch(replace(at, state=None), total, micro, after, most=max(counts))
            at = after
            if over:
                read, start, ended = [0] * self.share.ranks, 0, False

    def _told(self, local: Batch, ended: bool) -> tuple[list[int], bool]:
        """(samples of every share, whether all have ended). J023 when two have the same, J022 when copies of one differ."""
        digests = [*local.seen, *[0] * 8][:8]
        table: dict[int, list[int]] = {}
        for row in rows_of_ranks([self.share.rank, local.size, int(ended), *digests], self.group):
            if table.setdefault(row[0], row)[:3] != row[:3]:
                what = f"ranks that share their samples read different ones of share {row[0]}"
                raise PlaitError(Problem("J022", what, why="the iterable, or its `shard`, depends on the rank"))
        read = [tuple(row[3:]) for row in table.values() if any(row[3:])]
        if len(set(read)) < len(read):
            raise overlapping(self.share.ranks)
        return [table[i][1] for i in range(self.share.ranks)], all(row[2] for row in table.values())

    def _whole(self, read: list[int]) -> None:
        if self.length is not None and sum(read) != self.length:
            what = f"the shares of an iterable are not all of it: {sum(read)} samples, and its length is {self.length}"
            why = f"shard({len(read)}, i) gave " + ", ".join(map(str, read[:8]))
            raise PlaitError(Problem("J023", what, why=why, where="Job(data=…)"))


def overlapping(ranks: int) -> PlaitError:
    """J023: shares have the same samples."""
    what = f"the shares of an iterable overlap: shard({ranks}, i) gives the same samples for different i"
    fix = ("shard(num_shards, index) gives samples index, index + num_shards, …, or files that no other index has",)
    return PlaitError(Problem("J023", what, where="Job(data=…)", fix=fix))


def every_nth(data: Shardable, seed: int, share: BatchShare, rank: int, group: ProcessGroup | None) -> bool:
    """Whether shares are every Nth sample, as far as their first samples tell; `data` is read from its start. J023."""
    each = max(2, LOOKED_AT // share.ranks)
    with host_kept():
        mine = [number_of(sample) for sample in SeededReader(data, seed, 0, share).read(0, each)]
        all_read = SeededReader(data, seed, 0, BatchShare()).read(0, each * share.ranks) if rank == 0 else ()
        whole = [number_of(sample) for sample in all_read]
    shares = {row[0]: row[1:] for row in exchange_numbers([share.rank, *mine], group, CPU)}
    if len({row for row in shares.values() if len(set(row)) > 1}) < sum(len(set(row)) > 1 for row in shares.values()):
        raise overlapping(share.ranks)
    whole = exchange_numbers(whole, group, CPU)[0]
    return all(shares[j % share.ranks][j // share.ranks :][:1] == (number,) for j, number in enumerate(whole))


def exchange_numbers(numbers: Sequence[int], group: ProcessGroup | None, device: torch.device) -> list[tuple[int, ...]]:
    """The numbers of every rank, of which each may have another count."""
    rows = exchange(struct.pack(f"<{len(numbers)}q", *numbers), group, device)
    return [struct.unpack(f"<{len(row) // 8}q", row) for row in rows]
