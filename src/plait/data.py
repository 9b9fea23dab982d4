"""Which samples a step sees: a pure function of (seed, step), never of the layout.

The order of an epoch is a permutation keyed by (seed, epoch). Step k takes the next `batch` samples of it; the last
batch of an epoch is short, never padded and never dropped. Ranks take contiguous, possibly unequal shares of the
batch, micro-batches contiguous parts of a share. Augmentation inside ``dataset[i]`` may use Python's, numpy's or
torch's own generators: they are seeded by (seed, epoch, i), whoever loads the sample, so neither the rank nor the
number of loader workers changes it.

An iterable data set is read by every rank in full and each keeps its share; its ``state_dict`` (when it has one)
travels in checkpoints, otherwise a resumed run reads up to where it was.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, default_collate

from plait.errors import PlaitError, Problem
from plait.randomness import host_fingerprint, host_state, permutation, restore_host, seed_host


@dataclass(frozen=True)
class Position:
    """Where a run is in its data: `step` steps done, next sample `start` of `epoch`, `samples` seen in all."""

    step: int = 0
    epoch: int = 0
    start: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank: samples first … first + count − 1 of the global batch."""

    first: int
    count: int
    inputs: Any
    targets: Any
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """One step's work for one rank. `size` samples over all ranks; `after` is the position once it is done."""

    position: Position
    size: int
    micro: tuple[Micro, ...]
    after: Position
    state: Any = None
    """State of an iterable data set after this batch."""

    @property
    def count(self) -> int:
        return sum(m.count for m in self.micro)


@dataclass(frozen=True)
class Share:
    """Which part of every batch is ours: part `rank` of `ranks`, computed in `microbatches` parts."""

    rank: int = 0
    ranks: int = 1
    microbatches: int = 1

    def parts(self, size: int) -> list[tuple[int, int]]:
        """(first, count) of each micro-batch in a global batch of `size`; a count may be 0 in a short batch."""
        first, count = split(size, self.ranks, self.rank)
        inside = [split(count, self.microbatches, i) for i in range(self.microbatches)]
        return [(first + offset, n) for offset, n in inside]


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of part `index` when `size` things are shared out as evenly as they go, larger parts first."""
    each, extra = divmod(size, parts)
    return index * each + min(index, extra), each + (index < extra)


def batches(
    data: Any, batch: int, seed: int, share: Share, at: Position, workers: int = 0, state: Any = None
) -> Iterator[Batch]:
    """The endless sequence of this rank's batches, from position `at` on.

    `data` is what `Job.data` returned. `workers` loader processes fetch ahead (an iterable uses at most one).
    """
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        plan = _Plan(len(data), batch, seed, share, at)
        source: Any = _Mapped(data, seed)
        if workers == 0:
            for item in plan:
                yield source[item]
            return
        loader = DataLoader(source, sampler=plan, batch_size=None, num_workers=workers, worker_init_fn=_die_with_parent)
        yield from loader
    else:
        stream = _Streamed(data, batch, seed, share, at, state)
        yield from (
            stream
            if workers == 0
            else DataLoader(stream, batch_size=None, num_workers=1, worker_init_fn=_die_with_parent)
        )


def checked(data: Any, where: str) -> Any:
    """`data` when it can be read by `batches`, with at least one sample. J007 otherwise."""
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if len(data) == 0:
            raise PlaitError(Problem("J007", "the job's data is empty", why="len(data) = 0", where=where))
    elif not hasattr(data, "__iter__"):
        raise PlaitError(
            Problem("J007", f"the job's data is a {type(data).__name__}, which cannot be read", where=where,
                    fix=("give it  __len__ and __getitem__,  or  __iter__",))
        )  # fmt: skip
    return data


def collate(data: Any, samples: list[Any]) -> tuple[Any, Any]:
    """(inputs, targets) of some samples: the data set's own `collate` when it has one, else torch's default."""
    pairs = data.collate(samples) if hasattr(data, "collate") else default_collate(samples)
    if not isinstance(pairs, (tuple, list)) or len(pairs) != 2:
        raise PlaitError(
            Problem("J007", "a sample is not a pair (inputs, targets)", why=f"got {type(samples[0]).__name__}",
                    fix=("return inputs, targets    from __getitem__ (inputs may be a tensor, a tuple or a dict)",))
        )  # fmt: skip
    return pairs[0], pairs[1]


def first_samples(data: Any, count: int) -> tuple[Any, Any]:
    """A collated batch of `count` samples for the sketch: the first sample, repeated. Leaves the generators as they were."""
    state = host_state()
    sample = data[0] if hasattr(data, "__getitem__") else next(iter(data))
    restore_host(state)
    return collate(data, [sample] * count)


class _Plan:
    """The sampler: for each step the position and, per micro-batch, the sample ids. Plain numbers, so it pickles."""

    def __init__(self, length: int, batch: int, seed: int, share: Share, at: Position):
        self.length, self.batch, self.seed, self.share, self.at = length, batch, seed, share, at

    def __iter__(self) -> Iterator[tuple[Position, int, list[tuple[int, list[int]]], Position]]:
        at, order, epoch = self.at, None, -1
        while True:
            if epoch != at.epoch:
                order, epoch = permutation(self.seed, at.epoch, self.length), at.epoch
            assert order is not None
            size = min(self.batch, self.length - at.start)
            parts = [(f, order[at.start + f : at.start + f + n].tolist()) for f, n in self.share.parts(size)]
            after = _advance(at, size, at.start + size == self.length)
            yield at, size, parts, after
            at = after


def _advance(at: Position, size: int, ends: bool) -> Position:
    start, epoch = (0, at.epoch + 1) if ends else (at.start + size, at.epoch)
    return Position(at.step + 1, epoch, start, at.samples + size)


class _Mapped:
    """Loads the samples of one step. Seeds the host generators per sample once it sees that the data uses them."""

    def __init__(self, data: Any, seed: int):
        self.data, self.seed, self.augmented = data, seed, False

    def __getitem__(self, item: tuple[Position, int, list[tuple[int, list[int]]], Position]) -> Batch:
        at, size, parts, after = item
        if not self.augmented:
            before = host_fingerprint()
            micro = self._load(at, parts)
            if host_fingerprint() == before:
                return Batch(at, size, micro, after)
            self.augmented = True  # the samples just loaded drew unkeyed numbers: load them again
        return Batch(at, size, self._load(at, parts), after)

    def _load(self, at: Position, parts: list[tuple[int, list[int]]]) -> tuple[Micro, ...]:
        micro = []
        for first, ids in parts:
            empty = not ids
            wanted = ids or [0]  # an empty part still has the shape of a batch, with no sample in it
            inputs, targets = collate(self.data, [self._sample(at.epoch, i) for i in wanted])
            if empty:
                inputs, targets = tree_map_only(torch.Tensor, lambda t: t[:0], (inputs, targets))
            micro.append(Micro(first, len(ids), inputs, targets, tuple(ids)))
        return tuple(micro)

    def _sample(self, epoch: int, i: int) -> Any:
        if self.augmented:
            seed_host(self.seed, "sample", epoch, i)
        return self.data[i]


class _Streamed(IterableDataset):
    """Batches of an iterable: every rank reads every sample and keeps its own."""

    def __init__(self, data: Any, batch: int, seed: int, share: Share, at: Position, state: Any):
        self.data, self.batch, self.seed, self.share, self.at, self.state = data, batch, seed, share, at, state

    def __iter__(self) -> Iterator[Batch]:
        at = self.at
        source = self._open(at)
        while True:
            samples, ended = self._take(source, at)
            if not samples and at.start == 0:
                raise PlaitError(Problem("J007", "the job's data is empty", why="the iterable ended without a sample"))
            if samples:
                after = _advance(at, len(samples), ended)
                state = self.data.state_dict() if hasattr(self.data, "state_dict") and not ended else None
                yield Batch(at, len(samples), self._share(at, samples), after, state)
                at = after
            else:  # the epoch ended exactly at a batch's end
                at = Position(at.step, at.epoch + 1, 0, at.samples)
                ended = True
            if ended:
                source = self._open(at)

    def _open(self, at: Position) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(at.epoch)
        if at.start and self.state is not None:
            self.data.load_state_dict(self.state)
            return iter(self.data)
        source = iter(self.data)
        for i in range(at.start):
            seed_host(self.seed, "sample", at.epoch, i)
            next(source)
        return source

    def _take(self, source: Iterator[Any], at: Position) -> tuple[list[Any], bool]:
        samples: list[Any] = []
        while len(samples) < self.batch:
            seed_host(self.seed, "sample", at.epoch, at.start + len(samples))
            try:
                samples.append(next(source))
            except StopIteration:
                return samples, True
        return samples, False

    def _share(self, at: Position, samples: list[Any]) -> tuple[Micro, ...]:
        micro = []
        for first, n in self.share.parts(len(samples)):
            inputs, targets = collate(self.data, samples[first : first + n] or samples[:1])
            if n == 0:
                inputs, targets = tree_map_only(torch.Tensor, lambda t: t[:0], (inputs, targets))
            ids = tuple(range(at.start + first, at.start + first + n))
            micro.append(Micro(first, n, inputs, targets, ids))
        return tuple(micro)


def _die_with_parent(worker: int) -> None:
    """Loader workers end with their rank, also when it is killed, and leave signals to it."""
    from plait.launch.here import die_with_parent

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    torch.set_num_threads(1)
    die_with_parent()


Weigh = Callable[[Any], Any] | None


def weigh(weight: Weigh, micro: Micro) -> float:
    """What the loss of a micro-batch is a mean over: `Job.weight` of its targets, or its number of samples."""
    if micro.count == 0:
        return 0.0
    if weight is None:
        return float(micro.count)
    value = weight(micro.targets)
    return float(value.sum() if isinstance(value, torch.Tensor) else value)
