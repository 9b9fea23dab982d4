"""What a rank sends and receives in a step, in order, and whether the ranks of a group agree on it.

Ranks of a group that make other calls, or the same in another order, wait for each other for ever. In a dry run each
kind of rank runs alone (`planner/dryrun/dry_run.py`); here what they did is put side by side: collectives call by call, and what one
sends to another with what that one receives from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist

from plait.config.errors import PlaitError, Problem
from plait.config.plan import AXES, Plan
from plait.engine.comm_log import BY_DATA, given
from plait.tensors.torch_private import group_in

POINTED = ("send", "recv_")


@dataclass(frozen=True)
class Message:
    """One call: an operator, and bytes. `peer`: of a send or a receive, how far the other rank is in the group."""

    group: int
    """Number of the group, as the rank met them."""
    op: str
    bytes: int
    form: str
    """Shapes and number format."""
    peer: int = 0

    def __str__(self) -> str:
        return f"{self.op.strip('_')} of {self.form}"


@dataclass(frozen=True)
class Circle:
    """A group of ranks as one of them sees it. `axes`: along which they differ."""

    axes: str
    ranks: tuple[int, ...]
    number: int
    """Of the groups along these axes, in the order in which they are first used."""

    @cached_property
    def key(self) -> Any:
        """What groups have in common that are the same to other ranks."""
        return self.axes, tuple(r - self.ranks[0] for r in self.ranks), self.number


@dataclass
class Mail:
    """All messages of one rank in a step."""

    rank: int
    plan: Plan
    circles: list[Circle] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)

    def note(self, op: str, args: tuple[Any, ...]) -> None:
        """A call of a collective."""
        group: Any = next((g for g in map(group_in, args) if g is not None), dist.group.WORLD)
        number = self.known.get(group.group_name)
        if number is None:
            number = self.known[group.group_name] = len(self.circles)
            ranks = tuple(dist.get_process_group_ranks(group))
            axes = named(self.plan, ranks)
            self.circles.append(Circle(axes, ranks, sum(c.axes == axes for c in self.circles)))
        tensors = given(op, args)
        peer = (args[2] - group.rank()) % group.size() if op in POINTED else 0
        form = f"{', '.join(str(list(t.shape)) for t in tensors)} {tensors[0].dtype}" if tensors else "nothing"
        self.messages.append(Message(number, op, sum(t.nbytes for t in tensors), form.replace("torch.", ""), peer))

    def traffic(self) -> dict[str, tuple[int, int]]:
        """(messages, bytes) by axis; of what is sent or received, what is sent."""
        found: dict[str, tuple[int, int]] = {}
        for m in self.messages:
            if m.op != "recv_":
                axes = self.circles[m.group].axes
                calls, size = found.get(axes, (0, 0))
                found[axes] = calls + 1, size + m.bytes
        return found

    def operators(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) by operator."""
        found: dict[str, tuple[int, int]] = {}
        for m in self.messages:
            calls, size = found.get(m.op, (0, 0))
            found[m.op] = calls + 1, size + m.bytes
        return found

    @cached_property
    def sorted(self) -> dict[Any, tuple[Circle, list[Message], dict[tuple[str, int], list[Message]]]]:
        """For each group: its collectives in order, and its sends and receives by (operator, peer) in order."""
        found: dict[Any, Any] = {c.key: (c, [], {}) for c in self.circles}
        for m in self.messages:
            _, together, pointed = found[self.circles[m.group].key]
            (pointed.setdefault((m.op, m.peer), []) if m.op in POINTED else together).append(m)
        return found


def named(plan: Plan, ranks: tuple[int, ...]) -> str:
    """The axes along which ranks differ; `ep` for those that share out experts."""
    places = [plan.at(r) for r in ranks]
    axes = "×".join(a for a in AXES if len({p[a] for p in places}) > 1)
    shares = {plan.share(r) // plan.ep for r in ranks}
    return (
        "ep"
        if plan.ep > 1 and len(ranks) == plan.ep and len(shares) == 1 and set(axes.split("×")) <= {"dp", "fsdp"}
        else axes or "alone"
    )


def agree(mails: dict[int, Mail], like: Callable[[int], int]) -> None:
    """D001 at the first call on which two ranks of a group do not agree. `like`: the rank that one is represented by."""
    for rank, mail in mails.items():
        for key, (circle, together, pointed) in mail.sorted.items():
            here, done = circle.ranks.index(rank), set[Any]()
            for there, other in enumerate(circle.ranks):
                peer = (there - here) % len(circle.ranks)
                whose = mails[like(other)]
                found = whose.sorted.get(key, (circle, [], {}))
                if whose.rank not in done:
                    done.add(whose.rank)
                    _same(circle, (mail.rank, together), (whose.rank, found[1]), "calls")
                back = -peer % len(circle.ranks)
                if peer and (whose.rank, peer) not in done:
                    done.add((whose.rank, peer))
                    sent, taken = pointed.get(("send", peer), []), found[2].get(("recv_", back), [])
                    _same(circle, (mail.rank, sent), (whose.rank, taken), "sends and")


def _same(circle: Circle, mine: tuple[int, list[Message]], others: tuple[int, list[Message]], what: str) -> None:
    for i, (a, b) in enumerate(_pairs(mine[1], others[1]), 1):
        if a is None or b is None or _content(a) != _content(b):
            told = [str(m) if m is not None else "nothing more" for m in (a, b)]
            raise PlaitError(Problem(
                "D001", f"ranks {mine[0]} and {others[0]} would wait for each other: number {i} on {circle.axes}",
                why=f"rank {mine[0]}: {told[0]}; rank {others[0]}: {told[1]}", fix=("another plan",),
            ))  # fmt: skip


def _pairs(a: list[Any], b: list[Any]) -> Iterator[tuple[Any, Any]]:
    for i in range(max(len(a), len(b))):
        yield a[i] if i < len(a) else None, b[i] if i < len(b) else None


def _content(m: Message) -> Any:
    """What both ends of a message, or all ranks of a collective, have in common."""
    return ("" if m.op in POINTED else m.op), 0 if m.op in BY_DATA else m.bytes
