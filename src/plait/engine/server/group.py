"""A group: it asks for a portion of samples and the weights, computes the gradient, sends it, and asks again.

Which tensors are on which server, and tensors as bytes on their way between a group and a server.

Servers share out the parameters, each the largest first to whoever has least, so that all hold about as many bytes. Buffers are
on every one: a group that runs needs them all, and they are small. What travels is the bytes of the tensors, one after the other
in an order that both sides know, behind a byte for each that says whether it is there: a parameter that no sample used has no gradient.

A message has a kind and eight numbers:

group → server     HELLO group fence · ASK fence · PUSH ticket fence · PART ticket fence · VALUES errand fence
server → group     WELCOME fence · DEAL ticket clock epoch start size first count version · EVALUATE errand fence
                   WEIGHTS ticket version · HAVE ticket · FENCED fence · END
lead → follower    SEND group fence ticket errand · APPLY version samples · FORGET ticket · SNAP errand · DROP errand
                   SAVE step epoch start samples wait · END

What groups and servers know before they are forked (`ServerSetting`): the job, the plan, where the servers listen, and the run's key.
"""

import json
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Batch, BatchShare, Position, is_map, weigh
from plait.data.loading import StepSamples, reader
from plait.data.padding import Padding, fetching
from plait.engine.engine import Engine
from plait.engine.server.dealing import Rules
from plait.engine.step import sort_of, tokens
from plait.launch import limits
from plait.launch.channel import Hub, Packet, Peer
from plait.launch.loopback import LocalStore
from plait.launch.place import Place
from plait.tensors.rows import split


@dataclass(frozen=True)
class Doors:
    """Where servers listen, open before anyone is forked: who is forked later finds them too."""

    key: bytes
    listening: tuple[socket.socket, ...]
    store: LocalStore | None
    """Of the process group among servers, where there are several."""

    @staticmethod
    def open(servers: int) -> "Doors":
        store = LocalStore() if servers > 1 else None
        return Doors(secrets.token_bytes(32), tuple(limits.listening() for _ in range(servers)), store)

    @property
    def ports(self) -> list[int]:
        return [door.getsockname()[1] for door in self.listening]

    def close(self) -> None:
        for door in self.listening:
            door.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True)
class ServerSetting:
    """One run of groups and servers."""

    job: Job
    plan: Plan
    device: str = "auto"
    cast: torch.dtype | None = None
    on_nan: str = "stop"
    folder: Path | None = None
    """The run's directory: without one nothing is written."""
    save_every: int = 100
    keep: int = 3
    resume: str | None = None
    allow_changes: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    pause: Callable[[int, int], float] = field(default=lambda group, ticket: 0.0)
    """Seconds that a group waits before a portion: for proofs and tests."""
    evaluates: bool = True
    described: Callable[[], Any] = field(default=lambda: None)
    """Called by the lead once a checkpoint was resumed: writes down what the run is now."""

    @property
    def rules(self) -> Rules:
        plan = self.plan
        return Rules(plan.replica_groups, plan.staleness, plan.server_update == "nesterov", plan.quorum)


def shared_out(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """The names that each server holds, in the model's order, balanced by bytes."""
    held, least = [set[str]() for _ in range(servers)], [0] * servers
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        server = min(range(servers), key=least.__getitem__)
        held[server].add(name)
        least[server] += sizes[name]
    return [[name for name in sizes if name in mine] for mine in held]


class Layout:
    """Tensors of known names, shapes and formats, and their bytes."""

    def __init__(self, named: Mapping[str, Tensor]):
        self.specs = {name: (t.shape, t.dtype, t.nbytes) for name, t in named.items()}
        self.bytes = len(self.specs) + sum(size for _, _, size in self.specs.values())
        """Of all of them, at most."""

    def pack(self, tensors: Mapping[str, Tensor | None]) -> list[bytes]:
        """The bytes of those that are there."""
        here = [(name, t) for name in self.specs if (t := tensors.get(name)) is not None]
        names = {name for name, _ in here}
        return [bytes(name in names for name in self.specs), *(_raw(t) for _, t in here)]

    def unpack(self, data: bytes | bytearray | memoryview) -> dict[str, Tensor]:
        """The tensors, which are copies. ValueError when the bytes are not of this layout."""
        flags, at, found = data[: len(self.specs)], len(self.specs), dict[str, Tensor]()
        if len(flags) < len(self.specs) or not set(flags) <= {0, 1}:
            raise ValueError(f"{len(data)} bytes are no tensors of this model")
        for flag, (name, (shape, dtype, size)) in zip(flags, self.specs.items()):
            if flag:
                part = bytearray(data[at : at + size])
                if len(part) != size:
                    raise ValueError(f"{name} ends after {len(part)} of {size} bytes")
                at += size
                found[name] = (
                    torch.frombuffer(part, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
                )
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are left over")
        return found


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weighted(parts: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The weighted sum of tensors by name; of each over those that have it."""
    total: dict[str, Tensor] = {}
    for weight, tensors in parts:
        for name, tensor in tensors.items():
            if name in total:
                total[name].add_(tensor, alpha=weight)
            else:
                total[name] = tensor * weight
    return total


HELLO, ASK, PUSH, PART, VALUES = 1, 2, 3, 4, 5
WELCOME, DEAL, EVALUATE, WEIGHTS, HAVE, FENCED, END = 11, 12, 13, 14, 15, 16, 17
SEND, APPLY, FORGET, SNAP, DROP, SAVE = 21, 22, 23, 24, 25, 26
FOLLOWER = -1
"""What a follower says its group is: −1 − its number."""

FIGURES = struct.Struct("!5d")
"""Of a push: weight of the portion, loss, tokens, seconds of waiting for samples, seconds computing."""
_USED = struct.Struct("!qd")
_LOSS = struct.Struct("!d")


def of_ids(ids: Iterable[int]) -> bytes:
    row = [*ids]
    return struct.pack(f"!{len(row)}q", *row)


def to_ids(data: bytes | bytearray) -> list[int]:
    return list(struct.unpack(f"!{len(data) // 8}q", data))


@dataclass(frozen=True)
class UsedGradient:
    """A gradient that an update uses, by the number of its ticket, and what it counts."""

    ticket: int
    weight: float


@dataclass(frozen=True)
class ServerUpdate:
    """An update: its loss, and the gradients that it uses, in their order."""

    loss: float
    used: tuple[UsedGradient, ...]

    def pack(self) -> bytes:
        return _LOSS.pack(self.loss) + b"".join(_USED.pack(each.ticket, each.weight) for each in self.used)

    @staticmethod
    def unpack(data: bytes | bytearray) -> "ServerUpdate":
        (loss,) = _LOSS.unpack(data[: _LOSS.size])
        return ServerUpdate(loss, tuple(UsedGradient(*pair) for pair in _USED.iter_unpack(data[_LOSS.size :])))


COMPUTES = ("forward", "backward")


@dataclass(frozen=True)
class Gradient:
    """Of a portion: the gradient of its mean loss, by parameter; how its forward passes changed buffers; and figures."""

    tensors: dict[str, Tensor]
    changes: dict[str, Tensor]
    weight: float
    loss: float
    tokens: int
    waited: float
    computed: float


class Trainer:
    """One device that computes gradients of portions: the job's model under the plan of a group."""

    def __init__(self, setting: ServerSetting, place: Place):
        job, plan = setting.job, setting.plan.inner
        inside = replace(place, rank=0, world=1, store=None)
        self.engine = Engine(
            job, plan, device=setting.device, place=inside, cast=setting.cast, on_nan="ignore", read_weights=False
        )
        engine = self.engine
        if not is_map(engine.data):
            raise PlaitError(not_dealt(type(engine.data).__name__))
        self.read = reader(engine.data, job.seed, place.reads)
        self.padding = Padding(engine.data, None) if hasattr(engine.data, "collate") else None
        self.buffers = dict(self.engine.model.named_buffers())

    def gradient(self, at: Position, size: int, first: int, ids: list[int]) -> Gradient:
        """Forward and backward of these samples, which stand from place `first` on in the batch of a clock."""
        engine, job = self.engine, self.engine.job
        engine.position = at
        kept = {name: b.clone() for name, b in self.buffers.items()}
        engine.spans.begin("data")
        batch = self._batch(at, size, first, ids)
        engine.spans.end("data")
        weights = [weigh(job.weight, micro) for micro in batch.micro]
        total, losses = sum(weights), list[Tensor]()
        if total > 0:
            shares = {i: weights[i] / total for i in engine.runs(batch, weights)}
            engine.passes.run(engine.passes.pieces(batch, shares), at.step, losses.extend)
        found = {n: p.grad for n, p in engine.rank_model.params.items() if p.grad is not None}
        for parameter in engine.rank_model.params.values():
            parameter.grad = None
        mean = float(torch.stack(losses).sum()) if losses else 0.0
        spent = engine.spans.taken()()
        waited = sum(took for name, _, took in spent if name == "data")
        computed = sum(took for name, _, took in spent if sort_of(name) in COMPUTES)
        changes = {
            n: b - kept[n] for n, b in self.buffers.items() if b.dtype != torch.bool and not torch.equal(b, kept[n])
        }
        return Gradient(found, changes, total, mean, tokens(batch), waited, computed)

    def _batch(self, at: Position, size: int, first: int, ids: list[int]) -> Batch:
        cuts = [split(len(ids), self.engine.plan.microbatches, i) for i in range(self.engine.plan.microbatches)]
        parts = [(first + begin, ids[begin : begin + n]) for begin, n in cuts]
        batch = self.read(StepSamples(at, size, parts, at, (ids or [0])[0]))
        if self.padding is None:
            return batch
        return self.padding.batch(batch, fetching(self.engine.data, self.engine.job.seed, batch, BatchShare()))

    def load(self, tensors: dict[str, Tensor]) -> None:
        named = {**self.engine.rank_model.params, **self.buffers}
        with torch.no_grad():
            for name, tensor in tensors.items():
                named[name].copy_(tensor)
        self.engine.rank_model.refresh()


def not_dealt(kind: str) -> Problem:
    """P062 of data that has no numbers to deal."""
    what = f"the job's data is a {kind}, of which samples cannot be dealt"
    why = "groups are dealt samples by their number, in an order of their own; an iterable gives them only one after the other"
    return Problem(
        "P062", what, why=why, fix=("data with __len__ and __getitem__", "outer_sync=local sync_every=8    reads iterables")
    )


class Group:
    """A group's side of the connections."""

    def __init__(self, setting: ServerSetting, place: Place, doors: Doors):
        self.setting, self.place, self.number = setting, place, place.rank
        self.trainer = Trainer(setting, place)
        own = self.trainer.engine.rank_model.params
        sizes = {name: p.nbytes for name, p in own.items()}
        self.layouts = [Layout({n: own[n] for n in names}) for names in shared_out(sizes, setting.plan.servers)]
        self.buffers = Layout(self.trainer.buffers)
        self.hub = Hub(doors.key)
        self.inbox: dict[Peer, deque[Packet]] = {}
        self.alive("reduce")
        self.servers = [self.hub.connect(port, lambda: self.alive("build")) for port in doors.ports]
        self.fence = 0

    def alive(self, phase: str) -> None:
        """Tell the launcher that this process waits, and does not hang."""
        self.place.within(phase)

    def run(self) -> dict[str, Any]:
        """Until the lead says that the run has ended."""
        self.join()
        while True:
            self.servers[0].send(ASK, (self.fence,))
            message = self.wait(self.servers[0], DEAL, EVALUATE, FENCED, END)
            if message.kind == END:
                self.hub.shut()
                return {}
            if message.kind == FENCED:
                self.join()
            else:
                with suppress(Fenced):
                    (self.evaluate if message.kind == EVALUATE else self.portion)(message)

    def join(self) -> None:
        """Be known to all servers, under a fence of the lead's."""
        self.servers[0].send(HELLO, (self.number, 0))
        self.fence = self.wait(self.servers[0], WELCOME).numbers[0]
        for peer in self.servers[1:]:
            peer.send(HELLO, (self.number, self.fence))
        for peer in self.servers[1:]:
            self.wait(peer, WELCOME)

    def weights(self, ticket: int) -> None:
        """Take over the weights that go with a ticket, from all servers."""
        for server, (peer, layout) in enumerate(zip(self.servers, self.layouts)):
            payload = memoryview(self.wait(peer, WEIGHTS, about=ticket).payload)
            cut = len(payload)
            if server == 0:
                cut -= self.buffers.bytes
                self.trainer.load(self.buffers.unpack(payload[cut:]))
            self.trainer.load(layout.unpack(payload[:cut]))

    def portion(self, message: Packet) -> None:
        """Compute and send the gradient of a portion. Parts for other servers go first: the lead's comes when all are there."""
        ticket, clock, epoch, start, size, first, _, _ = message.numbers
        ids = to_ids(message.payload)
        self.place.beat(clock, "reduce")
        self.weights(ticket)
        end = time.monotonic() + self.setting.pause(self.number, ticket)
        while (left := end - time.monotonic()) > 0:
            self.alive("reduce")
            time.sleep(min(1.0, left))
        found = self.trainer.gradient(Position(clock, epoch, start, 0), size, first, ids)
        self.place.beat(clock, "reduce")
        for peer, layout in zip(self.servers[1:], self.layouts[1:]):
            peer.send(PART, (ticket, self.fence), layout.pack(found.tensors))
        for peer in self.servers[1:]:
            self.wait(peer, HAVE, about=ticket)
        figures = FIGURES.pack(found.weight, found.loss, found.tokens, found.waited, found.computed)
        changes = Layout(found.changes).pack(found.changes) if found.changes else []
        names = json.dumps([*found.changes]).encode()
        head = [figures, len(names).to_bytes(8, "big"), names, *changes]
        own = self.layouts[0].pack(found.tensors)
        numbers = (ticket, self.fence, sum(map(len, head)))
        self.servers[0].send(PUSH, numbers, [*head, *own])

    def evaluate(self, message: Packet) -> None:
        """The job's metrics over its held-out data, at the weights that come with the errand."""
        errand = message.numbers[0]
        self.weights(-1 - errand)
        values = self.trainer.engine.evaluate()
        self.servers[0].send(VALUES, (errand, self.fence), [json.dumps(values).encode()])

    def wait(self, peer: Peer, *kinds: int, about: int | None = None) -> Packet:
        """The next message of these kinds from a server. ConnectionError when the server is gone."""
        box = self.inbox.setdefault(peer, deque())
        while True:
            for message in [*box]:
                if message.kind in kinds and (about is None or message.numbers[0] == about):
                    box.remove(message)
                    return message
                if message.kind in (FENCED, END) and about is not None:
                    raise Fenced
            self._hear()

    def _hear(self) -> None:
        for who, message in self.hub.poll(1.0):
            if message is None:
                raise ConnectionError(f"Connection closed by peer: server {self.servers.index(who)} is gone")
            self.inbox.setdefault(who, deque()).append(message)
        self.alive("reduce")


class Fenced(Exception):
    """The lead has declared this group dead, or ended the run, while it waited for what belongs to a portion."""


def run(
    setting: ServerSetting, place: Place, doors: Doors, told: Callable[[Group], None] = lambda group: None
) -> dict[str, Any]:
    """A group, from its build to the end of the run."""
    group = Group(setting, place, doors)
    told(group)
    return group.run()
