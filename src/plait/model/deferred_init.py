"""Building a model that no rank could hold: the weights its constructor draws, a part of each kept at once.

A constructor draws from torch's generator one tensor after another, often twice (the layer's default, then the model's
own rule), so to have the weights that one device would have, all of it must be drawn, in its order. It need not be
*held*. The constructor runs twice. The first run, on fake tensors, notes what is done to each large tensor: when it is
overwritten as a whole, changed, or read. The second run is for real, but a large tensor has storage only from the last
time it is overwritten to the last time it is touched; what is drawn into it before is drawn into a buffer and
forgotten. After its last touch this rank's share is put by and the storage is dropped.
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
from plait.tensors.modules import put_parameters
from plait.tensors.parameters import like
from plait.tensors.torch_private import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    is_seeded,
    schema,
    storage_key,
    tree_leaves,
)
from plait.tensors.trees import flat

WORTH = 256 << 20
"""Bytes of parameters from which a model is built this way: it draws the weights up to twice and makes them once."""
LARGE = 1 << 16
"""Bytes from which a tensor is followed; smaller ones are simply made."""
_OVERWRITING = ("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "bernoulli_", "random_")


@dataclass
class Story:
    """What is done to one large storage, by the number of the operation: it starts `lives`, each to a last touch."""

    lives: list[list[int]] = field(default_factory=list)
    read: list[bool] = field(default_factory=list)
    """Whether another tensor was computed from it in that life."""

    def live(self, number: int) -> bool:
        """Whether the values at this operation matter: it is the last life, or one that was read."""
        index = max(i for i, (first, _) in enumerate(self.lives) if first <= number)
        return index == len(self.lives) - 1 or self.read[index]

    def starts(self, number: int) -> bool:
        """Whether a life starts with this operation."""
        return any(first == number for first, _ in self.lives)

    def ends(self, number: int) -> bool:
        """Whether a life ends with this operation."""
        return any(last == number for _, last in self.lives)


class _Following(TorchDispatchMode):
    """Numbers the operations on large storages, and the storages, in the order they come."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.known: dict[int, tuple[int, Tensor]] = {}
        self.count = 0

    def index(self, t: object) -> int | None:
        """The number of a tensor's storage, or None when it is not followed."""
        known = self.known.get(storage_key(t)) if isinstance(t, Tensor) else None
        return None if known is None else known[0]

    def made(self, result: object) -> list[int]:
        """Start following the large storages that an operation made; their numbers."""
        new = []
        for t in flat(result):
            if t.untyped_storage().nbytes() >= LARGE and storage_key(t) not in self.known:
                self.known[storage_key(t)] = (self.count, t.detach())
                new.append(self.count)
                self.count += 1
        return new


Roles = tuple[list[Tensor], list[Tensor]]
"""(tensors an operator writes, tensors it reads)."""


STATISTICS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"))
"""Operators that write running statistics in training, without a word of it in torch's schema: also those of instance norms."""


def roles(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Roles:
    """What a call of an operator writes and reads."""
    written, read = list[Tensor](), list[Tensor]()
    arguments = _arguments(func)
    if func.overloadpacket.__name__ in STATISTICS:
        given = {name: value for (name, _), value in zip(arguments, args)} | kwargs
        updates = given.get("training", True)
        arguments = tuple((name, bool(updates) and name.startswith("running_")) for name, _ in arguments)
    for (_, writes), value in zip(arguments, args):
        (written if writes else read).extend(flat(value))
    if kwargs:
        for name, writes in arguments:
            (written if writes else read).extend(flat(kwargs.get(name)))
    return written, read


@cache
def _arguments(func: OpOverload) -> tuple[tuple[str, bool], ...]:
    """The arguments of an operator: name, and whether it is written."""
    return tuple((argument.name, argument.is_write) for argument in schema(func).arguments)


class Noting(_Following):
    """The first run: writes the stories. A view is not a touch: what is done through it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stories: list[Story] = []
        self.order: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _untouching(func):
            return result
        written, read = roles(func, args, kwargs)
        mine = {k for t in written if (k := self.index(t)) is not None}
        others = {k for t in read if (k := self.index(t)) is not None} - mine
        new = self.made(result)
        if not mine and not others and not new:
            return result
        self.number += 1
        self.order.append(str(func))
        whole = func.overloadpacket.__name__ in _OVERWRITING and _covers(written)
        for k in (*mine, *others):
            story = self.stories[k]
            if whole and k in mine:
                story.lives.append([self.number, self.number])
                story.read.append(False)
            story.lives[-1][1] = self.number
            story.read[-1] |= k in others
        self.stories += [Story([[self.number, self.number]], [False]) for _ in new]
        return result


def _untouching(func: OpOverload) -> bool:
    """A view, or a question about a tensor."""
    aliases = [r.alias_info for r in schema(func).returns if r.alias_info is not None]
    return func.namespace == "prim" or not all(alias.is_write for alias in aliases)


def _covers(written: list[Tensor]) -> bool:
    return len(written) == 1 and written[0].numel() * written[0].itemsize == written[0].untyped_storage().nbytes()


class UnlikeRuns(Exception):
    """The second run does something else than the first."""


class Drawing(_Following):
    """The second run: gives storages to large tensors while they live, and each finished one to `keep`."""

    def __init__(self, noted: Noting, keep: Callable[[int, Tensor], bool]):
        super().__init__()
        self.stories, self.order, self.keep = noted.stories, noted.order, keep
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _untouching(func):
            return self._view(func, args, kwargs)
        written, read = roles(func, args, kwargs)
        touched = {k for t in (*written, *read) if (k := self.index(t)) is not None}
        number = self.number + 1
        if touched and self.order[number - 1 : number] != [str(func)]:
            raise UnlikeRuns(str(func))
        if len(written) == 1 and (k := self.index(written[0])) is not None:
            if not self.stories[k].live(number):
                self.number = number
                if is_seeded(func):  # it is overwritten before anyone reads it: only the generator must move on
                    t = written[0]
                    func(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), *args[1:], **kwargs)
                self._end(touched, number)
                return written[0]
            if self.stories[k].starts(number):
                written[0].untyped_storage().resize_(self.sizes[k])
        result = func(*args, **kwargs)
        new = self.made(result)
        if touched or new:
            self.number = number
        for k in new:
            self.sizes[k] = next(t for i, t in self.known.values() if i == k).untyped_storage().nbytes()
        self._end((*touched, *new), number)
        return result

    def _end(self, storages: Iterable[int], number: int) -> None:
        for k in storages:
            if self.stories[k].ends(number):
                self._ended(k, number)

    def _view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch makes no view of a storage that is too small, so one that is away has its size for a moment."""
        away = {k: t.untyped_storage() for t in tree_leaves((args, kwargs)) if (k := self.index(t)) is not None}
        away = {k: storage for k, storage in away.items() if not storage.nbytes()}
        for k, storage in away.items():
            storage.resize_(self.sizes[k])
        try:
            return func(*args, **kwargs)
        finally:
            for storage in away.values():
                storage.resize_(0)

    def _ended(self, k: int, number: int) -> None:
        key, t = next((key, t) for key, (index, t) in self.known.items() if index == k)
        if number != self.stories[k].lives[-1][1] or self.keep(k, t):
            t.untyped_storage().resize_(0)
        else:
            del self.known[key]  # nothing of ours: it goes when nobody holds it


@contextmanager
def _giving_back() -> Iterator[None]:
    """Let the C library return large blocks to the system as soon as they are free, which it stops to do by itself."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mmap_threshold, trim_threshold = -3, -1
    mallopt(mmap_threshold, 1 << 16)
    mallopt(trim_threshold, 1 << 16)
    try:
        yield
    finally:  # where glibc's own adjustment ends
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 64 << 20)


@dataclass
class Deferred:
    """A model whose large parameters are on the meta device, this rank's shares of them, and digests of the wholes.

    `fake` is the same model on fake tensors: what a sketch can run.
    """

    model: nn.Module
    fake: nn.Module
    shares: dict[str, Tensor]
    digests: dict[str, Tensor]


def defer(
    make: Callable[[], nn.Module], share: Callable[[Tensor], Tensor], digest: Callable[[Tensor], Tensor]
) -> Deferred | None:
    """Build the model of `make` (which must do the same each time) without holding it; `share` takes a rank's part.

    None when the model is small, when its constructor looks at values, which fake tensors do not have, when a parameter
    is part of another tensor, or when the two runs do not do the same.
    """
    noting = Noting()
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), noting:
            warnings.simplefilter("ignore")  # whatever it is, the second run will say it
            fake = make()
    except FAKE_FAILURES:
        return None
    if sum(p.nbytes for p in fake.parameters()) < WORTH:
        return None
    shapes = {k: (n, p.shape, p.stride()) for n, p in fake.named_parameters() if (k := noting.index(p)) is not None}
    followed = {n for n, _, _ in shapes.values()}
    if any(not _covers([p]) or not p.is_contiguous() for n, p in fake.named_parameters() if n in followed):
        return None
    deferred = Deferred(nn.Module(), fake, {}, {})

    def keep(k: int, t: Tensor) -> bool:
        if k not in shapes:
            return False
        name, shape, _ = shapes[k]
        deferred.shares[name] = share(t.view(shape)).clone()
        deferred.digests[name] = digest(t)
        return True

    with _giving_back(), Drawing(noting, keep):
        try:
            deferred.model = make()
        except Exception:  # it strayed from the first run, or does what cannot be followed; its own fault comes again
            return None
    if deferred.shares.keys() != followed:
        return None
    large = [p for n, p in deferred.model.named_parameters() if n in deferred.shares]
    put_parameters(deferred.model, {id(p): like(p, p.detach().to("meta")) for p in large})
    return deferred
