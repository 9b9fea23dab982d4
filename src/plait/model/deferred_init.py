"""Build a model that is too large for one rank: draw all initial weights, and keep only this rank's shards.

A constructor draws tensors from torch's generator in order, often twice: the layer's default, then the model's own rule. To get the
weights of one device, all of them must be drawn in this order, but not all kept in memory.

The constructor runs twice. The first run, on fake tensors, records for each large tensor when it is fully overwritten, changed, or read. In the
second
run, on real tensors, a large tensor has storage only from its last full overwrite to its last use. Earlier draws go into a temporary
buffer. After the last use, this rank's shard is copied and the storage is freed.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.fake import FAKE_FAILURES
from plait.tensors.module_state import replace_parameters
from plait.tensors.parameters import make_parameter_like
from plait.tensors.torch_private import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    is_seeded,
    schema,
    storage_key,
    tree_leaves,
)
from plait.tensors.trees import flatten_tensors

DEFER_BYTES = 256 << 20
"""Minimum bytes of parameters for deferred initialization, which draws weights up to twice and builds the model twice."""
LARGE_TENSOR_BYTES = 1 << 16
"""Minimum bytes of tracked tensors; smaller ones are built normally."""
_OVERWRITING = ("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "bernoulli_", "random_")


@dataclass
class StorageHistory:
    """The uses of one large storage by operation number. Each of its `lives` is [full overwrite, last use]."""

    lives: list[list[int]] = field(default_factory=list)
    read: list[bool] = field(default_factory=list)
    """Whether another tensor was computed from it, for each life."""

    def is_needed(self, number: int) -> bool:
        """Whether the values at this operation are needed: in the last life, or in one that was read."""
        index = max(i for i, (first, _) in enumerate(self.lives) if first <= number)
        return index == len(self.lives) - 1 or self.read[index]

    def has_start(self, number: int) -> bool:
        """Whether a life starts with this operation."""
        return any(first == number for first, _ in self.lives)

    def has_end(self, number: int) -> bool:
        """Whether a life ends with this operation."""
        return any(last == number for _, last in self.lives)


class _StorageTracker(TorchDispatchMode):
    """Numbers large storages, and the operations on them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.known: dict[int, tuple[int, Tensor]] = {}
        self.count = 0

    def find_index(self, t: object) -> int | None:
        """Return the number of a tensor's storage, or None if it is not tracked."""
        known = self.known.get(storage_key(t)) if isinstance(t, Tensor) else None
        return None if known is None else known[0]

    def track_new(self, result: object) -> list[int]:
        """Track the large storages that an operation created, and return their numbers."""
        new = []
        for t in flatten_tensors(result):
            if t.untyped_storage().nbytes() >= LARGE_TENSOR_BYTES and storage_key(t) not in self.known:
                self.known[storage_key(t)] = (self.count, t.detach())
                new.append(self.count)
                self.count += 1
        return new


TouchedTensors = tuple[list[Tensor], list[Tensor]]
"""(tensors an operator writes, tensors it reads)."""


STATISTICS_OPERATORS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"))
"""Operators that write running statistics in training without a mark in torch's schema, including those of instance norms."""


def find_touched(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TouchedTensors:
    """Return the tensors that a call of an operator writes and reads."""
    written, read = list[Tensor](), list[Tensor]()
    arguments = _list_arguments(func)
    if func.overloadpacket.__name__ in STATISTICS_OPERATORS:
        given = {name: value for (name, _), value in zip(arguments, args)} | kwargs
        updates = given.get("training", True)
        arguments = tuple((name, bool(updates) and name.startswith("running_")) for name, _ in arguments)
    for (_, writes), value in zip(arguments, args):
        (written if writes else read).extend(flatten_tensors(value))
    if kwargs:
        for name, writes in arguments:
            (written if writes else read).extend(flatten_tensors(kwargs.get(name)))
    return written, read


@cache
def _list_arguments(func: OpOverload) -> tuple[tuple[str, bool], ...]:
    """Return (name, is written) of each argument of an operator."""
    return tuple((argument.name, argument.is_write) for argument in schema(func).arguments)


class HistoryRecorder(_StorageTracker):
    """Records the history of storages in the first run. A view is not a use; operations through it are."""

    def __init__(self) -> None:
        super().__init__()
        self.stories: list[StorageHistory] = []
        self.order: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _returns_view(func):
            return result
        written, read = find_touched(func, args, kwargs)
        mine = {k for t in written if (k := self.find_index(t)) is not None}
        others = {k for t in read if (k := self.find_index(t)) is not None} - mine
        new = self.track_new(result)
        if not mine and not others and not new:
            return result
        self.number += 1
        self.order.append(str(func))
        whole = func.overloadpacket.__name__ in _OVERWRITING and _is_full_storage(written)
        for k in (*mine, *others):
            story = self.stories[k]
            if whole and k in mine:
                story.lives.append([self.number, self.number])
                story.read.append(False)
            story.lives[-1][1] = self.number
            story.read[-1] |= k in others
        self.stories += [StorageHistory([[self.number, self.number]], [False]) for _ in new]
        return result


def _returns_view(func: OpOverload) -> bool:
    """Whether an operator returns a view or a property of a tensor."""
    aliases = [r.alias_info for r in schema(func).returns if r.alias_info is not None]
    return func.namespace == "prim" or not all(alias.is_write for alias in aliases)


def _is_full_storage(written: list[Tensor]) -> bool:
    return len(written) == 1 and written[0].numel() * written[0].itemsize == written[0].untyped_storage().nbytes()


class RunMismatch(Exception):
    """The second run executes other operations than the first."""


class DeferredInitMode(_StorageTracker):
    """Gives storage to large tensors during their lives in the second run, and passes each finished one to `keep`."""

    def __init__(self, noted: HistoryRecorder, keep: Callable[[int, Tensor], bool]):
        super().__init__()
        self.stories, self.order, self.keep = noted.stories, noted.order, keep
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _returns_view(func):
            return self._run_view(func, args, kwargs)
        written, read = find_touched(func, args, kwargs)
        touched = {k for t in (*written, *read) if (k := self.find_index(t)) is not None}
        number = self.number + 1
        if touched and self.order[number - 1 : number] != [str(func)]:
            raise RunMismatch(str(func))
        if len(written) == 1 and (k := self.find_index(written[0])) is not None:
            if not self.stories[k].is_needed(number):
                self.number = number
                if is_seeded(func):  # it is overwritten before a read: only the generator must advance
                    t = written[0]
                    func(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), *args[1:], **kwargs)
                self._end_lives(touched, number)
                return written[0]
            if self.stories[k].has_start(number):
                written[0].untyped_storage().resize_(self.sizes[k])
        result = func(*args, **kwargs)
        new = self.track_new(result)
        if touched or new:
            self.number = number
        for k in new:
            self.sizes[k] = next(t for i, t in self.known.values() if i == k).untyped_storage().nbytes()
        self._end_lives((*touched, *new), number)
        return result

    def _end_lives(self, storages: Iterable[int], number: int) -> None:
        for k in storages:
            if self.stories[k].has_end(number):
                self._release(k, number)

    def _run_view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a view operator. torch rejects views of freed storages, so these get their size for the duration of the call."""
        away = {k: t.untyped_storage() for t in tree_leaves((args, kwargs)) if (k := self.find_index(t)) is not None}
        away = {k: storage for k, storage in away.items() if not storage.nbytes()}
        for k, storage in away.items():
            storage.resize_(self.sizes[k])
        try:
            return func(*args, **kwargs)
        finally:
            for storage in away.values():
                storage.resize_(0)

    def _release(self, k: int, number: int) -> None:
        key, t = next((key, t) for key, (index, t) in self.known.items() if index == k)
        if number != self.stories[k].lives[-1][1] or self.keep(k, t):
            t.untyped_storage().resize_(0)
        else:
            del self.known[key]  # not a parameter: it is freed with its last reference


@contextmanager
def _return_memory() -> Iterator[None]:
    """Let the C library return large free blocks to the system immediately, which it otherwise stops to do."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mmap_threshold, trim_threshold = -3, -1
    mallopt(mmap_threshold, 1 << 16)
    mallopt(trim_threshold, 1 << 16)
    try:
        yield
    finally:  # the upper limits of glibc's own adjustment
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 64 << 20)


@dataclass
class DeferredModel:
    """A model with its large parameters on the meta device, this rank's shards of them, and digests of the full parameters.

    `fake` is the same model on fake tensors, for a sketch.
    """

    model: nn.Module
    fake: nn.Module
    shards: dict[str, Tensor]
    digests: dict[str, Tensor]


def build_deferred(
    make: Callable[[], nn.Module], take_shard: Callable[[Tensor], Tensor], digest: Callable[[Tensor], Tensor]
) -> DeferredModel | None:
    """Build the model of `make` without keeping all of its weights. `make` must be deterministic; `take_shard` returns this rank's shard of a
    parameter.

    Returns None in four cases: the model is small; its constructor reads values, which fake tensors lack; a parameter is part of another tensor; the
    two
    runs differ.
    """
    noting = HistoryRecorder()
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), noting:
            warnings.simplefilter("ignore")  # the second run emits all warnings
            fake = make()
    except FAKE_FAILURES:
        return None
    if sum(p.nbytes for p in fake.parameters()) < DEFER_BYTES:
        return None
    shapes = {k: (n, p.shape, p.stride()) for n, p in fake.named_parameters() if (k := noting.find_index(p)) is not None}
    followed = {n for n, _, _ in shapes.values()}
    if any(not _is_full_storage([p]) or not p.is_contiguous() for n, p in fake.named_parameters() if n in followed):
        return None
    deferred = DeferredModel(nn.Module(), fake, {}, {})

    def keep_shard(k: int, t: Tensor) -> bool:
        if k not in shapes:
            return False
        name, shape, _ = shapes[k]
        deferred.shards[name] = take_shard(t.view(shape)).clone()
        deferred.digests[name] = digest(t)
        return True

    with _return_memory(), DeferredInitMode(noting, keep_shard):
        try:
            deferred.model = make()
        except Exception:  # it differs from the first run, or cannot be tracked; the normal build raises the model's own errors
            return None
    if deferred.shards.keys() != followed:
        return None
    large = [p for n, p in deferred.model.named_parameters() if n in deferred.shards]
    replace_parameters(deferred.model, {id(p): make_parameter_like(p, p.detach().to("meta")) for p in large})
    return deferred
