"""Iterable data sets over ranks: every rank reads all samples and keeps its local batch, or each rank reads its own shard.

[Note: Full reads]
If every rank reads all samples, all ranks must read the same samples in the same order. An iterable that shards itself by rank, or that
shuffles with its own generator, gives each rank other samples. Some would be trained on twice and some never, without an error. So in every
step ranks compare a digest of the samples read. Noise in some parts of a sample (augmentation with its own generator) is allowed, since the
other parts identify the order.

[Note: Sharded reads]
With `shard(num_shards, index)`, as in Hugging Face datasets, a rank reads its shard only. In every step it takes as many samples as if
shards were every Nth sample. If they are, the global batch equals the batch of one device, and a run can resume with another number of
ranks. Other shards (of files, for example) change the order, which is reported. A shard that ends early gives fewer samples. The epoch ends
when all shards have ended; no sample is dropped or padded. Ranks exchange their sample counts in every step. Digests detect shards that
overlap. The first samples and, if the data has a length, the number of samples read detect shards that are incomplete.

An exception while reading a sample is reported with the sample's number (`name_failing_samples`).
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
from plait.data.batch import (
    Batch,
    BatchShare,
    Data,
    MicroBatch,
    Position,
    empty_data_error,
    is_map,
    make_micro_batch,
    split_pair,
)
from plait.launch.failures import describe_error, format_location, format_title
from plait.randomness.keyed import preserve_host_state, seed_host
from plait.tensors.collectives import all_gather_bytes
from plait.tensors.torch_private import tree_leaves

MAX_SHOWN = 8
"""Sample numbers that a message shows."""


@contextmanager
def name_failing_samples(numbers: Sequence[int], when: str, samples: Sequence[object] = ()) -> Iterator[None]:
    """Context that adds the sample numbers to exceptions of the job's data.

    `when`: the epoch or data set, as text. `samples`: the samples that are collated inside. Exceptions about memory, files or loader
    processes are not changed.

    """
    try:
        yield
    except PlaitError as error:
        if not samples or error.codes[0] != "J007":
            raise
        first, *rest = error.problems
        odd = [n for n, sample in zip(numbers, samples) if split_pair(sample) is None] or list(numbers)
        raise PlaitError(
            [replace(first, where=f"{_format_numbers(odd)} {when}"), *rest], error.exit_code, error.trace
        ) from error
    except (Exception, SystemExit) as error:
        told = describe_error(error)
        if told["sort"]:
            raise
        what = f"{_format_numbers(numbers)} {when} raised {format_title(told)}"
        fix = ("fix the data, or remove these samples", "--resume    continues from the last checkpoint")
        why = (
            "the job's data raised it while reading the sample"
            if not samples
            else "the job's data raised it while collating the samples"
        )
        raise PlaitError(Problem("C014", what, why=why, where=format_location(told), fix=fix), FAILED, told["trace"]) from error


def _format_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MAX_SHOWN])) + (", …" if len(numbers) > MAX_SHOWN else "")
    return f"sample{'s' if len(numbers) > 1 else ''} {shown}"


_ENDED = object()
COMPARED_SAMPLES = 64
"""Samples that are compared with those of the shards, at least two of each shard."""
CPU = torch.device("cpu")
DIGEST_LEAVES = 8
"""Tensors and numbers of a sample that are compared."""


def digest_samples(samples: list[Any]) -> tuple[int, ...]:
    """Return a digest of values and order for each part of the samples; 0 for a part that is equal in all of them."""
    if not samples:
        return (0,) * DIGEST_LEAVES
    rows = [[_hash_leaf(leaf) for leaf in tree_leaves(sample)[:DIGEST_LEAVES]] for sample in samples]
    parts = list(zip(*rows)) if len({len(row) for row in rows}) == 1 else [tuple(map(hash, map(tuple, rows)))]
    numbers = [0 if len(set(part)) == 1 else zlib.crc32(repr(part).encode()) + 1 for part in parts]
    return tuple([*numbers, *[0] * DIGEST_LEAVES][:DIGEST_LEAVES])


def hash_sample(sample: object) -> int:
    """Return a hash of a sample's values."""
    return zlib.crc32(repr([_hash_leaf(leaf) for leaf in tree_leaves(sample)]).encode())


def _hash_leaf(leaf: object) -> int:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if leaf.numel() else b""
    if isinstance(leaf, np.ndarray):
        leaf = np.ascontiguousarray(leaf).tobytes() if leaf.dtype != object else repr(leaf)
    return zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode())


def agree_on_samples(read: int, digests: tuple[int, ...], group: ProcessGroup | None, where: str) -> bool:
    """Return whether every rank of the group read `read` samples and they are equal. Collective.

    False if they differ in noise only. J022 if they are different samples.

    """
    rows = gather_int_rows([read, *digests], group)
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if not others:
        return True
    counts, *parts = zip(*rows)
    if any(any(part) and len(set(part)) == 1 for part in parts) and set(counts) == {read}:
        return False
    raise PlaitError(_different_read_problem(others[0], counts, where))


def gather_int_rows(row: list[int], group: ProcessGroup | None) -> list[list[int]]:
    """Return the row of every rank; all rows have the same length. Collective."""
    mine = torch.tensor(row, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [each.tolist() for each in rows]


def _different_read_problem(rank: int, counts: tuple[int, ...], where: str) -> Problem:
    what = f"ranks 0 and {rank} read different samples from an iterable"
    if counts[0] != counts[rank]:
        what = f"an iterable ended after {counts[0]} samples on rank 0 and after {counts[rank]} on rank {rank}"
    why = "every rank must read the full iterable; this one is already sharded by rank, or shuffled with a generator of its own"
    fix = (
        "read all of it on every rank, without RANK, split_dataset_by_node or split_by_node",
        "shuffle with Python's, numpy's or torch's own generators, or with a seed",
        "add  shard(num_shards, index) -> samples of that shard,  and each rank reads its shard only",
    )
    return Problem("J022", what, why=why, where=where, fix=fix)


class Shardable(Protocol):
    """An iterable with a `shard` method."""

    def __iter__(self) -> Iterator[object]: ...

    def shard(self, *, num_shards: int, index: int) -> Iterable[object]:
        """As `datasets.IterableDataset.shard`: the shards are disjoint and cover the data."""


def can_shard(data: object, ranks: int) -> TypeGuard[Shardable]:
    """Return whether an iterable can give each of `ranks` ranks its shard; Hugging Face's limit the number of shards."""
    most = getattr(data, "num_shards", None)
    can = callable(getattr(data, "shard", None)) and not is_map(data)
    return ranks > 1 and can and not (isinstance(most, int) and most < ranks)


def is_read_sharded(data: object, share: BatchShare) -> TypeGuard[Shardable]:
    """Return whether each rank reads only its shard of an iterable.

    False for uneven local batches: the shards are equal, so a rank with a larger local batch would reach the end first.

    """
    return can_shard(data, share.ranks) and not share.is_uneven


def count_due(start: int, batch: int, ranks: int, rank: int) -> int:
    """Return how many of the samples start … start + batch − 1 belong to the shard of every `ranks`th sample from `rank` on.

    >>> [count_due(4, 5, 2, rank) for rank in (0, 1)]
    [3, 2]

    """
    return (start + batch - rank + ranks - 1) // ranks - (start - rank + ranks - 1) // ranks


def count_read(at: Position, ranks: int) -> tuple[int, list[int]]:
    """Return (samples of the epoch that are due before position `at`, the number read from each shard). J026."""
    state = at.state if isinstance(at.state, dict) and "shares" in at.state else None
    if state is not None and state["shares"] == ranks:
        return state["due"], list(state["read"])
    if state is not None and not state["every_nth"]:
        what = f"the run stopped in an epoch read in {state['shares']} shards, and this plan has {ranks}"
        why = "its shards are not every Nth sample, so other shards hold the remaining samples of the epoch"
        fix = (
            f"resume with a plan of {state['shares']} data-parallel ranks",
            "shard(N, i) that gives samples i, i + N, …",
        )
        raise PlaitError(Problem("J026", what, why=why, fix=fix))
    return at.start, [count_due(0, at.start, ranks, rank) for rank in range(ranks)]


class SeededReader:
    """Reads an iterable, or a rank's shard of it, from the start of an epoch, seeding the host generators before each sample.

    `state`: the iterable's saved state to resume from.

    """

    def __init__(
        self, data: Data, seed: int, epoch: int, share: BatchShare, *, reads: Callable[[], None] = lambda: None,
        state: object = None,
    ):  # fmt: skip
        self.seed, self.epoch, self.share, self.on_read = seed, epoch, share, reads
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed_host(seed, "epoch", epoch)  # an iterable may shuffle as soon as it is opened
        if state is not None and hasattr(data, "load_state_dict"):
            data.load_state_dict(state)
        if share.ranks > 1 and hasattr(data, "shard"):
            data = data.shard(num_shards=share.ranks, index=share.rank)
        self.source = iter(data)

    def global_index(self, i: int) -> int:
        """Return the index of sample `i` in the data, if the shard is every Nth sample."""
        return i * self.share.ranks + self.share.rank

    def read(self, first: int, count: int) -> Iterator[object]:
        """Yield up to `count` further samples; the first of them has number `first` in this reader."""
        for i in range(first, first + count):
            self.on_read()
            seed_host(self.seed, "sample", self.epoch, self.global_index(i))
            with name_failing_samples([self.global_index(i)], f"of epoch {self.epoch}"):
                sample = next(self.source, _ENDED)
            if sample is _ENDED:
                return
            yield sample


def make_micro_batches(
    data: Data, samples: list[Any], share: BatchShare, number: Callable[[int], int], other: object
) -> tuple[MicroBatch, ...]:
    """Split a local batch into micro-batches. `number`: index -> sample number; `other`: a filler sample for empty ones."""
    return tuple(
        make_micro_batch(data, samples[first : first + n] or [other], first, [number(k) for k in range(first, first + n)])
        for first, n in share.locate_micro_batches(len(samples))
    )


class ShardStream(IterableDataset):
    """Samples that this rank reads from its shard, step by step. Counts and positions are those of the shard, not of the batch."""

    def __init__(self, data: Shardable, batch: int, seed: int, share: BatchShare, at: Position):
        self.data, self.batch, self.seed, self.share, self.at = data, batch, seed, share, at
        self.on_read: Callable[[], None] = lambda: None
        self.last: object = None
        """A filler sample for a rank without samples in a step."""

    def __iter__(self) -> Iterator[Batch]:
        start, counts = count_read(self.at, self.share.ranks)
        epoch, read = self.at.epoch, counts[self.share.rank]
        local = BatchShare(microbatches=self.share.microbatches)
        while True:
            reader, ended = SeededReader(self.data, self.seed, epoch, self.share, reads=self.on_read), False
            for sample in reader.read(0, read):
                self.last = sample
            while not ended:
                count = count_due(start, self.batch, self.share.ranks, self.share.rank)
                samples = list(reader.read(read, count))
                ended = len(samples) < count
                self.last = samples[-1] if samples else self.last
                if self.last is None:
                    raise empty_data_error(f"shard {self.share.rank} of {self.share.ranks} ended without a sample")
                number = lambda k, read=read, reader=reader: reader.global_index(read + k)  # noqa: E731
                idle = make_micro_batches(self.data, [], local, number, self.last) if ended else ()
                micro = make_micro_batches(self.data, samples, local, number, self.last)
                after = Position(0, epoch + ended)
                yield Batch(Position(0, epoch), len(samples), micro, after, digest_samples(samples), idle_micro_batches=idle)
                read, start = read + len(samples), start + self.batch
            epoch, read, start = epoch + 1, 0, 0


class ShardMerger:
    """Makes each step's batch from the samples that each rank of the group read. Collective."""

    def __init__(self, share: BatchShare, batch: int, group: ProcessGroup | None, every_nth: bool, length: int | None):
        self.share, self.batch, self.group, self.every_nth, self.length = share, batch, group, every_nth, length

    def batches(self, source: Iterator[Batch], at: Position) -> Iterator[Batch]:
        """Yield the batches from position `at` on."""
        start, read = count_read(at, self.share.ranks)
        local, ended = None, False
        while True:
            local = next(source) if local is None or not ended else replace(local, size=0, micro_batches=local.idle_micro_batches, digests=())
            ended = ended or local.next_position.epoch > local.position.epoch
            counts, over = self._exchange_counts(local, ended)
            read, start = [a + b for a, b in zip(read, counts)], start + self.batch
            if over:
                self._check_total(read)
            state = {"shares": self.share.ranks, "every_nth": self.every_nth, "due": start, "read": read}
            now, total = (0, at.epoch + 1) if over else (at.start + sum(counts), at.epoch), sum(counts)
            after = Position(at.step + (total > 0), now[1], now[0], at.samples + total, None if over else state)
            if total:
                first = sum(counts[: self.share.rank])
                micro = tuple(replace(m, first=m.first + first) for m in local.micro_batches)
                yield Batch(replace(at, state=None), total, micro, after, max_share=max(counts))
            at = after
            if over:
                read, start, ended = [0] * self.share.ranks, 0, False

    def _exchange_counts(self, local: Batch, ended: bool) -> tuple[list[int], bool]:
        """Return (samples of every shard, whether all have ended). J023 if two shards are equal, J022 if ranks read one shard differently."""
        digests = [*local.digests, *[0] * 8][:8]
        table: dict[int, list[int]] = {}
        for row in gather_int_rows([self.share.rank, local.size, int(ended), *digests], self.group):
            if table.setdefault(row[0], row)[:3] != row[:3]:
                what = f"ranks of one local batch read different samples of shard {row[0]}"
                raise PlaitError(Problem("J022", what, why="the iterable, or its `shard`, depends on the rank"))
        read = [tuple(row[3:]) for row in table.values() if any(row[3:])]
        if len(set(read)) < len(read):
            raise overlap_error(self.share.ranks)
        return [table[i][1] for i in range(self.share.ranks)], all(row[2] for row in table.values())

    def _check_total(self, read: list[int]) -> None:
        if self.length is not None and sum(read) != self.length:
            what = f"the shards of an iterable have {sum(read)} samples together, and its length is {self.length}"
            why = f"shard({len(read)}, i) gave " + ", ".join(map(str, read[:8]))
            raise PlaitError(Problem("J023", what, why=why, where="Job(data=…)"))


def overlap_error(ranks: int) -> PlaitError:
    """J023 for shards with common samples."""
    what = f"the shards of an iterable overlap: shard({ranks}, i) gives the same samples for different i"
    fix = ("return samples index, index + num_shards, … from shard(num_shards, index), or files of no other index",)
    return PlaitError(Problem("J023", what, where="Job(data=…)", fix=fix))


def is_every_nth(data: Shardable, seed: int, share: BatchShare, rank: int, group: ProcessGroup | None) -> bool:
    """Return whether shards are every Nth sample, judged by their first samples; `data` is read from its start. J023."""
    each = max(2, COMPARED_SAMPLES // share.ranks)
    with preserve_host_state():
        mine = [hash_sample(sample) for sample in SeededReader(data, seed, 0, share).read(0, each)]
        all_read = SeededReader(data, seed, 0, BatchShare()).read(0, each * share.ranks) if rank == 0 else ()
        whole = [hash_sample(sample) for sample in all_read]
    shares = {row[0]: row[1:] for row in exchange_numbers([share.rank, *mine], group, CPU)}
    if len({row for row in shares.values() if len(set(row)) > 1}) < sum(len(set(row)) > 1 for row in shares.values()):
        raise overlap_error(share.ranks)
    whole = exchange_numbers(whole, group, CPU)[0]
    return all(shares[j % share.ranks][j // share.ranks :][:1] == (number,) for j, number in enumerate(whole))


def exchange_numbers(numbers: Sequence[int], group: ProcessGroup | None, device: torch.device) -> list[tuple[int, ...]]:
    """Return the numbers of every rank; counts may differ between ranks. Collective."""
    rows = all_gather_bytes(struct.pack(f"<{len(numbers)}q", *numbers), group, device)
    return [struct.unpack(f"<{len(row) // 8}q", row) for row in rows]
