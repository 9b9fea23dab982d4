"""Loading of each step's samples in this process or in loader processes, by the rules of `data/batch.py`.

[Note: Items that are batches]
Data whose items are ready batches, as loaders give them, is rejected. A sample may have its own leading dim, such as a sequence length, so
shapes alone are ambiguous. An item counts as a batch if all its tensors have the same leading size and the code that makes the items
indicates a batch. Signs are a DataLoader of that batch size, a value of that size whose name contains batch, or a generator or class
with such a name.

[Note: Copies to a GPU]
Samples are copied from pinned memory on a separate stream, while the previous step computes. A copy from memory that is not pinned blocks
the host, and one on the compute stream blocks the GPU. So each tensor is copied to pinned memory and from there to the GPU on a
separate stream, and its consumer's stream waits for that copy alone. The copy starts as soon as the host has read a batch; by then the
previous step is queued and still running. Batches are read no earlier than without prefetching, so checkpoints are unaffected.

At most `MAX_COPIES_AHEAD` batches are on the device. If the host is further ahead, as in an evaluation, it does not wait: later batches
are copied on the compute stream.
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

from plait.config.errors import PlaitError, Problem, parse_problem
from plait.config.job import Job
from plait.data.batch import (
    Batch,
    BatchShare,
    Data,
    MapStyle,
    MicroBatch,
    Position,
    ReopenedIterable,
    empty_data_error,
    is_map,
    make_micro_batch,
    split_pair,
)
from plait.data.iterables import (
    SeededReader,
    ShardStream,
    count_read,
    digest_samples,
    is_read_sharded,
    make_micro_batches,
    name_failing_samples,
)
from plait.data.loaders import LoaderStream
from plait.data.padding import pack_samples
from plait.data.reachable_objects import ReachedObject, check_loader_data, iter_reachable
from plait.data.sampling import Sampling
from plait.launch.failures import LoaderError, describe_error
from plait.launch.limits import reopen_inherited_files
from plait.randomness.keyed import draw_host_numbers, seed_host
from plait.tensors.torch_private import tree_map_only

MAX_COPIES_AHEAD = 3
"""Maximum number of batches that are copied ahead of their steps."""


class DevicePrefetcher:
    """Prefetches samples to one device. On a CPU it does nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pending: deque[dict[int, tuple[Tensor, Tensor, Any]]] = deque(maxlen=2)
        """id of a host tensor -> (tensor, copy, event of the copy), for the last two batches."""
        self.end_events: deque[Any] = deque()
        """Events recorded before each batch was requested, without those that are known to be complete."""

    def start_copies(self, trees: Iterable[object]) -> None:
        """Start to copy the current values of a batch's tensors. Each copy may be taken once."""
        if self.stream is None:
            return
        while self.end_events and self.end_events[0].query():
            self.end_events.popleft()
        if len(self.end_events) == MAX_COPIES_AHEAD:
            return
        self.end_events.append(torch.cuda.current_stream(self.device).record_event())
        copies: dict[int, tuple[Tensor, Tensor, Any]] = {}
        tree_map_only(Tensor, lambda t: self._start_copy(t, copies), [*trees])
        self.pending.append(copies)

    def take_tree(self, tree: object) -> Any:
        """Return the tree with its host tensors on the device; a tensor without a pending copy is copied now."""
        return tree if self.stream is None else tree_map_only(Tensor, self._take_tensor, tree)

    def _take_tensor(self, t: Tensor) -> Tensor:
        copies = next((copies for copies in self.pending if id(t) in copies), None)
        if copies is None:
            return _copy_to_pinned(t).to(self.device, non_blocking=True) if _is_plain_host(t) else t
        _, copy, end = copies.pop(id(t))
        here = torch.cuda.current_stream(self.device)
        here.wait_event(end)
        copy.record_stream(here)  # allocated on the other stream, which must not reuse the memory earlier
        return copy

    def _start_copy(self, t: Tensor, copies: dict[int, tuple[Tensor, Tensor, Any]]) -> None:
        assert self.stream is not None
        if not _is_plain_host(t) or id(t) in copies:
            return
        pinned = _copy_to_pinned(t)
        with torch.cuda.stream(self.stream):
            copies[id(t)] = t, pinned.to(self.device, non_blocking=True), self.stream.record_event()


def _is_plain_host(t: Tensor) -> bool:
    """Return whether it is a plain host tensor; others are moved elsewhere."""
    return t.device.type == "cpu" and t.layout is torch.strided and not t.requires_grad and type(t) is Tensor


def _copy_to_pinned(t: Tensor) -> Tensor:
    """Copy to pinned memory, since the data set may overwrite its tensor."""
    return torch.empty_like(t, pin_memory=True).copy_(t)


SHUTDOWN_GRACE_S = 0.5
"""Seconds in which loader processes may exit by themselves."""


def iter_batches(
    data: Data, batch: int, seed: int, share: BatchShare, at: Position, *, workers: int = 0, reads: Callable[[], None] = lambda: None,
    sampling: Sampling | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Yield this rank's batches from position `at` on, without end.

    `data`: result of `Job.data`; `sampling`: the samples of each step (None: a permutation, `batch` at a time). `workers`: number of loader
    processes that prefetch (an iterable uses at most one). `reads` is called before each sample, also in those processes.

    """
    if workers:
        check_loader_data(data)
    if is_map(data):
        sampling = sampling or Sampling(len(data), batch, seed)
        plan, source = _StepSampler(sampling, share, at), _StepReader(data, seed, reads)
        if workers == 0:
            for item in plan:
                yield source[item]
            return
        loaded = DataLoader(_CatchingDataset(source), sampler=plan, batch_size=None, num_workers=workers, worker_init_fn=_init_worker)
    else:
        shared = is_read_sharded(data, share)
        stream = ShardStream(data, batch, seed, share, at) if shared else _FullStream(data, batch, seed, share, at)
        stream.on_read = reads
        if workers == 0:
            yield from stream
            return
        loaded = DataLoader(_CatchingStream(stream), batch_size=None, num_workers=1, worker_init_fn=_init_worker)
    others = multiprocessing.active_children()
    source = iter(loaded)
    processes = [process for process in multiprocessing.active_children() if process not in others]
    kill = atexit.register(partial(_kill_workers, processes))  # Python would send SIGTERM, which they ignore, and wait
    try:
        for item in source:
            if isinstance(item, _LoaderFailure):
                raise item.to_error()
            yield item
    finally:
        with _shutdown_deadline(processes):
            del source
        atexit.unregister(kill)


def make_step_reader(data: MapStyle, seed: int, reads: Callable[[], None]) -> "Callable[[StepSamples], Batch]":
    """Return a function that reads the samples of a step, or of a part of one, by their ids."""
    return _StepReader(data, seed, reads).__getitem__


class _CatchingDataset(Dataset):
    """A source of batches that returns its exceptions, since torch would raise new ones with the same text in the rank."""

    def __init__(self, source: "_StepReader"):
        self.source = source

    def __getitem__(self, index: "StepSamples") -> "Batch | _LoaderFailure":
        try:
            return _move_to_shared(self.source[index])
        except CAUGHT_ERRORS as error:
            return _capture_failure(error)


class _CatchingStream(IterableDataset):
    def __init__(self, source: "ShardStream | _FullStream"):
        self.source = source

    def __iter__(self) -> "Iterator[Batch | _LoaderFailure]":
        try:
            for batch in self.source:
                yield _move_to_shared(batch)
        except CAUGHT_ERRORS as error:
            yield _capture_failure(error)


CAUGHT_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""Exceptions of the job's data, including those that would end a loader process silently."""


@dataclass(frozen=True)
class _LoaderFailure:
    """An exception in loader process `worker`, as `describe_error` encodes it."""

    description: dict[str, Any]
    worker: int

    def to_error(self) -> Exception:
        if self.description["problems"]:
            return PlaitError(map(parse_problem, self.description["problems"]), self.description["exit_code"], self.description["trace"])
        return LoaderError(self.description, self.worker)


def _capture_failure(error: BaseException) -> _LoaderFailure:
    info = get_worker_info()
    return _LoaderFailure(describe_error(error), info.id if info is not None else 0)


def _move_to_shared(batch: Batch) -> Batch:
    """Move a batch's tensors to shared memory, so that a lack of memory raises here and not in a background thread."""
    tree_map_only(Tensor, Tensor.share_memory_, [(m.inputs, m.targets) for m in batch.micro_batches])
    micro = tuple(replace(m, samples=pack_samples(m.samples)) if m.samples else m for m in batch.micro_batches)
    return replace(batch, micro_batches=micro, all_samples=pack_samples(batch.all_samples))


def _shorter_data_error(at: Position, length: int) -> PlaitError:
    what = f"the run is at sample {at.start} of epoch {at.epoch}, which has only {length} now"
    fix = ("resume with the original data",)
    return PlaitError(
        Problem("K003", what, why="the data, or its order, is shorter than at the checkpoint", fix=fix)
    )


@dataclass(frozen=True)
class StepSamples:
    """The samples that a rank reads for a step."""

    position: Position
    size: int
    micro_ids: list[tuple[int, list[int]]]
    """(first, sample ids) of each micro-batch."""
    next_position: Position
    filler: int
    """A sample of the step, for micro-batches without one."""
    max_share: int = 0
    """Size of the largest local batch."""


class _StepSampler:
    """Sampler of positions and sample ids of each step. It has plain numbers only, so it can be pickled."""

    def __init__(self, sampling: Sampling, share: BatchShare, at: Position):
        self.sampling, self.share, self.at = sampling, share, at

    def __iter__(self) -> Iterator[StepSamples]:
        at = self.at
        while True:
            order = self.sampling.epoch_indices(at.epoch)
            size = self.sampling.step_size(at.epoch, at.start)
            if not size:
                raise _shorter_data_error(at, len(order))
            share = self.share.at_step(at.step)
            parts = [(f, order[at.start + f : at.start + f + n].tolist()) for f, n in share.locate_micro_batches(size)]
            after = _advance_position(at, size, at.start + size == len(order))
            yield StepSamples(at, size, parts, after, int(order[at.start]), max(share.compute_sizes(size)))
            at = after


def _advance_position(at: Position, size: int, ends: bool) -> Position:
    start, epoch = (0, at.epoch + 1) if ends else (at.start + size, at.epoch)
    return Position(at.step + 1, epoch, start, at.samples + size)


class _StepReader:
    """Loads the samples of one step, seeding the host generators that the data uses before each sample."""

    def __init__(self, data: MapStyle, seed: int, reads: Callable[[], None]):
        self.data, self.seed, self.on_read = data, seed, reads
        self.used_generators: set[int] = set()
        seed_host("untouched")
        self.initial_draws = draw_host_numbers()

    def __getitem__(self, step: StepSamples) -> Batch:
        epoch = step.position.epoch
        while True:
            seed_host("untouched")
            loaded = [(first, ids, [self._read_sample(epoch, i) for i in ids or [step.filler]]) for first, ids in step.micro_ids]
            micro = tuple(self._collate(step, samples, first, ids) for first, ids, samples in loaded)
            moved = {k for k, number in enumerate(draw_host_numbers()) if number != self.initial_draws[k]} - self.used_generators
            if not moved:
                return Batch(step.position, step.size, micro, step.next_position, max_share=step.max_share)
            self.used_generators |= moved  # these samples used an unseeded generator: seed it and load them again

    def _collate(self, step: StepSamples, samples: list[Any], first: int, ids: list[int]) -> MicroBatch:
        with name_failing_samples(ids or [step.filler], f"of epoch {step.position.epoch}", samples):
            return make_micro_batch(self.data, samples, first, ids)

    def _read_sample(self, epoch: int, i: int) -> Any:
        self.on_read()
        if self.used_generators:
            seed_host(self.seed, "sample", epoch, i, only=self.used_generators)
        with name_failing_samples([i], f"of epoch {epoch}"):
            return self.data[i]


class _FullStream(IterableDataset):
    """Batches of an iterable: every rank reads every sample and keeps its own."""

    def __init__(self, data: Data, batch: int, seed: int, share: BatchShare, at: Position):
        self.data, self.batch, self.seed, self.share, self.at = data, batch, seed, share, at
        self.on_read: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Batch]:
        at = self.at
        reader = self._open_reader(at)
        while True:
            samples = list(reader.read(at.start, self.batch))
            ended = len(samples) < self.batch
            if not samples and at.start == 0:
                again = f" in epoch {at.epoch}; it can be read only once" if at.epoch else ""
                raise empty_data_error(f"the iterable ended without a sample{again}")
            if samples:
                state = self.data.state_dict() if hasattr(self.data, "state_dict") else None
                after = replace(_advance_position(at, len(samples), ended), state=state)
                around = tuple(samples) if hasattr(self.data, "collate") else ()
                share = self.share.at_step(at.step)
                micro = make_micro_batches(self.data, samples, share, lambda k, at=at: at.start + k, samples[0])
                most = max(share.compute_sizes(len(samples)))
                yield Batch(at, len(samples), micro, after, digest_samples(samples), all_samples=around, max_share=most)
                at = after
            else:  # the epoch ended at the end of a batch
                at = Position(at.step, at.epoch + 1, 0, at.samples)
                ended = True
            if ended:
                reader = self._open_reader(at)

    def _open_reader(self, at: Position) -> SeededReader:
        state = at.state if at is self.at and hasattr(self.data, "load_state_dict") else None
        if isinstance(at.state, dict) and "shares" in at.state:
            count_read(at, 1)  # raises J026 unless shards were every Nth sample
            state = None
        reader = SeededReader(self.data, self.seed, at.epoch, BatchShare(), reads=self.on_read, state=state)
        if state is None:
            known = sum(1 for _ in reader.read(0, at.start))
            if known < at.start:
                raise _shorter_data_error(at, known)
        return reader


def _kill_workers(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in workers:
        process.kill()


@contextmanager
def _shutdown_deadline(workers: Sequence[multiprocessing.process.BaseProcess]) -> Iterator[None]:
    """Context in which torch shuts down these loader processes.

    torch waits five seconds for each. Those still reading after `SHUTDOWN_GRACE_S` are killed, and torch's handler of SIGCHLD does not
    raise for them.

    """
    late = threading.Timer(SHUTDOWN_GRACE_S, _kill_workers, (workers,))
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


def _init_worker(worker: int) -> None:
    """Set up a loader process: it ends with its rank, ignores signals, and has its own file offsets."""
    from plait.launch.child import die_with_parent
    from plait.launch.stopping import STOP_SIGNALS

    os.setpgid(0, 0)  # Ctrl-C in a terminal must reach the launcher's group only
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    reopen_inherited_files()
    die_with_parent()


BATCH_WORD = "batch"
UNRELATED_NAMES = ("collate", "microbatch", "batch_first", "batch_norm", "batchnorm")
"""Names that contain the word without referring to items."""


def check_not_batches(job: Job, data: object, item: object) -> None:
    """J007 if the items of the job's data are ready batches. `item`: the first item."""
    size = find_common_length(item)
    if size < 2:
        return
    start: object = data.dataset if isinstance(data, LoaderStream) else data
    if isinstance(data, ReopenedIterable):
        start = [data.make, data.make()]
    if (told := find_batching_sign(start, size, job.batch)) is None:
        return
    what = f"the items of the data are ready batches of {size}, not samples"
    why = f"{told}, and all tensors of an item have {size} rows; each item would count as one of the {job.batch} samples of a step"
    fix = (
        f"pass the data set itself:    data=lambda: dataset, batch={size}",
        "yield single samples:    for x, y in batches: yield from zip(x, y)",
        "if an item is one sample, such as a sequence: read it without that loader, and rename values of its size that contain batch",
    )
    raise PlaitError(Problem("J007", what, why=why, where="Job(data=…)", fix=fix))


def find_common_length(item: object) -> int:
    """Return the size of dim 0 that all tensors of an item have; 0 if they differ."""
    pair = split_pair(item)
    sizes = set(_iter_first_dims(pair)) if pair is not None else {0}
    return sizes.pop() if len(sizes) == 1 else 0


def _iter_first_dims(tree: object) -> Iterator[int]:
    if isinstance(tree, (Tensor, np.ndarray)):
        yield tree.shape[0] if tree.ndim else 0
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _iter_first_dims(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _iter_first_dims(value)
    else:
        yield len(tree) if isinstance(tree, list) else 0


def find_batching_sign(start: object, size: int, batch: int) -> str | None:
    """Describe the sign in the code that items are batches of `size`; None without one. `batch`: the job's batch size."""
    found = list(iter_reachable(start))
    sized = size == batch or any(type(one.value) is int and one.value == size for one in found)
    return next((told for one in found if (told := _describe_batching(one, size, sized))), None)


def _describe_batching(found: ReachedObject, size: int, sized: bool) -> str | None:
    """Describe the sign that one object gives, or None. `sized`: the job, or another object, has the number `size`."""
    value = found.value
    if isinstance(value, DataLoader):
        if value.batch_sampler is None:
            return "they come from a DataLoader with batch_size=None, which makes no batches of its own"
        return f"they come from a DataLoader with batch_size={size}" if value.batch_size == size else None
    if type(value) is int and value == size and _has_batch_word(found.name):
        return f"{found.path} is {size}"
    code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
    if isinstance(code, types.CodeType) and code.co_flags & inspect.CO_GENERATOR and _has_batch_name(code):
        return f"the generator {code.co_name} makes them" if sized or size in code.co_consts else None
    if not found.path and sized and _has_batch_word(type(value).__name__):
        return f"they are those of a {type(value).__name__}"
    return None


def _has_batch_name(code: types.CodeType) -> bool:
    """Return whether the name of a function, or of one of its arguments, contains batch."""
    return any(map(_has_batch_word, (code.co_name, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])))


def _has_batch_word(name: str) -> bool:
    name = name.lower()
    return BATCH_WORD in name and not any(other in name for other in UNRELATED_NAMES)
