"""Point-to-point messages of a pipelined step between two ranks: their order, and receives that are posted in advance.

The schedule table determines every message before the step. A sender sends to each receiver in the order of its row.
The receiver reads that order from the same table, so the order alone identifies a message. gloo also matches tags, so a
wrong tag raises an error instead of mixing up two messages. NCCL ignores tags and matches by order only.

Receives are posted while earlier actions compute. A message with a posted receive is transferred at once; any other
message first needs a handshake. At most `PREPOSTED_RECEIVES` per sender are posted in advance, which bounds the memory.

NCCL runs the messages of a pair of ranks, in both directions, in the order in which each end issues them. A send may
block until its receive. Under 1f1b, two neighboring ranks both send first and would deadlock. So on NCCL all ranks
issue messages in one global order, in which the table can be executed (`MessageOrder.turns`). Before a rank issues a
message, it posts the receives of all earlier messages, possibly a little before it needs them.

A sent tensor is kept until its receiver has it, without an acknowledgment. The position of each returning message in
the table implies how many messages its sender had received before.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.parallel.pipeline.schedule_search import simulate
from plait.parallel.pipeline.schedules import Action, Row, ScheduleTable
from plait.tensors.collectives import is_direct_exchange
from plait.tensors.rows import memory_order
from plait.tensors.trees import TensorSlot

PREPOSTED_RECEIVES = 2
"""Number of receives posted per sender, in addition to the one that is waited for."""


class StageMessage(NamedTuple):
    """A message to `stage` for one micro-batch: outputs of the previous stage, or gradients from the next stage."""

    forward: bool
    stage: int
    micro: int


class MessageOrder(NamedTuple):
    """All messages from one rank to another, in order."""

    messages: tuple[StageMessage, ...]
    received_before: tuple[int, ...]
    """Per message: the number of messages in the other direction that its sender has received before it sends."""
    turns: tuple[int, ...]
    """Per message: its position among all messages of the step, in the order in which equally slow stages produce them."""


Routes = dict[tuple[int, int], MessageOrder]
"""Message order by (sender, receiver)."""


def plan_routes(rows: Iterable[Iterable[Action]], owner: tuple[int, ...], crosses: Callable[[StageMessage], bool]) -> Routes:
    """List the messages that these rows send, by (sender, receiver). `crosses` returns whether a message contains any
    tensor."""
    played: list[Row] = [tuple(row) for row in rows]
    order: dict[tuple[int, int], list[StageMessage]] = {}
    needs: list[list[tuple[StageMessage | None, tuple[int, StageMessage] | None]]] = []
    for rank, row in enumerate(played):
        needs.append([])
        for action in row:
            need, gives = _find_messages(action, owner)
            to = gives[0] if gives and crosses(gives[1]) else rank
            needs[rank].append((need, gives if to != rank else None))
            if gives and to != rank:
                order.setdefault((rank, to), []).append(gives[1])
    orders: Routes = {}
    turns = _order_messages(played, owner)
    for (rank, to), messages in order.items():
        back, had, first, taken = order.get((to, rank), []), set[StageMessage](), 0, list[int]()
        for need, gives in needs[rank]:
            if need is not None:
                had.add(need)
            while first < len(back) and back[first] in had:
                first += 1
            if gives and gives[0] == to:
                taken.append(first)
        orders[rank, to] = MessageOrder(tuple(messages), tuple(taken), tuple(turns[message] for message in messages))
    return orders


def _order_messages(rows: list[Row], owner: tuple[int, ...]) -> dict[StageMessage, int]:
    """Order all messages of a step by the time they are produced, if all actions take equal time and messages take
    none. Every action takes time, so a message of a rank always follows the messages that the rank needed for it."""
    ones = [1.0] * len(owner)
    run = simulate(
        ScheduleTable.from_rows("", 1 + max((a.micro for row in rows for a in row), default=0), owner, rows), ones, ones, ones
    )
    ends = ((event.end, _find_messages(event.action, owner)[1]) for event in run.events)
    order = sorted((end, gives[1]) for end, gives in ends if gives)
    return {message: turn for turn, (_, message) in enumerate(order)}


def _find_messages(action: Action, owner: tuple[int, ...]) -> tuple[StageMessage | None, tuple[int, StageMessage] | None]:
    """Return the message that an action waits for, and (rank, message) that it sends, even if that is the same rank."""
    forward, stage = action.kind == "F", action.stage
    if action.kind == "W":
        return None, None
    to = stage + 1 if forward else stage - 1
    gives = (owner[to], StageMessage(forward, to, action.micro)) if 0 <= to < len(owner) else None
    return StageMessage(forward, stage, action.micro), gives


class PointToPoint:
    """One step's messages of this rank. `make_buffers` allocates the tensors that a message is received into.

    `ahead`: receives posted in advance per sender, or 0 if messages run in the order in which they are issued.
    """

    def __init__(
        self, group: ProcessGroup, routes: Routes, make: Callable[[StageMessage], list[Tensor]], ahead: int = PREPOSTED_RECEIVES
    ):
        self.group, self.routes, self.make_buffers, self.ahead = group, routes, make, ahead
        self.rank = rank = group.rank()
        self.places = {
            message: (a, i) for (a, b), r in routes.items() if b == rank for i, message in enumerate(r.messages)
        }
        self.senders = sorted({a for a, b in routes if b == rank})
        self.posted = dict.fromkeys(self.senders, 0)
        mine = [route for ends, route in routes.items() if rank in ends and not ahead]
        self.turns = {message: turn for route in mine for message, turn in zip(route.messages, route.turns)}
        self.unposted = deque(sorted(self.turns.keys() & self.places, key=self.turns.__getitem__))
        """Messages without a posted receive, in the order of the step."""
        self.pending: dict[StageMessage, tuple[list[Tensor], list[Any]]] = {}
        self.received_counts = dict.fromkeys(self.senders, 0)
        self.sent: dict[int, deque[tuple[list[Any], list[Tensor]]]] = {b: deque() for a, b in routes if a == rank}
        self.delivered = dict.fromkeys(self.sent, 0)
        """Per receiver: the number of messages that it has certainly received."""
        for sender in self.senders:
            self._post_from(sender, ahead)

    def send(self, message: StageMessage, to: int, values: list[Tensor]) -> None:
        """Send a message without waiting."""
        if not self.ahead:
            self._post_before(self.turns[message])
        values = [t.contiguous() for t in values]
        works = [dist.isend(t, group=self.group, group_dst=to, tag=_tag(message) + k) for k, t in enumerate(values)]
        self.sent[to].append((works, values))

    def receive(self, message: StageMessage) -> list[Tensor]:
        """Wait for a message and return its tensors."""
        sender, place = self.places[message]
        if self.ahead:
            self._post_from(sender, max(place + 1, self.received_counts[sender] + 1 + self.ahead))
        else:
            self._post_before(self.turns[message] + 1)
        tensors, works = self.pending.pop(message)
        for work in works:
            work.wait()
        self.received_counts[sender] += 1
        if sender in self.sent:
            self._release_sent(sender, self.routes[sender, self.rank].received_before[place])
        return tensors

    def close(self) -> None:
        """Wait until all sent messages have been received."""
        for to, sent in self.sent.items():
            self._release_sent(to, self.delivered[to] + len(sent))

    def _post_from(self, sender: int, until: int) -> None:
        """Post receives of the first `until` messages of a sender, in its order."""
        for message in self.routes[sender, self.rank].messages[self.posted[sender] : until]:
            self._post_receive(message, sender)
            self.posted[sender] += 1

    def _post_before(self, turn: int) -> None:
        """Post receives of all senders' messages before this turn, in the order of the step."""
        while self.unposted and self.turns[self.unposted[0]] < turn:
            message = self.unposted.popleft()
            self._post_receive(message, self.places[message][0])

    def _post_receive(self, message: StageMessage, sender: int) -> None:
        tensors = self.make_buffers(message)
        flat = [t.permute(memory_order(t)) if memory_order(t) else t for t in tensors]
        works = [
            dist.irecv(t, group=self.group, group_src=sender, tag=_tag(message) + k) for k, t in enumerate(flat)
        ]
        self.pending[message] = tensors, works

    def _release_sent(self, to: int, known: int) -> None:
        while self.delivered[to] < known:
            works, _ = self.sent[to].popleft()
            for work in works:
                work.wait()
            self.delivered[to] += 1


def _tag(message: StageMessage) -> int:
    """Return the first of up to 4,096 tags of a message."""
    return ((message.micro * 64 + message.stage % 64) * 2 + message.forward) * 4096 + 32768


def allocate_buffers(slots: Sequence[TensorSlot], samples: int, device: torch.device, *, forward: bool) -> list[Tensor]:
    """Allocate the tensors that a message is received into. For outputs: one tensor per slot. For gradients: the layout
    of `pack_gradients`, which is one tensor per dtype, and on a device also one host tensor."""
    if forward:
        return [slot.allocate(samples, device) for slot in slots]
    sizes, inside = dict[torch.dtype, int](), int(is_direct_exchange(device))  # flags travel inside the tensors
    given = [slot for slot in slots if slot.grad]
    for slot in given:
        sizes[slot.dtype] = sizes.get(slot.dtype, 0) + prod(slot.shape_for(samples)) + inside
    flats = [torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()]
    return flats if inside else [*flats, torch.ones(len(given), dtype=torch.bool)]


def pack_gradients(values: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Concatenate gradients into one flat tensor per dtype. A flag follows each gradient: 0, or 1 after zeros if there
    is no gradient. An optimizer treats a missing gradient differently from zeros. (A dry run on real tensors receives
    zeros.)

    On a device, reading a flag would make the receiver wait for all queued kernels. So the flags are sent in a separate
    message from host to host. The sender's host has them as soon as its backward pass is queued.
    """
    parts: dict[torch.dtype, list[Tensor]] = {}
    inside = is_direct_exchange(values[0].device)
    for value, grad in zip(values, grads):
        flat = value.new_zeros(value.numel()) if grad is None else grad.reshape(-1)
        none = (value.new_full((1,), float(grad is None)),) if inside else ()
        parts.setdefault(value.dtype, []).extend((flat, *none))
    flats = [torch.cat(flats) for flats in parts.values()]
    return flats if inside else [*flats, torch.tensor([grad is not None for grad in grads])]


def unpack_gradients(messages: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of `values`, as views of the messages."""
    inside = is_direct_exchange(values[0].device)
    there = [] if inside else messages[-1].tolist()
    rest = {message.dtype: message for message in (messages if inside else messages[:-1])}
    grads: list[Tensor | None] = []
    for i, value in enumerate(values):
        own, none, rest[value.dtype] = rest[value.dtype].tensor_split((value.numel(), value.numel() + inside))
        grads.append(own.view(value.shape) if (bool(none == 0) if inside else there[i]) else None)
    return grads
