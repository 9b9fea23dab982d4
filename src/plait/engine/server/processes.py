"""The processes of a run of groups and servers: forked together, supervised, with the result of each.

The lead is the first server: it deals portions, receives gradients, orders updates, and writes the run's record. A follower is any
other server: it stores incoming gradients, and executes the lead's orders.
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
from plait.engine.server.dealer import Clocks, Dealer, PlannedUpdate, Ticket
from plait.engine.server.group import Layout, ServerSetting, ServerSockets, make_iterable_problem
from plait.engine.server.server_record import GradientStats, ServerRecord
from plait.engine.server.state import LedgerState, Server, UpdateResult
from plait.launch import fork
from plait.launch.channel import Packet, Peer
from plait.launch.place import Place
from plait.launch.supervisor import Listener, SpareRanks
from plait.parallel.server.strategy import inexact_reasons
from plait.tensors.norm import finite_or_none


@dataclass
class EvaluationTask:
    """An evaluation of the weights of a step, to be run by a group."""

    step: int
    fence: int = 0
    """Fence of the group that runs it; 0 if not assigned."""


@dataclass(frozen=True)
class ReceivedGradient:
    """The report of a gradient that has arrived."""

    stats: GradientStats
    buffer_changes: dict[str, Tensor]
    """Changes of buffers in its forward passes."""


class LeadServer:
    """The lead server, number 0."""

    def __init__(self, setting: ServerSetting, place: Place, sockets: ServerSockets):
        self.setting, self.server = setting, Server(setting, place, sockets)
        engine = self.server.engine
        if not is_map(engine.data):
            raise PlaitError(make_iterable_problem(type(engine.data).__name__))
        report = place.report or (lambda message: None)
        self.note = lambda text: report({"kind": "note", "text": text})
        for line in (*inexact_reasons(setting.plan, engine.rank_model.global_sketch), *_list_padding_notes(engine.data)):
            self.note(f"note  not exact: {line}")
        self.resumed_from = self.saved = self.server.resume()
        self.dealer, rows = self._make_dealer()
        self.record = ServerRecord(setting, lambda value: report({"kind": "status", "value": value}), self.note, engine)
        self._report_resume(rows)
        self.server.version = self.dealer.version
        self.groups: dict[Peer, tuple[int, int]] = {}
        """(group, fence) of the connected groups."""
        self.requests: dict[Peer, float] = {}
        """Peers waiting for a portion, with the start time."""
        self.arrivals: dict[int, ReceivedGradient] = {}
        """By ticket."""
        self.followers: list[Peer] = []
        self.evaluations: deque[EvaluationTask] = deque()
        self.first_step = self.dealer.done_clocks
        self.skipped = 0

    def _make_dealer(self) -> tuple[Dealer, str]:
        """Make the dealer at the position of the run. Also returns the digest of the ledger up to there."""
        setting, at = self.setting, self.server.engine.position
        job, data = setting.job, self.server.engine.data
        assert is_map(data)
        facts = LedgerState.from_checkpoint(self.resumed_from, at.step)
        clocks = Clocks(Sampling.from_job(job, len(data)), setting.plan.replica_groups, at)
        dealer = Dealer(
            clocks,
            setting.rules,
            job.steps,
            version=facts.version,
            seq=facts.rows,
            fence=facts.fence,
            returned=facts.pending,
        )
        return dealer, facts.digest

    def _report_resume(self, digest: str) -> None:
        engine = self.server.engine
        if self.setting.resume is None:
            return
        for problem in engine.checkpoints.damaged_found:
            self.note(f"refused {problem.what}: {problem.why}")
        self.note(
            f"resumed from {self.resumed_from} at step {self.dealer.done_clocks}"
            if self.resumed_from
            else "no checkpoint yet: starting from step 0"
        )
        for line in engine.checkpoints.job_changes:
            self.note(f"changed  {line}")
        self.setting.on_resumed()
        self.record.truncate(self.dealer, digest)

    def run(self) -> dict[str, Any]:
        """Run until all clocks are done, or a stop is requested."""
        self._wait_for_servers()
        stopped = False
        self._request_evaluation(self.dealer.done_clocks, owed=self.resumed_from is not None)
        while not (self.dealer.is_finished or (stopped := self.server.place.is_stopping())):
            self._receive_messages()
            while (update := self.dealer.find_update()) is not None:
                self._apply_update(update)
            self._serve_requests()
        if not stopped:
            self._close_ledger()
        self._save(wait=True)
        while self.evaluations and not stopped:
            self._receive_messages()
            self._serve_requests()
        return self._end_run(stopped)

    # connections

    def _wait_for_servers(self) -> None:
        """Wait for the other servers to connect."""
        while len(self.followers) < self.setting.plan.servers - 1:
            self._receive_messages()

    def _receive_messages(self) -> None:
        for peer, message in self.server.hub.poll(0.5):
            if message is None:
                self._remove_peer(peer)
            else:
                self._handle_message(peer, message)
        self.server.place.beat(self.dealer.done_clocks, "reduce")

    def _handle_message(self, peer: Peer, message: Packet) -> None:
        kind, numbers = message.kind, message.numbers
        if kind == say.HELLO and numbers[0] < 0:
            self.followers.append(peer)
        elif kind == say.HELLO:
            self._add_group(peer, numbers[0])
        elif self.groups.get(peer, (0, 0))[1] != numbers[0 if kind == say.REQUEST else 1]:
            peer.send(say.FENCED, (numbers[0],))
        elif kind == say.REQUEST:
            self.requests[peer] = time.monotonic()
        elif kind == say.PUSH:
            self._receive_gradient(peer, message)
        elif kind == say.VALUES:
            self._record_evaluation(numbers[0], json.loads(message.payload))

    def _add_group(self, peer: Peer, group: int) -> None:
        for other, (known, _) in [*self.groups.items()]:
            if known == group and other is not peer:  # it was forked again before its disconnect arrived
                self._remove_peer(other)
                self.server.hub.close(other)
        self._forget_tickets(self.dealer.remove_group(group))
        fence = self.dealer.add_group(group)
        self.groups[peer] = (group, fence)
        peer.send(say.WELCOME, (fence,))

    def _remove_peer(self, peer: Peer) -> None:
        """Handle a closed connection: a group whose connection closes is declared dead."""
        if peer in self.followers:
            raise ConnectionError(f"Connection closed by peer: server {1 + self.followers.index(peer)} is gone")
        group, fence = self.groups.pop(peer, (-1, 0))
        self.requests.pop(peer, None)
        for errand in self.evaluations:
            errand.fence = 0 if errand.fence == fence else errand.fence
        if group >= 0 and self.dealer.fences.get(group) == fence:
            back = self.dealer.remove_group(group)
            self._forget_tickets(back)
            if not self.dealer.is_finished and not self.server.place.is_stopping():
                self.record.add_lost_group(group, fence, self.dealer)
                portions = (
                    f": {len(back)} portion{'s' * (len(back) != 1)} of its samples go{'es' * (len(back) == 1)} back to the queue"
                    if back
                    else ""
                )
                self.note(f"note  group {group} was lost after version {self.dealer.version}{portions}")

    def _forget_tickets(self, tickets: list[int]) -> None:
        for ticket in tickets:
            self.server.gradients.pop(ticket, None)
            self.arrivals.pop(ticket, None)
            for peer in self.followers:
                peer.send(say.FORGET, (ticket,))

    # portions and gradients

    def _serve_requests(self) -> None:
        """Answer each request with an evaluation task or a portion, if there is one."""
        for peer, since in [*self.requests.items()]:
            group, fence = self.groups[peer]
            errand = next((e for e in self.evaluations if not e.fence), None)
            if errand is not None:
                errand.fence = fence
                peer.send(say.EVALUATE, (errand.step, fence))
                self._send_weights(peer, -1 - errand.step)
            elif (ticket := self.dealer.deal(group, time.monotonic())) is not None:
                self._send_portion(peer, ticket)
            else:
                continue
            self.record.add_wait(group, time.monotonic() - since)
            del self.requests[peer]

    def _send_portion(self, peer: Peer, ticket: Ticket) -> None:
        portion = ticket.portion
        numbers = (
            ticket.number,
            portion.clock,
            portion.epoch,
            portion.start,
            portion.size,
            portion.first,
            portion.count,
            ticket.read_version,
        )
        peer.send(say.DEAL, numbers, [say.pack_ids(self.dealer.clocks.list_ids(portion))])
        self._send_weights(peer, ticket.number)

    def _send_weights(self, peer: Peer, ticket: int) -> None:
        group, fence = self.groups[peer]
        self.server.send_weights(peer, ticket)
        for follower in self.followers:
            follower.send(say.SEND, (group, fence, ticket))

    def _receive_gradient(self, peer: Peer, message: Packet) -> None:
        """Store a gradient, unless its sender was declared dead."""
        (ticket, fence, head), data = message.numbers[:3], memoryview(message.payload)
        size = say.GRADIENT_STATS.size
        figures = GradientStats(*say.GRADIENT_STATS.unpack(data[:size]))
        (length,) = struct.unpack("!q", data[size : size + 8])
        names, begin = json.loads(bytes(data[size + 8 : size + 8 + length])), size + 8 + length
        dealt = self.dealer.outstanding.get(ticket)
        group = self.groups[peer][0]
        if not self.dealer.accept_gradient(ticket, group, fence, figures.weight):
            return
        changes = Layout({name: self.server.buffers[name] for name in names}).unpack(data[begin:head]) if names else {}
        self.server.gradients[ticket] = self.server.layout.unpack(data[head:])
        self.arrivals[ticket] = ReceivedGradient(replace(figures, latency=time.monotonic() - dealt.dealt_at if dealt else 0.0), changes)

    def _apply_update(self, update: PlannedUpdate) -> None:
        """Make an update, on all servers."""
        samples = self.dealer.samples + sum(t.portion.count for t in update.dropped)
        numbers = [t.number for t in update.used]
        came = [self.arrivals.pop(number) for number in numbers]
        if not sum(t.weight for t in update.used) > 0:
            why = "Job.weight is 0 for its samples, so their mean loss is 0 / 0"
            raise PlaitError(Problem("J009", f"the weights of update {update.version + 1} sum to 0", why=why))
        self._forget_tickets([t.number for t in update.dropped])
        rows = self.dealer.complete_update(update)
        used = [row for row in rows if not row.dropped]
        loss = sum(row.weight * each.stats.loss for row, each in zip(used, came)) / sum(row.weight for row in used)
        step = say.ServerUpdate(loss, tuple(say.UsedGradient(number, row.weight) for number, row in zip(numbers, used)))
        for peer in self.followers:
            peer.send(say.APPLY, (self.dealer.version, samples), [step.pack()])
        self.server.hub.flush(self.followers)  # they all-reduce with this server
        made = self.server.apply(step, samples)
        self.server.update_buffers([row.weight for row in used], [each.buffer_changes for each in came])
        self.skipped += made.skipped
        self._record_update(rows, [each.stats for each in came], made, loss)

    def _record_update(self, rows: list[Any], stats: list[GradientStats], made: UpdateResult, loss: float) -> None:
        before = self.record.step
        self.record.update(self.dealer, rows, stats, made, loss)
        if made.skipped:
            self.note(f"note  skipped update {self.dealer.version}: its loss or gradient norm is not finite")
        done = self.dealer.done_clocks
        for step in range(before + 1, done + 1):
            if step % self.setting.save_every == 0 and step < self.dealer.steps:
                self._save(wait=False)
        self._request_evaluation(done, since=before)

    # saves and evaluations

    def _save(self, wait: bool) -> None:
        if self.setting.folder is None or not self.dealer.position.step:
            return
        at = self.dealer.position
        self.record.flush()
        dealer = self.dealer
        facts = LedgerState(dealer.version, dealer.seq, dealer.fence, self.record.digest, tuple(dealer.list_pending()))
        for peer in self.followers:
            peer.send(say.SAVE, (at.step, at.epoch, at.start, at.samples, int(wait)))
        self.server.hub.flush(self.followers)
        self.saved = self.server.save(at, asdict(facts), wait)

    def _request_evaluation(self, done: int, since: int | None = None, owed: bool = False) -> None:
        """Queue an evaluation of the weights of a step, if one is due."""
        wanted, steps = self.setting.job.evaluate, self.dealer.steps
        if wanted is None or not self.setting.has_evaluation or done == since:
            return
        crossed = wanted.every and any(step % wanted.every == 0 for step in range((since or done - 1) + 1, done + 1))
        if done and (crossed or done >= steps) and not (owed and self.record.has_evaluation(done)):
            self.evaluations.append(EvaluationTask(done))
            self.server.snapshots[done] = self.server.pack_weights()
            for peer in self.followers:
                peer.send(say.SNAPSHOT, (done,))

    def _record_evaluation(self, step: int, values: dict[str, float]) -> None:
        self.evaluations = deque(errand for errand in self.evaluations if errand.step != step)
        self.server.snapshots.pop(step, None)
        for peer in self.followers:
            peer.send(say.DROP_SNAPSHOT, (step,))
        self.record.record_evaluation(step, values)

    def _close_ledger(self) -> None:
        self.record.add_rows(self.dealer.end())
        self.arrivals.clear()

    def _end_run(self, stopped: bool) -> dict[str, Any]:
        """Notify all processes of the end and wait for their disconnects: first the groups, then the servers."""
        hub = self.server.hub
        for peers in ([*self.groups], self.followers):
            for peer in peers:
                peer.send(say.END)
            while hub.peers.intersection(peers):
                hub.poll(0.5)
                self.server.report_alive("reduce")
        self.server.hub.close_all()
        for line in self.record.summarize(self.dealer):
            self.note(line)
        self.record.close()
        loss, step = self.record.loss, self.dealer.done_clocks
        return {
            "step": step, "loss": None if loss is None or not math.isfinite(loss) else finite_or_none(loss), "skipped": self.skipped,
            "made": step - self.first_step, "stopped": stopped, "checkpoint": str(self.saved) if self.saved else None,
            "device_bytes": [], "applied": self.server.applied, "stalest": self.dealer.max_staleness,
        }  # fmt: skip


def _list_padding_notes(data: object) -> list[str]:
    """List a note for data that pads samples."""
    return ["samples are padded to the longest of their portion, not of the batch"] if hasattr(data, "collate") else []


class FollowerServer:
    """Server `number`, from 1 on."""

    def __init__(self, setting: ServerSetting, place: Place, sockets: ServerSockets):
        self.server = Server(setting, place, sockets)
        self.server.resume()
        self.groups: dict[tuple[int, int], Peer] = {}
        self.forgotten: set[int] = set()
        self.lead = self.server.hub.connect(sockets.ports[0], lambda: self.server.report_alive("build"))
        self.lead.send(say.HELLO, (say.FOLLOWER_ID - self.server.number, 0))

    def run(self) -> dict[str, Any]:
        """Run until the lead ends the run."""
        server = self.server
        while True:
            for peer, message in server.hub.poll(1.0):
                if peer is self.lead:
                    if message is None:
                        raise ConnectionError("Connection closed by peer: server 0 is gone")
                    if message.kind == say.END:
                        server.hub.close_all()
                        return {"applied": server.applied}
                    self.handle_lead(message)
                elif message is not None:
                    self.handle_group(peer, message)
            server.report_alive("reduce")

    def handle_group(self, peer: Peer, message: Packet) -> None:
        if message.kind == say.HELLO:
            peer.name = (message.numbers[0], message.numbers[1])
            self.groups[peer.name] = peer
            peer.send(say.WELCOME)
        elif message.kind == say.PART:
            if message.numbers[0] not in self.forgotten:
                self.server.gradients[message.numbers[0]] = self.server.layout.unpack(message.payload)
            peer.send(say.ACK, message.numbers[:1])

    def handle_lead(self, message: Packet) -> None:
        """Handle an order of the lead."""
        server, numbers = self.server, message.numbers
        if message.kind == say.SEND:
            peer = self.groups.get((numbers[0], numbers[1]))
            if peer is not None and peer in server.hub.peers:
                server.send_weights(peer, numbers[2])
        elif message.kind == say.APPLY:
            server.apply(say.ServerUpdate.unpack(message.payload), numbers[1])
        elif message.kind == say.FORGET:
            self.forgotten.add(numbers[0])
            server.gradients.pop(numbers[0], None)
        elif message.kind == say.SNAPSHOT:
            server.snapshots[numbers[0]] = server.pack_weights()
        elif message.kind == say.DROP_SNAPSHOT:
            server.snapshots.pop(numbers[0], None)
        elif message.kind == say.SAVE:
            step, epoch, start, samples, wait = numbers[:5]
            server.save(Position(step, epoch, start, samples), {}, bool(wait))


def run_processes(
    setting: ServerSetting, spare: SpareRanks, listener: Listener | None = None, patience: float | None = None
) -> list[dict[str, Any]]:
    """Fork groups and servers, and wait for the end. Returns the result of each, groups first. `spare`: handles a group that dies."""
    plan, doors = setting.plan, ServerSockets.open(setting.plan.servers)
    groups = plan.replica_groups

    def work(place: Place) -> dict[str, Any]:
        if place.rank < groups:
            return group.run_group(setting, replace(place, world=groups), doors)
        return (LeadServer if place.rank == groups else FollowerServer)(setting, place, doors).run()

    try:
        return fork.run_ranks(work, plan.world, listener, hang_timeout=patience, uniform=False, spare=spare)
    finally:
        doors.close()
