"""Tools to break training from outside: patches of torch alone, that act in the ranks of a split run only.

A fault is a function that patches torch's classes and functions, as a `sitecustomize` would, and knows no name of plait's.
It acts where a process group of several ranks exists, so one device trains as ever. Each says what is true of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import plait


def split() -> bool:
    """Whether this process is one of several."""
    return c10d.is_initialized() and c10d.get_world_size() > 1


def rank() -> int:
    return c10d.get_rank()


@dataclass(frozen=True)
class Truth:
    """What is wrong: the kind of cause, and where. What is left out is not asked for."""

    kind: str
    """data, forward, backward, message, gather, reduction, accumulation, loss, clip, optimizer, random, recompute, buffers."""
    names: tuple[str, ...] = ()
    """The parameter (or buffer) first wrong, in the model's order: the beginnings of names, any of them."""
    unit: tuple[str, ...] = ()
    axis: str = ""
    rank: int | None = None
    micro: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Fault:
    name: str
    job: Callable[[], plait.Job]
    plan: str
    patch: Callable[["Patches"], None]
    truth: Truth
    also: tuple[str, ...] = field(default=())
    """Kinds of cause that are as right: what happens is the same."""


class Patches:
    """Replaces attributes of torch's modules and classes; `undo` puts them back."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, str, Any]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        self.done.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def undo(self) -> None:
        while self.done:
            setattr(*self.done.pop())

    def wrap(self, holder: Any, name: str, around: Callable[..., Any]) -> None:
        """`around(real, *args, **kwargs)` is called in the ranks of a split run."""
        real, inside = getattr(holder, name), [False]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if inside[0] or not split():  # torch calls a function again by its name where modes look on
                return real(*args, **kwargs)
            inside[0] = True
            try:
                return around(real, *args, **kwargs)
            finally:
                inside[0] = False

        self.set(holder, name, wrapped)


class Then:
    """A work of a collective, and what happens when it is waited for."""

    def __init__(self, work: Any, after: Callable[[], None]):
        self.work, self.after, self.done = work, after, False

    def wait(self, *timeout: Any) -> Any:
        result = self.work.wait(*timeout)
        if not self.done:
            self.done = True
            self.after()
        return result

    def is_completed(self) -> bool:
        return self.work.is_completed()


Change = Callable[[int, Tensor, Tensor], None]
"""(number of the call among those that count, the result, what was given) -> changed in place."""
When = Callable[[Tensor], bool]


def all_reduce(patches: Patches, when: When, change: Change, before: Change | None = None, **only: Any) -> None:
    """Change the results of all-reduces. `before` changes what is given to them. `group`: of so many ranks only."""
    count = [0]
    size = only.get("size")

    def around(real: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        fits = size is None or (c10d.get_world_size(group) == size)
        spans = only.get("ranks")
        fits = fits and (spans is None or dist.get_process_group_ranks(group or dist.group.WORLD) in spans)
        if not (fits and when(tensor)):
            return real(tensor, *args, **kwargs)
        n = count[0]
        count[0] += 1
        given = tensor.clone()
        if before is not None:
            before(n, tensor, given)
        work = real(tensor, *args, **kwargs)
        if work is None:
            change(n, tensor, given)
            return None
        return Then(work, lambda: change(n, tensor, given))

    patches.wrap(dist, "all_reduce", around)


def received(patches: Patches, when: Callable[[Tensor, int], bool], change: Callable[[int, Tensor], None]) -> None:
    """Change what single messages bring. `when(tensor, tag)`."""
    count = [0]

    def around(real: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = real(tensor, *args, **kwargs)
        if not when(tensor, kwargs.get("tag", 0)):
            return work
        n = count[0]
        count[0] += 1
        return Then(work, lambda: change(n, tensor))

    patches.wrap(dist, "irecv", around)


def batched(patches: Patches, when: When, change: Callable[[int, Tensor], None]) -> None:
    """Change what batches of messages bring."""
    count = [0]

    def around(real: Any, ops: list[Any]) -> Any:
        works = list(real(ops))
        for op in ops:
            if op.op is dist.irecv and when(op.tensor):
                n = count[0]
                count[0] += 1
                works[-1] = Then(works[-1], lambda n=n, t=op.tensor: change(n, t))
        return works

    patches.wrap(dist, "batch_isend_irecv", around)


def all_to_all(patches: Patches, when: When, change: Callable[[int, Tensor], None]) -> None:
    """Change what an all-to-all brings."""
    count = [0]

    def around(real: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(output, given, *args, **kwargs)
        if when(output):
            n = count[0]
            count[0] += 1
            change(n, output)
        return result

    patches.wrap(dist, "all_to_all_single", around)


def optimizer_step(patches: Patches, kind: Any, around: Callable[[Any, Any, int], Any]) -> None:
    """`around(real, optimizer, number)` for each step of each optimizer: number 0 is its first."""
    real_step = kind.step

    def step(self: Any, closure: Any = None) -> Any:
        if not split():
            return real_step(self, closure)
        n = self.__dict__.setdefault("_number", 0)
        self.__dict__["_number"] = n + 1
        return around(lambda: real_step(self, closure), self, n)

    patches.set(kind, "step", step)


def of_shape(optimizer: Any, *shape: int) -> list[Any]:
    """The parameters of an optimizer that have this shape."""
    return [p for group in optimizer.param_groups for p in group["params"] if tuple(p.shape) == shape]


def real(tensor: Tensor) -> bool:
    """A tensor with numbers of a training (and not one of those that shapes are found with)."""
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def judged(fault: Fault, verdict: Any) -> tuple[bool, bool, bool, str]:
    """(caught, the parameter is right, the cause is right, what of the cause is not)."""
    truth, where = fault.truth, verdict.where
    caught = not verdict.equal
    named = caught and (not truth.names or verdict.parameter.startswith(truth.names))
    kinds = (truth.kind, *fault.also)
    if not caught:
        return False, False, False, "missed"
    if truth.kind == "buffers":
        return True, named, verdict.code == "V011", "code"
    if where is None:
        return True, named, truth.kind == "data" and verdict.code == "V006", "nowhere"
    random = "random" in kinds and verdict.code == "V005"
    wrong = [] if where.kind in kinds or random else [f"kind {where.kind}"]
    wrong += [f"unit {where.unit}"] if truth.unit and not random and not _of(truth.unit, where) else []
    wrong += [f"axes {where.axes}"] if truth.axis and truth.axis not in where.axes else []
    wrong += [f"ranks {where.ranks}"] if truth.rank is not None and where.ranks != (truth.rank,) else []
    wrong += [f"micro {where.micros}"] if truth.micro is not None and where.micros != (truth.micro,) else []
    wrong += [f"step {where.step + 1}"] if truth.step is not None and where.step + 1 != truth.step else []
    return True, named, not wrong, ", ".join(wrong)


def _of(units: tuple[str, ...], where: Any) -> bool:
    return bool({where.unit, where.after} & set(units)) or where.name.startswith(tuple(f"{u}." for u in units))
