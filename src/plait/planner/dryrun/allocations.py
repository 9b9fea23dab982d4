"""Record the storage of every tensor from allocation to release.

The memory is that of tensors. The allocator of a process may reserve and round more. Storages are counted, so views cost nothing, and a storage
counts until its last reference is dropped, including the autograd graph. Temporary memory inside an operator is not visible. Real and fake
tensors are recorded alike, so predictions by a dry run and measurements are the same quantity. `planner/dryrun/measure.py` records a step.
"""

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from plait.tensors.fake import is_remote_fake
from plait.tensors.torch_private import TorchDispatchMode, is_without_memory, local_tensor
from plait.tensors.trees import flatten_tensors

FORWARD_PREFIXES = ("forward", "F")
"""Prefixes of the names of moments in forward passes."""
TEMPORARY = "temporary"
"""Category of a storage that was allocated while the recorder was active."""


@dataclass(frozen=True)
class TapeEntry:
    """An entry of a tape: a change in bytes of a storage or, without bytes, a named moment."""

    bytes: int
    storage: int = -1
    moment: str = ""


@dataclass(frozen=True)
class Peak:
    """The moment of maximum memory: its bytes by category, and the last named moment before it."""

    total: int
    categories: dict[str, int]
    moment: str
    host: dict[str, int] = field(default_factory=dict)
    """Bytes by category on the host at its own maximum, if host and device are separated."""


@dataclass
class MemoryTape:
    """Allocations and releases in order, with named moments between them."""

    changes: list[TapeEntry] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)
    """Category by storage; all others are temporary."""

    def find_peak(self, storages: Container[int] | None = None) -> Peak:
        """Find the moment of maximum memory. `storages`: count only these."""
        now = most = at = 0
        for i, change in enumerate(self.changes, 1):
            now += change.bytes if storages is None or change.storage in storages else 0
            if now > most:
                most, at = now, i
        last = next((c.moment for c in reversed(self.changes[:at]) if c.moment), "")
        return Peak(most, self.sum_categories(at, storages), last)

    def split_peaks(self, on_host: Callable[[str, bool], bool]) -> Peak:
        """Find the maximum of a device, with the maximum of its host. `on_host(category, updating)` assigns storages to the host; `updating`:
        allocated by the
        optimizer's step."""
        late = self.find_update_storages()
        storages = {change.storage for change in self.changes}
        hosts = {n for n in storages if on_host(self.categories.get(n, TEMPORARY), n in late)}
        return replace(self.find_peak(storages - hosts), host=self.find_peak(hosts).categories)

    def find_update_storages(self) -> set[int]:
        """Return the storages that the optimizer's step allocated."""
        began, before, found = False, set[int](), set[int]()
        for change in self.changes:
            began = began or change.moment == "optimizer"
            if change.bytes > 0 and change.storage not in before:
                (found if began else before).add(change.storage)
        return found

    def label_activations(self) -> None:
        """Label as activations all storages that were allocated in a forward pass and outlive it."""
        forward, made = False, set[int]()
        for change in self.changes:
            if change.moment:
                if forward and not change.moment.startswith(FORWARD_PREFIXES):
                    self.categories |= {n: "activations" for n in made if self.categories.get(n) in (None, "exchange")}
                forward = change.moment.startswith(FORWARD_PREFIXES)
                made = made if forward else set()
            elif change.bytes < 0:
                made.discard(change.storage)
            elif forward:
                made.add(change.storage)

    def sum_categories(self, at: int, storages: Container[int] | None = None) -> dict[str, int]:
        """Sum bytes by category after `at` entries. `storages`: count only these."""
        found: dict[str, int] = {}
        for change in self.changes[:at]:
            if change.bytes and (storages is None or change.storage in storages):
                category = self.categories.get(change.storage, TEMPORARY)
                found[category] = found.get(category, 0) + change.bytes
        return {name: size for name, size in found.items() if size}


class AllocationRecorder(TorchDispatchMode):
    """Records all allocations while it is active, also of backward in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = MemoryTape()
        self.sizes: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        """By the id of the storage's Python object, which lives as long as the storage."""
        self.uncounted: set[int] = set()
        self.count = 0
        self.resize: Callable[..., Any] | None = None

    def __enter__(self) -> "AllocationRecorder":
        before = self.resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # not an operator; FSDP2 frees and allocates with it
            result = before(storage, size)
            self._count_storage(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        assert self.resize is not None
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(exc_type, exc_val, exc_tb)

    def add_existing(self, category: str, tensors: Iterable[Any], free: bool = False) -> None:
        """Register existing tensors. `free`: they count as 0 bytes, because another sum includes them."""
        for tensor in tensors:
            self._count_tensor(local_tensor(tensor), category, free)

    def label(self, category: str, tensor: Tensor) -> int:
        """Label a tensor's storage with a category, and return the number of the storage."""
        number = self.numbers[id(local_tensor(tensor).untyped_storage())]
        self.tape.categories[number] = category
        return number

    def mark_moment(self, name: str) -> None:
        self.tape.changes.append(TapeEntry(0, moment=name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        category = "exchange" if func.namespace == "c10d" else TEMPORARY
        for tensor in flatten_tensors((args, kwargs, result)):
            self._count_tensor(tensor, category)
        return result

    def run_higher_order(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator. Its results count; its temporary memory does not."""
        result = func(*args, **kwargs)
        for tensor in flatten_tensors(result):
            self._count_tensor(tensor)
        return result

    def _count_tensor(self, tensor: Tensor, category: str = TEMPORARY, free: bool = False) -> None:
        tensor = local_tensor(tensor)
        if is_without_memory(tensor) or is_remote_fake(tensor):
            return
        self._count_storage(tensor.untyped_storage(), category, free)

    def _count_storage(self, storage: torch.UntypedStorage, category: str, free: bool = False) -> None:
        number = self.numbers.get(id(storage))
        if number is None:
            number, self.count = self.count, self.count + 1
            self.numbers[id(storage)], self.sizes[number] = number, 0
            self.uncounted |= {number} if free else set()
            weakref.finalize(storage, self._count_freed, id(storage), number)
        if category != TEMPORARY:
            self.tape.categories.setdefault(number, category)
        self._add_entry(number, storage.nbytes() - self.sizes[number])

    def _count_freed(self, key: int, number: int) -> None:
        if self.numbers.get(key) == number:
            del self.numbers[key]
        self._add_entry(number, -self.sizes[number])

    def _add_entry(self, number: int, size: int) -> None:
        if size and number not in self.uncounted:
            self.sizes[number] += size
            self.tape.changes.append(TapeEntry(size, number))
