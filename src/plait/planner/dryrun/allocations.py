"""Metering memory: the storage of every tensor, from when it is made to when it is freed.

Memory is that of tensors, not that of the process, whose allocator keeps and rounds as it likes. Storages are counted,
so views cost nothing, and a storage counts until nothing refers to it, autograd's graph included. What an operator
needs inside itself and frees before it returns is not seen. Works on real and on fake tensors alike, so that what is
predicted by a dry run and what is measured in one are the same quantity. `planner/dryrun/measure.py` shows how a step is metered.
"""

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from plait.tensors.fake import is_unknown
from plait.tensors.torch_private import TorchDispatchMode, held_on_meta, local_of
from plait.tensors.trees import flat

FORWARD = ("forward", "F")
"""How the names of moments of forward passes begin."""
MADE = "temporary"
"""Category of a storage that was made while the meter was on."""


@dataclass(frozen=True)
class Change:
    """An entry of a tape: so many bytes more (or fewer) of a storage, or, without bytes, a moment with a name."""

    bytes: int
    storage: int = -1
    moment: str = ""


@dataclass(frozen=True)
class Peak:
    """The fullest moment: its bytes by category, and the last named moment before it."""

    total: int
    categories: dict[str, int]
    moment: str
    host: dict[str, int] = field(default_factory=dict)
    """What the host holds at its own fullest moment, where that is told apart."""


@dataclass
class MemoryTape:
    """What was allocated and freed, in order, with named moments between."""

    changes: list[Change] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)
    """Of storages that are not just temporary."""

    def peak(self, among: Container[int] | None = None) -> Peak:
        """The fullest moment of the tape; `among`: counting these storages only."""
        now = most = at = 0
        for i, change in enumerate(self.changes, 1):
            now += change.bytes if among is None or change.storage in among else 0
            if now > most:
                most, at = now, i
        last = next((c.moment for c in reversed(self.changes[:at]) if c.moment), "")
        return Peak(most, self.level(at, among), last)

    def apart(self, on_host: Callable[[str, bool], bool]) -> Peak:
        """The fullest moment of a device, and what its host holds at the fullest of its own: `on_host(category, updating)`
        tells which is which; updating: it was made by the optimizer's step."""
        late = self.updating()
        storages = {change.storage for change in self.changes}
        hosts = {n for n in storages if on_host(self.categories.get(n, MADE), n in late)}
        return replace(self.peak(storages - hosts), host=self.peak(hosts).categories)

    def updating(self) -> set[int]:
        """Storages that were made by the optimizer's step."""
        began, before, found = False, set[int](), set[int]()
        for change in self.changes:
            began = began or change.moment == "optimizer"
            if change.bytes > 0 and change.storage not in before:
                (found if began else before).add(change.storage)
        return found

    def keep(self) -> None:
        """Name as activations what was made in a forward pass and is there when something else begins."""
        forward, made = False, set[int]()
        for change in self.changes:
            if change.moment:
                if forward and not change.moment.startswith(FORWARD):
                    self.categories |= {n: "activations" for n in made if self.categories.get(n) in (None, "exchange")}
                forward = change.moment.startswith(FORWARD)
                made = made if forward else set()
            elif change.bytes < 0:
                made.discard(change.storage)
            elif forward:
                made.add(change.storage)

    def level(self, at: int, among: Container[int] | None = None) -> dict[str, int]:
        """Bytes by category after so many entries; `among`: of these storages only."""
        found: dict[str, int] = {}
        for change in self.changes[:at]:
            if change.bytes and (among is None or change.storage in among):
                category = self.categories.get(change.storage, MADE)
                found[category] = found.get(category, 0) + change.bytes
        return {name: size for name, size in found.items() if size}


class Allocations(TorchDispatchMode):
    """Writes the tape of everything that is allocated while it is on, also by backward in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = MemoryTape()
        self.sizes: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        """By the id of the storage's Python object, which lives as long as the storage."""
        self.uncounted: set[int] = set()
        self.count = 0
        self.resize: Callable[..., Any] | None = None

    def __enter__(self) -> "Allocations":
        before = self.resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # no operator: FSDP2 frees and allocates by it
            result = before(storage, size)
            self._count(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        assert self.resize is not None
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(exc_type, exc_val, exc_tb)

    def hold(self, category: str, tensors: Iterable[Any], free: bool = False) -> None:
        """These exist already. `free`: they count nothing; another sum has them."""
        for tensor in tensors:
            self._meet(local_of(tensor), category, free)

    def label(self, category: str, tensor: Tensor) -> int:
        """Name what a tensor is; the number of its storage."""
        number = self.numbers[id(local_of(tensor).untyped_storage())]
        self.tape.categories[number] = category
        return number

    def moment(self, name: str) -> None:
        self.tape.changes.append(Change(0, moment=name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        category = "exchange" if func.namespace == "c10d" else MADE
        for tensor in flat((args, kwargs, result)):
            self._meet(tensor, category)
        return result

    def passed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator of higher order returns counts; what it needs inside does not."""
        result = func(*args, **kwargs)
        for tensor in flat(result):
            self._meet(tensor)
        return result

    def _meet(self, tensor: Tensor, category: str = MADE, free: bool = False) -> None:
        tensor = local_of(tensor)
        if held_on_meta(tensor) or is_unknown(tensor):
            return
        self._count(tensor.untyped_storage(), category, free)

    def _count(self, storage: torch.UntypedStorage, category: str, free: bool = False) -> None:
        number = self.numbers.get(id(storage))
        if number is None:
            number, self.count = self.count, self.count + 1
            self.numbers[id(storage)], self.sizes[number] = number, 0
            self.uncounted |= {number} if free else set()
            weakref.finalize(storage, self._freed, id(storage), number)
        if category != MADE:
            self.tape.categories.setdefault(number, category)
        self._change(number, storage.nbytes() - self.sizes[number])

    def _freed(self, key: int, number: int) -> None:
        if self.numbers.get(key) == number:
            del self.numbers[key]
        self._change(number, -self.sizes[number])

    def _change(self, number: int, size: int) -> None:
        if size and number not in self.uncounted:
            self.sizes[number] += size
            self.tape.changes.append(Change(size, number))
