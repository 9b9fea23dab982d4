"""`plait verify` of sync=async: groups and servers run with random delays, and one process plays their ledger again.

The run is the real one, its processes and messages included; only float64, small ragged batches and delays drawn from a seed are
forced on it, so that gradients come in another order than they were dealt in and are stale. Compared are the weights, the buffers
and every step's loss, norm and learning rate; and the ledger is held against what must be true of any (`parallel/server/ledger.py`).
With staleness=0, a step per clock and no quorum it is also held against one device.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.reading import tensors as tensors_of
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.sampling import Sampling
from plait.engine.server.processes import start
from plait.engine.server.record import FILE
from plait.engine.server.setting import ServerSetting
from plait.launch import fork
from plait.launch.scratch import Scratch
from plait.launch.supervise import Listener, Spare
from plait.parallel import precision
from plait.parallel.server.ledger import LedgerRow, problems
from plait.parallel.server.portions import Clocks
from plait.proof import own_numerics, reference, tensor_files
from plait.proof.algorithms.server import Replay
from plait.proof.probes import Probe, floor_of, moved, rows, tensors
from plait.proof.verdict import AlgorithmTold, Verdict, distance

NOT_COMPARED = ("batches of the job's own size", "a step in the plan's own formats", "messages of a dry run")
"""What `verify` compares under other plans."""
PAUSES = (0.03, 0.3, 1.0)
"""Seconds of the longest pause before a portion; the last group takes three times as long. The longer ones are for a machine that
has so much else to do that nothing was stale."""
CLIP = 0.1


def pause(seed: int, groups: int, longest: float, number: int, ticket: int) -> float:
    """Seconds that a group waits before a portion."""
    draw = random.Random(f"{seed} {number} {ticket}").random() * longest
    return 3.0 * draw if number == groups - 1 else draw


def verify(job: Job, plan: Plan, steps: int, harden: Callable[[Job, Plan, int], Job]) -> Verdict:
    """Run it, play it again, and compare. `harden` makes the job's rare paths common (`proof/verify.py`)."""
    inner = dataclasses.replace(plan, dp=plan.replica_groups, replica_groups=1)
    try:
        return _verify(harden(job, inner, 1), plan, steps)
    except PlaitError:  # a model that cannot train on one sample gets a short batch with two for each part
        return _verify(harden(job, inner, 2 * inner.shares * plan.microbatches), plan, steps)


def _verify(hard: Job, plan: Plan, steps: int) -> Verdict:
    steps = max(steps, plan.staleness + 3)
    hard = dataclasses.replace(hard, steps=steps)
    with Scratch("verify") as folder:
        (expected,) = fork.run(lambda _: _one_device(hard, steps, folder), 1)
        hard = dataclasses.replace(hard, clip=expected["clip"])
        results = _run(hard, plan, folder)
        (played,) = fork.run(lambda _: _play(hard, plan, folder), 1)
        return _judged(plan, hard, folder, (expected, played, results))


def _one_device(job: Job, steps: int, folder: Path) -> dict[str, Any]:
    """The job on one device, plainly."""
    out = reference.train(job, steps, CLIP, torch.float64, then=own_numerics.check)
    data = job.data()
    tensor_files.write(folder / "one", out["weights"] | out["buffers"])
    tensor_files.write(folder / "initial", out["initial"])
    return {"rows": out["rows"], "clip": out["clip"], "length": len(data)}


def _run(job: Job, plan: Plan, folder: Path) -> list[dict[str, Any]]:
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
    return results


def _play(job: Job, plan: Plan, folder: Path) -> dict[str, Any]:
    """The ledger, in one process."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    replay = Replay(job, plan.replica_groups if plan.server_update == "nesterov" else 0)
    replay.run([line for line in lines if "seq" in line])
    tensor_files.write(folder / "played", replay.versions[-1])
    return {"told": replay.told}


def _saved(folder: Path) -> dict[str, Tensor]:
    """The model's tensors of the newest checkpoint."""
    found = tensors_of(Checkpoints(folder / "checkpoints").found()[0])
    return {name.removeprefix("model/"): tensor for name, tensor in found.items() if name.startswith("model/")}


def _judged(
    plan: Plan, job: Job, folder: Path, told: tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]
) -> Verdict:
    expected, played, results = told
    actual, replayed = _saved(folder), tensor_files.read(folder / "played")
    initial, one = tensor_files.read(folder / "initial"), tensor_files.read(folder / "one")
    weights = {n: t for n, t in replayed.items() if n in initial}
    buffers = {n: t for n, t in replayed.items() if n not in initial and n in actual}
    names, floor = [*initial], moved(initial, weights)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = _ledger(plan, job, folder, expected["length"], results)
    probes = [
        tensors("U", "weights, as played again", weights, {n: actual[n] for n in weights if n in actual}, names, floor),
        tensors(
            "B", "buffers, as played again", buffers, {n: actual[n] for n in buffers}, [*buffers], floor_of(buffers)
        ),
        _rows(plan, played["told"], steps),
        Probe("D", "ledger", float(len(ledger)), 0, ledger[0] if ledger else "", ledger[0] if ledger else ""),
    ]
    same = plan.staleness == 0 and plan.quorum == 0 and plan.server_update == "clock"
    if same and not buffers:
        ours = {n: actual[n] for n in names}
        probes.append(
            tensors("O", "weights of one device", {n: one[n] for n in names}, ours, names, moved(initial, one))
        )
        probes.append(rows("S", "one device's every step", expected["rows"], steps, ("loss", "norm", "lr", "samples")))
    far = distance(initial, one, actual)
    inexact = (
        ("statistics in buffers are those of a portion of the batch, not of the whole",) if same and buffers else ()
    )
    wrong = next((p for p in probes if not p.equal), None)
    cause = f"{wrong.title}: {wrong.name}, {wrong.detail}" if wrong else ""
    rows_used = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    stale = [r["version_made"] - 1 - r["version_read"] for r in rows_used if "seq" in r and not r.get("dropped")]
    sizes = [row["samples"] - before["samples"] for before, row in zip([{"samples": 0}, *steps], steps)]
    clipped = all(row["norm"] > job.clip for row in steps) if job.clip else False
    forced = {
        "clip": job.clip, "clipped": clipped, "batch": job.batch, "sizes": sizes, "steps": len(steps),
        "stalest": max(stale, default=0),
        "then": [f"{len(stale)} gradients, {sum(s > 0 for s in stale)} of them stale, the stalest {max(stale, default=0)} versions"],
    }  # fmt: skip
    algorithm = AlgorithmTold("the server's ledger, played again", far, len(steps), NOT_COMPARED)
    code = "V027" if wrong else ""
    return Verdict(str(plan), tuple(probes), code, cause, inexact, plan.world, forced, algorithm=algorithm)


def _rows(plan: Plan, told: list[dict[str, float]], steps: list[dict[str, float]]) -> Probe:
    """Loss, norm and rate of every update that ends a step, as played again."""
    by_version = [told[int(row["version"]) - 1] for row in steps]
    keys = ("norm", "lr") if plan.server_update == "nesterov" else ("loss", "norm", "lr")
    return rows("U2", "loss, norm and rate, played again", by_version, steps, keys)


def _ledger(plan: Plan, job: Job, folder: Path, length: int, results: list[dict[str, Any]]) -> list[str]:
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    found = [LedgerRow.of_json(line) for line in lines if "seq" in line]
    clocks = Clocks(Sampling.of(job, length), plan.replica_groups)
    portions = [portion for _ in range(job.steps) for portion in clocks.take()]
    expected = [(portion.clock, portion.first + k) for portion in portions for k in range(portion.count)]
    wrong = problems(found, (), plan.staleness, expected)
    orders = [result["applied"] for result in results[plan.replica_groups :]]
    if any(order != orders[0] for order in orders):
        wrong.append("servers applied gradients in different orders")
    return wrong
