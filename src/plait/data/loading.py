"""Reading the samples of each step, here or in loader processes: the iteration behind `data/batch.py`'s rules.

Items that are no samples: data whose items are ready batches, as loaders give them.

A sample may have a leading dim of its own, such as the length of a sequence, so the shape of an item tells nothing alone. An item is
taken for a batch if all its tensors have the same leading size, and if the code that makes the items says that this is a batch: it reads
from a DataLoader with batches of that size, has a value of that size whose name says batch, or a generator or class with such a name.

[Note: Copies to a GPU]
Samples on their way to a GPU: copied from pinned memory, on a stream of their own, while the step before computes.

A copy from memory that is not pinned makes the host wait, and one on the stream that computes makes the GPU wait. So each tensor
is put into pinned memory, copied on a stream of its own, and whoever takes it has its stream wait for that copy alone. The host
asks as soon as it has read a batch. It has then queued the step before, which the GPU is still computing: nothing has to be read
earlier than it is today, and what a checkpoint says of the data is the same.

At most `AHEAD` batches lie on the device for this. A host that is farther ahead, as in an evaluation, does not wait: what it asks
for then is copied in its turn, by the stream that computes.
"""

import atexit
import inspect
import multiprocessing
import os
import signal
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from plait.config.errors import PlaitError, Problem, problem_of
from plait.config.job import Job
from plait.data.batch import Batch, BatchShare, Data, MapStyle, Micro, Position, Remade, empty, is_map, pair_of, part
from plait.data.iterables import OfShare, SeededReader, cut, digest, naming_samples, read_apart, read_before
from plait.data.loaders import LoaderStream
from plait.data.padding import packed
from plait.data.reachable import Reached, check_loaders, reachable
from plait.data.sampling import Sampling
from plait.launch.failures import LoaderError, described
from plait.launch.limits import own_offsets
from plait.randomness.keyed import first_draws, seed_host
from plait.tensors.torch_private import tree_map_only

AHEAD = 3
"""Batches that are copied ahead of their steps, at most."""


class DeviceCopies:
    """Copies of samples on one device. On a CPU there are none: samples are used where they are."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.asked: deque[dict[int, tuple[Tensor, Tensor, Any]]] = deque(maxlen=2)
        """By the tensor of the host: it, its copy, and what tells that the copy is there; of the last two batches."""
        self.ends: deque[Any] = deque()
        """What tells that all is over that was queued before a batch was asked for; of those that are not known to be over."""

    def begin(self, trees: Iterable[object]) -> None:
        """Start copying the tensors of a batch, as they are now. They may be taken once."""
        if self.stream is None:
            return
        while self.ends and self.ends[0].query():
            self.ends.popleft()
        if len(self.ends) == AHEAD:
            return
        self.ends.append(torch.cuda.current_stream(self.device).record_event())
        copies: dict[int, tuple[Tensor, Tensor, Any]] = {}
        tree_map_only(Tensor, lambda t: self._copy(t, copies), [*trees])
        self.asked.append(copies)

    def take(self, tree: object) -> Any:
        """The tree with its tensors on the device, as far as they are of the host; what nobody asked for is copied now."""
        return tree if self.stream is None else tree_map_only(Tensor, self._taken, tree)

    def _taken(self, t: Tensor) -> Tensor:
        copies = next((copies for copies in self.asked if id(t) in copies), None)
        if copies is None:
            return _pinned(t).to(self.device, non_blocking=True) if _plain(t) else t
        _, copy, end = copies.pop(id(t))
        here = torch.cuda.current_stream(self.device)
        here.wait_event(end)
        copy.record_stream(here)  # it was allocated on the other one, which may not use the memory again before
        return copy

    def _copy(self, t: Tensor, copies: dict[int, tuple[Tensor, Tensor, Any]]) -> None:
        assert self.stream is not None
        if not _plain(t) or id(t) in copies:
            return
        pinned = _pinned(t)
        with torch.cuda.stream(self.stream):
            copies[id(t)] = t, pinned.to(self.device, non_blocking=True), self.stream.record_event()


def _plain(t: Tensor) -> bool:
    """Whether it is a plain tensor of the host; others are left to those who move them."""
    return t.device.type == "cpu" and t.layout is torch.strided and not t.requires_grad and type(t) is Tensor


def _pinned(t: Tensor) -> Tensor:
    """In pinned memory of our own: the data may write into what it gave."""
    return torch.empty_like(t, pin_memory=True).copy_(t)


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


WORD = "batch"
OTHERS = ("collate", "microbatch", "batch_first", "batch_norm", "batchnorm")
"""Names with the word that say nothing of items."""


def check(job: Job, data: object, item: object) -> None:
    """J007 if the items of the job's data are ready batches. `item`: the first of them."""
    size = leading(item)
    if size < 2:
        return
    start: object = data.dataset if isinstance(data, LoaderStream) else data
    if isinstance(data, Remade):
        start = [data.make, data.make()]
    if (told := said(start, size, job.batch)) is None:
        return
    what = f"the items of the data are ready batches of {size}, not samples"
    why = f"{told}, and all tensors of an item have {size} rows: each item would count as one of the {job.batch} samples of a step"
    fix = (
        f"give the data set itself:    data=lambda: dataset, batch={size}",
        "give single samples:    for x, y in batches: yield from zip(x, y)",
        "if an item is one sample, such as a sequence: read it without that loader, and name no value of its size batch",
    )
    raise PlaitError(Problem("J007", what, why=why, where="Job(data=…)", fix=fix))


def leading(item: object) -> int:
    """The first dim's size of all tensors of an item; 0 if they have no such size in common."""
    pair = pair_of(item)
    sizes = set(_sizes(pair)) if pair is not None else {0}
    return sizes.pop() if len(sizes) == 1 else 0


def _sizes(tree: object) -> Iterator[int]:
    if isinstance(tree, (Tensor, np.ndarray)):
        yield tree.shape[0] if tree.ndim else 0
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _sizes(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _sizes(value)
    else:
        yield len(tree) if isinstance(tree, list) else 0


def said(start: object, size: int, batch: int) -> str | None:
    """How the code that makes the items says that they are batches of `size`; None if it does not. `batch`: the job's."""
    found = list(reachable(start))
    sized = size == batch or any(type(one.value) is int and one.value == size for one in found)
    return next((told for one in found if (told := _told(one, size, sized))), None)


def _told(found: Reached, size: int, sized: bool) -> str | None:
    """What one object says. `sized`: the job, or another object, has the number `size`."""
    value = found.value
    if isinstance(value, DataLoader):
        if value.batch_sampler is None:
            return "they come from a DataLoader with batch_size=None, which makes no batches of its own"
        return f"they come from a DataLoader with batch_size={size}" if value.batch_size == size else None
    if type(value) is int and value == size and _says(found.name):
        return f"{found.path} is {size}"
    code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
    if isinstance(code, types.CodeType) and code.co_flags & inspect.CO_GENERATOR and _named(code):
        return f"the generator {code.co_name} makes them" if sized or size in code.co_consts else None
    if not found.path and sized and _says(type(value).__name__):
        return f"they are those of a {type(value).__name__}"
    return None


def _named(code: types.CodeType) -> bool:
    """Whether the name of a function, or of one of its arguments, says batch."""
    return any(map(_says, (code.co_name, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])))


def _says(name: str) -> bool:
    name = name.lower()
    return WORD in name and not any(other in name for other in OTHERS)
