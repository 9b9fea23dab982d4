"""What a rank sends and receives in a step, in order, and whether the ranks of a group agree on it.

Ranks of a group that make other calls, or the same in another order, wait for each other for ever, or compute garbage.
Both kinds of runs have the same record: a real step is watched (`Traffic.watch`), which costs time at every operator, so
that only proofs and tests do it; a dry run tells what each kind of rank would send (`planner/dryrun/dry_run.py`). There
what they did is put side by side: collectives call by call, and what one sends to another with what that one receives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.config.keys import AXES, OTHER_SAMPLES
from plait.config.plan import Plan
from plait.engine.logged import AGREEING
from plait.losses.global_batch import CURRENT
from plait.tensors.torch_private import TorchDispatchMode, group_in, tree_leaves

POINTED = ("send", "recv_")
BY_DATA = ("alltoall_base_",)
"""Operators whose sizes depend on the data."""


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
    asked: bool = False
    """By the job's own loss (`plait.global_batch`): of sizes that depend on the data."""

    @property
    def sized(self) -> bool:
        """Whether its bytes follow from plan, model and samples."""
        return self.op not in BY_DATA and not self.asked

    @property
    def row(self) -> str:
        """What ranks that are alike have in common."""
        return f"{self.op} {self.form}" if self.sized else f"{self.op} {self.form.rpartition(' ')[2]}"

    def __str__(self) -> str:
        return f"{self.op.strip('_')} of {self.form}"


@dataclass(frozen=True)
class GroupSeen:
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
class Traffic:
    """All messages of one rank in a step."""

    rank: int
    plan: Plan
    groups: list[GroupSeen] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)

    def note(self, op: str, args: tuple[Any, ...]) -> None:
        """A call of a collective."""
        group = next((g for g in map(group_in, args) if g is not None), dist.group.WORLD)
        assert group is not None
        number = self.known.get(group.group_name)
        if number is None:
            number = self.known[group.group_name] = len(self.groups)
            ranks = tuple(dist.get_process_group_ranks(group))
            axes = named(self.plan, ranks)
            self.groups.append(GroupSeen(axes, ranks, sum(g.axes == axes for g in self.groups)))
        tensors, peers = given(op, args), CURRENT.get()
        peer = (args[2] - group.rank()) % group.size() if op in POINTED else 0
        form = f"{', '.join(str(list(t.shape)) for t in tensors)} {tensors[0].dtype}" if tensors else "nothing"
        size, asked = sum(t.nbytes for t in tensors), peers is not None and peers.asking
        self.messages.append(Message(number, op, size, form.replace("torch.", ""), peer, asked))

    def watch(self) -> "_Watch":
        """A mode of torch in which every call of a collective is noted."""
        return _Watch(self)

    def totals(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) by operator; bytes only of messages whose size follows from plan, model and samples."""
        return _counted((m.op, m.sized * m.bytes) for m in self.messages)

    def by_axes(self) -> dict[str, tuple[int, int]]:
        """(messages, bytes) by axis; of what is sent or received, what is sent."""
        return _counted((self.groups[m.group].axes, m.bytes) for m in self.messages if m.op != "recv_")

    @cached_property
    def sorted(self) -> dict[Any, tuple[GroupSeen, list[Message], dict[tuple[str, int], list[Message]]]]:
        """For each group: its collectives in order, and its sends and receives by (operator, peer) in order."""
        found: dict[Any, Any] = {c.key: (c, [], {}) for c in self.groups}
        for m in self.messages:
            _, together, pointed = found[self.groups[m.group].key]
            (pointed.setdefault((m.op, m.peer), []) if m.op in POINTED else together).append(m)
        return found


def _counted(rows: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """How often each name comes, and the sum of its numbers."""
    found: dict[str, tuple[int, int]] = {}
    for name, size in rows:
        calls, total = found.get(name, (0, 0))
        found[name] = calls + 1, total + size
    return found


def given(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that a rank gives to a collective (or a message is received into)."""
    tree = args[1] if op in ("allgather_", "_allgather_base_") else args[0]
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class _Watch(TorchDispatchMode):
    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled model stays compiled while it is watched."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if AGREEING.get():
            return func(*args, **(kwargs or {}))
        if namespace == "c10d":
            self.traffic.note(name.partition(".")[0], args)
        elif namespace == "_c10d_functional" and (usual := _outside_a_graph(name)):
            self.traffic.note(usual, (*args[:1], *args[:1]))
        return func(*args, **(kwargs or {}))


def _outside_a_graph(name: str) -> str:
    """What the operator of a compiled graph is called outside of one."""
    compiled = {"all_gather_into_tensor": "_allgather_base_", "all_reduce": "allreduce_"}
    return next((usual for start, usual in compiled.items() if name.startswith(start)), "")


def named(plan: Plan, ranks: tuple[int, ...]) -> str:
    """The axes along which ranks differ; `ep` for those that share out experts."""
    places = [plan.at(r) for r in ranks]
    axes = "×".join(a for a in AXES if len({p[a] for p in places}) > 1)
    one_share = plan.ep > 1 and len(ranks) == plan.ep and len({plan.share(r) // plan.ep for r in ranks}) == 1
    return "ep" if one_share and set(axes.split("×")) <= set(OTHER_SAMPLES) else axes or "alone"


def agree(records: dict[int, Traffic], like: Callable[[int], int]) -> None:
    """D001 at the first call on which two ranks of a group do not agree. `like`: the rank that one is represented by."""
    for rank, record in records.items():
        for key, (group, together, pointed) in record.sorted.items():
            here, done = group.ranks.index(rank), set[Any]()
            for there, other in enumerate(group.ranks):
                peer = (there - here) % len(group.ranks)
                whose = records[like(other)]
                found = whose.sorted.get(key, (group, [], {}))
                if whose.rank not in done:
                    done.add(whose.rank)
                    _same(group, RankMessages(record.rank, together), RankMessages(whose.rank, found[1]))
                back = -peer % len(group.ranks)
                if peer and (whose.rank, peer) not in done:
                    done.add((whose.rank, peer))
                    sent, taken = pointed.get(("send", peer), []), found[2].get(("recv_", back), [])
                    _same(group, RankMessages(record.rank, sent), RankMessages(whose.rank, taken))


class RankMessages(NamedTuple):
    """Messages of a rank, in their order."""

    rank: int
    messages: list[Message]


def _same(group: GroupSeen, mine: RankMessages, others: RankMessages) -> None:
    for i, (a, b) in enumerate(zip_longest(mine.messages, others.messages), 1):
        if a is None or b is None or _content(a) != _content(b):
            told = [str(m) if m is not None else "nothing more" for m in (a, b)]
            raise PlaitError(Problem(
                "D001", f"ranks {mine.rank} and {others.rank} would wait for each other: number {i} on {group.axes}",
                why=f"rank {mine.rank}: {told[0]}; rank {others.rank}: {told[1]}", fix=("another plan",),
            ))  # fmt: skip


def _content(m: Message) -> Any:
    """What both ends of a message, or all ranks of a collective, have in common."""
    return ("" if m.op in POINTED else m.op), m.bytes if m.sized else 0
