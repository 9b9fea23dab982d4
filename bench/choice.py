"""Compares the planner's choice with every other plan by measurement: small models on the cores of this machine.

Each case is a job on a number of processes. The plans are all meshes of the search over dp, fsdp (zero 1 to 3), tp (with
and without sequence shards between slices), cp and pp (each schedule). Each has the micro-batches,
activation checkpointing and other options that the planner would choose. All of them are measured like `plait plan --try`
(`plait.planner.trial`): by processor time, the least of several rounds.

    choice     the planner's first, with its predicted and its measured time
    best       the plan with the least measured time
    regret     time of the choice over the best; the same for the best of the planner's first three
               plans, which have three meshes, as in `plait plan --try 3`
    order      rank correlation of predicted and measured times
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import inf, prod
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from scores import spearman
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.job import Job
from plait.config.machine import Machine
from plait.launch.detect import read_machine
from plait.planner.plan_request import PlanRequest
from plait.planner.search import Candidate, find_best_plans
from plait.planner.search_space import list_divisors
from plait.planner.trial import time_plans

AXES = ("pp", "dp", "fsdp", "cp", "tp")
ADAM = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class Drawn:
    """`n` samples: x of one shape; y is a class, or as many classes as x has positions."""

    def __init__(self, shape: tuple[int, ...], classes: int, words: int = 0, n: int = 240):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randint(words, (n, *shape), generator=g) if words else torch.randn(n, *shape, generator=g)
        self.y = torch.randint(classes, (n, *shape) if words else (n,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Residual(nn.Module):
    """A wide MLP added to the identity."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mlp(batch: int = 12) -> Job:
    """Large weights and few samples."""
    model = lambda: nn.Sequential(nn.Linear(64, 256), *(Residual(256, 768) for _ in range(6)), nn.Linear(256, 10))  # noqa: E731
    return job(model, lambda: Drawn((64,), 10), batch)


def conv(batch: int = 24) -> Job:
    """Convolutions with norms: small weights, large activations."""

    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU())

    def model() -> nn.Module:
        blocks = [block(3, 16), block(16, 16), nn.MaxPool2d(2), block(16, 32), block(32, 32), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 10))

    return job(model, lambda: Drawn((3, 16, 16), 10), batch)


class Recurrent(nn.Module):
    """An LSTM that labels each position."""

    def __init__(self, words: int, width: int, layers: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x).transpose(1, 2)


def lstm(batch: int = 24) -> Job:
    return job(lambda: Recurrent(500, 96, 3), lambda: Drawn((16,), 500, 500), batch)


class Encoder(nn.Module):
    """A block of attention and an MLP, over positions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = Residual(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.mlp(x)


class Vision(nn.Module):
    """A small ViT: patches of an image, blocks, the mean over positions."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 10)
        self.place = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.ModuleList(Encoder(width, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def vit(batch: int = 12) -> Job:
    return job(lambda: Vision(96, 6), lambda: Drawn((3, 16, 16), 10), batch)


class UNet(nn.Module):
    """A small U-Net: down, through the middle and up again, with the first activations concatenated to the last."""

    def __init__(self, width: int):
        super().__init__()
        part = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
        self.first, self.down, self.along = part(3, width), part(width, 2 * width), part(2 * width, 2 * width)
        self.up, self.head = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.up(self.along(self.down(F.max_pool2d(x, 2))))
        return self.head(torch.cat([x, y], 1)).mean((2, 3))


def unet(batch: int = 24) -> Job:
    return job(lambda: UNet(16), lambda: Drawn((3, 16, 16), 4), batch)


def words(batch: int = 12) -> Job:
    """A job with a large vocabulary: most weights are in the embedding and the head."""
    return job(lambda: Recurrent(4000, 128, 2), lambda: Drawn((8,), 4000, 4000), batch)


def job(model: Callable[[], nn.Module], data: Callable[[], Any], batch: int) -> Job:
    return Job(model=model, loss=F.cross_entropy, data=data, optimizer=ADAM, batch=batch, steps=10**9)


JOBS: dict[str, Callable[[], Job]] = {"mlp": mlp, "conv": conv, "lstm": lstm, "vit": vit, "unet": unet, "words": words}


def plans(asked: PlanRequest, most: int) -> list[Candidate]:
    """Return the best plan of each mesh, sharding and stage order by predicted time, fastest first."""
    n, pace, refused, found = asked.machine.devices, asked.pace, asked.make_refusal(), {}
    for sizes in product(list_divisors(n), repeat=len(AXES)):
        mesh: dict[str, Any] = dict(zip(AXES, sizes))
        if prod(sizes) != n or (mesh["cp"] > 1 and n > 2):
            continue
        zeros = [{"zero_stage": z} for z in (1, 2, 3)] if mesh["fsdp"] > 1 else [{}]
        words = ("1f1b", "zb", "interleaved", "zbv") if mesh["pp"] > 1 else ("",)
        stretched = [{"sequence_parallel": s} for s in (True, False)] if mesh["tp"] > 1 else [{}]
        for zero, word, between in product(zeros, words, stretched):
            pins = mesh | zero | between | ({"schedule": word} if word else {})
            for one in find_best_plans(pace, asked.make_space(pins), refused).best[:1]:
                found.setdefault(str(one.plan), one)
    order = sorted(found.values(), key=lambda c: (c.seconds, str(c.plan)))
    return spaced(order, most)


def spaced(order: list[Candidate], most: int) -> list[Candidate]:
    """Return at most `most` plans in their order: the first plan of each mesh, and the fastest of the others."""
    firsts: dict[tuple[int, ...], Candidate] = {}
    for one in order:
        firsts.setdefault(one.mesh, one)
    chosen = [*firsts.values(), *(c for c in order if firsts[c.mesh] is not c)][:most]
    return sorted(chosen, key=order.index)


def case(name: str, machine: Machine, asked: Any) -> dict[str, Any]:
    """Measure one job on one number of processes."""
    made = JOBS[name]()
    n = machine.devices
    found = plans(PlanRequest.from_job(made, name, machine), asked.plans)
    got = time_plans(made, [c.plan for c in found], n, asked.rounds)
    took = [inf if isinstance(seconds, str) else seconds for seconds in got]
    meshes = [next(k for k, c in enumerate(found) if c.mesh == mesh) for mesh in dict.fromkeys(c.mesh for c in found)]
    best = min(range(len(found)), key=lambda k: took[k])
    return {
        "job": name, "processes": n, "plans": len(found), "choice": str(found[0].plan), "predicted": found[0].seconds,
        "measured": took[0], "best": str(found[best].plan), "least": took[best],
        "failed": {str(c.plan): why for c, why in zip(found, got) if isinstance(why, str)},
        "regret": took[0] / took[best] - 1, "regret_of_3": min(took[k] for k in meshes[:3]) / took[best] - 1,
        "order": spearman([c.seconds for c in found], took),
        "rows": [{"plan": str(c.plan), "predicted": c.seconds, "measured": t, "parts": c.estimate.parts}
                 for c, t in zip(found, took) if c.estimate],
    }  # fmt: skip


def machines(asked: Any, sizes: list[int]) -> Iterator[Machine]:
    """Yield the machine with each number of processes: as measured by `plait bench`, or as detected here."""
    for n in sizes:
        path = Path(asked.machines.replace("{}", str(n)))
        yield Machine.load(path) if path.exists() else read_machine("here").resize(n)


def show(row: dict[str, Any], every: bool) -> str:
    """Format one case as a line, and each of its plans as another."""
    text = (
        f"{row['job']:<5} × {row['processes']}  {row['choice']:<34} {1000 * row['predicted']:7.2f} {1000 * row['measured']:7.2f}   "
        f"{row['best']:<34} {1000 * row['least']:7.2f} {100 * row['regret']:6.1f} % {100 * row['regret_of_3']:6.1f} % {row['order']:6.2f}"
    )
    more = [f"         {r['plan']:<60} {1000 * r['predicted']:8.2f} {1000 * r['measured']:8.2f}" for r in row["rows"]]
    return "\n".join([text, *(more if every else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="mlp,conv,lstm,vit,unet,words")
    parser.add_argument("--nproc", default="2,3,4", help="numbers of processes")
    parser.add_argument(
        "--machines", default="machine{}.toml", help="files of `plait bench`, {} the number of processes"
    )
    parser.add_argument("--plans", type=int, default=12, help="at most so many in each case")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--every", action="store_true", help="show each plan")
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if not asked.json:
        print(
            f"{'case':<10} {'choice':<34} {'ms':>7} {'real':>7}   {'best':<34} {'real':>7} {'regret':>8} {'of 3':>8} {'order':>6}"
        )
    for machine, name in product(machines(asked, [int(n) for n in asked.nproc.split(",")]), asked.jobs.split(",")):
        rows.append(case(name, machine, asked))
        print(json.dumps(rows[-1]) if asked.json else show(rows[-1], asked.every), flush=True)
    if not asked.json:
        worst, tried = (max(row[key] for row in rows) for key in ("regret", "regret_of_3"))
        order = mean(row["order"] for row in rows)
        print(
            f"worst regret {100 * worst:.1f} %, when three are tried {100 * tried:.1f} % · rank correlation {order:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
