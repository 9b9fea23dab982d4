"""Reading the samples of each step, here or in loader processes: the iteration behind `data/batch.py`'s rules."""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from plait.config.errors import PlaitError, Problem, problem_of
from plait.data.batch import Batch, BatchShare, Data, MapStyle, Micro, Position, empty, is_map, part
from plait.data.iterables import OfShare, SeededReader, cut, digest, read_apart, read_before
from plait.data.padding import packed
from plait.data.reachable import check_loaders
from plait.data.sample_errors import naming_samples
from plait.data.sampling import Sampling
from plait.launch.descriptors import own_offsets
from plait.launch.failure_report import LoaderError, described
from plait.randomness.keyed import first_draws, seed_host
from plait.tensors.torch_private import tree_map_only

PATIENCE = 0.5
"""Seconds in which loader processes may end by themselves."""


def batches(
    data: Data, batch: int, seed: int, share: BatchShare, at: Position, *, workers: int = 0, reads: Callable[[], None] = lambda: None,
    sampling: Sampling | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """The endless sequence of this rank's batches, from position `at` on.

    `data` is what `Job.data` returned; `sampling` says which samples a step takes (None: a permutation, `batch` at a time).
    `workers` loader processes fetch ahead (an iterable uses at most one). `reads` is called before each sample, also in those
    processes.
    """
    if workers:
        check_loaders(data)
    if is_map(data):
        sampling = sampling or Sampling(len(data), batch, seed)
        plan, source = _Plan(sampling, share, at), _Mapped(data, seed, reads)
        if workers == 0:
            for item in plan:
                yield source[item]
            return
        loaded = DataLoader(_Caught(source), sampler=plan, batch_size=None, num_workers=workers, worker_init_fn=_settle)
    else:
        shared = read_apart(data, share)
        stream = OfShare(data, batch, seed, share, at) if shared else _Streamed(data, batch, seed, share, at)
        stream.reads = reads
        if workers == 0:
            yield from stream
            return
        loaded = DataLoader(_CaughtStream(stream), batch_size=None, num_workers=1, worker_init_fn=_settle)
    others = multiprocessing.active_children()
    source = iter(loaded)
    processes = [process for process in multiprocessing.active_children() if process not in others]
    kill = atexit.register(partial(_kill, processes))  # Python would end them by SIGTERM, which they ignore, and wait for them
    try:
        for item in source:
            if isinstance(item, _Failed):
                raise item.error()
            yield item
    finally:
        with _shutdown_deadline(processes):
            del source
        atexit.unregister(kill)


def reader(data: MapStyle, seed: int, reads: Callable[[], None]) -> "Callable[[StepSamples], Batch]":
    """Reads the samples of a step, or of a part of one, by their ids."""
    return _Mapped(data, seed, reads).__getitem__


class _Caught(Dataset):
    """A source of batches whose failures are returned: torch would make new exceptions of their text in the rank."""

    def __init__(self, source: "_Mapped"):
        self.source = source

    def __getitem__(self, index: "StepSamples") -> "Batch | _Failed":
        try:
            return _shared(self.source[index])
        except RAISED as error:
            return _failed(error)


class _CaughtStream(IterableDataset):
    def __init__(self, source: "OfShare | _Streamed"):
        self.source = source

    def __iter__(self) -> "Iterator[Batch | _Failed]":
        try:
            for batch in self.source:
                yield _shared(batch)
        except RAISED as error:
            yield _failed(error)


RAISED = (Exception, SystemExit, KeyboardInterrupt)
"""What the job's data may raise: also what would end a loader process without a word."""


@dataclass(frozen=True)
class _Failed:
    """An exception in loader process `worker`, as `described` told it."""

    told: dict[str, Any]
    worker: int

    def error(self) -> Exception:
        if self.told["problems"]:
            return PlaitError(map(problem_of, self.told["problems"]), self.told["exit_code"], self.told["trace"])
        return LoaderError(self.told, self.worker)


def _failed(error: BaseException) -> _Failed:
    info = get_worker_info()
    return _Failed(described(error), info.id if info is not None else 0)


def _shared(batch: Batch) -> Batch:
    """A batch whose tensors are in shared memory: what has no room raises here, and not in a thread that nobody hears."""
    tree_map_only(Tensor, Tensor.share_memory_, [(m.inputs, m.targets) for m in batch.micro])
    micro = tuple(replace(m, samples=packed(m.samples)) if m.samples else m for m in batch.micro)
    return replace(batch, micro=micro, around=packed(batch.around))


def _shorter(at: Position, length: int) -> PlaitError:
    what = f"the run is at sample {at.start} of epoch {at.epoch}, and that has only {length}"
    fix = ("resume with the data it was started with",)
    return PlaitError(
        Problem("K003", what, why="the data, or its order, has become shorter since the checkpoint", fix=fix)
    )


@dataclass(frozen=True)
class StepSamples:
    """Which samples a rank reads for a step."""

    position: Position
    size: int
    parts: list[tuple[int, list[int]]]
    """(first, sample ids) of each micro-batch."""
    after: Position
    other: int
    """A sample of the step, for micro-batches without one."""
    most: int = 0
    """Samples of the largest share."""


class _Plan:
    """The sampler: for each step the position and, per micro-batch, the sample ids. Plain numbers, so it pickles."""

    def __init__(self, sampling: Sampling, share: BatchShare, at: Position):
        self.sampling, self.share, self.at = sampling, share, at

    def __iter__(self) -> Iterator[StepSamples]:
        at = self.at
        while True:
            order = self.sampling.epoch(at.epoch)
            size = self.sampling.size(at.epoch, at.start)
            if not size:
                raise _shorter(at, len(order))
            share = self.share.at(at.step)
            parts = [(f, order[at.start + f : at.start + f + n].tolist()) for f, n in share.parts(size)]
            after = _advance(at, size, at.start + size == len(order))
            yield StepSamples(at, size, parts, after, int(order[at.start]), max(share.sizes(size)))
            at = after


def _advance(at: Position, size: int, ends: bool) -> Position:
    start, epoch = (0, at.epoch + 1) if ends else (at.start + size, at.epoch)
    return Position(at.step + 1, epoch, start, at.samples + size)


class _Mapped:
    """Loads the samples of one step, the host generators that the data draws from seeded before each sample."""

    def __init__(self, data: MapStyle, seed: int, reads: Callable[[], None]):
        self.data, self.seed, self.reads = data, seed, reads
        self.drawn: set[int] = set()
        seed_host("untouched")
        self.untouched = first_draws()

    def __getitem__(self, step: StepSamples) -> Batch:
        epoch = step.position.epoch
        while True:
            seed_host("untouched")
            loaded = [(first, ids, [self._sample(epoch, i) for i in ids or [step.other]]) for first, ids in step.parts]
            micro = tuple(self._together(step, samples, first, ids) for first, ids, samples in loaded)
            moved = {k for k, number in enumerate(first_draws()) if number != self.untouched[k]} - self.drawn
            if not moved:
                return Batch(step.position, step.size, micro, step.after, most=step.most)
            self.drawn |= moved  # these samples drew unkeyed numbers: load them again, and seed that generator too

    def _together(self, step: StepSamples, samples: list[Any], first: int, ids: list[int]) -> Micro:
        with naming_samples(ids or [step.other], f"of epoch {step.position.epoch}", samples):
            return part(self.data, samples, first, ids)

    def _sample(self, epoch: int, i: int) -> Any:
        self.reads()
        if self.drawn:
            seed_host(self.seed, "sample", epoch, i, only=self.drawn)
        with naming_samples([i], f"of epoch {epoch}"):
            return self.data[i]


class _Streamed(IterableDataset):
    """Batches of an iterable: every rank reads every sample and keeps its own."""

    def __init__(self, data: Data, batch: int, seed: int, share: BatchShare, at: Position):
        self.data, self.batch, self.seed, self.share, self.at = data, batch, seed, share, at
        self.reads: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Batch]:
        at = self.at
        reader = self._open(at)
        while True:
            samples = list(reader.read(at.start, self.batch))
            ended = len(samples) < self.batch
            if not samples and at.start == 0:
                again = f" when it was read again for epoch {at.epoch}: it can be read only once" if at.epoch else ""
                raise empty(f"the iterable ended without a sample{again}")
            if samples:
                state = self.data.state_dict() if hasattr(self.data, "state_dict") else None
                after = replace(_advance(at, len(samples), ended), state=state)
                around = tuple(samples) if hasattr(self.data, "collate") else ()
                share = self.share.at(at.step)
                micro = cut(self.data, samples, share, lambda k, at=at: at.start + k, samples[0])
                most = max(share.sizes(len(samples)))
                yield Batch(at, len(samples), micro, after, digest(samples), around=around, most=most)
                at = after
            else:  # the epoch ended exactly at a batch's end
                at = Position(at.step, at.epoch + 1, 0, at.samples)
                ended = True
            if ended:
                reader = self._open(at)

    def _open(self, at: Position) -> SeededReader:
        state = at.state if at is self.at and hasattr(self.data, "load_state_dict") else None
        if isinstance(at.state, dict) and "shares" in at.state:
            read_before(at, 1)  # of other shares: only every Nth sample can be found again
            state = None
        reader = SeededReader(self.data, self.seed, at.epoch, BatchShare(), reads=self.reads, state=state)
        if state is None:
            known = sum(1 for _ in reader.read(0, at.start))
            if known < at.start:
                raise _shorter(at, known)
        return reader


def _kill(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in workers:
        process.kill()


@contextmanager
def _shutdown_deadline(workers: Sequence[multiprocessing.process.BaseProcess]) -> Iterator[None]:
    """Inside, torch shuts these loader processes down, and waits five seconds for each. Those that still read after `PATIENCE` are
    killed, and torch's handler of SIGCHLD does not raise for them."""
    late = threading.Timer(PATIENCE, _kill, (workers,))
    heard = signal.getsignal(signal.SIGCHLD) if threading.current_thread() is threading.main_thread() else None
    if heard is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        late.start()
    try:
        yield
    finally:
        if heard is not None:
            late.cancel()
            late.join()
            signal.signal(signal.SIGCHLD, heard)


def _settle(worker: int) -> None:
    """Loader workers end with their rank, also when it is killed, leave signals to it, and read files at offsets of their own."""
    from plait.launch.child import die_with_parent
    from plait.launch.stopping import REQUESTS

    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the launcher's group only
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    own_offsets()
    die_with_parent()
