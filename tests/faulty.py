"""How the test suite injects faults that a proof must detect: in the ranks of a split run, a torch function behaves differently.

A fault is a row of a table (`faults.py`): a job, a plan, a patch, and the truth about it. A patch replaces functions before ranks
are forked, as a `sitecustomize` would. The patches made here act only in a process group of several ranks, so training on one device is
unchanged. (Faults that kill, stop or slow a rank are strikes of `plait.chaos.strike`.)
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import plait
from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.proof.verify import verify

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Truth:
    """The truth about a fault: the kind of its cause, and its place. Fields without a value are not checked."""

    kind: str
    """The kind of cause: data, forward, backward, message, gather, reduction, accumulation, loss, clip, optimizer, random, recompute or buffers."""
    names: tuple[str, ...] = ()
    """Prefixes of the name of the first wrong parameter or buffer, in the model's order. Any of them is correct."""
    unit: tuple[str, ...] = ()
    axis: str = ""
    rank: int | None = None
    micro: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    job: Callable[[], plait.Job]
    plan: str
    patch: Patch
    truth: Truth
    also: tuple[str, ...] = ()
    """Other kinds of cause that are also correct, because their effect is the same."""


@dataclass(frozen=True)
class Judgement:
    """The score of a verdict on a fault."""

    caught: bool
    parameter: bool = False
    cause: bool = False
    wrong: str = "missed"
    """The part of the cause that is wrong."""


def tried(fault: Fault) -> Judgement:
    """Verify the fault's job under its plan, with the fault injected."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault.patch(monkeypatch)
        return judged(fault, verify(fault.job(), Plan.parse(fault.plan)))


def judged(fault: Fault, verdict: Any) -> Judgement:
    truth, where = fault.truth, verdict.where
    if verdict.equal:
        return Judgement(False)
    named = not truth.names or verdict.parameter.startswith(truth.names)
    kinds = (truth.kind, *fault.also)
    if truth.kind == "buffers":
        right = verdict.code == "V011"
        return Judgement(True, named, right, "" if right else f"code {verdict.code}")
    if where is None:
        right = truth.kind == "data" and verdict.code == "V006"
        return Judgement(True, named, right, "" if right else "nowhere")
    random = "random" in kinds and verdict.code == "V005"
    wrong = [] if where.kind in kinds or random else [f"kind {where.kind}"]
    wrong += [f"unit {where.unit}"] if truth.unit and not random and not _of(truth.unit, where) else []
    wrong += [f"axes {where.axes}"] if truth.axis and truth.axis not in where.axes else []
    wrong += [f"ranks {where.ranks}"] if truth.rank is not None and where.ranks != (truth.rank,) else []
    wrong += [f"micro {where.micros}"] if truth.micro is not None and where.micros != (truth.micro,) else []
    wrong += [f"step {where.step + 1}"] if truth.step is not None and where.step + 1 != truth.step else []
    return Judgement(True, named, not wrong, ", ".join(wrong))


def _of(units: tuple[str, ...], where: Any) -> bool:
    return bool({where.unit, where.after} & set(units)) or where.name.startswith(tuple(f"{u}." for u in units))


def sees(job: plait.Job, plan: str, probe: str, name: str = "", *codes: str) -> None:
    """Assert that the verdict is a mismatch in this probe and names this parameter. With `codes`, the code must be one of them."""
    verdict = verify(job, Plan.parse(plan), quiet=not codes)
    assert verdict.exit_code == DIFFERENT
    assert probe in [p.code for p in verdict.probes if not p.equal], verdict.to_dict()
    assert name in verdict.parameter, verdict.to_dict()
    assert not codes or verdict.code in codes, (verdict.code, verdict.cause)


# — patches —


def split() -> bool:
    """Whether this process is one rank of several."""
    return c10d.is_initialized() and c10d.get_world_size() > 1


def rank() -> int:
    return c10d.get_rank()


def wrapping(holder: Any, name: str, around: Callable[..., Any]) -> Patch:
    """Return a patch that calls `around(real, *args, **kwargs)` instead of the function, in the ranks of a split run."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real, inside = getattr(holder, name), [False]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if inside[0] or not split():  # under a torch-function mode, torch calls a function again by its name
                return real(*args, **kwargs)
            inside[0] = True
            try:
                return around(real, *args, **kwargs)
            finally:
                inside[0] = False

        monkeypatch.setattr(holder, name, wrapped)

    return patch


def counted(holder: Any, name: str, around: Callable[..., Any]) -> Patch:
    """Return a patch that calls `around(number of the call, real, *args, **kwargs)` instead of the function."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = itertools.count()
        wrapping(holder, name, lambda real, *args, **kwargs: around(next(numbers), real, *args, **kwargs))(monkeypatch)

    return patch


def optimizer_step(around: Callable[[Any, Any, int], Any], kind: Any = torch.optim.AdamW) -> Patch:
    """Call `around(real, optimizer, number)` for each step of each optimizer; the first step has number 0."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = kind.step

        def step(self: Any, closure: Any = None) -> Any:  # code that inspects the signature must find a closure
            if not split():
                return real(self, closure)
            n = self.__dict__.setdefault("_number", 0)
            self.__dict__["_number"] = n + 1
            return around(lambda: real(self, closure), self, n)

        monkeypatch.setattr(kind, "step", step)

    return patch


def of_shape(optimizer: Any, *shape: int) -> list[Any]:
    """Return the optimizer's parameters with this shape."""
    return [p for group in optimizer.param_groups for p in group["params"] if tuple(p.shape) == shape]


class Then:
    """The work handle of a collective, with a function to call after the wait."""

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


Change = Callable[[Tensor, Tensor, list[Tensor]], Any]
"""A function of (result, this rank's input, earlier results) that changes the result in place."""


@dataclass(frozen=True)
class Results:
    """Which results of a communication function are changed: of each `each` matching results in a step, the one with index `number`."""

    call: str
    """all_reduce, irecv, all_to_all_single or batch_isend_irecv."""
    counts: Callable[[Tensor, int], bool]
    """A filter by (tensor, tag)."""
    each: int = 1
    number: int | None = None
    step: int = 1
    """The first step in which results are changed."""
    only: int | None = None
    """The rank whose results are changed; None: all ranks."""
    among: Callable[[list[int]], bool] = lambda ranks: True
    """A filter for the ranks of the group."""
    given: bool = False
    """Change this rank's input before it is sent."""

    def changed(self, change: Change) -> Patch:
        """Return the patch that changes these results."""

        def patch(monkeypatch: pytest.MonkeyPatch) -> None:
            numbers, earlier = itertools.count(), list[Tensor]()

            def after(tensor: Tensor, tag: int, group: Any) -> Callable[[], None] | None:
                if not self.counts(tensor, tag) or not self.among(dist.get_process_group_ranks(group or dist.group.WORLD)):
                    return None
                n, own = next(numbers), tensor.clone()

                def strike() -> None:
                    now = tensor.clone()
                    if self._strikes(n):
                        change(tensor, own, earlier)
                    earlier.append(now)

                return strike() if self.given else strike

            if self.call == "batch_isend_irecv":
                wrapping(dist, self.call, lambda real, ops: _batch(real, ops, after))(monkeypatch)
            else:
                wrapping(dist, self.call, lambda *args, **kwargs: _single(after, *args, **kwargs))(monkeypatch)

        return patch

    def _strikes(self, n: int) -> bool:
        mine = self.only in (None, rank()) and self.number in (None, n % self.each)
        return mine and n // self.each + 1 >= self.step


def _single(after: Any, real: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    strike = after(tensor, kwargs.get("tag", 0), kwargs.get("group"))
    work = real(tensor, *args, **kwargs)
    if strike is None:
        return work
    return Then(work, strike) if work is not None else strike()


def _batch(real: Any, ops: list[Any], after: Any) -> Any:
    works = list(real(ops))
    for op in ops:
        strike = after(op.tensor, op.tag, op.group) if op.op is dist.irecv else None
        works[-1] = works[-1] if strike is None else Then(works[-1], strike)
    return works


def keep(t: Tensor, given: Tensor, earlier: list[Tensor]) -> None:
    """Replace the result with this rank's input, as if no message had been sent."""
    t.copy_(given)


def zero(t: Tensor, *_: Any) -> None:
    t.zero_()


def flip(t: Tensor, *_: Any) -> None:
    t.copy_(t.flip(0))


def halves(t: Tensor, *_: Any) -> None:
    """Swap the two halves."""
    t.copy_(torch.cat(t.chunk(2)[::-1]))


def fp32(t: Tensor, *_: Any) -> None:
    t.copy_(t.float())


def times(factor: float) -> Change:
    return lambda t, *_: t.mul_(factor)


MILLIONTH = times(1 + 1e-6)


def instead(number: int) -> Change:
    """Replace the result with an earlier one (−1: the previous), up to its size. Do nothing until one exists."""

    def change(t: Tensor, given: Tensor, earlier: list[Tensor]) -> None:
        if len(earlier) >= -number:
            rows = min(len(t), len(earlier[number]))
            t[:rows] = earlier[number][:rows]

    return change


def part(first: int, end: int | None, change: Change) -> Change:
    """Apply the change to some rows alone."""
    return lambda t, given, earlier: change(t[first:end], given[first:end], [e[first:end] for e in earlier])
