"""Runs checks on two to eight GPUs: the proof of every axis over NCCL, scaling, overlap of communication, and pipeline bubbles.

    python bench/gpus.py                       all visible GPUs; on a machine without one, two processes over gloo
    python bench/gpus.py --nproc 4 --out DIR   four of them
    python bench/gpus.py --parts scaling       some parts; --minutes, --again and the files are those of bench/gpu.py

    environment      versions and links of the devices
    verify           `plait verify` of dp, fsdp, tp, pp, cp, ep and pairs of them
    scaling          tokens/s of each device under a plan, over those of one device alone in the same call
    overlap          the fraction of collective time in which kernels compute
    bubble           the idle fraction of a device in a pipeline's step, and that of the schedule's table

One device and the plan take blocks of steps in turn, in the same processes. First each device trains the same small batch alone, then
all devices together train a multiple of that batch. The time of a block is that of its slowest rank.
"""

import argparse
import shutil
import subprocess
import sys
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import gpu_checks
import gpu_looks
import torch
import torch.distributed as dist
from gpu_checks import equal, gpt, has, llama, mixture
from gpu_looks import Look, Part, Row, Setting, spread, wait
from gpu_speed import SIZES, tokens
from gpu_steps import covered, on_device, profiled, shared

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.devices import list_cuda_devices, resolve_kind
from plait.launch.place import Place
from plait.planner.estimate import StageSchedule, make_table, time_schedule

WARM, BLOCK = 4, 4
SENT = ("nccl", "rccl", "gloo:")
"""How the names of collectives begin in a profile."""
ASKED = ("c10d::",)
"""How the names of their calls begin; for gloo, torch 2.11 records only these."""
MICRO = 4
"""Micro-batches of each rank in a pipeline."""


def job_of(setting: Setting, times: int) -> Job:
    """Return the GPT of the speed part, with `times` its batch, and with numbers of blocks and heads that the ranks divide evenly."""
    size, n = SIZES[setting.kind]["gpt"], setting.ranks
    heads = size["heads"] if size["heads"] % n == 0 else 2 * n
    return gpt(**{**size, "batch": size["batch"] * times, "depth": job_depth(setting), "heads": heads, "dropout": 0.0})


def formats(setting: Setting) -> str:
    return " precision=bf16" if setting.gpu else ""


# — environment and proof —


def environment(setting: Setting) -> dict[str, Look]:
    looks: dict[str, Look] = {"versions": gpu_checks.versions, "machine": partial(gpu_checks.machine, setting)}
    if shutil.which("nvidia-smi"):
        looks |= {"driver": gpu_checks.smi, "links": links}
    return looks


def links() -> Row:
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=60)
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("GPU")]
    kinds = sorted(
        {cell.strip() for row in rows for cell in row[1:] if cell.strip()[:2] in ("NV", "PI", "PH", "PX", "NO", "SY")}
    )
    return {"saw": ", ".join(kinds) or "one device", "data": {"topology": done.stdout}}


def proofs(setting: Setting) -> dict[str, Look]:
    n, half = setting.ranks, setting.ranks // 2
    plans = [
        f"dp={n}",
        f"fsdp={n}",
        "tp=2",
        f"pp=2 microbatches={MICRO}",
        f"pp=2 microbatches={MICRO} schedule=zb",
        "cp=2",
    ]
    plans += ["cp=2 cp_method=ulysses"]
    plans += (
        [f"dp={half} fsdp=2", f"fsdp={half} tp=2", f"dp={half} pp=2 microbatches=2", f"dp={half} cp=2"]
        if half > 1
        else []
    )
    looks: dict[str, Look] = {f"gpt, {plan}": partial(equal, gpt, plan, setting.kind) for plan in plans}
    if has("transformers"):
        looks["llama, tp=2"] = partial(equal, partial(llama, length=32, batch=8), "tp=2", setting.kind)
        looks["mixture, ep=2"] = partial(equal, mixture, "ep=2", setting.kind)
    return looks


# — scaling —


class Sides:
    """The job alone and under the plan, on one rank. The job alone is built before the process group exists."""

    def __init__(self, setting: Setting, plans: tuple[str, str], times: tuple[int, int], place: Place):
        alone = Place(local_rank=place.local_rank, beat=place.beat, set_phase=place.set_phase)
        self.setting, self.engines = setting, list[Engine]()
        for plan, many, where in zip(plans, times, (alone, place)):
            self.engines.append(Engine(job_of(setting, many), plan, place=where, device=setting.kind))
        self.sources = [engine.batches() for engine in self.engines]
        self.place = place
        for side in (0, 1):
            self.steps(side, WARM)

    def steps(self, side: int, count: int = BLOCK) -> float:
        """Return the seconds of one of `count` steps, which all ranks begin together."""
        self.meet()
        return self.alone(side, count)

    def meet(self) -> None:
        dist.barrier()
        wait(self.setting)

    def alone(self, side: int, count: int) -> float:
        """Return the seconds of a step, independent of the other ranks."""
        began, before = perf_counter(), None
        for _ in range(count):
            step = self.engines[side].step(next(self.sources[side]))
            _ = before.loss if before is not None else None
            before = step
        wait(self.setting)
        return (perf_counter() - began) / count

    def blocks(self) -> list[list[float]]:
        """Return the seconds of a step in every round, for each side. All ranks run the same number of rounds."""
        took, rounds = [list[float](), list[float]()], 0
        first = sum(self.steps(side) for side in (0, 1)) * BLOCK
        while rounds < max(4, min(50, self._alike(2 * self.setting.seconds / max(first, 1e-3)))):
            for side in (0, 1) if rounds % 2 else (1, 0):
                took[side].append(self.steps(side))
            rounds += 1
        return took

    def _alike(self, number: float) -> int:
        """Return the minimum over all ranks."""
        told = torch.tensor([number], dtype=torch.float64, device=self.engines[1].rank_model.device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return int(told)


def on_ranks(setting: Setting, work: Any, alike: bool = True) -> list[dict[str, Any]]:
    return fork.run_ranks(work, setting.ranks, fork.Listener(lambda *_: None), hang_timeout=200.0, uniform=alike)


def slowest(rows: list[dict[str, Any]], side: int) -> list[float]:
    """Return the time of the slowest rank in every round."""
    return [max(each) for each in zip(*(row["seconds"][side] for row in rows))]


def scaling(setting: Setting) -> dict[str, Look]:
    n, form = setting.ranks, formats(setting)
    micros = f"microbatches={MICRO * n}"
    plans = {"dp": f"dp={n}", "fsdp": f"fsdp={n}", "tp": f"tp={n}", "pp": f"pp={n} {micros}"}
    if n % 2 == 0 and n > 2:
        plans |= {"dp × tp": f"dp={n // 2} tp=2", "fsdp × pp": f"fsdp={n // 2} pp=2 microbatches={2 * MICRO}"}
    looks: dict[str, Look] = {
        name: partial(scaled, setting, plan + form, "dp=1" + form) for name, plan in plans.items()
    }
    if setting.gpu:
        looks["dp, compiled"] = partial(scaled, setting, plans["dp"] + form + " compile=true", "compile=true" + form)
    return looks


def scaled(setting: Setting, plan: str, alone: str) -> Row:
    """Measure weak scaling: the same number of samples per device."""
    fits = job_of(setting, setting.ranks).batch

    def work(place: Place) -> dict[str, Any]:
        sides = Sides(setting, (alone, plan), (1, setting.ranks), place)
        device = sides.engines[1].rank_model.device
        most = torch.cuda.max_memory_allocated(device) / 2**30 if setting.gpu else 0.0
        return {"seconds": sides.blocks(), "GiB": most}

    assert fits % Plan.parse(plan).microbatches == 0, f"a batch of {fits} has no {plan}"
    rows = on_ranks(setting, work, "pp" not in plan)
    one, many = slowest(rows, 0), slowest(rows, 1)
    per = tokens(job_of(setting, 1))
    row: Row = {"plan": plan, "one device ms": median(one) * 1e3, "ms": median(many) * 1e3}
    row |= {"one device tokens/s": per / median(one), "tokens/s of each": per / median(many)}
    row["efficiency"] = spread([a / b for a, b in zip(one, many)])
    return row | {"data": {"ranks": rows}}


# — overlap —


def overlap(setting: Setting) -> dict[str, Look]:
    n, form = setting.ranks, formats(setting)
    plans = (f"dp={n}", f"fsdp={n}", f"fsdp={n} zero_stage=1", f"tp={n}", f"cp={n}")
    return {plan: partial(hidden, setting, plan + form) for plan in plans}


def hidden(setting: Setting, plan: str) -> Row:
    """Measure by the profiler how long collectives run in a step, and how long kernels compute meanwhile."""

    def work(place: Place) -> dict[str, Any]:
        sides = Sides(setting, ("dp=1" + formats(setting), plan), (1, setting.ranks), place)
        took = [median(sides.steps(side) for _ in range(3)) for side in (0, 1)]
        sides.meet()
        with profiled(setting) as prof:
            sides.alone(1, 3)
        busy = on_device(prof, setting)
        sent = [span for name, span in busy if name.lower().startswith(SENT)]
        sent = sent or [span for name, span in busy if name.startswith(ASKED)]
        computed = [
            span
            for name, span in busy
            if name.startswith("aten::") or (setting.gpu and not name.lower().startswith(SENT))
        ]
        found = {"sent": covered(sent) / 3e3, "both": shared(sent, computed) / 3e3, "collectives": len(sent) / 3}
        return found | {"alone": took[0], "plan": took[1]}

    rows = on_ranks(setting, work)
    sent, both = (median(row[name] for row in rows) for name in ("sent", "both"))
    assert sent > 0, "the profiler has seen no collective"
    row: Row = {"collectives per step": rows[0]["collectives"], "ms of them": sent, "hidden %": 100 * both / sent}
    more = max(r["plan"] for r in rows) - max(r["alone"] for r in rows)
    return row | {
        "ms of a step": max(r["plan"] for r in rows) * 1e3,
        "ms beyond one device": more * 1e3,
        "data": {"ranks": rows},
    }


# — bubble —


def bubbles(setting: Setting) -> dict[str, Look]:
    kinds = {"gpipe": 1, "1f1b": 1, "zb": 1}
    kinds |= {"interleaved": 2} if job_depth(setting) % (2 * setting.ranks) == 0 else {}
    return {kind: partial(bubble, setting, kind, per) for kind, per in kinds.items()}


def job_depth(setting: Setting) -> int:
    return -(-SIZES[setting.kind]["gpt"]["depth"] // setting.ranks) * setting.ranks


def bubble(setting: Setting, schedule: str, per_rank: int) -> Row:
    """Measure the bubble. One device with the same micro-batches, fewer by the number of devices, has no bubble. The additional time of the
    pipeline is its bubble and its exposed messages. The table assumes stages of equal time, and a backward twice as long as a forward."""
    n, form = setting.ranks, formats(setting)
    alone, many = f"microbatches={MICRO}{form}", f"pp={n} microbatches={MICRO * n} schedule={schedule}{form}"
    many += f" stages_per_rank={per_rank}" if per_rank > 1 else ""

    def work(place: Place) -> dict[str, Any]:
        return {"seconds": Sides(setting, (alone, many), (1, n), place).blocks()}

    rows = on_ranks(setting, work, False)
    one, took = slowest(rows, 0), slowest(rows, 1)
    kind = StageSchedule(schedule, n, per_rank)
    stages = (1.0 / per_rank,) * (n * per_rank)
    assert len(make_table(kind, MICRO * n).owner) == len(stages)
    whole = time_schedule(kind, MICRO * n, (stages, stages, stages), 0.0)
    row: Row = {"plan": many, "one device ms": median(one) * 1e3, "ms": median(took) * 1e3}
    row["bubble %"] = 100 * (1 - median(a / b for a, b in zip(one, took)))
    return row | {"the table's %": 100 * (1 - 3 * MICRO * n / whole), "data": {"ranks": rows}}


PARTS = {
    "environment": Part("environment", environment),
    "verify": Part("`plait verify`, in float64", proofs),
    "scaling": Part("speed of each device, over one device alone", scaling),
    "overlap": Part("collectives that are hidden", overlap),
    "bubble": Part("bubbles of pipelines", bubbles),
}


def ranks(options: argparse.Namespace) -> int:
    seen = len(list_cuda_devices()) if resolve_kind(options.device) == "cuda" else 0
    count = options.nproc or seen or 2
    if count < 2 or (seen and count > seen):
        raise SystemExit(
            f"{count} processes, and {seen} devices are visible: this compares at least two (bench/gpu.py is for one)"
        )
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu_looks.options(parser, "build/gpus")
    parser.add_argument("--nproc", type=int, help="how many devices (all that are visible; without any, 2 processes)")
    sys.exit(gpu_looks.main(parser, PARTS, ranks))
