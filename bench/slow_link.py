"""Ways to synchronise over slow links and unequal ranks: what each reaches in the same time, and what the map had predicted.

The job is the GPT of `examples/stdlib_gpt`, small, on the standard library's source, for four ranks of one batch of 32. Every arm
is `Engine` under a plan; its loss on held-out text is measured as training goes on. Arms whose technique does not depend on
when messages arrive are trained once for each seed, recorded, and played on the clock of `bench/virtual_clock.py` in every setting:

    links     1/20 and 1/100 of what loopback reaches here, with 0.1 and 10 ms a hop
    ranks     all equal, and one that takes three times as long to compute

Time is therefore that of a model of the links, with computing that was measured; `--shaped` runs two arms over real links between
network namespaces, shaped by the kernel, and compares. All arms have the same constant learning rate, so that a loss does not depend
on how long a run would have gone on. `one` is one rank alone with a quarter of the samples of each step. The target is the loss
halfway between those of `one` and `dp` after `TARGET` of the steps.

    python bench/slow_link.py [--quick] [--json] [--out FILE.svg] [--shaped]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from virtual_clock import Played, Recorded, Trace, Wire, replay

from plait.config.errors import PlaitError
from plait.config.job import Evaluate, Job, load_job
from plait.config.network import Link
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.detect import read_machine
from plait.launch.place import Place
from plait.parallel.order import ORDER
from plait.planner.exactness import progress
from plait.planner.late_map import LateJob, SyncWay, late_map
from plait.planner.question import PlanRequest, sized

RANKS, BATCH, LENGTH, WIDTH, DEPTH = 4, 32, 64, 64, 2
RATE = 3e-3
TARGET = 0.4
HELD_OUT = 256
"""Windows of text that no arm trains on."""
SLOW = 3.0
WITHIN = 0.10
"""A predicted winner that takes at most so much longer than the measured one is right."""
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "stdlib_gpt" / "job.py"


@dataclass(frozen=True)
class Arm:
    """A way to train. `alone`: one rank, a quarter of the batch. `recorded`: its course does not depend on when messages arrive."""

    name: str
    plan: str
    alone: bool = False
    recorded: bool = True
    slow: str = ""
    """The plan where one rank is slow, if it is another one."""


def arms(steps: int, every: int = 8, outer: tuple[float, float] = (0.7, 0.9)) -> tuple[Arm, ...]:
    """All of them, for runs of so many steps."""
    lr, momentum = outer
    diloco = f"replica_groups=4 sync=diloco every={every} outer_lr={lr} outer_momentum={momentum}"
    return (
        Arm("one", "dp=1", alone=True),
        Arm("dp", "dp=4"),
        Arm("shares", "dp=4", slow="dp=4 batch_shares=3:3:3:1"),
        Arm("bf16", "dp=4 compress=bf16"),
        Arm("int8", "dp=4 compress=int8"),
        Arm("powersgd", "dp=4 compress=powersgd compress_rank=4"),
        Arm("post-local", f"replica_groups=4 every={every} start_local={steps // 2}"),
        Arm("local", f"replica_groups=4 every={every}"),
        Arm("diloco", diloco),
        Arm("streaming", f"{diloco} fragments=3 fragment_delay=2"),
        Arm("async", "replica_groups=4 sync=async server_update=nesterov staleness=9", recorded=False),
    )


def not_there(job: Job, plan: Plan) -> str:
    """Why the product cannot run a plan yet; nothing when it can. A key that no strategy takes up would be passed over in silence."""
    try:
        check_plan(job, plan)
    except PlaitError as error:
        return error.problems[0].what
    keys = {"compress": "compress", "batch_shares": "batch_shares", "replica_groups": "sync"}
    for key, word in keys.items():
        if key in plan.changed():
            without = replace(plan, **{key: getattr(Plan(), key)})
            if [s for s in ORDER if s.wanted(plan)] == [s for s in ORDER if s.wanted(without)]:
                return f"{word}={getattr(plan, word)} is not there: no strategy takes it up"
    return ""


class Part:
    """Some of the samples of a data set."""

    def __init__(self, whole: Any, first: int, last: int):
        self.whole, self.first, self.last = whole, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, i: int) -> Any:
        return self.whole[self.first + i]


def loss_of(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Of every sample."""
    return {"loss": cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)}


def made(seed: int, steps: int, batch: int = BATCH) -> Job:
    """The job."""
    arguments = {"depth": DEPTH, "width": WIDTH, "length": LENGTH, "lr": RATE, "batch": batch, "steps": steps}
    job = load_job(str(EXAMPLE), {name: str(value) for name, value in arguments.items()})
    whole = job.data()
    train = len(whole) - HELD_OUT
    warm = 20 * batch
    return replace(
        job, seed=seed, data=lambda: Part(whole, 0, train), schedule=lambda samples: min(1.0, (samples + batch) / warm),
        evaluate=Evaluate(data=lambda: Part(whole, train, len(whole)), metrics=loss_of),
    )  # fmt: skip


# — training, recorded —


@dataclass(frozen=True)
class Course:
    """What an arm did: losses by step, and its trace."""

    losses: list[tuple[int, float]]
    run: Recorded
    """With computing as on a machine whose yardstick takes as long as here."""

    def smooth(self) -> list[tuple[int, float]]:
        """Losses that never rise: the best so far."""
        best, found = inf, []
        for step, loss in self.losses:
            best = min(best, loss)
            found.append((step, best))
        return found

    def reached(self, target: float, played: Played) -> float:
        """Seconds until the loss is at the target, in a straight line between two evaluations; infinite where it never is."""
        before = None
        for step, loss in self.smooth():
            if loss <= target:
                if before is None or before[1] <= target:
                    return played.at(step)
                part = (before[1] - target) / (before[1] - loss)
                return played.at(before[0]) + part * (played.at(step) - played.at(before[0]))
            before = step, loss
        return inf

    def after(self, seconds: float, played: Played) -> tuple[int, float]:
        """Steps done, and the last loss that was measured by then."""
        done = sum(end <= seconds for end in played.ends)
        return done, next((loss for step, loss in reversed(self.losses) if step <= done), self.losses[0][1])


def train(place: Place, job: Job, plan: str, every: int, folder: Path) -> dict[str, Any]:
    """One rank's part."""
    torch.set_num_threads(1)
    with Trace() as trace, Engine(job, plan, place=place, device="cpu", directory=folder / "none") as engine:
        losses = [(0, engine.evaluate()["loss"])]
        for batch in engine.batches():
            trace.begin()
            step = engine.step(batch)
            trace.end()
            if step.step % every == 0:
                losses.append((step.step, engine.evaluate()["loss"]))
        trace.save(folder / f"{place.rank}.json")
    return {"losses": losses}


def course(arm: Arm, plan: str, seed: int, steps: int, every: int) -> Course:
    """Train an arm. It is not there when the product refuses its plan."""
    job = made(seed, steps, BATCH // RANKS if arm.alone else BATCH)
    if why := not_there(job, Plan.parse(plan)):
        raise LookupError(why)
    world = Plan.parse(plan).world
    with tempfile.TemporaryDirectory() as root:
        target = partial(train, job=job, plan=plan, every=every, folder=Path(root))
        listener = fork.Listener(lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" and "corpus" not in m["text"] else None)
        found = fork.run(target, world, listener)
        recorded = Recorded.load([Path(root) / f"{rank}.json" for rank in range(world)])
    return Course([(s, x) for s, x in found[0]["losses"]], recorded)


# — settings and predictions —


@dataclass(frozen=True)
class Setting:
    """A link, and how unequal ranks are."""

    fraction: int
    """The link has 1/fraction of what loopback reaches."""
    latency: float
    slow: float
    wire: Wire

    @property
    def slower(self) -> tuple[float, ...]:
        """How many times as long each rank takes."""
        return (1.0,) * (RANKS - 1) + (self.slow,)

    @property
    def name(self) -> str:
        return f"1/{self.fraction}, {1e3 * self.latency:g} ms, {'even' if self.slow == 1 else f'one {self.slow:g}× slower'}"


def settings(loopback: float, quick: bool) -> Iterator[Setting]:
    """All of them."""
    for fraction, latency, slow in product((20, 100), (1e-4,) if quick else (1e-4, 1e-2), (1.0, SLOW)):
        yield Setting(fraction, latency, slow, Wire(loopback / fraction, latency))


def loopback(place: Place, size: int = 4 << 20, times: int = 8) -> dict[str, Any]:
    """Bytes a second that a rank passes on in an all-reduce here, with nothing else to do."""
    torch.set_num_threads(1)
    place.connect(torch.device("cpu"))
    x, took = torch.ones(size // 4), []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        took.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return {"rate": Wire.passed("all_reduce", size, RANKS) / statistics.median(took)}


def predictions(job: Job, setting: Setting, arms: Sequence[Arm], computing: float) -> dict[str, tuple[float, float, float]]:
    """Of each arm: predicted seconds of a step, bytes that a rank sends in one, and what a sample is worth."""
    link = Link("link", None, setting.wire.rate, setting.wire.latency, "loopback")
    machine = replace(sized(read_machine("here"), RANKS), links=(link,), collectives=(), loaders=())
    asked = PlanRequest.of(job, "stdlib_gpt", machine, split=False)
    ways = [SyncWay(arm.name, Plan.parse(arm.plan if setting.slow == 1 or not arm.slow else arm.slow)) for arm in arms if not arm.alone]
    late = LateJob(asked.pace, BATCH, job.steps, computing)
    bits = 8 * setting.wire.rate
    cell = late_map(late, ways, (bits,), (setting.slow,), setting.wire.latency)[0][0]
    sent = {way.name: late.sent(way.plan) for way in ways}
    found = {way.name: (cell.seconds[way.name], sent[way.name], progress(way.plan)) for way in ways}
    return found | {"one": (computing, 0.0, 1 / RANKS)}
