"""What a rank of a sharded model holds, and when: its parts, and what FSDP2 and `parallel/fsdp/collectives.py` make beside them.

A group's parameters arrive in one buffer and are copied out of it into the whole tensors; its gradients are copied
into one buffer, sent, and summed into the part that stays. The next group's buffer is gathered
while this group computes, in both directions. Of two things at one moment, the smaller number comes first.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.fsdp.groups import differentiated, groups, members
from plait.parallel.fsdp.runtime import divides, padded
from plait.parallel.precision import plan_format
from plait.parallel.strategy import OVER, START, Charge, Moment, held


@dataclass(frozen=True)
class _Group:
    """Units gathered together, with bytes of their parameters: `parts` of one rank, padded, in both formats."""

    first: str
    last: str
    parts: int
    """Of all parameters, in the format they are gathered in."""
    sums: int
    """Of those that are trained, in the format their gradients are summed in."""
    gradients: tuple[tuple[str, int], ...]
    """Whole gradients, as backward leaves them."""
    widened: bool
    """Gathered in another format than they are kept in."""

    @property
    def label(self) -> str:
        """As a reader knows it."""
        return self.first or "what has no unit of its own"


def memory(plan: Plan, sketch: Sketch) -> Iterable[Charge]:
    """Every charge of memory of a sharded plan."""
    rows = [(n, s, d, True) for n, s, d in sketch.parameters] + [(n, s, d, False) for n, s, d in sketch.frozen]
    kept = sum((padded(s, plan.fsdp) if divides(s) else prod(s)) * d.itemsize for _, s, d, _ in rows)
    yield held("parameters", kept, f"1/{plan.fsdp} of each")
    yield held(
        "gradients", sum(d.itemsize for _, s, d, trained in rows if trained and not divides(s)), "scalars, whole"
    )
    found = [_group(plan, sketch, names) for names in groups(sketch)]
    root = _group(plan, sketch, None)
    yield from _forward(plan, found, root)
    back = _backward(sketch, found)
    yield from _gathered_again(plan, sketch, found, root) if plan.zero == 3 else ()
    yield from _sums(plan, back, root)


def _group(plan: Plan, sketch: Sketch, names: list[str] | None) -> _Group:
    rows = {n: (s, d, True) for n, s, d in sketch.parameters} | {n: (s, d, False) for n, s, d in sketch.frozen}
    mine = [n for n in members(sketch)[names[0] if names else ""] if divides(rows[n][0])]
    widths = {n: width(plan, rows[n][1]) for n in mine}
    trained = [n for n in mine if rows[n][2]]
    return _Group(
        names[0] if names else "",
        names[-1] if names else "",
        sum(padded(rows[n][0], plan.fsdp) * widths[n] for n in mine),
        sum(padded(rows[n][0], plan.fsdp) * rows[n][1].itemsize for n in trained),
        tuple((n, prod(rows[n][0]) * widths[n]) for n in trained),
        plan_format(plan) is not None,
    )


def width(plan: Plan, dtype: torch.dtype) -> int:
    """Bytes of a number of a parameter when it is gathered."""
    half = plan_format(plan)
    return half.itemsize if half is not None and dtype.is_floating_point else dtype.itemsize


def _gather(
    plan: Plan, group: _Group, asked: Moment, wanted: Moment, dropped: Moment, *, turns: str = ""
) -> Iterable[Charge]:
    """The buffer from when it is asked for to when it is copied out of; the whole parameters until they are dropped."""
    if group.widened:
        sent = (asked[0], asked[1] + 1)
        yield held("temporary", group.parts, f"parts of {group.label} to send", asked, sent, turns)
    whole, copied = plan.fsdp * group.parts, (wanted[0], wanted[1] + 1)
    yield held("gathered", whole, f"buffer of {group.label}, on its way", asked, copied, turns)
    yield held("gathered", whole, f"parameters of {group.label}", wanted, dropped, turns)


def _forward(plan: Plan, found: list[_Group], root: _Group) -> Iterable[Charge]:
    everything = [(None, root), *((before, here) for before, here in zip([None, *found], found))]
    for before, group in everything:
        begins, done = f"forward {group.first}", _done(group)
        asked, wanted = (f"forward {before.first}", 10) if before else (begins, 0), (begins, 2)
        if plan.zero == 3:
            dropped = done if group is root else (f"forward end {group.last}", 1)
            yield from _gather(plan, group, asked, wanted, dropped)
            continue
        yield from _gather(plan, group, asked, wanted, done, turns="first last")
        yield from _gather(plan, group, asked, wanted, OVER, turns="first early")
        whole, label = plan.fsdp * group.parts, f"parameters of {group.label}"
        yield held("gathered", whole, label, START, done, "later last")
        yield held("gathered", whole, label, START, OVER, "later early")


def _gathered_again(plan: Plan, sketch: Sketch, found: list[_Group], root: _Group) -> Iterable[Charge]:
    twice = differentiated(sketch)
    again = [*(g for g in found if g.first in twice), root]
    for here, ahead in itertools.pairwise(again):
        yield from _gather(plan, here, (f"backward {ahead.last}", 10), (f"backward {here.last}", 2), _done(here))


def _done(group: _Group) -> Moment:
    """When a group's gradients are all there and its parameters are dropped."""
    return (f"backward end {group.first}", 2)


def _backward(sketch: Sketch, found: list[_Group]) -> list[_Group]:
    """Groups by when their gradients are summed: those whose inputs have no gradient come after the root, last."""
    calls = {c.unit: c for c in sketch.calls}
    ends = {g.first: any(sketch.calls[i].backward for i in calls[g.first].needs) for g in found}
    return [g for g in reversed(found) if ends[g.first]] + [_ROOT] + [g for g in found if not ends[g.first]]


_ROOT = _Group("", "", 0, 0, (), False)


def _sums(plan: Plan, back: list[_Group], root: _Group) -> Iterable[Charge]:
    order = [root if g is _ROOT else g for g in back]
    summed = [(f"backward end {g.first}", 100 * (i + 1)) for i, g in enumerate(order)]
    once = "last" if plan.zero == 1 else ""
    for i, group in enumerate(order):
        name, at = summed[i]
        settled = (summed[i + 1][0], summed[i + 1][1] + SETTLED) if i + 1 < len(order) else ("end", 10**6)
        for parameter, size in group.gradients:
            made, sent, why = (f"gradient {parameter}", 0), (name, at + 5), f"whole gradient of {parameter}"
            if plan.zero > 1:
                yield held("gradients", size, why, made, sent)
            else:
                for since, until, turns in _kept_whole(made, sent):
                    yield held("gradients", size, why, since, until, turns)
        whole = plan.fsdp * group.sums
        yield held("exchange", whole, f"gradients of {group.label} to send", (name, at + 3), settled, once)
        others = (plan.fsdp - 2) * group.sums  # the first part arrives where the sum stays
        yield held("exchange", others, f"gradients of {group.label} received", (name, at + 8), settled, once)
        yield held("gradients", group.sums, f"1/{plan.fsdp} of those of {group.label}", (name, at + 6), OVER, once)
        if plan.zero > 1:
            why = f"sums of earlier micro-batches of {group.label}"
            yield held("gradients", group.sums, why, START, OVER, "later early")
            yield held("gradients", group.sums, why, START, ("end", 10**7), "later last")
    if plan.zero > 1 and plan.dp > 1:
        late, why = 2 * sum(g.sums for g in order), "sums of all micro-batches, to add up over copies"
        yield held("exchange", late, why, ("end", 10**6 + 1), ("end", 10**7), "later last")


def _kept_whole(made: Moment, sent: Moment) -> Iterable[tuple[Moment, Moment, str]]:
    """From when and to when gradients are there that are summed in the last micro-batch only."""
    return (
        (made, sent, "first last"),
        (made, OVER, "first early"),
        (START, sent, "later last"),
        (START, OVER, "later early"),
    )


SETTLED = 7
"""The sum of a group is made when the next group's buffer to send is filled."""
