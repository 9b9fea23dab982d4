"""Messages of a pipelined step between two ranks: which there are, in which order, and receiving them ahead of time.

What crosses, and when, is known before the step: it stands in the table. For each sender and receiver, messages go in
the order of the sender's row, and the receiver takes them in that same order, which it reads off the same table. So the
order alone says which message is which. gloo also matches tags, and here a wrong tag makes an error of what would be a
mix-up; NCCL ignores tags and knows only the order.

A receive is posted while earlier actions compute: a message that finds it posted arrives at once, and one that does not
must first ask for it and be answered. At most `AHEAD` of a sender wait for their turn, which bounds the memory.

Not on NCCL: there a pair of ranks, or a whole group, runs messages of both directions one after another, in the order in
which each end asked for them, and a send may wait for its receive. Two ranks that both send first, as neighbours do under
1f1b, would wait for each other. So all ranks ask in one order, in which the table can be played (`MessageOrder.turns`): before a
rank asks for a message, it asks for the earlier ones that it is sent, which may be a little before it needs them.

A sent tensor is kept until its receiver has it. Nobody asks: each message that comes back says, by its place in the
table, how many of ours its sender had taken by then.
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
from plait.parallel.pipeline.schedules import Action, Row, Table
from plait.tensors.collectives import directly
from plait.tensors.rows import memory_order
from plait.tensors.trees import Slot

AHEAD = 2
"""Receives posted beyond the one that is waited for, of each sender."""


class StageMessage(NamedTuple):
    """A message to `stage` about a micro-batch: outputs of the stage before, or gradients from the one behind."""

    forward: bool
    stage: int
    micro: int


class MessageOrder(NamedTuple):
    """All messages from one rank to another, in order."""

    messages: tuple[StageMessage, ...]
    taken: tuple[int, ...]
    """For each: how many of the messages the other way, from the first on, its sender has taken before it sends."""
    turns: tuple[int, ...]
    """For each: its place among all messages of the step, in the order in which they are made when stages are equal."""


Routes = dict[tuple[int, int], MessageOrder]
"""By (sender, receiver)."""


def routes(rows: Iterable[Iterable[Action]], owner: tuple[int, ...], crosses: Callable[[StageMessage], bool]) -> Routes:
    """What these rows send. `crosses` says whether there is anything in a message."""
    played: list[Row] = [tuple(row) for row in rows]
    order: dict[tuple[int, int], list[StageMessage]] = {}
    needs: list[list[tuple[StageMessage | None, tuple[int, StageMessage] | None]]] = []
    for rank, row in enumerate(played):
        needs.append([])
        for action in row:
            need, gives = _ends(action, owner)
            to = gives[0] if gives and crosses(gives[1]) else rank
            needs[rank].append((need, gives if to != rank else None))
            if gives and to != rank:
                order.setdefault((rank, to), []).append(gives[1])
    orders: Routes = {}
    turns = _turns(played, owner)
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


def _turns(rows: list[Row], owner: tuple[int, ...]) -> dict[StageMessage, int]:
    """The order in which messages are made when all actions take the same time and messages none: as every action takes
    time, whatever a rank sends comes after what it needed for it."""
    ones = [1.0] * len(owner)
    run = simulate(
        Table.of("", 1 + max((a.micro for row in rows for a in row), default=0), owner, rows), ones, ones, ones
    )
    ends = ((event.end, _ends(event.action, owner)[1]) for event in run.events)
    order = sorted((end, gives[1]) for end, gives in ends if gives)
    return {message: turn for turn, (_, message) in enumerate(order)}


def _ends(action: Action, owner: tuple[int, ...]) -> tuple[StageMessage | None, tuple[int, StageMessage] | None]:
    """(what an action waits for, (rank, what it sends there)), also where that is the same rank."""
    forward, stage = action.kind == "F", action.stage
    if action.kind == "W":
        return None, None
    to = stage + 1 if forward else stage - 1
    gives = (owner[to], StageMessage(forward, to, action.micro)) if 0 <= to < len(owner) else None
    return StageMessage(forward, stage, action.micro), gives


class PointToPoint:
    """One step's messages of this rank. `make` gives the empty tensors that a message is received into.

    `ahead`: receives posted before they are waited for, of each sender; 0 where messages run in the order of asking.
    """

    def __init__(
        self, group: ProcessGroup, routes: Routes, make: Callable[[StageMessage], list[Tensor]], ahead: int = AHEAD
    ):
        self.group, self.routes, self.make, self.ahead = group, routes, make, ahead
        self.rank = rank = group.rank()
        self.places = {
            message: (a, i) for (a, b), r in routes.items() if b == rank for i, message in enumerate(r.messages)
        }
        self.senders = sorted({a for a, b in routes if b == rank})
        self.posted = dict.fromkeys(self.senders, 0)
        mine = [route for ends, route in routes.items() if rank in ends and not ahead]
        self.turns = {message: turn for route in mine for message, turn in zip(route.messages, route.turns)}
        self.coming = deque(sorted(self.turns.keys() & self.places, key=self.turns.__getitem__))
        """What no receive is posted for, in the order of the step."""
        self.waiting: dict[StageMessage, tuple[list[Tensor], list[Any]]] = {}
        self.taken = dict.fromkeys(self.senders, 0)
        self.sent: dict[int, deque[tuple[list[Any], list[Tensor]]]] = {b: deque() for a, b in routes if a == rank}
        self.gone = dict.fromkeys(self.sent, 0)
        """How many of the messages to a rank it is known to have."""
        for sender in self.senders:
            self._post(sender, ahead)

    def send(self, message: StageMessage, to: int, values: list[Tensor]) -> None:
        """Hand a message over, without waiting."""
        if not self.ahead:
            self._post_before(self.turns[message])
        values = [t.contiguous() for t in values]
        works = [dist.isend(t, group=self.group, group_dst=to, tag=_tag(message) + k) for k, t in enumerate(values)]
        self.sent[to].append((works, values))

    def receive(self, message: StageMessage) -> list[Tensor]:
        """Wait for a message."""
        sender, place = self.places[message]
        if self.ahead:
            self._post(sender, max(place + 1, self.taken[sender] + 1 + self.ahead))
        else:
            self._post_before(self.turns[message] + 1)
        tensors, works = self.waiting.pop(message)
        for work in works:
            work.wait()
        self.taken[sender] += 1
        if sender in self.sent:
            self._release(sender, self.routes[sender, self.rank].taken[place])
        return tensors

    def close(self) -> None:
        """Wait until all that was sent has been received."""
        for to, sent in self.sent.items():
            self._release(to, self.gone[to] + len(sent))

    def _post(self, sender: int, until: int) -> None:
        """Post receives in the sender's order: the first `until` of its messages."""
        for message in self.routes[sender, self.rank].messages[self.posted[sender] : until]:
            self._ask(message, sender)
            self.posted[sender] += 1

    def _post_before(self, turn: int) -> None:
        """Post receives in the order of the step: of all messages, whoever sends them, that come before this turn."""
        while self.coming and self.turns[self.coming[0]] < turn:
            message = self.coming.popleft()
            self._ask(message, self.places[message][0])

    def _ask(self, message: StageMessage, sender: int) -> None:
        tensors = self.make(message)
        flat = [t.permute(memory_order(t)) if memory_order(t) else t for t in tensors]
        works = [
            dist.irecv(t, group=self.group, group_src=sender, tag=_tag(message) + k) for k, t in enumerate(flat)
        ]
        self.waiting[message] = tensors, works

    def _release(self, to: int, known: int) -> None:
        while self.gone[to] < known:
            works, _ = self.sent[to].popleft()
            for work in works:
                work.wait()
            self.gone[to] += 1


def _tag(message: StageMessage) -> int:
    """The first of up to 4,096 tags of a message."""
    return ((message.micro * 64 + message.stage % 64) * 2 + message.forward) * 4096 + 32768


def empty(slots: Sequence[Slot], samples: int, device: torch.device, *, forward: bool) -> list[Tensor]:
    """What a message is received into: a tensor for each slot, or gradients of those that have any, as `packed` makes them:
    a tensor for each number format; on a device one of the host beside them."""
    if forward:
        return [slot.empty(samples, device) for slot in slots]
    sizes, inside = dict[torch.dtype, int](), int(directly(device))  # processes know numbers at once: they travel inside
    given = [slot for slot in slots if slot.grad]
    for slot in given:
        sizes[slot.dtype] = sizes.get(slot.dtype, 0) + prod(slot.shape(samples)) + inside
    flats = [torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()]
    return flats if inside else [*flats, torch.ones(len(given), dtype=torch.bool)]


def packed(values: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of values, those of a number format as one message: each flat, and behind it 0, or zeros and 1 where there
    is none, since no gradient and one of zeros are not the same to an optimizer. (A dry run on real tensors receives zeros.)

    On a device a number that the receiver has to know would make it wait for all that is queued there. So it is told which
    there are in a message from host to host, which the sender's host knows as soon as it has queued its backward pass."""
    parts: dict[torch.dtype, list[Tensor]] = {}
    inside = directly(values[0].device)
    for value, grad in zip(values, grads):
        flat = value.new_zeros(value.numel()) if grad is None else grad.reshape(-1)
        none = (value.new_full((1,), float(grad is None)),) if inside else ()
        parts.setdefault(value.dtype, []).extend((flat, *none))
    flats = [torch.cat(flats) for flats in parts.values()]
    return flats if inside else [*flats, torch.tensor([grad is not None for grad in grads])]


def unpacked(messages: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of values again: views of the messages."""
    inside = directly(values[0].device)
    there = [] if inside else messages[-1].tolist()
    rest = {message.dtype: message for message in (messages if inside else messages[:-1])}
    grads: list[Tensor | None] = []
    for i, value in enumerate(values):
        own, none, rest[value.dtype] = rest[value.dtype].tensor_split((value.numel(), value.numel() + inside))
        grads.append(own.view(value.shape) if (bool(none == 0) if inside else there[i]) else None)
    return grads
