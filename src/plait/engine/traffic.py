"""The messages that a rank sends and receives in a step, in order, and a check that the ranks of a group agree on them.

If ranks of a group make different calls, or the same calls in a different order, they wait for each other forever, or compute
garbage. Real steps and dry runs have the same record. A real step is watched (`Traffic.watch`), which slows every operator, so only
proofs and tests use it. A dry run records the messages of each kind of rank (`planner/dryrun/dry_run.py`). The records are then
compared: collectives call by call, and sends with the matching receives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.config.keys import AXES, DATA_AXES
from plait.config.plan import Plan
from plait.engine.step_log import EXCHANGING_NAMES
from plait.losses.global_batch import CURRENT_PEERS
from plait.tensors.torch_private import TorchDispatchMode, find_process_group, tree_leaves

POINT_TO_POINT = ("send", "recv_")
DATA_SIZED = ("alltoall_base_",)
"""Operators whose sizes depend on the data."""


@dataclass(frozen=True)
class Message:
    """One call: an operator, and bytes. `peer`: for a send or receive, the offset of the other rank in the group."""

    group: int
    """Number of the group, in order of first use on the rank."""
    op: str
    bytes: int
    form: str
    """Shapes and number format."""
    peer: int = 0
    is_from_loss: bool = False
    """Whether the job's own loss sent it (`plait.global_batch`): its sizes depend on the data."""

    @property
    def has_fixed_size(self) -> bool:
        """Whether its bytes are determined by plan, model and samples."""
        return self.op not in DATA_SIZED and not self.is_from_loss

    @property
    def signature(self) -> str:
        """The part of the message that is equal on equivalent ranks."""
        return f"{self.op} {self.form}" if self.has_fixed_size else f"{self.op} {self.form.rpartition(' ')[2]}"

    def __str__(self) -> str:
        return f"{self.op.strip('_')} of {self.form}"


@dataclass(frozen=True)
class GroupView:
    """A group of ranks as seen by one of them. `axes`: the axes along which they differ."""

    axes: str
    ranks: tuple[int, ...]
    number: int
    """Number among the groups along these axes, in order of first use."""

    @cached_property
    def key(self) -> Any:
        """Key that is equal for equivalent groups of other ranks."""
        return self.axes, tuple(r - self.ranks[0] for r in self.ranks), self.number


@dataclass
class Traffic:
    """All messages of one rank in a step."""

    rank: int
    plan: Plan
    groups: list[GroupView] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    group_numbers: dict[str, int] = field(default_factory=dict)

    def add_message(self, op: str, args: tuple[Any, ...]) -> None:
        """Record a call of a collective."""
        group = next((g for g in map(find_process_group, args) if g is not None), dist.group.WORLD)
        assert group is not None
        number = self.group_numbers.get(group.group_name)
        if number is None:
            number = self.group_numbers[group.group_name] = len(self.groups)
            ranks = tuple(dist.get_process_group_ranks(group))
            axes = describe_axes(self.plan, ranks)
            self.groups.append(GroupView(axes, ranks, sum(g.axes == axes for g in self.groups)))
        tensors, peers = get_op_tensors(op, args), CURRENT_PEERS.get()
        peer = (args[2] - group.rank()) % group.size() if op in POINT_TO_POINT else 0
        form = f"{', '.join(str(list(t.shape)) for t in tensors)} {tensors[0].dtype}" if tensors else "nothing"
        size, asked = sum(t.nbytes for t in tensors), peers is not None and peers.is_exchanging
        self.messages.append(Message(number, op, size, form.replace("torch.", ""), peer, asked))

    def watch(self) -> "_TrafficWatch":
        """Return a torch mode that records every call of a collective."""
        return _TrafficWatch(self)

    def total_by_op(self) -> dict[str, tuple[int, int]]:
        """Return (calls, bytes) by operator; bytes only of messages whose size is determined by plan, model and samples."""
        return _count_and_sum((m.op, m.has_fixed_size * m.bytes) for m in self.messages)

    def total_by_axes(self) -> dict[str, tuple[int, int]]:
        """Return (messages, bytes) by axis; for point-to-point messages, only the sends."""
        return _count_and_sum((self.groups[m.group].axes, m.bytes) for m in self.messages if m.op != "recv_")

    @cached_property
    def by_group(self) -> dict[Any, tuple[GroupView, list[Message], dict[tuple[str, int], list[Message]]]]:
        """For each group: its collectives in order, and its sends and receives by (operator, peer) in order."""
        found: dict[Any, Any] = {c.key: (c, [], {}) for c in self.groups}
        for m in self.messages:
            _, together, pointed = found[self.groups[m.group].key]
            (pointed.setdefault((m.op, m.peer), []) if m.op in POINT_TO_POINT else together).append(m)
        return found


def _count_and_sum(rows: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Count each name, and sum its sizes."""
    found: dict[str, tuple[int, int]] = {}
    for name, size in rows:
        calls, total = found.get(name, (0, 0))
        found[name] = calls + 1, total + size
    return found


def get_op_tensors(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that a rank passes to a collective (or receives a message into)."""
    tree = args[1] if op in ("allgather_", "_allgather_base_") else args[0]
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class _TrafficWatch(TorchDispatchMode):
    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep a compiled model compiled while it is watched."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if EXCHANGING_NAMES.get():
            return func(*args, **(kwargs or {}))
        if namespace == "c10d":
            self.traffic.add_message(name.partition(".")[0], args)
        elif namespace == "_c10d_functional" and (usual := _get_eager_name(name)):
            self.traffic.add_message(usual, (*args[:1], *args[:1]))
        return func(*args, **(kwargs or {}))


def _get_eager_name(name: str) -> str:
    """Return the eager name of a compiled graph's operator; "" for others."""
    compiled = {"all_gather_into_tensor": "_allgather_base_", "all_reduce": "allreduce_"}
    return next((usual for start, usual in compiled.items() if name.startswith(start)), "")


def describe_axes(plan: Plan, ranks: tuple[int, ...]) -> str:
    """Name the axes along which ranks differ; `ep` for ranks across which experts are sharded."""
    places = [plan.at(r) for r in ranks]
    axes = "×".join(a for a in AXES if len({p[a] for p in places}) > 1)
    one_share = plan.ep > 1 and len(ranks) == plan.ep and len({plan.dp_rank(r) // plan.ep for r in ranks}) == 1
    return "ep" if one_share and set(axes.split("×")) <= set(DATA_AXES) else axes or "alone"


def check_agreement(records: dict[int, Traffic], representative: Callable[[int], int]) -> None:
    """Raise D001 at the first call on which two ranks of a group disagree. `representative`: the rank that stands for a rank."""
    for rank, record in records.items():
        for key, (group, together, pointed) in record.by_group.items():
            here, done = group.ranks.index(rank), set[Any]()
            for there, other in enumerate(group.ranks):
                peer = (there - here) % len(group.ranks)
                whose = records[representative(other)]
                found = whose.by_group.get(key, (group, [], {}))
                if whose.rank not in done:
                    done.add(whose.rank)
                    _check_same(group, RankMessages(record.rank, together), RankMessages(whose.rank, found[1]))
                back = -peer % len(group.ranks)
                if peer and (whose.rank, peer) not in done:
                    done.add((whose.rank, peer))
                    sent, taken = pointed.get(("send", peer), []), found[2].get(("recv_", back), [])
                    _check_same(group, RankMessages(record.rank, sent), RankMessages(whose.rank, taken))


class RankMessages(NamedTuple):
    """Messages of a rank, in order."""

    rank: int
    messages: list[Message]


def _check_same(group: GroupView, mine: RankMessages, others: RankMessages) -> None:
    for i, (a, b) in enumerate(zip_longest(mine.messages, others.messages), 1):
        if a is None or b is None or _get_comparable(a) != _get_comparable(b):
            told = [str(m) if m is not None else "nothing more" for m in (a, b)]
            raise PlaitError(Problem(
                "D001", f"ranks {mine.rank} and {others.rank} would wait for each other: call {i} on {group.axes}",
                why=f"rank {mine.rank}: {told[0]}; rank {others.rank}: {told[1]}", fix=("another plan",),
            ))  # fmt: skip


def _get_comparable(m: Message) -> Any:
    """Return the part that is equal at both ends of a message, or on all ranks of a collective."""
    return ("" if m.op in POINT_TO_POINT else m.op), m.bytes if m.has_fixed_size else 0
