"""Measures the gain of local batches by speed, measured and predicted, if one rank is a third as fast as the others.

    python bench/shares.py                   2 and 4 ranks whose passes sleep
    python bench/shares.py --by computing    2 ranks that compute; the slow one also sleeps for twice its computing time

Sleeping ranks take no cores from each other, so load on the machine does not change the figures. Each pair is a run with equal local
batches and one with batch_split=auto, in turn. A figure is the median step of the last third, after the local batches have converged.

    ideal       the earliest possible end of all ranks with integer numbers of samples. Speeds are the given ones (sleeping) or those
                with equal local batches (computing: seconds per sample without a fixed cost, so the real bound is lower)
    gain        the fraction of the ideal gain: (equal − measured) / (equal − ideal), the median over the pairs
    predicted   step times of the note about a changed split, over those measured then
"""

import argparse
import json
import re
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.job import Job
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place

EACH, FIXED, SLOW, BATCH, STEPS = 2.5e-3, 2e-3, 3.0, 32, 90
"""Seconds per sample and per pass, the slowdown of the last rank, samples of a batch, steps of a run."""


class Samples:
    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.full((64, 256), i / 100)
        return x, x[:, :1]


class Paced(nn.Module):
    """A small model with slowed forward and backward. `times`: the slowdown relative to other ranks; 0: computation only."""

    def __init__(self, times: float, computing: bool):
        super().__init__()
        width = 512 if computing else 8
        self.body = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.times, self.computing, self.began = times, computing, 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or isinstance(x, torch._subclasses.FakeTensor):
            return self.body(x)
        self.began = time.thread_time()
        x = x.detach().requires_grad_()
        x.register_hook(lambda g: self.pause(len(g), 2 / 3))
        y = self.body(x)
        self.pause(len(x), 1 / 3)
        y.register_hook(self.begin)
        return y

    def begin(self, gradient: Tensor) -> None:
        self.began = time.thread_time()

    def pause(self, samples: int, part: float) -> None:
        """Pause for the rest of this pass's duration."""
        if self.computing:
            time.sleep((self.times - 1) * (time.thread_time() - self.began))
        else:
            time.sleep(self.times * part * (FIXED + EACH * samples))


def rank(place: Place, shares: str, computing: bool) -> dict[str, Any]:
    """Run a training, and return seconds of each step, final local batch sizes, notes, and thread time of a sample."""
    times = SLOW if place.rank == place.world - 1 else 1.0
    job = Job(
        model=lambda: Paced(times, computing), loss=F.mse_loss, data=Samples, batch=BATCH, steps=STEPS,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
    )  # fmt: skip
    engine = Engine(job, f"dp={place.world} batch_split={shares}", device="cpu", place=place)
    seconds, notes, busy, sizes = list[float](), list[str](), list[list[float]](), list[int]()
    last = time.perf_counter()
    for batch in engine.batches():
        step = engine.step(batch)
        now = time.perf_counter()
        seconds.append(now - last)
        last, sizes = now, [n for n, _ in step.by_rank]
        busy.append([t for _, t in step.by_rank])
        notes += [step.note] if step.note else []
    return {"seconds": seconds, "notes": notes, "busy": busy, "sizes": sizes}


def settled(found: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Return the median step of a run's last third: wall seconds, computing seconds of the slowest rank, and those of each rank."""
    late = len(found["seconds"]) * 2 // 3
    each = [median(row) for row in zip(*found["busy"][late:])]
    return median(found["seconds"][late:]), median(max(row) for row in found["busy"][late:]), each


def ideal(costs: list[tuple[float, float]]) -> float:
    """Return the seconds of a step with the best integer split, for ranks with these costs per step and per sample."""
    samples = [1] * len(costs)
    takes = lambda i, n: costs[i][0] + costs[i][1] * n  # noqa: E731
    for _ in range(BATCH - len(costs)):
        samples[min(range(len(costs)), key=lambda i: takes(i, samples[i] + 1))] += 1
    return max(takes(i, n) for i, n in enumerate(samples))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--by", choices=("sleeping", "computing"), default="sleeping")
    options.add_argument("--pairs", type=int, default=5)
    asked = options.parse_args()
    computing = asked.by == "computing"
    for ranks in (2,) if computing else (2, 4):
        gains, speedups, predictions, last = list[float](), list[float](), list[float](), dict[str, Any]()
        for _ in range(asked.pairs):
            equal, auto = (fork.run_ranks(partial(rank, shares=s, computing=computing), ranks)[0] for s in ("equal", "auto"))
            (wall, busy, each), (fast, spent, _), last = settled(equal), settled(auto), auto
            costs = [(0.0, seconds * ranks / BATCH) for seconds in each]
            if not computing:
                speeds, share = [1.0] * (ranks - 1) + [SLOW], BATCH / ranks
                beside = [seconds - s * (FIXED + EACH * share) for s, seconds in zip(speeds, each)]
                costs = [(s * FIXED + rest, s * EACH) for s, rest in zip(speeds, beside)]
            best = ideal(costs)
            gains.append((busy - spent) / (busy - best))
            speedups.append(wall / fast)
            told = re.search(r"computing takes ([\d.e+]+) ms", auto["notes"][-1]) if auto["notes"] else None
            predictions.append(float(told[1]) / 1000 / spent if told else 0.0)
        print(json.dumps({
            "ranks": ranks, "by": asked.by, "pairs": asked.pairs, "shares": last["sizes"], "speedup": round(median(speedups), 3),
            "part_of_ideal_gain": round(median(gains), 3), "least": round(min(gains), 3), "most": round(max(gains), 3),
            "predicted_over_measured": round(median(predictions), 3), "notes": last["notes"],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
