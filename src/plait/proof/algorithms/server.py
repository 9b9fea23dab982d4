"""Groups and servers (outer_sync=async): run them with random delays, and replay their ledger in one process.

    for (samples, version read) of each row:   g = gradient(weights[version read], samples) ;  rule(g)

The run uses the real processes and messages. Only float64, small ragged batches and seeded random delays are forced, so that gradients are
stale and arrive out of order. Compared are the weights, the buffers and every step's loss, norm and learning rate. The ledger is also
checked against the rules of any ledger (`engine/server/dealer.py`). With staleness=0, a step per clock and no quorum, the run is also
compared with one device. The replay shares with the run only the meaning of a job, the keyed random numbers, and the ledger.
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

from plait.checkpoint.checkpoint_reader import read_checkpoint_tensors as tensors_of
from plait.checkpoint.checkpoints import Checkpoints
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.sampling import Sampling
from plait.engine.server.dealer import Clocks, LedgerRow, find_ledger_faults
from plait.engine.server.group import ServerSetting
from plait.engine.server.processes import run_processes
from plait.engine.server.server_record import LEDGER_FILE
from plait.launch.scratch import ScratchFolder
from plait.launch.supervisor import Listener, SpareRanks
from plait.parallel import precision
from plait.proof import float64_check, reference
from plait.proof.probes import Probe, Trace, compare_rows, compare_tensors, compute_floor, measure_movement
from plait.proof.scenario import CLIP, count_parts, harden
from plait.proof.verdict import Verdict, measure_algorithm
from plait.randomness.keyed import seed_host
from plait.tensors.float64 import Float64Mode

NOT_COMPARED = ("batches of the job's own size", "a step in the plan's own formats", "messages of a dry run")
"""Comparisons of `verify` that are left out here."""
PAUSES = (0.03, 0.3, 1.0)
"""Longest pause before a portion, in seconds; the last group pauses three times as long. Longer pauses are tried on a busy machine, if no
gradient was stale."""


def describe_replay(plan: Plan) -> str:
    """Name of the reference."""
    return "the replayed ledger of the server"


def compare_replay(job: Job, plan: Plan, steps: int) -> Verdict:
    """Run the job, replay the ledger, and compare."""
    inner = replace(plan, dp=plan.replica_groups, replica_groups=1)
    try:
        return _compare_hard_job(harden(job, inner, 1), plan, steps)
    except PlaitError:  # a model that cannot train on one sample gets two per part
        return _compare_hard_job(harden(job, inner, 2 * count_parts(inner)), plan, steps)


def _compare_hard_job(hard: Job, plan: Plan, steps: int) -> Verdict:
    steps = max(steps, plan.staleness + 3)
    hard = replace(hard, steps=steps)
    with ScratchFolder("verify") as folder:
        one = Trace.from_process(folder / "one", lambda _: _train_one_device(hard, steps))
        hard = replace(hard, clip=one.facts["clip"])
        run = _run_servers(hard, plan, folder)
        played = Trace.from_process(folder / "played", lambda _: train_reference(hard, plan, run.ledger))
        return _judge_replay(run, one, played)


def _train_one_device(job: Job, steps: int) -> dict[str, Any]:
    return reference.train_reference(job, steps, CLIP, torch.float64, then=float64_check.check_float64) | {"length": len(job.data())}


@dataclass(frozen=True)
class ServedRun:
    """Results of a run of groups and servers."""

    job: Job
    plan: Plan
    model: dict[str, Tensor]
    """Parameters and buffers of its checkpoint."""
    steps: list[dict[str, Any]]
    """Rows of its metrics."""
    ledger: list[LedgerRow]
    orders: list[list[int]]
    """Gradients applied by each server, in its order."""


def draw_pause(seed: int, groups: int, longest: float, number: int, ticket: int) -> float:
    """Seconds that a group waits before a portion."""
    draw = random.Random(f"{seed} {number} {ticket}").random() * longest
    return 3.0 * draw if number == groups - 1 else draw


def _run_servers(job: Job, plan: Plan, folder: Path) -> ServedRun:
    """Run groups and servers with pauses, with longer pauses if no gradient was stale."""
    groups, results = plan.replica_groups, list[dict[str, Any]]()
    for longest in PAUSES:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in (LEDGER_FILE, "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)
        setting = ServerSetting(
            job, precision.make_fp32_plan(plan), "cpu", torch.float64, "ignore", folder=folder, save_every=10**9,
            pause=partial(draw_pause, job.seed, groups, longest), has_evaluation=False,
        )  # fmt: skip
        results = run_processes(setting, SpareRanks(lambda rank: False, lambda rank, failure: ""), Listener(on_note=lambda text: None))
        if not plan.staleness or results[groups]["stalest"]:
            break
    saved = tensors_of(Checkpoints(folder / "checkpoints").list_published()[0])
    model = {name.removeprefix("model/"): tensor for name, tensor in saved.items() if name.startswith("model/")}
    steps, lines = ([json.loads(line) for line in (folder / name).read_text().splitlines()] for name in ("metrics.jsonl", LEDGER_FILE))
    ledger = [convert(line, LedgerRow) for line in lines if "seq" in line]
    return ServedRun(job, plan, model, steps, ledger, [result["applied"] for result in results[groups:]])


def _judge_replay(run: ServedRun, one: Trace, played: Trace) -> Verdict:
    plan, actual, names = run.plan, run.model, [*one.initial]
    buffers = {n: t for n, t in played.buffers.items() if n in actual}
    weights, floor = {n: actual[n] for n in names if n in actual}, measure_movement(one.initial, played.weights)
    wrong = _check_ledger(run, one.facts["length"])
    probes = [
        compare_tensors("U", "weights, replayed", played.weights, weights, names, floor),
        compare_tensors("B", "buffers, replayed", buffers, {n: actual[n] for n in buffers}, [*buffers], compute_floor(buffers)),
        _compare_replayed_rows(run, played.facts["rows"]),
        Probe("D", "ledger", float(len(wrong)), 0, *(wrong[0], wrong[0]) if wrong else ()),
    ]
    same = plan.staleness == 0 and plan.quorum == 0 and plan.server_update == "clock"
    if same and not buffers:
        probes.append(compare_tensors("O", "weights of one device", one.weights, weights, names, measure_movement(one.initial, one.weights)))
        probes.append(compare_rows("S", "one device's every step", one.facts["rows"], run.steps, ("loss", "norm", "lr", "samples")))
    inexact = ("statistics in buffers are computed from a portion of the batch, not from the full batch",) if same and buffers else ()
    first = next((p for p in probes if not p.equal), None)
    code, cause = ("V027", f"{first.title}: {first.name}, {first.detail}") if first else ("", "")
    told = replace(measure_algorithm(describe_replay(plan), one, replace(played, weights=weights)), steps=len(run.steps), left_out=NOT_COMPARED)
    return Verdict(str(plan), tuple(probes), code, cause, inexact, plan.world, _collect_forced(run), algorithm=told)


def _collect_forced(run: ServedRun) -> dict[str, Any]:
    job, steps = run.job, run.steps
    stale = [row.staleness for row in run.ledger if not row.dropped]
    sizes = [row["samples"] - before["samples"] for before, row in zip([{"samples": 0}, *steps], steps)]
    most = max(stale, default=0)
    return {
        "clip": job.clip, "clipped": all(row["norm"] > job.clip for row in steps) if job.clip else False, "batch": job.batch,
        "sizes": sizes, "steps": len(steps), "stalest": most,
        "then": [f"{len(stale)} gradients, {sum(s > 0 for s in stale)} of them stale, the stalest {most} versions"],
    }  # fmt: skip


def _compare_replayed_rows(run: ServedRun, updates: list[dict[str, float]]) -> Probe:
    """Compare loss, norm and rate of every update that ends a step with the replay."""
    by_version = [updates[int(row["version"]) - 1] for row in run.steps]
    keys = ("norm", "lr") if run.plan.server_update == "nesterov" else ("loss", "norm", "lr")
    return compare_rows("U2", "loss, norm and rate, replayed", by_version, run.steps, keys)


def _check_ledger(run: ServedRun, length: int) -> list[str]:
    """List violated rules of the ledger and the servers."""
    clocks = Clocks(Sampling.from_job(run.job, length), run.plan.replica_groups)
    portions = [portion for _ in range(run.job.steps) for portion in clocks.take_clock()]
    expected = [(portion.clock, portion.first + k) for portion in portions for k in range(portion.count)]
    wrong = find_ledger_faults(run.ledger, (), run.plan.staleness, expected)
    if any(order != run.orders[0] for order in run.orders):
        wrong.append("servers applied gradients in different orders")
    return wrong


def train_reference(job: Job, plan: Plan, ledger: Sequence[LedgerRow]) -> dict[str, Any]:
    """Replay a ledger. Returns the same values as `train` of `proof/reference.py`; `rows`: one per update."""
    replay = Replay(job, plan.replica_groups if plan.server_update == "nesterov" else 0)
    replay.run(ledger)
    last, parameters = replay.versions[-1], dict(replay.model.named_parameters())
    weights = {name: tensor for name, tensor in last.items() if name in parameters}
    return {"weights": weights, "buffers": {n: t for n, t in last.items() if n not in parameters}, "rows": replay.rows}


@dataclass(frozen=True)
class ReplayedGradient:
    """Gradient of the mean loss of a row's samples, at the weights that the group read."""

    tensors: dict[str, Tensor]
    weight: float
    """Weight in the mean."""
    loss: float
    moved: dict[str, Tensor]
    """Changes of buffers."""


class Replay:
    """The model, all versions of its weights and buffers, and the row of each update."""

    def __init__(self, job: Job, nesterov: int = 0):
        self.job, self.data, self.nesterov = job, job.data(), nesterov
        one = reference.OneDevice.from_job(job, self.data, torch.float64, "cpu")
        self.model, self.optimizer, self.keyed, self.rates = one.model, one.optimizer, one.keyed, one.rates
        one.recorder.close()
        self.state = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        self.versions, self.rows = [{n: t.detach().clone() for n, t in self.state.items()}], list[dict[str, float]]()
        self.momentum, self.delta, self.pushes, self.samples = dict[Tensor, Tensor](), dict[Tensor, Tensor](), 0, 0

    def run(self, ledger: Sequence[LedgerRow]) -> None:
        """Replay all rows in order. Rows of one update are adjacent; dropped rows only count samples."""
        for dropped, group in groupby(ledger, key=lambda row: bool(row.dropped)):
            for _, update in groupby(group, key=lambda row: row.version_made):
                used = [*update]
                if not dropped:
                    self.update(used, [self.compute_gradient(row) for row in used])
                self.samples += sum(len(row.ids) for row in used)

    def compute_gradient(self, row: LedgerRow) -> ReplayedGradient:
        """Compute the gradient of the group."""
        before = self.versions[row.version_read]
        self.set_state(before)
        self.model.zero_grad()
        samples = [seed_host(self.job.seed, "sample", row.epoch, i) or self.data[i] for i in row.ids]
        inputs, targets = reference.collate_to_device(self.data, samples, torch.float64, "cpu")
        with Float64Mode(), self.keyed.forward_pass(row.clock, row.first, len(samples)):
            loss = self.job.loss(reference.call_model(self.model, inputs), targets)
        with self.keyed.replay():
            loss.backward()
        weight = float(torch.as_tensor(self.job.weight(targets)).double().sum()) if self.job.weight else float(len(samples))
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None and weight}
        changes = {n: b - before[n] for n, b in self.model.named_buffers() if b.dtype != torch.bool}
        return ReplayedGradient(gradients, weight, loss.item() if weight else 0.0, changes)

    def update(self, rows: list[LedgerRow], found: list[ReplayedGradient]) -> None:
        """Make the next version: clip the sum of the gradients, and run an optimizer step."""
        total = sum(each.weight for each in found)
        shares = [row.weight for row in rows] if self.nesterov else [each.weight / total for each in found]
        self.set_state(self.versions[-1])
        for name, p in self.model.named_parameters():
            parts = [(1.0 if self.nesterov else a) * each.tensors[name] for a, each in zip(shares, found) if name in each.tensors]
            p.grad = torch.stack(parts).sum(0) if parts else None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.job.clip or torch.inf)
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * (self.job.schedule(self.samples) if self.job.schedule else 1.0)
        self.apply_nesterov(shares[0]) if self.nesterov else self.optimizer.step()
        for name, b in self.model.named_buffers():
            changes = [(a, each.moved[name]) for a, each in zip(shares, found) if name in each.moved]
            step = sum(a * m for a, m in changes) if b.is_floating_point() else max(m for _, m in changes) if changes else 0
            b.copy_(b + step)
        self.versions.append({n: t.detach().clone() for n, t in self.state.items()})
        loss = sum(a * each.loss for a, each in zip(shares, found)) / sum(shares)
        self.rows.append({"loss": loss, "norm": float(norm), "lr": self.optimizer.param_groups[0]["lr"]})

    @torch.no_grad()
    def apply_nesterov(self, a: float) -> None:
        """Delayed Nesterov: update the momentum with every N-th gradient, by the accumulated remainder of N gradients."""
        self.pushes += 1
        for group in self.optimizer.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g, beta = a * (p.grad + group["weight_decay"] * p), group["momentum"]
                self.delta[p] = self.delta.get(p, 0.0) + g
                if self.pushes % self.nesterov == 0:
                    self.momentum[p] = beta * self.momentum.get(p, 0.0) + self.delta.pop(p)
                    g = g + beta * self.momentum[p]
                p -= group["lr"] * g

    def set_state(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            [t.copy_(state[n]) for n, t in self.state.items()]
