"""Compares the bubbles of every schedule with their tables, and plait's pipelined step with torch's own pipeline.

`plait.engine.metrics.Recorder` records `Engine.step`, and `plait report --timeline` shows the bubbles: medians over the
steps after warm-up. All stages are equal. They have two kinds:

    sleeping   F, I and W are time.sleep, which needs no cores. Four ranks are therefore measured correctly on two cores, and
               the table predicts the result (F = I = W, messages free). Each takes 0.1 s, which is long compared with the
               1 to 2 ms of Python in an action and the wake-up time on a busy host; --sleep 0.012 shows those
    computing  blocks of linear maps on two processes with one thread each

    table      the bubble of the table with F = I = W and free messages
    predicted  the table simulated with measured median times of stages and messages, as in the report
    measured   and its ratio to predicted; and the same for the time from the first action to the last

Steps compare `plait pp=2 microbatches=8 schedule=1f1b` with a `PipelineStage` under `Schedule1F1B`. Both have the same stages,
weights, samples, loss and optimizer, and run in turn in the same forked processes, in an order shuffled every round. All
ranks start a step together, and it takes as long as its slowest rank. The batch is ready before the clock starts. plait
also computes the gradient norm of the full model and sends the loss to all ranks. The output has medians, and the median
ratio of the same round with its quartiles. Before timing, the losses of three steps are compared.
"""

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import overhead
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.run_directory import RunDirectory
from plait.launch import fork
from plait.launch.place import Place
from plait.model.build_model import make_model
from plait.parallel.pipeline.schedule_search import build_table, simulate
from plait.report.run_files import RunFiles
from plait.report.timeline import Timeline, make_timeline

MICRO = 8
SCHEDULES = ("sequential", "gpipe", "1f1b", "zb", "auto", "interleaved", "zbv")
TWO = ("interleaved", "zbv")
Take = Callable[[], float]


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        if not isinstance(x, torch.nn.Parameter):
            time.sleep(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.back)
        return grads[0], None, None


class Sleeping(nn.Module):
    """F, I and W of `seconds` each, also on the first stage, whose input requires no gradient."""

    def __init__(self, seconds: float, width: int = 8):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = Sleep.apply(self.weight, 0.0, self.seconds * (1 if x.requires_grad else 2))
        return Sleep.apply(x, self.seconds, self.seconds) * weight


class Computing(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x).tanh()


class Random:
    """`n` pairs of random vectors."""

    def __init__(self, n: int, width: int):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(n, width, generator=g), torch.randn(n, width, generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def made(block: Callable[[], nn.Module], blocks: int, stages: int, batch: int, width: int) -> Job:
    """A chain of equal blocks, split into equal stages."""
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(blocks))),
        loss=nn.functional.mse_loss,
        data=lambda: Random(batch, width),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        batch=batch,
        steps=10**6,
        units=tuple(str(i) for i in range(blocks)),
        stages=tuple(str(blocks // stages * s) for s in range(1, stages)),
    )


def job(kind: str, asked: Any, ranks: int, stages: int) -> Job:
    if kind == "sleeping":
        return made(lambda: Sleeping(asked.sleep / 2), 2 * ranks, stages, 2 * MICRO, 8)
    return made(lambda: Computing(asked.width, asked.layers), 2 * ranks, stages, asked.samples * MICRO, asked.width)


# — bubbles —


def record(place: Place, job: Job, plan: Plan, run: RunDirectory, steps: int) -> None:
    """Run one rank's part: train and write events."""
    torch.set_num_threads(1)
    engine = Engine(job, plan, place=place, device="cpu")
    recorder = Recorder(engine, run, lambda value: None, [])
    for batch, _ in zip(engine.batches(), range(steps)):
        recorder.step(batch, engine.step(batch))
    recorder.close()


def bubble(kind: str, schedule: str, asked: Any) -> dict[str, Any]:
    """Measure one row of the first table."""
    ranks, per_rank = {"sleeping": 4, "computing": 2}[kind], 2 if schedule in TWO else 1
    plan = Plan.parse(f"pp={ranks} microbatches={MICRO} schedule={schedule} stages_per_rank={per_rank}")
    listener = fork.Listener(lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" else None)
    with tempfile.TemporaryDirectory() as root:
        run = RunDirectory.create("pipeline", plan, {}, Path(root))
        mine = job(kind, asked, ranks, plan.pp * per_rank)
        fork.run_ranks(partial(record, job=mine, plan=plan, run=run, steps=asked.steps + 3), ranks, listener)
        found = [make_timeline(RunFiles.read(run.path, step), step) for step in range(4, asked.steps + 4)]
    planned = build_table(schedule, ranks, MICRO, per_rank)
    ones = [1.0] * planned.stages
    middle = lambda pick: statistics.median(pick(f) for f in found)  # noqa: E731
    told: Timeline = found[0]
    assert told.predicted is not None
    return {
        "kind": kind, "ranks": ranks, "schedule": schedule, "table": simulate(planned, ones, ones, ones).bubble,
        "predicted": told.predicted.bubble, "measured": middle(lambda f: f.measured.bubble),
        "predicted_ms": told.predicted.makespan * 1e3, "measured_ms": middle(lambda f: f.measured.makespan) * 1e3,
        "times": {f"{k}{s}": t * 1e3 for (s, k), t in told.times.items()},
    }  # fmt: skip


# — steps —


def with_plait(job: Job, place: Place) -> Take:
    engine = Engine(job, Plan.parse(f"pp=2 microbatches={MICRO} schedule=1f1b"), place=place, device="cpu")
    batch = next(engine.batches())
    return lambda: engine.step(batch).loss


def by_hand(job: Job, place: Place) -> Take:
    model = make_model(job)
    assert isinstance(model, nn.Sequential)
    half = len(model) // 2
    mine = model[:half] if place.rank == 0 else model[half:]
    optimizer = job.optimizer(list(mine.parameters()))
    stage = PipelineStage(mine, place.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=job.loss)
    order = next(Engine(job, "dp=1", place=Place(), device="cpu").batches()).micro_batches[0]  # the samples in plait's order

    def take() -> float:
        losses: list[Tensor] = []
        if place.rank == 0:
            schedule.step(order.inputs, return_outputs=False)
        else:
            schedule.step(target=order.targets, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    return take


def measure(place: Place, job: Job, rounds: int, gate: Any) -> dict[str, Any]:
    """Run one rank's part: build both, warm up, and run steps in turn."""
    torch.set_num_threads(1)
    place.connect(torch.device("cpu"))
    takes = {"plait": with_plait(job, place), "torch": by_hand(job, place), "torch, again": by_hand(job, place)}
    losses = torch.tensor([[take() for _ in range(3)] for take in takes.values()], dtype=torch.float64)
    seconds = overhead.in_turn(list(takes.values()), rounds, place, gate)
    dist.all_reduce(losses, dist.ReduceOp.MAX)
    return {"names": list(takes), "losses": losses.tolist(), "seconds": seconds.tolist()}


def steps(asked: Any) -> dict[str, Any]:
    """Measure the second table."""
    listener = fork.Listener(lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" else None)
    gate = memoryview(mmap.mmap(-1, 16)).cast("q")  # inherited by the forked processes
    target = partial(measure, job=job("computing", asked, 2, 2), rounds=asked.rounds, gate=gate)
    result = fork.run_ranks(target, 2, listener)[0]
    times = dict(zip(result["names"], zip(*result["seconds"])))
    ratios = {n: [a / b for a, b in zip(times["plait"], t)] for n, t in times.items() if n != "plait"}
    ratios["control"] = [a / b for a, b in zip(times["torch, again"], times["torch"])]
    return {
        "ms": {n: statistics.median(t) * 1e3 for n, t in times.items()},
        "ratios": {n: statistics.quantiles(r, n=4) for n, r in ratios.items()},
        "apart": [max(column) - min(column) for column in zip(*result["losses"])], "rounds": asked.rounds,
    }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    if "kind" not in row:
        ms = " · ".join(f"{n} {t:.1f}" for n, t in row["ms"].items())
        lines = [f"step of pp=2 1f1b, ms ({row['rounds']} rounds): {ms}"]
        lines += [
            f"  plait over {n}: {r[1]:.3f} [{r[0]:.3f}, {r[2]:.3f}]" for n, r in row["ratios"].items() if n != "control"
        ]
        r = row["ratios"]["control"]
        lines.append(f"  torch over itself: {r[1]:.3f} [{r[0]:.3f}, {r[2]:.3f}]")
        return "\n".join([*lines, f"  losses at most {max(row['apart']):.1e} apart"])
    cells = [f"{100 * row[name]:>8.1f} %" for name in ("table", "predicted", "measured")]
    over = row["measured"] / row["predicted"] if row["predicted"] else float("nan")
    ms = f"{row['predicted_ms']:>9.1f}{row['measured_ms']:>9.1f}{row['measured_ms'] / row['predicted_ms']:>8.3f}"
    return f"{row['kind']:<10} pp={row['ranks']} {row['schedule']:<12}{''.join(cells)}{over:>8.3f}   {ms}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("bubbles", "steps", "all"), default="all")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--kinds", default="sleeping,computing")
    parser.add_argument("--steps", type=int, default=12, help="of each bubble, after a warm-up")
    parser.add_argument("--rounds", type=int, default=40, help="of the comparison of steps")
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a stage's F, I and W")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2, help="linear maps in a block")
    parser.add_argument("--samples", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    agree = True
    if asked.part != "steps":
        head = f"{'':<27}{'table':>10}{'predicted':>10}{'measured':>10}{'ratio':>8}   {'ms: told':>9}{'took':>9}{'ratio':>8}"
        print("" if asked.json else head, flush=True)
        for kind in asked.kinds.split(","):
            for schedule in asked.schedules.split(","):
                row = bubble(kind, schedule, asked)
                print(json.dumps(row) if asked.json else show(row), flush=True)
    if asked.part != "bubbles":
        row = steps(asked)
        agree = max(row["apart"]) < 1e-5
        print(json.dumps(row) if asked.json else show(row), flush=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
