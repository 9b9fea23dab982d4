"""A worker group: requests a portion of samples and the weights, computes the gradient, sends it, and repeats.

Also the assignment of tensors to servers, and the byte format of tensors between a group and a server.

Servers share the parameters: each parameter, the largest first, is assigned to the server with the fewest bytes. Every server has all
buffers: a running group needs them all, and they are small. A message contains the bytes of the tensors in an order that both sides
derive. They follow one byte per tensor for its presence: a parameter that no sample used has no gradient.

A message has a kind and eight numbers:

group → server     HELLO group fence · REQUEST fence · PUSH ticket fence · PART ticket fence · VALUES task fence
server → group     WELCOME fence · DEAL ticket clock epoch start size first count version · EVALUATE task fence
                   WEIGHTS ticket version · ACK ticket · FENCED fence · END
lead → follower    SEND group fence ticket task · APPLY version samples · FORGET ticket · SNAPSHOT task · DROP_SNAPSHOT task
                   SAVE step epoch start samples wait · END

`ServerSetting` has the facts that groups and servers have before they are forked: the job, the plan, the server ports, and the run's
key.
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
from plait.data.batch import Batch, BatchShare, Position, is_map, weigh_micro_batch
from plait.data.loading import StepSamples, make_step_reader
from plait.data.padding import BatchPadder, make_fetch
from plait.engine.engine import Engine
from plait.engine.server.dealer import DealerRules
from plait.engine.step import count_tokens, get_span_kind
from plait.launch import limits
from plait.launch.channel import Hub, Packet, Peer
from plait.launch.loopback import LocalStore
from plait.launch.place import Place
from plait.tensors.rows import split_evenly


@dataclass(frozen=True)
class ServerSockets:
    """Listening sockets of the servers, opened before any fork, so processes forked later find them too."""

    key: bytes
    listeners: tuple[socket.socket, ...]
    store: LocalStore | None
    """Store of the process group among servers, if there are several."""

    @staticmethod
    def open(servers: int) -> "ServerSockets":
        store = LocalStore() if servers > 1 else None
        return ServerSockets(secrets.token_bytes(32), tuple(limits.open_loopback_socket() for _ in range(servers)), store)

    @property
    def ports(self) -> list[int]:
        return [door.getsockname()[1] for door in self.listeners]

    def close(self) -> None:
        for door in self.listeners:
            door.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True)
class ServerSetting:
    """The setting of one run of groups and servers."""

    job: Job
    plan: Plan
    device: str = "auto"
    cast: torch.dtype | None = None
    on_nan: str = "stop"
    folder: Path | None = None
    """The run's directory; without one nothing is written."""
    save_every: int = 100
    keep: int = 3
    resume: str | None = None
    allow_changes: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    pause: Callable[[int, int], float] = field(default=lambda group, ticket: 0.0)
    """Seconds that a group waits before a portion: for proofs and tests."""
    has_evaluation: bool = True
    on_resumed: Callable[[], Any] = field(default=lambda: None)
    """Called by the lead once a checkpoint was resumed: writes the description of the run."""

    @property
    def rules(self) -> DealerRules:
        plan = self.plan
        return DealerRules(plan.replica_groups, plan.staleness, plan.server_update == "nesterov", plan.quorum)


def assign_to_servers(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """Assign names to servers, in the model's order, balanced by bytes."""
    held, least = [set[str]() for _ in range(servers)], [0] * servers
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        server = min(range(servers), key=least.__getitem__)
        held[server].add(name)
        least[server] += sizes[name]
    return [[name for name in sizes if name in mine] for mine in held]


class Layout:
    """Names, shapes and dtypes of tensors, and their byte format."""

    def __init__(self, named: Mapping[str, Tensor]):
        self.specs = {name: (t.shape, t.dtype, t.nbytes) for name, t in named.items()}
        self.bytes = len(self.specs) + sum(size for _, _, size in self.specs.values())
        """Maximum bytes of all tensors."""

    def pack(self, tensors: Mapping[str, Tensor | None]) -> list[bytes]:
        """Return the bytes of the tensors that are present."""
        here = [(name, t) for name in self.specs if (t := tensors.get(name)) is not None]
        names = {name for name, _ in here}
        return [bytes(name in names for name in self.specs), *(_get_bytes(t) for _, t in here)]

    def unpack(self, data: bytes | bytearray | memoryview) -> dict[str, Tensor]:
        """Return the tensors as copies. ValueError if the bytes do not match this layout."""
        flags, at, found = data[: len(self.specs)], len(self.specs), dict[str, Tensor]()
        if len(flags) < len(self.specs) or not set(flags) <= {0, 1}:
            raise ValueError(f"{len(data)} bytes are not tensors of this model")
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
            raise ValueError(f"{len(data) - at} bytes are unexpected at the end")
        return found


def _get_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sum_weighted(parts: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the weighted sum of tensors by name; each over the parts that contain it."""
    total: dict[str, Tensor] = {}
    for weight, tensors in parts:
        for name, tensor in tensors.items():
            if name in total:
                total[name].add_(tensor, alpha=weight)
            else:
                total[name] = tensor * weight
    return total


HELLO, REQUEST, PUSH, PART, VALUES = 1, 2, 3, 4, 5
WELCOME, DEAL, EVALUATE, WEIGHTS, ACK, FENCED, END = 11, 12, 13, 14, 15, 16, 17
SEND, APPLY, FORGET, SNAPSHOT, DROP_SNAPSHOT, SAVE = 21, 22, 23, 24, 25, 26
FOLLOWER_ID = -1
"""A follower's group number in HELLO is −1 − its server number."""

GRADIENT_STATS = struct.Struct("!5d")
"""Statistics of a push: weight of the portion, loss, tokens, seconds of waiting for samples, seconds of computing."""
_USED_FORMAT = struct.Struct("!qd")
_LOSS_FORMAT = struct.Struct("!d")


def pack_ids(ids: Iterable[int]) -> bytes:
    row = [*ids]
    return struct.pack(f"!{len(row)}q", *row)


def unpack_ids(data: bytes | bytearray) -> list[int]:
    return list(struct.unpack(f"!{len(data) // 8}q", data))


@dataclass(frozen=True)
class UsedGradient:
    """A gradient that an update uses, by its ticket number, and its weight."""

    ticket: int
    weight: float


@dataclass(frozen=True)
class ServerUpdate:
    """An update: its loss, and the gradients that it uses, in order."""

    loss: float
    used: tuple[UsedGradient, ...]

    def pack(self) -> bytes:
        return _LOSS_FORMAT.pack(self.loss) + b"".join(_USED_FORMAT.pack(each.ticket, each.weight) for each in self.used)

    @staticmethod
    def unpack(data: bytes | bytearray) -> "ServerUpdate":
        (loss,) = _LOSS_FORMAT.unpack(data[: _LOSS_FORMAT.size])
        return ServerUpdate(loss, tuple(UsedGradient(*pair) for pair in _USED_FORMAT.iter_unpack(data[_LOSS_FORMAT.size :])))


COMPUTE_KINDS = ("forward", "backward")


@dataclass(frozen=True)
class Gradient:
    """The result of a portion: the gradient of its mean loss by parameter, changes of buffers in its forward passes, and statistics."""

    tensors: dict[str, Tensor]
    buffer_changes: dict[str, Tensor]
    weight: float
    loss: float
    tokens: int
    waited: float
    computed: float


class Trainer:
    """A device that computes gradients of portions: the job's model under the plan of a group."""

    def __init__(self, setting: ServerSetting, place: Place):
        job, plan = setting.job, setting.plan.inner
        inside = replace(place, rank=0, world=1, store=None)
        self.engine = Engine(
            job, plan, device=setting.device, place=inside, cast=setting.cast, on_nan="ignore", read_weights=False
        )
        engine = self.engine
        if not is_map(engine.data):
            raise PlaitError(make_iterable_problem(type(engine.data).__name__))
        self.read = make_step_reader(engine.data, job.seed, place.mark_read)
        self.padding = BatchPadder(engine.data, None) if hasattr(engine.data, "collate") else None
        self.buffers = dict(self.engine.model.named_buffers())

    def compute_gradient(self, at: Position, size: int, first: int, ids: list[int]) -> Gradient:
        """Run forward and backward of these samples, which start at index `first` of a clock's batch."""
        engine, job = self.engine, self.engine.job
        engine.position = at
        kept = {name: b.clone() for name, b in self.buffers.items()}
        engine.spans.begin("data")
        batch = self._read_batch(at, size, first, ids)
        engine.spans.end("data")
        weights = [weigh_micro_batch(job.weight, micro) for micro in batch.micro_batches]
        total, losses = sum(weights), list[Tensor]()
        if total > 0:
            shares = {i: weights[i] / total for i in engine.list_own_micro_batches(batch, weights)}
            engine.passes.run(engine.passes.make_micro_batches(batch, shares), at.step, losses.extend)
        found = {n: p.grad for n, p in engine.rank_model.params.items() if p.grad is not None}
        for parameter in engine.rank_model.params.values():
            parameter.grad = None
        mean = float(torch.stack(losses).sum()) if losses else 0.0
        spent = engine.spans.take_spans()()
        waited = sum(took for name, _, took in spent if name == "data")
        computed = sum(took for name, _, took in spent if get_span_kind(name) in COMPUTE_KINDS)
        changes = {
            n: b - kept[n] for n, b in self.buffers.items() if b.dtype != torch.bool and not torch.equal(b, kept[n])
        }
        return Gradient(found, changes, total, mean, count_tokens(batch), waited, computed)

    def _read_batch(self, at: Position, size: int, first: int, ids: list[int]) -> Batch:
        cuts = [split_evenly(len(ids), self.engine.plan.microbatches, i) for i in range(self.engine.plan.microbatches)]
        parts = [(first + begin, ids[begin : begin + n]) for begin, n in cuts]
        batch = self.read(StepSamples(at, size, parts, at, (ids or [0])[0]))
        if self.padding is None:
            return batch
        return self.padding.pad_batch(batch, make_fetch(self.engine.data, self.engine.job.seed, batch, BatchShare()))

    def load(self, tensors: dict[str, Tensor]) -> None:
        named = {**self.engine.rank_model.params, **self.buffers}
        with torch.no_grad():
            for name, tensor in tensors.items():
                named[name].copy_(tensor)
        self.engine.rank_model.refresh()


def make_iterable_problem(kind: str) -> Problem:
    """Make P062 for data without sample numbers."""
    what = f"the job's data is a {kind}, whose samples cannot be assigned to groups by number"
    why = "groups read samples by number, in any order; an iterable returns them only in sequence"
    return Problem(
        "P062", what, why=why, fix=("use data with __len__ and __getitem__", "outer_sync=local sync_every=8    reads iterables")
    )


class Group:
    """The group's side of the connections."""

    def __init__(self, setting: ServerSetting, place: Place, sockets: ServerSockets):
        self.setting, self.place, self.number = setting, place, place.rank
        self.trainer = Trainer(setting, place)
        own = self.trainer.engine.rank_model.params
        sizes = {name: p.nbytes for name, p in own.items()}
        self.layouts = [Layout({n: own[n] for n in names}) for names in assign_to_servers(sizes, setting.plan.servers)]
        self.buffers = Layout(self.trainer.buffers)
        self.hub = Hub(sockets.key)
        self.inbox: dict[Peer, deque[Packet]] = {}
        self.report_alive("reduce")
        self.servers = [self.hub.connect(port, lambda: self.report_alive("build")) for port in sockets.ports]
        self.fence = 0

    def report_alive(self, phase: str) -> None:
        """Report to the launcher that this process is waiting, not hanging."""
        self.place.set_phase(phase)

    def run(self) -> dict[str, Any]:
        """Compute portions until the lead ends the run."""
        self.join()
        while True:
            self.servers[0].send(REQUEST, (self.fence,))
            message = self.wait(self.servers[0], DEAL, EVALUATE, FENCED, END)
            if message.kind == END:
                self.hub.close_all()
                return {}
            if message.kind == FENCED:
                self.join()
            else:
                with suppress(GroupFenced):
                    (self.evaluate if message.kind == EVALUATE else self.compute_portion)(message)

    def join(self) -> None:
        """Register with all servers, under a fence from the lead."""
        self.servers[0].send(HELLO, (self.number, 0))
        self.fence = self.wait(self.servers[0], WELCOME).numbers[0]
        for peer in self.servers[1:]:
            peer.send(HELLO, (self.number, self.fence))
        for peer in self.servers[1:]:
            self.wait(peer, WELCOME)

    def load_weights(self, ticket: int) -> None:
        """Load the weights of a ticket from all servers."""
        for server, (peer, layout) in enumerate(zip(self.servers, self.layouts)):
            payload = memoryview(self.wait(peer, WEIGHTS, about=ticket).payload)
            cut = len(payload)
            if server == 0:
                cut -= self.buffers.bytes
                self.trainer.load(self.buffers.unpack(payload[cut:]))
            self.trainer.load(layout.unpack(payload[:cut]))

    def compute_portion(self, message: Packet) -> None:
        """Compute and send the gradient of a portion. Parts for other servers are sent first; the lead's follows once all have arrived."""
        ticket, clock, epoch, start, size, first, _, _ = message.numbers
        ids = unpack_ids(message.payload)
        self.place.beat(clock, "reduce")
        self.load_weights(ticket)
        end = time.monotonic() + self.setting.pause(self.number, ticket)
        while (left := end - time.monotonic()) > 0:
            self.report_alive("reduce")
            time.sleep(min(1.0, left))
        found = self.trainer.compute_gradient(Position(clock, epoch, start, 0), size, first, ids)
        self.place.beat(clock, "reduce")
        for peer, layout in zip(self.servers[1:], self.layouts[1:]):
            peer.send(PART, (ticket, self.fence), layout.pack(found.tensors))
        for peer in self.servers[1:]:
            self.wait(peer, ACK, about=ticket)
        figures = GRADIENT_STATS.pack(found.weight, found.loss, found.tokens, found.waited, found.computed)
        changes = Layout(found.buffer_changes).pack(found.buffer_changes) if found.buffer_changes else []
        names = json.dumps([*found.buffer_changes]).encode()
        head = [figures, len(names).to_bytes(8, "big"), names, *changes]
        own = self.layouts[0].pack(found.tensors)
        numbers = (ticket, self.fence, sum(map(len, head)))
        self.servers[0].send(PUSH, numbers, [*head, *own])

    def evaluate(self, message: Packet) -> None:
        """Compute the job's metrics over its held-out data, at the weights sent with the task."""
        errand = message.numbers[0]
        self.load_weights(-1 - errand)
        values = self.trainer.engine.evaluate()
        self.servers[0].send(VALUES, (errand, self.fence), [json.dumps(values).encode()])

    def wait(self, peer: Peer, *kinds: int, about: int | None = None) -> Packet:
        """Return the next message of these kinds from a server. ConnectionError if the server is gone."""
        box = self.inbox.setdefault(peer, deque())
        while True:
            for message in [*box]:
                if message.kind in kinds and (about is None or message.numbers[0] == about):
                    box.remove(message)
                    return message
                if message.kind in (FENCED, END) and about is not None:
                    raise GroupFenced
            self._receive_messages()

    def _receive_messages(self) -> None:
        for who, message in self.hub.poll(1.0):
            if message is None:
                raise ConnectionError(f"Connection closed by peer: server {self.servers.index(who)} is gone")
            self.inbox.setdefault(who, deque()).append(message)
        self.report_alive("reduce")


class GroupFenced(Exception):
    """Raised if the lead declares this group dead, or ends the run, while it waits for data of a portion."""


def run_group(
    setting: ServerSetting, place: Place, sockets: ServerSockets, on_built: Callable[[Group], None] = lambda group: None
) -> dict[str, Any]:
    """Run a group, from its build to the end of the run."""
    group = Group(setting, place, sockets)
    on_built(group)
    return group.run()
