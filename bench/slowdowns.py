"""Injects twelve slowdowns into a small run, one at a time: does `plait report` name the cause first, and is the predicted gain reached?

Each job is trained with the slowdown, and reported. Then runs with and without the slowdown take turns. If the advice is another command
of `plait train`, that command is the run without it. Sleeps replace work, so that all slowdowns can be measured on a machine with fewer
cores than ranks: a layer sleeps for every sample, forward and twice as long backward. A slow link is simulated inside the ranks: a
message arrives at its sending time, plus its bytes over the rate of the link (one message at a time), plus the latency.

    python bench/slowdowns.py [--only NAME] [--rounds 3] [--steps 30] [--json]
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import inf
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import plait
from plait.cli.main import main as main_of_plait
from plait.launch import fork
from plait.planner.trial import WARMUP_STEPS
from plait.report.summary import read_metric_rows
from plait.tensors.transfers import ISSUING_PREFIXES

FILE = Path(__file__).resolve()


@dataclass(frozen=True)
class Slowdown:
    """A run, and the same run without the slowdown. `cause`: the cause that the report must name first. `slow`: words of the command that the
    run without it lacks. `advised`: the run without it is the command that the report advises."""

    name: str
    cause: str
    words: str
    slow: str = ""
    advised: bool = False


SLOWDOWNS = (
    Slowdown("slow rank", "slow rank", "--plan dp=2", "--job.late=1"),
    Slowdown("slow loader", "slow loader", "--plan dp=2 --job.loads=0.02", advised=True),
    Slowdown("link bandwidth", "slow link, bandwidth", "--plan fsdp=2 --job.width=256", "--job.rate=2e6"),
    Slowdown("link latency", "slow link, latency", "--plan fsdp=2", "--job.latency=0.08"),
    Slowdown("small batch", "small batch", "--plan dp=1 --batch 2 --job.each=0 --job.depth=24", advised=True),
    Slowdown("uneven stages", "uneven stages", "--plan 'pp=2 microbatches=8'", "--job.uneven=1"),
    Slowdown("synchronous save", "checkpoint", "--plan dp=2 --job.width=1024 --save-every 1", advised=True),
    Slowdown("too many micro-batches", "too many micro-batches", "--plan 'dp=1 microbatches=16' --job.each=0 --job.depth=24", advised=True),
    Slowdown("tp over the slow link", "tp over a slow link", "--plan tp=2 --job.latency=0.01 --job.each=0 --job.width=512 --batch 64", advised=True),
    Slowdown("Python in the step", "Python", f"--plan dp=2 --callbacks {FILE}:callbacks", advised=True),
    Slowdown("no overlap", "no overlap", "--plan dp=2 --job.width=1024 --job.depth=8 --job.rate=1e8 --job.each=6e-3 --job.scaled=1", "--job.early=1"),
    Slowdown("recompute where memory is free", "recompute", "--plan 'dp=2 activation_checkpointing=full'", advised=True),
)


# — the run —


class SlowLink:
    """Delays every message of this process as on a link of `rate` bytes/s with a latency, once all ranks have sent it."""

    def __init__(self) -> None:
        self.rate, self.latency, self.free = inf, 0.0, 0.0
        self.arrives = dict[int, tuple[Any, SimpleQueue[float]]]()
        for name in [n for n in vars(dist.ProcessGroup) if n.strip("_").startswith(ISSUING_PREFIXES) and not n.startswith("__")]:
            setattr(dist.ProcessGroup, name, self.sends(getattr(dist.ProcessGroup, name)))
        dist.Work.wait = self.waits(dist.Work.wait)

    def sends(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def send(group: Any, *given: Any, **more: Any) -> Any:
            work, sent, arrives = plain(group, *given, **more), max(map(_bytes, given), default=0), SimpleQueue[float]()

            def done(*future: Any) -> None:
                self.free = max(self.free, time.perf_counter()) + sent / self.rate
                arrives.put(self.free + self.latency)

            self.arrives[id(work)] = work, arrives
            try:
                work.get_future().add_done_callback(done)
            except RuntimeError:  # a message from one rank to another has no future
                done()
            return work

        return send

    def waits(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *given: Any, **more: Any) -> Any:
            done = plain(work, *given, **more)
            if (found := self.arrives.pop(id(work), None)) is not None:
                time.sleep(max(0.0, found[1].get() - time.perf_counter()))
            return done

        return wait


def _bytes(given: Any) -> int:
    return given.nbytes if isinstance(given, Tensor) else sum(map(_bytes, given)) if isinstance(given, list) else 0


def set_link(rate: float, latency: float) -> None:
    """Slow down the link of this process, or restore it. It is hooked once in a process, even if this file is imported several times."""
    if rate or latency:
        dist.slow_link = getattr(dist, "slow_link", None) or SlowLink()
    if (link := getattr(dist, "slow_link", None)) is not None:
        link.rate, link.latency = rate or inf, latency


class Layer(nn.Module):
    """Sleeps `each` seconds for every sample forward, and twice as long backward; on rank 1 for an additional `late` times as long."""

    def __init__(self, width: int, each: float, late: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.each, self.late = each, late

    def forward(self, x: Tensor, up: Tensor | None = None, down: Tensor | None = None) -> Tensor:
        ranks = dist.group.WORLD  # None while the model is analyzed
        part = self.up.weight.numel() / x.shape[-1] ** 2  # of the layer on this rank
        seconds = 0.0 if ranks is None else self.each * part * len(x) * (1 + self.late * (ranks.rank() == 1))
        time.sleep(seconds)
        normed = self.norm(x)
        made = torch.tanh(self.up(normed) if up is None else nn.functional.linear(normed, up, self.up.bias))
        made = self.down(made) if down is None else nn.functional.linear(made, down, self.down.bias)
        if made.requires_grad and seconds:
            made.register_hook(lambda gradient: time.sleep(2 * seconds))
        return x + made


class Net(nn.Module):
    """`scaled`: one factor multiplies the layers' weights, each in its layer's turn or, with `early`, all before the first layer."""

    def __init__(self, layers: list[Layer], scaled: bool, early: bool):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale, self.scaled, self.early = nn.Parameter(torch.ones(())), scaled, early
        self.head = nn.Linear(layers[0].up.in_features, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = map(self.weights, self.layers)
        for layer, scaled in zip(self.layers, list(weights) if self.early else weights):
            x = layer(x, *scaled)
        return self.head(x).squeeze(-1) * (1 if self.scaled else self.scale)

    def weights(self, layer: Layer) -> list[Tensor]:
        return [self.scale * w for w in (layer.up.weight, layer.down.weight)] if self.scaled else []


class Samples:
    def __init__(self, width: int, seconds: float):
        self.width, self.seconds = width, seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        x = torch.randn(self.width, generator=torch.Generator().manual_seed(i))
        return x, x.sum().sign()


def job(
    width: int = 64, depth: int = 4, each: float = 0.003, late: float = 0.0, loads: float = 0.0, rate: float = 0.0, latency: float = 0.0,
    uneven: int = 0, scaled: int = 0, early: int = 0, batch: int = 16,
) -> plait.Job:  # fmt: skip
    """The job. `each`: seconds of a layer for a sample; `late`: additional time on rank 1; `loads`: seconds to read a sample."""
    set_link(rate, latency)
    return plait.Job(
        model=lambda: Net([Layer(width, each, late) for _ in range(depth)], bool(scaled), bool(early)), loss=mse_loss,
        data=lambda: Samples(width, loads), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), batch=batch, steps=40,
        stages=("layers.3",) if uneven else None,
    )  # fmt: skip


def callbacks() -> list[plait.Callback]:
    """Return a callback that sleeps after every step."""

    class Slow(plait.Callback):
        def on_step(self, *given: Any) -> None:
            time.sleep(0.1)

    return [Slow()]


# — the bench —


def command(words: list[str]) -> str:
    """Return the output of a plait command; raises SystemExit if it fails."""
    with redirect_stdout(StringIO()) as out, patch.object(sys, "argv", ["plait", *words]):  # a run records its command
        code = main_of_plait(words)
    if code:
        raise SystemExit(f"plait {shlex.join(words)}: exit code {code}")
    return out.getvalue()


def per_sample(words: list[str], steps: int, folder: str) -> float:
    """Return the seconds of a sample in a training, after the warm-up steps."""
    command([*words, f"--steps={steps}", f"--runs={folder}"])
    rows = [row for row in read_metric_rows(Path(folder) / "latest" / "metrics.jsonl") if "loss" in row]
    return sum(row["seconds"] for row in rows[WARMUP_STEPS:]) / (rows[-1]["samples"] - rows[WARMUP_STEPS - 1]["samples"])


def posed(slowdown: Slowdown, rounds: int, steps: int) -> dict[str, Any]:
    """Return the report's advice for a run with the slowdown, and the fraction of a sample's time that is gained without it."""
    words = shlex.split(f"train {FILE}:job --check none {slowdown.words}")
    slow, gains = [*words, *slowdown.slow.split()], list[float]()
    for k in range(rounds):
        with TemporaryDirectory() as folder:
            before = per_sample(slow, steps, folder)
            if k == 0:
                found = json.loads(command(["report", f"{folder}/latest", "--json"]))
                advice = found["advice"] or [{"cause": "none", "gain": 0.0, "what": "", "command": ""}]
                mine = next((a for a in advice if a["cause"] == slowdown.cause), None)
                changed = re.sub(r"--(runs|steps)[ =]\S+", "", mine["command"]) if mine and slowdown.advised else ""
                fast = shlex.split(changed)[1:] if changed else words
            gains.append(1 - per_sample(fast, steps, folder) / before if mine or not slowdown.advised else 0.0)
    return {
        "slowdown": slowdown.name, "cause": advice[0]["cause"], "first": advice[0]["cause"] == slowdown.cause,
        "predicted": mine["gain"] if mine else 0.0, "measured": median(gains), "gains": gains,
        "advice": [(a["cause"], round(a["gain"], 3)) for a in advice], "change": shlex.join(fast), "mean": found["runs"][0]["split"]["mean"],
        "expected": found["runs"][0]["predicted"]["parts"],
    }  # fmt: skip


def row(found: dict[str, Any]) -> str:
    """Format a row of the table."""
    measured, predicted = found["measured"], found["predicted"]
    wrong, right = abs(predicted - measured), "yes" if found["first"] else "no"
    near = "yes" if wrong <= 0.15 * abs(measured) else "in points" if wrong <= 0.15 else "no"
    return f"| {found['slowdown']} | {found['cause']} | {right} | {100 * predicted:.0f} % | {100 * measured:.0f} % | {near} |"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    fork.stay_forkable()
    print("| slowdown | first cause | right | predicted gain | measured gain | within 15 % |\n|---|---|---|--:|--:|---|", flush=True)
    for each in SLOWDOWNS:
        if not asked.only or each.name in asked.only:
            found = posed(each, asked.rounds, asked.steps)
            print(row(found), flush=True)
            if asked.json:
                print(json.dumps(found), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
