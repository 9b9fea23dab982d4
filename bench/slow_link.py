"""Compares ways to synchronize over slow links and unequal ranks: the loss of each after the same time, and the map's prediction.

The job is the GPT of `examples/stdlib_gpt`, small, on the standard library's source, for four ranks and a batch of 32. Every arm
runs `Engine` under a plan, and its loss on held-out text is measured during training. Arms whose result does not depend on the arrival
times of messages are trained once per seed, recorded, and replayed on the clock of `bench/virtual_clock.py` in every setting:

    links     1/20 and 1/100 of the loopback bandwidth here, with 0.1 and 10 ms a hop
    ranks     all equal, and one that takes three times as long to compute

Time is therefore that of modeled links, with measured computation; `bench/shaped_link.py` compares the clock with real links that the
kernel shapes. All arms have the same constant learning rate, so that a loss does not depend on the planned length of the run. `one` is
a single rank with a quarter of the samples of each step, for four times the steps. The target is a third of the way from the loss of
`one` to that of `dp`, after the common number of steps.

    python bench/slow_link.py [--quick] [--json] [--out FILE.svg] [--keep FOLDER]
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
from slow_link_table import picture, table
from torch import Tensor
from torch.nn.functional import cross_entropy
from virtual_clock import Played, Recorded, Trace, Wire, replay

from plait.config.errors import PlaitError
from plait.config.hardware import Link
from plait.config.job import Evaluate, Job, load_job
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.detect import read_machine
from plait.launch.place import Place
from plait.parallel.apply_order import ORDER
from plait.planner.exactness import MEASURED_PROGRESS, estimate_progress
from plait.planner.plan_request import PlanRequest
from plait.planner.sync_map import SyncJob, SyncWay, compute_sync_map

RANKS, BATCH, LENGTH, WIDTH, DEPTH = 4, 32, 64, 64, 2
RATE = 3e-3
HELD_OUT = 256
"""Windows of text for evaluation only."""
SLOW = 3.0
TARGET = 1 / 3
"""The target that all arms should reach; an arm that misses it has no time."""
SAME = 2e-3
"""Held-out losses of two exact plans in fp32 differ by less than this."""
WITHIN = 0.10
"""A predicted winner counts as right if its time exceeds that of the measured winner by at most this fraction."""
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "stdlib_gpt" / "job.py"


@dataclass(frozen=True)
class Arm:
    """A way to train. `alone`: one rank, a quarter of the batch. `recorded`: its result does not depend on when messages arrive."""

    name: str
    plan: str
    alone: bool = False
    recorded: bool = True
    slow: str = ""
    """The plan for the settings with one slow rank, if it is different."""


def arms(steps: int, every: int = 4, outer: tuple[float, float] = (0.7, 0.9)) -> tuple[Arm, ...]:
    """Return all arms, for runs of `steps` steps."""
    lr, momentum = outer
    diloco = f"replica_groups=4 outer_sync=diloco sync_every={every} outer_lr={lr} outer_momentum={momentum}"
    return (
        Arm("one", "dp=1", alone=True),
        Arm("dp", "dp=4"),
        Arm("shares", "dp=4", slow="dp=4 batch_split=3:3:3:1"),
        Arm("bf16", "dp=4 grad_compression=bf16"),
        Arm("int8", "dp=4 grad_compression=int8"),
        Arm("powersgd", "dp=4 grad_compression=powersgd compression_rank=4"),
        Arm("post-local", f"replica_groups=4 sync_every={every} warmup_sync_steps={steps // 2}"),
        Arm("local", f"replica_groups=4 sync_every={every}"),
        Arm("diloco", diloco),
        Arm("streaming", f"{diloco} num_fragments=3 fragment_delay=2"),
        Arm("async", "replica_groups=4 outer_sync=async staleness=2", recorded=False),
    )


def not_there(job: Job, plan: Plan) -> str:
    """Return why plait cannot run a plan yet, or an empty string. Without this check, a key without a strategy would be ignored silently."""
    try:
        check_plan(job, plan)
    except PlaitError as error:
        return error.problems[0].what
    keys = {"grad_compression": "grad_compression", "batch_split": "batch_split", "replica_groups": "outer_sync"}
    for key, word in keys.items():
        if key in plan.changed():
            without = replace(plan, **{key: getattr(Plan(), key)})
            if [s for s in ORDER if s.is_enabled(plan)] == [s for s in ORDER if s.is_enabled(without)]:
                return f"{word}={getattr(plan, word)} is not there: no strategy takes it up"
    return ""


class Part:
    """A subset of a data set."""

    def __init__(self, whole: Any, first: int, last: int):
        self.whole, self.first, self.last = whole, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, i: int) -> Any:
        return self.whole[self.first + i]


def loss_of(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the loss of every sample."""
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
    """The course of an arm: losses by step, and its trace."""

    losses: list[tuple[int, float]]
    run: Recorded
    """The trace, scaled to a machine with the same yardstick time as here."""

    def smooth(self) -> list[tuple[int, float]]:
        """Return losses that never rise: the best so far."""
        best, found = inf, []
        for step, loss in self.losses:
            best = min(best, loss)
            found.append((step, best))
        return found

    def reached(self, target: float, played: Played) -> float:
        """Return the seconds until the loss reaches the target, interpolated linearly between two evaluations; infinite if it never does."""
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
        """Return the completed steps, and the last loss measured by then."""
        done = sum(end <= seconds for end in played.ends)
        return done, next((loss for step, loss in reversed(self.losses) if step <= done), self.losses[0][1])


def train(place: Place, job: Job, plan: str, every: int, folder: Path) -> dict[str, Any]:
    """Run one rank."""
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


def course(arm: Arm, plan: str, seed: int, steps: int, every: int, keep: Path | None = None) -> Course:
    """Train an arm. Raises if plait rejects its plan. `keep`: the folder in which courses are saved and from which they are reused."""
    file = keep / f"{arm.name}-{plan.replace(' ', '_').replace('/', '')}-{seed}-{steps}.json" if keep else None
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        return Course([(s, x) for s, x in kept["losses"]], Recorded(kept["steps"], kept["yardsticks"]))
    trained = _trained(arm, plan, seed, steps, every)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        run = trained.run
        file.write_text(json.dumps({"losses": trained.losses, "steps": run.steps, "yardsticks": run.yardsticks}))
    return trained


def _trained(arm: Arm, plan: str, seed: int, steps: int, every: int) -> Course:
    job = made(seed, steps, BATCH // RANKS if arm.alone else BATCH)
    if why := not_there(job, Plan.parse(plan)):
        raise LookupError(why)
    world = Plan.parse(plan).world
    with tempfile.TemporaryDirectory() as root:
        target = partial(train, job=job, plan=plan, every=every, folder=Path(root))
        listener = fork.Listener(
            lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" and "corpus" not in m["text"] else None
        )
        found = fork.run_ranks(target, world, listener)
        recorded = Recorded.load([Path(root) / f"{rank}.json" for rank in range(world)])
    return Course([(s, x) for s, x in found[0]["losses"]], recorded)


# — settings and predictions —


@dataclass(frozen=True)
class Setting:
    """A link, and the speeds of the ranks."""

    fraction: int
    """The link has 1/fraction of the loopback bandwidth."""
    latency: float
    slow: float
    wire: Wire

    @property
    def slower(self) -> tuple[float, ...]:
        """Return the slowdown of each rank."""
        return (1.0,) * (RANKS - 1) + (self.slow,)

    @property
    def name(self) -> str:
        return f"1/{self.fraction}, {1e3 * self.latency:g} ms, {'even' if self.slow == 1 else f'one {self.slow:g}× slower'}"


def settings(loopback: float, quick: bool) -> Iterator[Setting]:
    """Yield all settings."""
    for fraction, latency, slow in product((20, 100), (1e-4,) if quick else (1e-4, 1e-2), (1.0, SLOW)):
        yield Setting(fraction, latency, slow, Wire(loopback / fraction, latency))


def loopback(place: Place, size: int = 4 << 20, times: int = 30) -> dict[str, Any]:
    """Measure the bytes per second that a rank forwards in an all-reduce here. The fastest try counts, because other load only slows it."""
    torch.set_num_threads(1)
    place.connect(torch.device("cpu"))
    x, took = torch.ones(size // 4), []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        took.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return {"rate": Wire.passed("all_reduce", size, RANKS) / min(took)}


def predictions(
    asked: PlanRequest, setting: Setting, arms: Sequence[Arm], computing: float
) -> dict[str, tuple[float, float, float]]:
    """Predict for each arm the seconds of a step, the bytes that a rank sends in it, and the progress per sample."""
    ways = [
        SyncWay(arm.name, Plan.parse(arm.plan if setting.slow == 1 or not arm.slow else arm.slow))
        for arm in arms
        if not arm.alone
    ]
    late = SyncJob(asked.pace, BATCH, asked.job.steps, computing)
    bits = 8 * setting.wire.rate
    cell = compute_sync_map(late, ways, (bits,), (setting.slow,), setting.wire.latency)[0][0]
    sent = {way.name: late.sum_sent(way.plan) for way in ways}
    found = {way.name: (cell.seconds[way.name], sent[way.name], estimate_progress(way.plan)) for way in ways}
    return found | {"one": (computing, 0.0, MEASURED_PROGRESS["one"])}


@dataclass(frozen=True)
class Size:
    """The size of a bench."""

    steps: int
    seeds: tuple[int, ...]
    every: int
    """Steps between two synchronizations of groups."""
    evaluate: int
    grid: tuple[tuple[float, float], ...]
    """Outer learning rates and momenta, tuned on a separate seed."""
    only: tuple[str, ...] = ()
    keep: Path | None = None
    loopback: float = 0.0
    """The assumed bandwidth of loopback in MB/s; 0: measure it."""


FULL = Size(400, (0, 1), 4, 20, ((0.7, 0.9), (0.7, 0.5), (0.4, 0.5), (0.7, 0.2), (1.0, 0.2)))
QUICK = Size(8, (0,), 4, 4, (), ("one", "dp", "local"))


def tuned(size: Size, say: Callable[[str], None]) -> tuple[float, float]:
    """Return the outer rate and momentum with the lowest loss after half of the steps, on a seed that is not measured."""
    found = {}
    for outer in size.grid:
        arm = next(arm for arm in arms(size.steps, size.every, outer) if arm.name == "diloco")
        found[outer] = course(arm, arm.plan, 100, size.steps // 2, size.steps // 4, size.keep).losses[-1][1]
        say(f"tune     outer_lr={outer[0]} outer_momentum={outer[1]}: {found[outer]:.4f}")
    return min(found, key=lambda outer: found[outer], default=(0.7, 0.9))


def courses(
    size: Size, wanted: Sequence[Arm], say: Callable[[str], None]
) -> tuple[dict[tuple[str, int, bool], Course], dict[str, str]]:
    """Train all arms. Returns the courses by arm, seed and whether the plan is that for a slow rank, and the reasons of missing arms."""
    found: dict[tuple[str, int, bool], Course] = {}
    missing: dict[str, str] = {}
    for seed, arm in product(size.seeds, wanted):
        start = time.monotonic()
        try:
            if arm.slow:
                found |= shared(arm, found["dp", seed, False], seed, size)
            elif not arm.recorded:
                if why := not_there(made(seed, size.steps), Plan.parse(arm.plan)):
                    raise LookupError(why)
                continue
            else:
                steps = size.steps * (RANKS if arm.alone else 1)
                found[arm.name, seed, False] = course(arm, arm.plan, seed, steps, size.evaluate, size.keep)
        except LookupError as error:
            missing[arm.name] = str(error)
            continue
        say(
            f"trained  {arm.name:<11} seed {seed}: loss {found[arm.name, seed, False].losses[-1][1]:.4f}, {time.monotonic() - start:.0f} s"
        )
    sticks = [statistics.median(y) for c in found.values() for y in c.run.yardsticks]
    unit = statistics.median(sticks)
    return {key: replace(c, run=c.run.in_yardsticks(unit)) for key, c in found.items()}, missing


def shared(arm: Arm, dp: Course, seed: int, size: Size) -> dict[tuple[str, int, bool], Course]:
    """Return the courses of local batches by speed: those of dp if all ranks are equal, else a few recorded steps whose losses equal those of dp."""
    few = min(size.steps, 2 * size.evaluate)
    got = course(arm, arm.slow, seed, few, size.evaluate, size.keep)
    known = dict(dp.losses)
    if any(abs(loss - known[step]) > SAME for step, loss in got.losses):
        raise RuntimeError(f"{arm.slow} is another training than {arm.plan}: {got.losses} and {dp.losses[:3]}")
    return {(arm.name, seed, False): dp, (arm.name, seed, True): Course(dp.losses, got.run.repeated(size.steps))}


@dataclass(frozen=True)
class Bench:
    """The trained courses, and the values to measure them by."""

    size: Size
    found: dict[tuple[str, int, bool], Course]
    served: dict[tuple[str, int, str], tuple[Course, Played]]
    """The courses of arms that depend on the setting, by arm, seed and setting."""
    there: tuple[Arm, ...]
    target: dict[int, float]
    computing: float
    asked: PlanRequest

    def of(self, arm: Arm, seed: int, setting: Setting) -> tuple[Course, Played] | None:
        """Return an arm in a setting."""
        if not arm.recorded:
            return self.served.get((arm.name, seed, setting.name))
        trained = self.found[arm.name, seed, setting.slow > 1 and bool(arm.slow)]
        return trained, replay(trained.run, setting.wire, (1.0,) if arm.alone else setting.slower)

    def row(self, setting: Setting) -> dict[str, Any]:
        """Return the row of one setting: every arm measured and predicted, and the winners."""
        told = predictions(self.asked, setting, self.there, self.computing)
        every = {(arm.name, seed): self.of(arm, seed, setting) for arm in self.there for seed in self.size.seeds}
        ended = (got[1].ends[-1] for (name, _), got in every.items() if got is not None and name not in self.late)
        until = min(ended)
        found = {}
        for arm in self.there:
            each = []
            for seed in self.size.seeds:
                if (got := every[arm.name, seed]) is not None:
                    (trained, played), target = got, self.target[seed]
                    step = played.ends[-1] / len(played.ends)
                    each.append((step, *trained.after(until, played), trained.reached(target, played), played.sent))
            columns = [statistics.mean(column) for column in zip(*each)]
            values = (*columns, *told[arm.name])
            found[arm.name] = dict(zip(NAMES, values, strict=True))
        return {
            "setting": setting.name, "rate": setting.wire.rate, "latency": setting.latency, "slow": setting.slow, "seconds": until,
            "arms": found, "winners": {
                "samples": judged(found, "step"), "loss": judged(found, "to_target"),
                "loss, all ranks": judged({name: a for name, a in found.items() if name != "one"}, "to_target"),
            },
        }  # fmt: skip

    @property
    def late(self) -> set[str]:
        """Return the names of arms that are not recorded."""
        return {arm.name for arm in self.there if not arm.recorded}

    def worth(self, arm: Arm) -> float | None:
        """Return the measured progress per sample: the steps that dp needs for the arm's final loss, over the steps of the arm."""
        if not arm.recorded:
            return None
        parts, steps = [], self.size.steps
        for seed in self.size.seeds:
            clock = Played([float(i + 1) for i in range(steps)], 0.0)
            end = dict(self.found[arm.name, seed, False].smooth())[steps]
            parts.append(min(1.0, self.found["dp", seed, False].reached(end, clock) / steps))
        return statistics.mean(parts)


NAMES = ("step", "updates", "loss", "to_target", "sent", "predicted_step", "predicted_sent", "predicted_progress")


def judged(arms: dict[str, dict[str, float]], what: str) -> dict[str, Any]:
    """Whether the predicted fastest arm is the fastest, or nearly. For the same samples `one` does not count, because it has fewer."""
    among = {name: a for name, a in arms.items() if what == "to_target" or name != "one"}
    worth = {name: a["predicted_progress"] if what == "to_target" else 1.0 for name, a in among.items()}
    best = min(among, key=lambda name: among[name][what])
    guess = min(among, key=lambda name: among[name]["predicted_step"] / worth[name])
    over = among[guess][what] / among[best][what] if among[best][what] < inf else 1.0
    return {"measured": best, "predicted": guess, "over": over, "right": over <= 1 + WITHIN}


def run(size: Size, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the complete bench."""
    rate = 1e6 * size.loopback or fork.run_ranks(loopback, RANKS)[0]["rate"]
    say(f"loopback {rate / 1e6:.0f} MB/s a rank")
    outer = tuned(size, say)
    wanted = [arm for arm in arms(size.steps, size.every, outer) if not size.only or arm.name in size.only]
    found, missing = courses(size, wanted, say)
    target = {seed: goal(found, seed, size) for seed in size.seeds}
    computing = statistics.median(found["one", seed, False].run.computing for seed in size.seeds)
    links = (Link("link", None, rate, 1e-4, "loopback"),)
    machine = replace(read_machine("here").resize(RANKS), links=links, collectives=(), loaders=())
    asked = PlanRequest.from_job(made(0, size.steps), "stdlib_gpt", machine, split=False)
    every = list(settings(rate, quick))
    served = {}
    for arm in wanted:
        if arm.name not in missing and not arm.recorded:
            start = time.monotonic()
            served |= async_courses(arm, every, (size, target, computing))
            say(f"trained  {arm.name:<11} in {len(every)} settings, {time.monotonic() - start:.0f} s")
    there = tuple(arm for arm in wanted if arm.name not in missing)
    bench = Bench(size, found, served, there, target, computing, asked)
    return {
        "ranks": RANKS, "batch": BATCH, "steps": size.steps, "seeds": size.seeds, "every": size.every, "outer": outer,
        "loopback": rate, "computing": computing, "target": target, "missing": missing, "plans": {a.name: a.plan for a in there},
        "losses": {a.name: [dict(found[a.name, s, False].losses)[size.steps] for s in size.seeds] for a in there if a.recorded},
        "progress": {a.name: bench.worth(a) for a in there}, "settings": [bench.row(setting) for setting in every],
    }  # fmt: skip


def async_courses(
    arm: Arm, settings: Sequence[Setting], how: tuple[Size, dict[int, float], float]
) -> dict[tuple[str, int, str], tuple[Course, Played]]:
    """Train an arm that depends on the setting in every setting, with the first seed."""
    from async_course import play

    size, target, computing = how
    seed, plan = size.seeds[0], Plan.parse(arm.plan)

    def part(place: Place) -> dict[str, Any]:
        torch.set_num_threads(1)
        mine = [s for i, s in enumerate(settings) if i % place.world == place.rank]
        beat = lambda step: place.beat(step, "reduce")  # noqa: E731
        found = {}
        for s in mine:
            how = s.wire, s.slower, computing
            found[s.name] = play(made(seed, size.steps), plan, how, (target[seed], size.evaluate), beat)
        return found

    found = {}
    for got in fork.run_ranks(part, 2, uniform=False):
        for name, (losses, ends, sent) in got.items():
            found[arm.name, seed, name] = (Course([(s, x) for s, x in losses], Recorded([], [])), Played(ends, sent))
    return found


def goal(found: dict[tuple[str, int, bool], Course], seed: int, size: Size) -> float:
    """Return the target: `TARGET` of the way from the loss of `one` after the steps of the bench to that of `dp`."""
    one, dp = (dict(found[name, seed, False].smooth())[size.steps] for name in ("one", "dp"))
    return one + TARGET * (dp - one)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="also draw it there")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what was trained, and take it from there again"
    )
    parser.add_argument("--loopback", type=float, default=0.0, metavar="MB/S", help="taken for measured")
    asked = parser.parse_args()
    fork.stay_forkable()
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    result = run(replace(QUICK if asked.quick else FULL, keep=asked.keep, loopback=asked.loopback), asked.quick, say)
    if asked.out:
        asked.out.write_text(picture(result))
    print(json.dumps(result) if asked.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
