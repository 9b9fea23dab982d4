"""The mechanism of faults that a proof must see: in the ranks of a split run, something of torch does otherwise.

A fault is a row of a table (`faults.py`): a job, a plan, a patch, and what is true of it. A patch replaces functions before ranks
are forked, as a `sitecustomize` would. Those made here act where a process group of several ranks exists, so one device trains as
ever. (What kills, stops or slows a rank is a strike of `plait.chaos.strike`.)
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
    """A row of a table."""

    name: str
    job: Callable[[], plait.Job]
    plan: str
    patch: Patch
    truth: Truth
    also: tuple[str, ...] = ()
    """Kinds of cause that are as right: what happens is the same."""


@dataclass(frozen=True)
class Judgement:
    """How much of a fault a verdict has right."""

    caught: bool
    parameter: bool = False
    cause: bool = False
    wrong: str = "missed"
    """What of the cause is not right."""


def tried(fault: Fault) -> Judgement:
    """Verify the fault's job under its plan, with the fault."""
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
    """Verify says that they differ, in this probe, and names this parameter, and one of these codes if the cause is asked for."""
    verdict = verify(job, Plan.parse(plan), quiet=not codes)
    assert verdict.exit_code == DIFFERENT
    assert probe in [p.code for p in verdict.probes if not p.equal], verdict.to_dict()
    assert name in verdict.parameter, verdict.to_dict()
    assert not codes or verdict.code in codes, (verdict.code, verdict.cause)


# — patches —


def split() -> bool:
    """Whether this process is one of several."""
    return c10d.is_initialized() and c10d.get_world_size() > 1


def rank() -> int:
    return c10d.get_rank()


def wrapping(holder: Any, name: str, around: Callable[..., Any]) -> Patch:
    """`around(real, *args, **kwargs)` is called instead, in the ranks of a split run."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real, inside = getattr(holder, name), [False]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if inside[0] or not split():  # torch calls a function again by its name where modes look on
                return real(*args, **kwargs)
            inside[0] = True
            try:
                return around(real, *args, **kwargs)
            finally:
                inside[0] = False

        monkeypatch.setattr(holder, name, wrapped)

    return patch


def counted(holder: Any, name: str, around: Callable[..., Any]) -> Patch:
    """`around(number of the call, real, *args, **kwargs)` is called instead."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = itertools.count()
        wrapping(holder, name, lambda real, *args, **kwargs: around(next(numbers), real, *args, **kwargs))(monkeypatch)

    return patch


def optimizer_step(around: Callable[[Any, Any, int], Any], kind: Any = torch.optim.AdamW) -> Patch:
    """`around(real, optimizer, number)` for each step of each optimizer: number 0 is its first."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = kind.step

        def step(self: Any, closure: Any = None) -> Any:  # whoever asks for its signature finds a closure
            if not split():
                return real(self, closure)
            n = self.__dict__.setdefault("_number", 0)
            self.__dict__["_number"] = n + 1
            return around(lambda: real(self, closure), self, n)

        monkeypatch.setattr(kind, "step", step)

    return patch


def of_shape(optimizer: Any, *shape: int) -> list[Any]:
    """The parameters of an optimizer that have this shape."""
    return [p for group in optimizer.param_groups for p in group["params"] if tuple(p.shape) == shape]


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


Change = Callable[[Tensor, Tensor, list[Tensor]], Any]
"""(the result, what this rank gave, the results before it) -> changed in place."""


@dataclass(frozen=True)
class Results:
    """Which results of a function that sends something are changed: of those that count, the `number`-th of `each` in a step."""

    call: str
    """all_reduce, irecv, all_to_all_single or batch_isend_irecv."""
    counts: Callable[[Tensor, int], bool]
    """(tensor, tag)."""
    each: int = 1
    number: int | None = None
    step: int = 1
    """From which on."""
    only: int | None = None
    """The rank; None: all."""
    among: Callable[[list[int]], bool] = lambda ranks: True
    """The ranks of the group."""
    given: bool = False
    """What this rank gives is changed, before it is sent."""

    def changed(self, change: Change) -> Patch:
        """The patch that changes them."""

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
    """What this rank gave, as if nothing had been sent."""
    t.copy_(given)


def zero(t: Tensor, *_: Any) -> None:
    t.zero_()


def flip(t: Tensor, *_: Any) -> None:
    t.copy_(t.flip(0))


def halves(t: Tensor, *_: Any) -> None:
    """Its halves change places."""
    t.copy_(torch.cat(t.chunk(2)[::-1]))


def fp32(t: Tensor, *_: Any) -> None:
    t.copy_(t.float())


def times(factor: float) -> Change:
    return lambda t, *_: t.mul_(factor)


MILLIONTH = times(1 + 1e-6)


def instead(number: int) -> Change:
    """An earlier result, the last being −1, as far as it goes; nothing while there is none."""

    def change(t: Tensor, given: Tensor, earlier: list[Tensor]) -> None:
        if len(earlier) >= -number:
            rows = min(len(t), len(earlier[number]))
            t[:rows] = earlier[number][:rows]

    return change


def part(first: int, end: int | None, change: Change) -> Change:
    """The change of some rows alone."""
    return lambda t, given, earlier: change(t[first:end], given[first:end], [e[first:end] for e in earlier])
