"""Groups and servers (outer_sync=async): they run with random delays, and one process plays their ledger again.

    for (samples, version read) of each row:   g = gradient(weights[version read], samples) ;  rule(g)

The run is the real one, its processes and messages included; only float64, small ragged batches and delays drawn from a seed are
forced on it, so that gradients come in another order than they were dealt in and are stale. Compared are the weights, the buffers
and every step's loss, norm and learning rate; and the ledger is held against what must be true of any (`engine/server/dealing.py`).
With staleness=0, a step per clock and no quorum it is also held against one device. What plays the ledger shares with the run
what a job means, the keyed random numbers, and the ledger, and nothing else.
"""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from msgspec import convert
from torch import Tensor

from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.reading import tensors as tensors_of
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.sampling import Sampling
from plait.engine.server.dealing import Clocks, LedgerRow, problems
from plait.engine.server.group import ServerSetting
from plait.engine.server.processes import start
from plait.engine.server.record import FILE
from plait.launch.scratch import Scratch
from plait.launch.supervise import Listener, Spare
from plait.parallel import precision
from plait.proof import own_numerics, reference
from plait.proof.probes import Probe, Trace, floor_of, moved, rows, tensors
from plait.proof.scenario import CLIP, harden, parts_of
from plait.proof.verdict import Verdict, told_of
from plait.randomness.keyed import seed_host
from plait.tensors.float64 import Wide

NOT_COMPARED = ("batches of the job's own size", "a step in the plan's own formats", "messages of a dry run")
"""What `verify` compares under other plans."""
PAUSES = (0.03, 0.3, 1.0)
"""Seconds of the longest pause before a portion; the last group takes three times as long. The longer ones are for a machine that
has so much else to do that nothing was stale."""


def named(plan: Plan) -> str:
    """What is held against the run, in a few words."""
    return "the server's ledger, played again"


def compare(job: Job, plan: Plan, steps: int) -> Verdict:
    """Run it, play it again, and compare."""
    inner = replace(plan, dp=plan.replica_groups, replica_groups=1)
    try:
        return _compared(harden(job, inner, 1), plan, steps)
    except PlaitError:  # a model that cannot train on one sample gets a short batch with two for each part
        return _compared(harden(job, inner, 2 * parts_of(inner)), plan, steps)


def _compared(hard: Job, plan: Plan, steps: int) -> Verdict:
    steps = max(steps, plan.staleness + 3)
    hard = replace(hard, steps=steps)
    with Scratch("verify") as folder:
        one = Trace.of_process(folder / "one", lambda _: _one_device(hard, steps))
        hard = replace(hard, clip=one.facts["clip"])
        run = _run(hard, plan, folder)
        played = Trace.of_process(folder / "played", lambda _: train(hard, plan, run.ledger))
        return _judged(run, one, played)


def _one_device(job: Job, steps: int) -> dict[str, Any]:
    """The job on one device, plainly."""
    return reference.train(job, steps, CLIP, torch.float64, then=own_numerics.check) | {"length": len(job.data())}


@dataclass(frozen=True)
class ServedRun:
    """What a run of groups and servers left."""

    job: Job
    plan: Plan
    model: dict[str, Tensor]
    """Parameters and buffers of its checkpoint."""
    steps: list[dict[str, Any]]
    """Rows of its metrics."""
    ledger: list[LedgerRow]
    orders: list[list[int]]
    """The gradients that each server applied, in its order."""


def pause(seed: int, groups: int, longest: float, number: int, ticket: int) -> float:
    """Seconds that a group waits before a portion."""
    draw = random.Random(f"{seed} {number} {ticket}").random() * longest
    return 3.0 * draw if number == groups - 1 else draw


def _run(job: Job, plan: Plan, folder: Path) -> ServedRun:
    """Groups and servers, with pauses: longer ones when nothing came late."""
    groups, results = plan.replica_groups, list[dict[str, Any]]()
    for longest in PAUSES:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in (FILE, "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)
        setting = ServerSetting(
            job, precision.unrounded(plan), "cpu", torch.float64, "ignore", folder=folder, save_every=10**9,
            pause=partial(pause, job.seed, groups, longest), evaluates=False,
        )  # fmt: skip
        results = start(setting, Spare(lambda rank: False, lambda rank, failure: ""), Listener(note=lambda text: None))
        if not plan.staleness or results[groups]["stalest"]:
            break
    saved = tensors_of(Checkpoints(folder / "checkpoints").found()[0])
    model = {name.removeprefix("model/"): tensor for name, tensor in saved.items() if name.startswith("model/")}
    steps, lines = ([json.loads(line) for line in (folder / name).read_text().splitlines()] for name in ("metrics.jsonl", FILE))
    ledger = [convert(line, LedgerRow) for line in lines if "seq" in line]
    return ServedRun(job, plan, model, steps, ledger, [result["applied"] for result in results[groups:]])


def _judged(run: ServedRun, one: Trace, played: Trace) -> Verdict:
    plan, actual, names = run.plan, run.model, [*one.initial]
    buffers = {n: t for n, t in played.buffers.items() if n in actual}
    weights, floor = {n: actual[n] for n in names if n in actual}, moved(one.initial, played.weights)
    wrong = _broken(run, one.facts["length"])
    probes = [
        tensors("U", "weights, as played again", played.weights, weights, names, floor),
        tensors("B", "buffers, as played again", buffers, {n: actual[n] for n in buffers}, [*buffers], floor_of(buffers)),
        _rows(run, played.facts["rows"]),
        Probe("D", "ledger", float(len(wrong)), 0, *(wrong[0], wrong[0]) if wrong else ()),
    ]
    same = plan.staleness == 0 and plan.quorum == 0 and plan.server_update == "clock"
    if same and not buffers:
        probes.append(tensors("O", "weights of one device", one.weights, weights, names, moved(one.initial, one.weights)))
        probes.append(rows("S", "one device's every step", one.facts["rows"], run.steps, ("loss", "norm", "lr", "samples")))
    inexact = ("statistics in buffers are those of a portion of the batch, not of the whole",) if same and buffers else ()
    first = next((p for p in probes if not p.equal), None)
    code, cause = ("V027", f"{first.title}: {first.name}, {first.detail}") if first else ("", "")
    told = replace(told_of(named(plan), one, replace(played, weights=weights)), steps=len(run.steps), left_out=NOT_COMPARED)
    return Verdict(str(plan), tuple(probes), code, cause, inexact, plan.world, _forced(run), algorithm=told)


def _forced(run: ServedRun) -> dict[str, Any]:
    job, steps = run.job, run.steps
    stale = [row.staleness for row in run.ledger if not row.dropped]
    sizes = [row["samples"] - before["samples"] for before, row in zip([{"samples": 0}, *steps], steps)]
    most = max(stale, default=0)
    return {
        "clip": job.clip, "clipped": all(row["norm"] > job.clip for row in steps) if job.clip else False, "batch": job.batch,
        "sizes": sizes, "steps": len(steps), "stalest": most,
        "then": [f"{len(stale)} gradients, {sum(s > 0 for s in stale)} of them stale, the stalest {most} versions"],
    }  # fmt: skip


def _rows(run: ServedRun, updates: list[dict[str, float]]) -> Probe:
    """Loss, norm and rate of every update that ends a step, as played again."""
    by_version = [updates[int(row["version"]) - 1] for row in run.steps]
    keys = ("norm", "lr") if run.plan.server_update == "nesterov" else ("loss", "norm", "lr")
    return rows("U2", "loss, norm and rate, played again", by_version, run.steps, keys)


def _broken(run: ServedRun, length: int) -> list[str]:
    """What must hold of the ledger and of the servers, and does not."""
    clocks = Clocks(Sampling.of(run.job, length), run.plan.replica_groups)
    portions = [portion for _ in range(run.job.steps) for portion in clocks.take()]
    expected = [(portion.clock, portion.first + k) for portion in portions for k in range(portion.count)]
    wrong = problems(run.ledger, (), run.plan.staleness, expected)
    if any(order != run.orders[0] for order in run.orders):
        wrong.append("servers applied gradients in different orders")
    return wrong


def train(job: Job, plan: Plan, ledger: Sequence[LedgerRow]) -> dict[str, Any]:
    """Play a ledger again. Returns what `train` of `proof/reference.py` does; `rows`: of each update."""
    replay = Replay(job, plan.replica_groups if plan.server_update == "nesterov" else 0)
    replay.run(ledger)
    last, parameters = replay.versions[-1], dict(replay.model.named_parameters())
    weights = {name: tensor for name, tensor in last.items() if name in parameters}
    return {"weights": weights, "buffers": {n: t for n, t in last.items() if n not in parameters}, "rows": replay.rows}


@dataclass(frozen=True)
class PlayedGradient:
    """Of the mean loss of a row's samples at the weights that were read."""

    tensors: dict[str, Tensor]
    weight: float
    """What it counts."""
    loss: float
    moved: dict[str, Tensor]
    """How buffers changed."""


class Replay:
    """The model, all versions of its weights and buffers, and what the updates did."""

    def __init__(self, job: Job, nesterov: int = 0):
        self.job, self.data, self.nesterov = job, job.data(), nesterov
        one = reference.OneDevice.of(job, self.data, torch.float64, "cpu")
        self.model, self.optimizer, self.keyed, self.rates = one.model, one.optimizer, one.keyed, one.rates
        one.notes.close()
        self.state = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        self.versions, self.rows = [{n: t.detach().clone() for n, t in self.state.items()}], list[dict[str, float]]()
        self.momentum, self.delta, self.pushes, self.samples = dict[Tensor, Tensor](), dict[Tensor, Tensor](), 0, 0

    def run(self, ledger: Sequence[LedgerRow]) -> None:
        """All rows, in order; those of one update stand together, and those that were dropped only count samples."""
        for dropped, group in groupby(ledger, key=lambda row: bool(row.dropped)):
            for _, update in groupby(group, key=lambda row: row.version_made):
                used = [*update]
                if not dropped:
                    self.update(used, [self.gradient(row) for row in used])
                self.samples += sum(len(row.ids) for row in used)

    def gradient(self, row: LedgerRow) -> PlayedGradient:
        """What the group computed."""
        before = self.versions[row.version_read]
        self.put(before)
        self.model.zero_grad()
        samples = [seed_host(self.job.seed, "sample", row.epoch, i) or self.data[i] for i in row.ids]
        inputs, targets = reference.collated(self.data, samples, torch.float64, "cpu")
        with Wide(), self.keyed.at(row.clock, row.first, len(samples)):
            loss = self.job.loss(reference.call(self.model, inputs), targets)
        with self.keyed.replay():
            loss.backward()
        weight = float(torch.as_tensor(self.job.weight(targets)).double().sum()) if self.job.weight else float(len(samples))
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None and weight}
        changes = {n: b - before[n] for n, b in self.model.named_buffers() if b.dtype != torch.bool}
        return PlayedGradient(gradients, weight, loss.item() if weight else 0.0, changes)

    def update(self, rows: list[LedgerRow], found: list[PlayedGradient]) -> None:
        """One version from the last: the sum of the gradients, clipped, and a step."""
        total = sum(each.weight for each in found)
        shares = [row.weight for row in rows] if self.nesterov else [each.weight / total for each in found]
        self.put(self.versions[-1])
        for name, p in self.model.named_parameters():
            parts = [(1.0 if self.nesterov else a) * each.tensors[name] for a, each in zip(shares, found) if name in each.tensors]
            p.grad = torch.stack(parts).sum(0) if parts else None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.job.clip or torch.inf)
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * (self.job.schedule(self.samples) if self.job.schedule else 1.0)
        self.delayed(shares[0]) if self.nesterov else self.optimizer.step()
        for name, b in self.model.named_buffers():
            changes = [(a, each.moved[name]) for a, each in zip(shares, found) if name in each.moved]
            step = sum(a * m for a, m in changes) if b.is_floating_point() else max(m for _, m in changes) if changes else 0
            b.copy_(b + step)
        self.versions.append({n: t.detach().clone() for n, t in self.state.items()})
        loss = sum(a * each.loss for a, each in zip(shares, found)) / sum(shares)
        self.rows.append({"loss": loss, "norm": float(norm), "lr": self.optimizer.param_groups[0]["lr"]})

    @torch.no_grad()
    def delayed(self, a: float) -> None:
        """Delayed Nesterov: momentum moves with every N-th gradient, by what N of them have left."""
        self.pushes += 1
        for group in self.optimizer.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g, beta = a * (p.grad + group["weight_decay"] * p), group["momentum"]
                self.delta[p] = self.delta.get(p, 0.0) + g
                if self.pushes % self.nesterov == 0:
                    self.momentum[p] = beta * self.momentum.get(p, 0.0) + self.delta.pop(p)
                    g = g + beta * self.momentum[p]
                p -= group["lr"] * g

    def put(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            [t.copy_(state[n]) for n, t in self.state.items()]
