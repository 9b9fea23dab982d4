"""The processes of a run of groups and servers: forked together, watched, and what each returned.

The first server: it deals portions, hears gradients, says what is updated when, and keeps the run's record.
A server beside the first: it keeps gradients that come, and does with them what the lead says.
"""

import json
import math
import struct
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.data.batch import Position, is_map
from plait.data.sampling import Sampling
from plait.engine.server import group
from plait.engine.server import group as say
from plait.engine.server.dealing import Clocks, Dealer, Ticket, Update
from plait.engine.server.group import Doors, Layout, ServerSetting, not_dealt
from plait.engine.server.record import Figures, ServerRecord
from plait.engine.server.state import Made, Server, ServerFacts
from plait.launch import fork
from plait.launch.channel import Packet, Peer
from plait.launch.place import Place
from plait.launch.supervise import Listener, Spare
from plait.parallel.server.strategy import inexact
from plait.tensors.norm import number


@dataclass
class Errand:
    """An evaluation of the weights of a step, which a group makes."""

    step: int
    fence: int = 0
    """Of the group that makes it; 0 while none does."""


@dataclass(frozen=True)
class Arrival:
    """What was told of a gradient that has come."""

    figures: Figures
    changes: dict[str, Tensor]
    """How its forward passes changed buffers."""


class Lead:
    """Server 0."""

    def __init__(self, setting: ServerSetting, place: Place, doors: Doors):
        self.setting, self.server = setting, Server(setting, place, doors)
        engine = self.server.engine
        if not is_map(engine.data):
            raise PlaitError(not_dealt(type(engine.data).__name__))
        report = place.report or (lambda message: None)
        self.note = lambda text: report({"kind": "note", "text": text})
        for line in (*inexact(setting.plan, engine.rank_model.whole_sketch), *_padded(engine.data)):
            self.note(f"note  not exact: {line}")
        self.resumed = self.saved = self.server.resume()
        self.dealer, rows = self._dealer()
        self.record = ServerRecord(setting, lambda value: report({"kind": "status", "value": value}), self.note, engine)
        self._resumed(rows)
        self.server.version = self.dealer.version
        self.groups: dict[Peer, tuple[int, int]] = {}
        """(group, fence) of those that are there."""
        self.asking: dict[Peer, float] = {}
        """Who waits for a portion, and since when."""
        self.arrivals: dict[int, Arrival] = {}
        """By ticket."""
        self.followers: list[Peer] = []
        self.errands: deque[Errand] = deque()
        self.began = self.dealer.done
        self.skipped = 0

    def _dealer(self) -> tuple[Dealer, str]:
        """Who deals, from where the run is; and the digest of the ledger up to there."""
        setting, at = self.setting, self.server.engine.position
        job, data = setting.job, self.server.engine.data
        assert is_map(data)
        facts = ServerFacts.of(self.resumed, at.step)
        clocks = Clocks(Sampling.of(job, len(data)), setting.plan.replica_groups, at)
        dealer = Dealer(
            clocks,
            setting.rules,
            job.steps,
            version=facts.version,
            seq=facts.rows,
            fence=facts.fence,
            back=facts.pending,
        )
        return dealer, facts.digest

    def _resumed(self, digest: str) -> None:
        engine = self.server.engine
        if self.setting.resume is None:
            return
        for problem in engine.checkpoints.refused:
            self.note(f"refused {problem.what}: {problem.why}")
        self.note(
            f"resumed from {self.resumed} at step {self.dealer.done}"
            if self.resumed
            else "nothing saved yet: starting from step 0"
        )
        for line in engine.checkpoints.changed:
            self.note(f"changed  {line}")
        self.setting.described()
        self.record.cut(self.dealer, digest)

    def run(self) -> dict[str, Any]:
        """Until all clocks are done, or somebody asks to stop."""
        self._meet()
        stopped = False
        self._evaluate_at(self.dealer.done, owed=self.resumed is not None)
        while not (self.dealer.finished or (stopped := self.server.place.stopping())):
            self._hear()
            while (update := self.dealer.update()) is not None:
                self._make(update)
            self._deal()
        if not stopped:
            self._close_ledger()
        self._save(wait=True)
        while self.errands and not stopped:
            self._hear()
            self._deal()
        return self._end(stopped)

    # who is there

    def _meet(self) -> None:
        """Wait for the other servers."""
        while len(self.followers) < self.setting.plan.servers - 1:
            self._hear()

    def _hear(self) -> None:
        for peer, message in self.server.hub.poll(0.5):
            if message is None:
                self._gone(peer)
            else:
                self._heard(peer, message)
        self.server.place.beat(self.dealer.done, "reduce")

    def _heard(self, peer: Peer, message: Packet) -> None:
        kind, numbers = message.kind, message.numbers
        if kind == say.HELLO and numbers[0] < 0:
            self.followers.append(peer)
        elif kind == say.HELLO:
            self._joined(peer, numbers[0])
        elif self.groups.get(peer, (0, 0))[1] != numbers[0 if kind == say.ASK else 1]:
            peer.send(say.FENCED, (numbers[0],))
        elif kind == say.ASK:
            self.asking[peer] = time.monotonic()
        elif kind == say.PUSH:
            self._pushed(peer, message)
        elif kind == say.VALUES:
            self._evaluated(numbers[0], json.loads(message.payload))

    def _joined(self, peer: Peer, group: int) -> None:
        for other, (known, _) in [*self.groups.items()]:
            if known == group and other is not peer:  # it was forked anew before its end was heard of
                self._gone(other)
                self.server.hub.close(other)
        self._forget(self.dealer.lost(group))
        fence = self.dealer.join(group)
        self.groups[peer] = (group, fence)
        peer.send(say.WELCOME, (fence,))

    def _gone(self, peer: Peer) -> None:
        """A connection has ended: a group's is the end of the group."""
        if peer in self.followers:
            raise ConnectionError(f"Connection closed by peer: server {1 + self.followers.index(peer)} is gone")
        group, fence = self.groups.pop(peer, (-1, 0))
        self.asking.pop(peer, None)
        for errand in self.errands:
            errand.fence = 0 if errand.fence == fence else errand.fence
        if group >= 0 and self.dealer.fences.get(group) == fence:
            back = self.dealer.lost(group)
            self._forget(back)
            if not self.dealer.finished and not self.server.place.stopping():
                self.record.lost(group, fence, self.dealer)
                portions = (
                    f": {len(back)} portion{'s' * (len(back) != 1)} of its samples go{'es' * (len(back) == 1)} back"
                    if back
                    else ""
                )
                self.note(f"note  group {group} is gone after version {self.dealer.version}{portions}")

    def _forget(self, tickets: list[int]) -> None:
        for ticket in tickets:
            self.server.parts.pop(ticket, None)
            self.arrivals.pop(ticket, None)
            for peer in self.followers:
                peer.send(say.FORGET, (ticket,))

    # portions and gradients

    def _deal(self) -> None:
        """Give those that ask an errand, a portion, or nothing yet."""
        for peer, since in [*self.asking.items()]:
            group, fence = self.groups[peer]
            errand = next((e for e in self.errands if not e.fence), None)
            if errand is not None:
                errand.fence = fence
                peer.send(say.EVALUATE, (errand.step, fence))
                self._weights(peer, -1 - errand.step)
            elif (ticket := self.dealer.deal(group, time.monotonic())) is not None:
                self._give(peer, ticket)
            else:
                continue
            self.record.waited(group, time.monotonic() - since)
            del self.asking[peer]

    def _give(self, peer: Peer, ticket: Ticket) -> None:
        portion = ticket.portion
        numbers = (
            ticket.number,
            portion.clock,
            portion.epoch,
            portion.start,
            portion.size,
            portion.first,
            portion.count,
            ticket.read,
        )
        peer.send(say.DEAL, numbers, [say.of_ids(self.dealer.clocks.ids(portion))])
        self._weights(peer, ticket.number)

    def _weights(self, peer: Peer, ticket: int) -> None:
        group, fence = self.groups[peer]
        self.server.send(peer, ticket)
        for follower in self.followers:
            follower.send(say.SEND, (group, fence, ticket))

    def _pushed(self, peer: Peer, message: Packet) -> None:
        """A gradient: taken, unless its sender was declared dead."""
        (ticket, fence, head), data = message.numbers[:3], memoryview(message.payload)
        size = say.FIGURES.size
        figures = Figures(*say.FIGURES.unpack(data[:size]))
        (length,) = struct.unpack("!q", data[size : size + 8])
        names, begin = json.loads(bytes(data[size + 8 : size + 8 + length])), size + 8 + length
        dealt = self.dealer.out.get(ticket)
        group = self.groups[peer][0]
        if not self.dealer.arrived(ticket, group, fence, figures.weight):
            return
        changes = Layout({name: self.server.buffers[name] for name in names}).unpack(data[begin:head]) if names else {}
        self.server.parts[ticket] = self.server.layout.unpack(data[head:])
        self.arrivals[ticket] = Arrival(replace(figures, took=time.monotonic() - dealt.dealt if dealt else 0.0), changes)

    def _make(self, update: Update) -> None:
        """An update, on all servers."""
        samples = self.dealer.samples + sum(t.portion.count for t in update.drops)
        numbers = [t.number for t in update.takes]
        came = [self.arrivals.pop(number) for number in numbers]
        if not sum(t.weight for t in update.takes) > 0:
            why = "Job.weight counts nothing in its samples, so their mean loss is 0 / 0"
            raise PlaitError(Problem("J009", f"the weights of update {update.version + 1} sum to 0", why=why))
        self._forget([t.number for t in update.drops])
        rows = self.dealer.made(update)
        used = [row for row in rows if not row.dropped]
        loss = sum(row.weight * each.figures.loss for row, each in zip(used, came)) / sum(row.weight for row in used)
        step = say.ServerUpdate(loss, tuple(say.UsedGradient(number, row.weight) for number, row in zip(numbers, used)))
        for peer in self.followers:
            peer.send(say.APPLY, (self.dealer.version, samples), [step.pack()])
        self.server.hub.flush(self.followers)  # they sum with this one
        made = self.server.apply(step, samples)
        self.server.change([row.weight for row in used], [each.changes for each in came])
        self.skipped += made.skipped
        self._tell(rows, [each.figures for each in came], made, loss)

    def _tell(self, rows: list[Any], figures: list[Figures], made: Made, loss: float) -> None:
        before = self.record.step
        self.record.update(self.dealer, rows, figures, made, loss)
        if made.skipped:
            self.note(f"note  left out update {self.dealer.version}: its loss or gradient norm is not finite")
        done = self.dealer.done
        for step in range(before + 1, done + 1):
            if step % self.setting.save_every == 0 and step < self.dealer.steps:
                self._save(wait=False)
        self._evaluate_at(done, since=before)

    # what is kept and looked at

    def _save(self, wait: bool) -> None:
        if self.setting.folder is None or not self.dealer.position.step:
            return
        at = self.dealer.position
        self.record.flush()
        dealer = self.dealer
        facts = ServerFacts(dealer.version, dealer.seq, dealer.fence, self.record.digest, tuple(dealer.pending()))
        for peer in self.followers:
            peer.send(say.SAVE, (at.step, at.epoch, at.start, at.samples, int(wait)))
        self.server.hub.flush(self.followers)
        self.saved = self.server.save(at, asdict(facts), wait)

    def _evaluate_at(self, done: int, since: int | None = None, owed: bool = False) -> None:
        """Have the weights of a step evaluated, when it is one of those that are."""
        wanted, steps = self.setting.job.evaluate, self.dealer.steps
        if wanted is None or not self.setting.evaluates or done == since:
            return
        crossed = wanted.every and any(step % wanted.every == 0 for step in range((since or done - 1) + 1, done + 1))
        if done and (crossed or done >= steps) and not (owed and self.record.evaluated(done)):
            self.errands.append(Errand(done))
            self.server.snaps[done] = self.server.packed()
            for peer in self.followers:
                peer.send(say.SNAP, (done,))

    def _evaluated(self, step: int, values: dict[str, float]) -> None:
        self.errands = deque(errand for errand in self.errands if errand.step != step)
        self.server.snaps.pop(step, None)
        for peer in self.followers:
            peer.send(say.DROP, (step,))
        self.record.evaluation(step, values)

    def _close_ledger(self) -> None:
        self.record.rows(self.dealer.end())
        self.arrivals.clear()

    def _end(self, stopped: bool) -> dict[str, Any]:
        """Say to all that the run has ended, and wait until they have heard; to the servers when the groups are gone."""
        hub = self.server.hub
        for peers in ([*self.groups], self.followers):
            for peer in peers:
                peer.send(say.END)
            while hub.peers.intersection(peers):
                hub.poll(0.5)
                self.server.alive("reduce")
        self.server.hub.shut()
        for line in self.record.summary(self.dealer):
            self.note(line)
        self.record.close()
        loss, step = self.record.loss, self.dealer.done
        return {
            "step": step, "loss": None if loss is None or not math.isfinite(loss) else number(loss), "skipped": self.skipped,
            "made": step - self.began, "stopped": stopped, "checkpoint": str(self.saved) if self.saved else None,
            "device_bytes": [], "applied": self.server.applied, "stalest": self.dealer.stalest,
        }  # fmt: skip


def _padded(data: object) -> list[str]:
    """A line on data that pads samples together."""
    return ["samples are padded to the longest of their portion, not of the batch"] if hasattr(data, "collate") else []


class Follower:
    """Server `number`, from 1 on."""

    def __init__(self, setting: ServerSetting, place: Place, doors: Doors):
        self.server = Server(setting, place, doors)
        self.server.resume()
        self.groups: dict[tuple[int, int], Peer] = {}
        self.forgotten: set[int] = set()
        self.lead = self.server.hub.connect(doors.ports[0], lambda: self.server.alive("build"))
        self.lead.send(say.HELLO, (say.FOLLOWER - self.server.number, 0))

    def run(self) -> dict[str, Any]:
        """Until the lead says that the run has ended."""
        server = self.server
        while True:
            for peer, message in server.hub.poll(1.0):
                if peer is self.lead:
                    if message is None:
                        raise ConnectionError("Connection closed by peer: server 0 is gone")
                    if message.kind == say.END:
                        server.hub.shut()
                        return {"applied": server.applied}
                    self.told(message)
                elif message is not None:
                    self.heard(peer, message)
            server.alive("reduce")

    def heard(self, peer: Peer, message: Packet) -> None:
        """A group says something."""
        if message.kind == say.HELLO:
            peer.name = (message.numbers[0], message.numbers[1])
            self.groups[peer.name] = peer
            peer.send(say.WELCOME)
        elif message.kind == say.PART:
            if message.numbers[0] not in self.forgotten:
                self.server.parts[message.numbers[0]] = self.server.layout.unpack(message.payload)
            peer.send(say.HAVE, message.numbers[:1])

    def told(self, message: Packet) -> None:
        """The lead says what to do."""
        server, numbers = self.server, message.numbers
        if message.kind == say.SEND:
            peer = self.groups.get((numbers[0], numbers[1]))
            if peer is not None and peer in server.hub.peers:
                server.send(peer, numbers[2])
        elif message.kind == say.APPLY:
            server.apply(say.ServerUpdate.unpack(message.payload), numbers[1])
        elif message.kind == say.FORGET:
            self.forgotten.add(numbers[0])
            server.parts.pop(numbers[0], None)
        elif message.kind == say.SNAP:
            server.snaps[numbers[0]] = server.packed()
        elif message.kind == say.DROP:
            server.snaps.pop(numbers[0], None)
        elif message.kind == say.SAVE:
            step, epoch, start, samples, wait = numbers[:5]
            server.save(Position(step, epoch, start, samples), {}, bool(wait))


def start(
    setting: ServerSetting, spare: Spare, listener: Listener | None = None, patience: float | None = None
) -> list[dict[str, Any]]:
    """Fork groups and servers, and wait for the end: what each returned, groups first. `spare`: what becomes of a group that dies."""
    plan, doors = setting.plan, Doors.open(setting.plan.servers)
    groups = plan.replica_groups

    def work(place: Place) -> dict[str, Any]:
        if place.rank < groups:
            return group.run(setting, replace(place, world=groups), doors)
        return (Lead if place.rank == groups else Follower)(setting, place, doors).run()

    try:
        return fork.run(work, plan.world, listener, patience=patience, alike=False, spare=spare)
    finally:
        doors.close()
