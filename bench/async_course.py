"""Simulates a server and groups that do not wait for each other, on a clock of modeled links. Dispatcher, gradients and updates are plait's.

The results of groups depend on when messages arrive, so no run can be recorded and replayed. Instead, one process runs all
groups in the order of the clock. The server assigns a piece and sends its weights. The group computes for the measured time,
times its slowdown, and sends its gradient. The server's link transfers one message after the other in each direction.
"""

import heapq
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from virtual_clock import Wire

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Position
from plait.data.sampling import Sampling
from plait.engine.server.dealer import Clocks, Dealer, Ticket
from plait.engine.server.group import ServerSetting, ServerSockets, ServerUpdate, Trainer, UsedGradient
from plait.engine.server.state import Server
from plait.launch.place import Place

Course = tuple[list[tuple[int, float]], list[float], float]
"""(clock, loss) of every evaluation, the seconds at which each clock ended, and the bytes that a group sends and receives per clock."""


class Play:
    """One simulated run. `how`: the link, the slowdown of each group, and the seconds of a piece."""

    def __init__(self, job: Job, plan: Plan, how: tuple[Wire, tuple[float, ...], float]):
        self.wire, self.slower, self.computing = how
        self.job, setting = job, ServerSetting(job, plan, device="cpu", on_nan="ignore")
        groups = plan.replica_groups
        self.doors = ServerSockets.open(1)
        self.server, self.trainer = (
            Server(setting, Place(groups, groups + 1), self.doors),
            Trainer(setting, Place(0, groups + 1)),
        )
        sampling = Sampling.from_job(job, len(self.trainer.engine.rank_model.setup.data))
        self.dealer = Dealer(Clocks(sampling, groups), setting.rules, job.steps)
        self.size = sum(p.nbytes for p in self.server.engine.rank_model.params.values())
        self.out = self.into = 0.0
        """The time at which the server's link is free again, in each direction."""
        self.events: list[tuple[float, int, int, Ticket, dict[str, Tensor]]] = []
        self.waiting: list[int] = []
        self.fences = {group: self.dealer.add_group(group) for group in range(groups)}
        self.found: dict[int, Any] = {}

    def weights(self) -> dict[str, Tensor]:
        """The server's current weights."""
        return {name: p.detach().clone() for name, p in self.server.engine.rank_model.params.items()}

    def ask(self, group: int, now: float) -> None:
        """Request a piece for a group."""
        ticket = self.dealer.deal(group, now)
        if ticket is None:
            self.waiting.append(group)
            return
        self.out = max(now, self.out) + self.size / self.wire.rate
        there = (
            self.out
            + self.wire.latency
            + self.computing * self.slower[group] * ticket.portion.count * len(self.slower) / self.job.batch
        )
        heapq.heappush(self.events, (there, ticket.number, group, ticket, self.weights()))

    def computed(self, ticket: Ticket, weights: dict[str, Tensor]) -> None:
        """Compute the gradient of a piece at the weights that were sent with it."""
        portion, trainer = ticket.portion, self.trainer
        trainer.load(weights)
        at = Position(portion.clock, portion.epoch, portion.start, 0)
        got = trainer.compute_gradient(at, portion.size, portion.first, self.dealer.clocks.list_ids(portion))
        self.server.gradients[ticket.number] = {name: t.clone() for name, t in got.tensors.items()}
        self.found[ticket.number] = got

    def arrived(self, ticket: Ticket) -> None:
        """Process a gradient that reached the server: make all possible updates."""
        self.dealer.accept_gradient(ticket.number, ticket.group, ticket.fence, self.found[ticket.number].weight)
        while (update := self.dealer.find_update()) is not None:
            total, samples = sum(t.weight for t in update.used), self.dealer.samples
            used = tuple(UsedGradient(t.number, t.weight / total) for t in update.used)
            loss = sum(self.found[t.number].loss * t.weight / total for t in update.used)
            self.server.apply(ServerUpdate(loss, used), samples)
            self.dealer.complete_update(update)

    def run(self, target: float, every: int, beat: Callable[[int], None]) -> Course:
        """Run until the loss reaches the target or all clocks are done. Calls `beat` with the number of finished clocks."""
        losses, ends, sent = [(0, self.evaluated())], [], 0
        for group in range(len(self.slower)):
            self.ask(group, 0.0)
        arrivals: list[tuple[float, int, int, Ticket]] = []
        while self.events or arrivals:
            if self.events and (not arrivals or self.events[0][0] <= arrivals[0][0]):
                now, number, group, ticket, weights = heapq.heappop(self.events)
                self.computed(ticket, weights)
                self.into, sent = max(now, self.into) + self.size / self.wire.rate, sent + 2 * self.size
                heapq.heappush(arrivals, (self.into + self.wire.latency, number, group, ticket))
                continue
            now, _, group, ticket = heapq.heappop(arrivals)
            before = self.dealer.version
            self.arrived(ticket)
            for clock in range(before + 1, self.dealer.version + 1):
                ends.append(now)
                beat(clock)
                if clock % every == 0:
                    losses.append((clock, self.evaluated()))
            if losses[-1][1] <= target or self.dealer.is_finished:
                break
            asking, self.waiting = [*self.waiting, group], []
            for each in asking:
                self.ask(each, now)
        self.doors.close()
        return losses, ends, sent / len(self.slower) / max(1, len(ends))

    def evaluated(self) -> float:
        """Return the loss of the server's weights on held-out text."""
        self.trainer.load(self.weights())
        return self.trainer.engine.evaluate()["loss"]


def play(
    job: Job,
    plan: Plan,
    how: tuple[Wire, tuple[float, ...], float],
    until: tuple[float, int],
    beat: Callable[[int], None],
) -> Course:
    """Run the asynchronous training. `until`: the loss at which it ends, and the number of clocks between two evaluations."""
    torch.manual_seed(job.seed)
    return Play(job, plan, how).run(*until, beat)
