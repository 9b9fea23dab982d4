"""outer_sync=async: the real processes equal a replay of their ledger in one process. Each of the injected bugs is detected."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jobs
import pytest
import torch
from rarely import rarely

import plait
from plait.config.plan import Plan
from plait.data.batch import Position
from plait.engine.server.dealer import Dealer, LedgerRow, PlannedUpdate
from plait.engine.server.group import ServerUpdate, Trainer, UsedGradient
from plait.engine.server.state import Server
from plait.proof.verdict import Verdict, format_verdict
from plait.proof.verify import verify


def sgd(job: plait.Job) -> plait.Job:
    def optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)

    return dataclasses.replace(job, optimizer=optimizer)


def proved(job: plait.Job, plan: str) -> Verdict:
    return verify(job, Plan.parse(f"outer_sync=async {plan}"), 4, "cpu")


@pytest.mark.parametrize(
    ("job", "plan"),
    (
        (lambda: jobs.mlp(), "replica_groups=3 staleness=2 servers=2"),
        (lambda: sgd(jobs.mlp()), "replica_groups=3 staleness=4 server_update=nesterov"),
        *rarely(
            (lambda: jobs.ragged(), "replica_groups=3 staleness=2 microbatches=2"),
            (lambda: sgd(jobs.ragged()), "replica_groups=2 staleness=3"),
            (lambda: sgd(jobs.ragged()), "replica_groups=3 staleness=2 server_update=nesterov servers=2"),
            (lambda: jobs.attention(), "replica_groups=3 quorum=2 staleness=1 servers=2"),
            (lambda: jobs.mlp(), "replica_groups=4 quorum=2"),
            (lambda: jobs.batch_norm(), "replica_groups=3 staleness=1"),
            (lambda: sgd(jobs.batch_norm()), "replica_groups=2 staleness=2 server_update=nesterov"),
            (lambda: jobs.mlp(), "replica_groups=2 staleness=1 activation_checkpointing=full microbatches=2"),
        ),
    ),
)
def test_a_run_is_its_ledger_played_again(job: Callable[[], plait.Job], plan: str) -> None:
    found = proved(job(), plan)
    assert found.equal, format_verdict(found, plan)
    assert found.forced["stalest"] > 0 or "staleness" not in plan, "nothing was stale: nothing is proved"
    assert "EQUAL to the algorithm (one process)" in format_verdict(found, plan)


@pytest.mark.parametrize(
    ("job", "plan"),
    (
        (lambda: jobs.mlp(), "replica_groups=3 servers=2"),
        *rarely(
            (lambda: jobs.ragged(), "replica_groups=3"),
            (lambda: sgd(jobs.ragged()), "replica_groups=2 servers=3 microbatches=2"),
            (lambda: jobs.attention(), "replica_groups=4"),
        ),
    ),
)
def test_without_staleness_it_is_one_device(job: Callable[[], plait.Job], plan: str) -> None:
    found = proved(job(), plan)
    assert found.equal, format_verdict(found, plan)
    assert (
        {"O", "S"} <= {probe.code for probe in found.probes}
        and found.algorithm is not None
        and found.algorithm.distance < 1e-9
    )


# Bugs. Each is in one function; forked processes have it too.

made, apply, gradient, norm, rate = Dealer.complete_update, Server.apply, Trainer.compute_gradient, Server._compute_norm, Server._set_learning_rate


def stale_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dealer, "_can_begin", lambda self: self.begun_clocks <= self.version + self.rules.staleness + 2)
    patch.setattr(Dealer, "find_update", _with_late(Dealer.find_update))  # which would drop them


def wrong_version(patch: pytest.MonkeyPatch) -> None:
    def written(self: Dealer, update: PlannedUpdate) -> list[LedgerRow]:
        rows = made(self, update)
        return [dataclasses.replace(row, version_read=row.version_made - 1) if not row.dropped else row for row in rows]

    patch.setattr(Dealer, "complete_update", written)


def used_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(self: Server, step: ServerUpdate, samples: int) -> object:
        first = step.used[0]
        self.gradients[10**6] = {n: g.clone() for n, g in self.gradients[first.ticket].items()}
        return apply(self, ServerUpdate(step.loss, (*step.used, UsedGradient(10**6, first.weight))), samples)

    patch.setattr(Server, "apply", twice)


def share_forgotten(patch: pytest.MonkeyPatch) -> None:
    def alike(self: Server, step: ServerUpdate, samples: int) -> object:
        used = tuple(UsedGradient(each.ticket, 1.0 / len(step.used)) for each in step.used)
        return apply(self, ServerUpdate(step.loss, used), samples)

    patch.setattr(Server, "apply", alike)


def clip_before_the_sum(patch: pytest.MonkeyPatch) -> None:
    def clipped(self: Server, step: ServerUpdate, samples: int) -> object:
        for each in step.used:
            length = float(torch.nn.utils.get_total_norm([*self.gradients[each.ticket].values()]))
            for g in self.gradients[each.ticket].values():
                g.mul_(min(1.0, self.setting.job.clip / (length + 1e-6)))
        return apply(self, step, samples)

    patch.setattr(Server, "apply", clipped)


def norm_of_one_server(patch: pytest.MonkeyPatch) -> None:
    def own(self: Server, gradients: list[torch.Tensor]) -> float:
        norm(self, gradients)
        return float(torch.nn.utils.get_total_norm(gradients))

    patch.setattr(Server, "_compute_norm", own)


def masks_of_the_portion(patch: pytest.MonkeyPatch) -> None:
    def from_zero(self: Trainer, at: Position, size: int, first: int, ids: list[int]) -> object:
        return gradient(self, at, size, 0, ids)

    patch.setattr(Trainer, "compute_gradient", from_zero)


def dropped_is_used(patch: pytest.MonkeyPatch) -> None:
    """A gradient that the ledger records as dropped still moves the weights, and the momentum."""

    def all_of_it(self: Dealer, update: PlannedUpdate) -> list[LedgerRow]:
        rows = made(self, dataclasses.replace(update, used=update.used + update.dropped, dropped=()))
        late = {ticket.portion for ticket in update.dropped}
        named = [row for row in rows if any((p.clock, p.first) == (row.clock, row.first) for p in late)]
        return [dataclasses.replace(row, dropped="late", version_made=-1) if row in named else row for row in rows]

    patch.setattr(Dealer, "complete_update", all_of_it)
    patch.setattr(Dealer, "find_update", _with_late(Dealer.find_update))


def _with_late(update: Callable[[Dealer], PlannedUpdate | None]) -> Callable[[Dealer], PlannedUpdate | None]:
    def found(self: Dealer) -> PlannedUpdate | None:
        now = update(self)
        return now if now is None else dataclasses.replace(now, used=now.used + now.dropped, dropped=())

    return found


def clock_of_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "_set_learning_rate", lambda self, samples: rate(self, samples + 3))


CLOCK = "replica_groups=3 staleness=1"


@pytest.mark.parametrize(
    ("mistake", "plan", "probe"),
    (
        (share_forgotten, CLOCK, "U"),
        (wrong_version, CLOCK, "U"),
        *rarely(
            (stale_reads, "replica_groups=3", "D"),
            (used_twice, CLOCK, "U"),
            (clip_before_the_sum, CLOCK, "U"),
            (norm_of_one_server, f"{CLOCK} servers=2", "U"),
            (masks_of_the_portion, CLOCK, "U"),
            (clock_of_steps, CLOCK, "U"),
            (dropped_is_used, "replica_groups=3 quorum=2", "D"),
        ),
    ),
)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], plan: str, probe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    found = proved(jobs.mlp(), plan)
    assert not found.equal and found.exit_code == 3
    assert probe in [p.code for p in found.probes if not p.equal], format_verdict(found, plan)
