"""Compares plait's step time with the same step by hand, with Accelerate, with Fabric, and without communication.

All variants live in the same forked processes and take steps in turn, in an order shuffled every round. All ranks start a step
together, and its time is that of the slowest rank. plait's time is divided by the other variant's in the *same* round, so that
other load of the machine affects both sides of the ratio. The output is the median ratio with its quartiles in brackets. A step has
all parts of a real one: fetch and collate the batch, set the learning rate, forward, backward, sum of gradients, clipping, fused
AdamW, loss.item(). Every process has one thread (--threads): with more, small operators measure OpenMP waiting for a busy core.

    plait             Engine.batches() and Engine.step: also the global loss, gradient norm and time spans
    plait train       the same with `plait.engine.metrics.Recorder` writing metrics and events (but no checkpoint)
    hand-written      plain PyTorch, on two processes in DistributedDataParallel with the options in DDP below
    Accelerate        accelerator.prepare(model, optimizer, loader), .backward, .clip_grad_norm_
    Fabric            fabric.setup, .setup_dataloaders, .backward, .clip_gradients
    no communication  the hand-written loop on each rank's local batch without DDP: a bound, not the same training

All start from the same weights, see the same samples and make the same choices (DDP's options too). Before timing, their global
mean losses of the first three steps are compared, which depend on all previous gradients and updates. `gpt` and `cnn` are the jobs
in examples/. In `cnn` a GroupNorm replaces each BatchNorm2d, because torch's SyncBatchNorm does not run on CPUs; `cnn-bn` keeps
them and uses plait's own in all variants. `cnn-augment` is `cnn` with its augmentation, for which only plait seeds the generators
sample by sample, so losses may differ there. Data sets are truncated to full global batches.

``--start`` measures a run of one step from start to end, with the job check and without, in turn. ``--lost`` measures the cost of readiness
for a lost rank: a run with in-memory snapshots against one without, in turn. It measures the time of the steps, and the ranks' processor
time, which other load changes less. ``--recorded`` measures the cost of records: steps with spans, metrics and events against steps
without any, in turn, in wall and processor time. "on" records waits in every 16th step, as a run does after its first 32.
"""

import argparse
import json
import mmap
import os
import random
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import chain, product, repeat
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from plait.cli.console import Console
from plait.cli.train import launch_run
from plait.cli.train_request import TrainRequest
from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.run_directory import RunDirectory
from plait.engine.step import DENSE_STEPS, SPARSE_INTERVAL
from plait.launch import fork
from plait.launch.place import Place
from plait.model.build_model import make_model, run_model
from plait.parallel.data import batch_norm
from plait.randomness.keyed import make_permutation
from plait.tensors.rows import split_evenly

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DDP = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning_fabric"}
ROUNDS = {"gpt": 1, "gpt-large": 1 / 3, "cnn": 5, "cnn-augment": 5, "cnn-bn": 5}  # times --rounds
Take = Callable[[], float]  # takes one step and returns its loss


def workloads(which: str) -> dict[str, Job]:
    gpt, cnn = (str(EXAMPLES / name / "job.py") for name in ("stdlib_gpt", "digits"))
    found = {"gpt": load_job(gpt), "gpt-large": load_job(gpt, {"batch": "64"})}
    still, moving = (load_job(cnn, {"augment": augment}) for augment in ("no", "yes"))
    found |= {"cnn": group_normed(still), "cnn-augment": group_normed(moving), "cnn-bn": still}
    return {name: whole_batches(job) for name, job in found.items() if which in ("all", name.split("-")[0])}


def group_normed(job: Job) -> Job:
    """Return the job with GroupNorms of groups of two channels instead of every BatchNorm2d."""

    def model() -> nn.Module:
        made = job.model()
        for parent in list(made.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(parent, name, nn.GroupNorm(child.num_features // 2, child.num_features))
        return made

    return replace(job, model=model)


STEPS = 80
"""The steps of a run whose steps are compared with another's."""


class Cut:
    """The first `length` samples. torch's Subset has a fast path that only the DataLoader uses."""

    def __init__(self, data: Any, length: int):
        self.data, self.length = data, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.data[i]


def whole_batches(job: Job) -> Job:
    """Return the job without the samples of its short last batch and without an end. Its data is read now."""
    data = job.data()
    cut = Cut(data, len(data) // job.batch * job.batch)
    return replace(job, data=lambda: cut, steps=10**9, evaluate=None)


class Order:
    """Sampler of one rank's contiguous local batch of each global batch, in plait's order."""

    def __init__(self, job: Job, rank: int = 0, world: int = 1):
        self.seed, self.batch, self.length, self.epoch = job.seed, job.batch, len(job.data()), -1
        self.world, (self.first, self.count) = world, split_evenly(job.batch, world, rank)

    def __len__(self) -> int:
        return self.length // self.world

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = make_permutation(self.seed, self.epoch, self.length)
        for start in range(self.first, self.length, self.batch):
            yield from order[start : start + self.count].tolist()


def loop(job: Job, model: Any, optimizer: Any, loader: Any, backward: Any = None, clip: Any = None) -> Take:
    """The hand-written training loop. A library passes its own `backward` and `clip`."""
    backward, clip = backward or Tensor.backward, clip or clip_grad_norm_
    source, rates, seen = chain.from_iterable(repeat(loader)), [g["lr"] for g in optimizer.param_groups], 0

    def take() -> float:
        nonlocal seen
        inputs, targets = next(source)
        factor = job.schedule(seen)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * factor
        loss = job.loss(run_model(model, inputs), targets)
        backward(loss)
        clip(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        seen += job.batch
        return loss.item()

    return take


def made(job: Job, synchronised: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(job)
    if synchronised:
        names = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
        batch_norm.sync_batch_norms(model, names, dist.group.WORLD)
    return model, job.optimizer(list(model.parameters()))


def by_hand(job: Job, place: Place, communicate: bool) -> Take:
    model, optimizer = made(job, communicate)
    loader = DataLoader(job.data(), job.batch // place.world, sampler=Order(job, place.rank, place.world))
    return loop(job, DistributedDataParallel(model, **DDP) if communicate else model, optimizer, loader)


def with_accelerate(job: Job, place: Place) -> Take:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**DDP)])
    loader = DataLoader(job.data(), job.batch // place.world, sampler=Order(job))  # prepare() splits it across ranks
    model, optimizer, loader = accelerator.prepare(*made(job, place.world > 1), loader)
    assert (accelerator.num_processes, accelerator.process_index) == (place.world, place.rank)
    return loop(job, model, optimizer, loader, accelerator.backward, accelerator.clip_grad_norm_)


def with_fabric(job: Job, place: Place) -> Take:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(**DDP) if place.world > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=place.world, strategy=strategy)
    fabric.launch()
    assert (fabric.world_size, fabric.global_rank) == (place.world, place.rank)
    model, optimizer = fabric.setup(*made(job, place.world > 1))
    loader = fabric.setup_dataloaders(DataLoader(job.data(), job.batch // place.world, sampler=Order(job)))
    clip = partial(fabric.clip_gradients, model, optimizer)
    return loop(job, model, optimizer, loader, fabric.backward, lambda _, largest: clip(max_norm=largest))


def with_plait(job: Job, place: Place, run: RunDirectory | None, spans: list[dict[str, float]]) -> Take:
    engine = Engine(job, Plan.parse(f"dp={place.world}"), place=place, device="cpu")
    status = lambda value: place.report({"kind": "status", "value": value})  # noqa: E731
    recorder = Recorder(engine, run, status, []) if run else None
    source = engine.batches()

    def take() -> float:
        batch = next(source)
        step = engine.step(batch)
        if recorder is not None:
            recorder.step(batch, step)
        spans.append({name: seconds for name, _, seconds in step.spans})
        return step.loss

    return take


def with_records(job: Job, place: Place, run: RunDirectory | None, every: int) -> Take:
    """Steps that record waits in every n-th step; without a run, steps without records."""
    engine = Engine(job, Plan.parse(f"dp={place.world}"), place=place, device="cpu")
    spans, waits_of, source = engine.spans, engine.spans.record_waits, engine.batches()
    status = lambda value: place.report({"kind": "status", "value": value})  # noqa: E731
    recorder = Recorder(engine, run, status) if run else None
    if recorder is None:
        spans.begin = spans.end = lambda name: None  # type: ignore[method-assign]
        spans.record_span = spans.record_waits = lambda *args: nullcontext()  # type: ignore[method-assign, assignment]
    else:  # like a late step, or like one of the first, all of which are recorded
        spans.record_waits = lambda step, axes: waits_of(0 if step % every == 0 else DENSE_STEPS + 1, axes)  # type: ignore[method-assign]

    def take() -> float:
        batch = next(source)
        step = engine.step(batch)
        if recorder is not None:
            with spans.record_span("record"):
                recorder.step(batch, step)
        return step.loss

    return take


def measure_records(place: Place, job: Job, rounds: int, run: RunDirectory, gate: Any, asked: Any) -> dict[str, Any]:
    """Run one rank's part of `--recorded`: ratios to steps without records."""
    place.connect(torch.device("cpu"))
    torch.set_num_threads(asked.threads)
    takes = {"off": with_records(job, place, None, 0), "on": with_records(job, place, run, SPARSE_INTERVAL)}
    takes |= {"waits in every step": with_records(job, place, run, 1), "off, again": with_records(job, place, None, 0)}
    for take in takes.values():
        [take() for _ in range(3)]
    ratios = dict[str, dict[str, list[float]]]()
    for name, clock in {"wall": perf_counter, "processor": process_time}.items():
        seconds = in_turn([*takes.values()], rounds, place, gate, clock)
        ratios[name] = {"off, ms": [1e3 * s for s in seconds[:, 0].tolist()]}
        ratios[name] |= {other: (seconds[:, i] / seconds[:, 0]).tolist() for i, other in enumerate(takes) if i}
    return ratios


def show_records(name: str, world: int, ratios: dict[str, dict[str, list[float]]]) -> str:
    lines = [f"steps with records over steps without · {name} · nproc {world}"]
    for clock, columns in ratios.items():
        quartiles = {column: statistics.quantiles(values, n=4) for column, values in columns.items()}
        lines.append(f"  {clock:<10}" + "   ".join(f"{column} {q[1]:.3f} [{q[0]:.3f}, {q[2]:.3f}]" for column, q in quartiles.items()))
    return "\n".join(lines) + "\n"


def in_turn(takes: list[Take], rounds: int, place: Place, gate: Any, clock: Callable[[], float] = perf_counter) -> Tensor:
    """Return the seconds of each step [rounds, takes] on the slowest rank; every round runs all takes in a different order."""
    seconds = torch.zeros(rounds, len(takes), dtype=torch.float64)
    for i in range(rounds):
        for j, take in random.Random(i).sample(list(enumerate(takes)), len(takes)):
            gate[place.rank] += 1  # a barrier that all leave within microseconds, unlike dist.barrier
            while min(gate[: place.world]) < gate[place.rank]:
                os.sched_yield()
            start = clock()
            take()
            seconds[i, j] = clock() - start
    if place.world > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def measure(place: Place, job: Job, rounds: int, run: RunDirectory, gate: Any, asked: Any) -> dict[str, Any]:
    """Run one rank's part: build all variants, warm them up, and run their steps in turn."""
    place.connect(torch.device("cpu"))
    world, threads = place.world, asked.threads
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise the libraries choose another number
    if world > 1:  # the variables by which Accelerate and Fabric detect that the processes exist already
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(place.rank))
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    spans: list[dict[str, float]] = []
    takes = {"plait": with_plait(job, place, None, spans), "plait train": with_plait(job, place, run, [])}
    takes["hand-written"] = by_hand(job, place, world > 1)
    takes |= {"hand-written, again": by_hand(job, place, world > 1)} if asked.control else {}
    builders = {"Accelerate": with_accelerate, "Fabric": with_fabric}
    takes |= {name: builders[name](job, place) for name, module in LIBRARIES.items() if find_spec(module)}
    takes |= {"no communication": by_hand(job, place, False)} if world > 1 else {}
    assert dist.is_initialized() == (world > 1) and torch.get_num_threads() == threads
    losses = torch.tensor([[take() for _ in range(3)] for take in takes.values()], dtype=torch.float64)
    seconds = in_turn(list(takes.values()), rounds, place, gate)
    if world > 1:
        dist.all_reduce(losses.div_(world))
    middle = {name: statistics.median(s[name] for s in spans[3:]) for name in spans[0]}
    return {"names": list(takes), "losses": losses.tolist(), "seconds": seconds.tolist(), "spans": middle}


def summary(name: str, job: Job, world: int, result: dict[str, Any]) -> dict[str, Any]:
    """Return medians, quartiles of paired ratios, and the distance of losses. A row is None if the library is not installed."""
    times = dict(zip(result["names"], zip(*result["seconds"])))
    losses = [row for n, row in zip(result["names"], result["losses"]) if n != "no communication"]
    apart = [max(column) - min(column) for column in zip(*losses)]
    rows: dict[str, Any] = {n: {"ms": statistics.median(t) * 1e3} for n, t in times.items()}
    for n, other in times.items():
        for mine in {"plait": ["plait train"], "plait train": []}.get(n, ["plait", "plait train"]):
            rows[n][mine] = statistics.quantiles((a / b for a, b in zip(times[mine], other)), n=4)
    return {
        "workload": name, "processes": world, "batch": job.batch, "rounds": len(result["seconds"]),
        "rows": rows | {n: None for n in LIBRARIES if n not in times}, "spans": result["spans"],
        "agree": name == "cnn-augment" or max(apart) < 1e-5, "apart": apart, "torch": torch.__version__,
    }  # fmt: skip


def show(s: dict[str, Any]) -> str:
    lines = ["{workload} · nproc {processes} · batch {batch} · {rounds} rounds · torch {torch}".format(**s)]
    lines.append(f"  {'':<20}{'ms':>8}   {'plait over it':<22}   plait train over it")
    for name, row in s["rows"].items():
        ratios = [(row or {}).get(mine) for mine in ("plait", "plait train")]
        first, second = (f"{r[1]:.3f} [{r[0]:.3f}, {r[2]:.3f}]" if r else "" for r in ratios)
        text = f"{row['ms']:>8.2f}   {first:<22}   {second}".rstrip() if row else "not installed"
        lines.append(f"  {name:<20}{text}")
    spans = "  ".join(f"{n} {t * 1e3:.2f}" for n, t in s["spans"].items())
    verdict = "need not agree" if s["workload"] == "cnn-augment" else "agree" if s["agree"] else "DISAGREE"
    apart = " ".join(f"{d:.1e}" for d in s["apart"])
    lines += [f"  plait's spans, ms: {spans}", f"  losses {verdict}: at most {apart} apart in steps 1, 2, 3"]
    return "\n".join(lines) + "\n"


def first_step(path: str, plan: Plan, check: str, folder: Path) -> float:
    """Return the seconds of a run of one step, from its start in a warm process to its end, with its job check."""
    job = replace(load_job(path), steps=1, evaluate=None)
    request = TrainRequest(path, job, plan, runs=folder, device="cpu", check=check)
    began = perf_counter()
    launch_run(request, Console(out=StringIO()))
    return perf_counter() - began


def starts(plan: Plan, rounds: int) -> list[dict[str, Any]]:
    """Measure the time to the first step of every example, with and without the job check, in turn."""
    tables = []
    for path in sorted(map(str, EXAMPLES.glob("*/job.py"))):
        seconds: dict[str, list[float]] = {"none": [], "quick": []}
        for i, check in product(range(rounds + 1), seconds):
            with tempfile.TemporaryDirectory() as folder:
                took = first_step(path, plan, check, Path(folder))  # a new folder, so that no cached result is used
            seconds[check] += [took] if i else []  # the first run imports the modules that the others need, too
        middle = {check: statistics.median(row) for check, row in seconds.items()}
        paired = statistics.median(b - a for a, b in zip(*seconds.values()))
        tables.append({"example": Path(path).parent.name, "plan": str(plan), **middle, "check": paired})
    return tables


def steps_of_run(path: str, plan: Plan, restarts: int, folder: Path) -> tuple[float, float]:
    """Return the total seconds of a run's steps without the first ten, and the total processor seconds of its ranks."""
    job = replace(load_job(path), steps=STEPS, evaluate=None)
    request = TrainRequest(path, job, plan, runs=folder, device="cpu", check="none", max_restarts=restarts)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launch_run(request, Console(out=StringIO()))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = map(json.loads, (folder / "latest" / "metrics.jsonl").read_text().splitlines())
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return sum(row["seconds"] for row in rows if row.get("seconds") and row["step"] > 10), busy


def ready_for_loss(plan: Plan, rounds: int) -> str:
    """Measure both ratios for every example."""
    lines = [
        f"with snapshots in memory over without · {plan} · {STEPS} steps · {rounds} rounds",
        f"  {'':<14}{'seconds of steps':<25}seconds of processors",
    ]
    for path in sorted(map(str, EXAMPLES.glob("*/job.py"))):
        ratios = list[tuple[float, float]]()
        for number in range(rounds):
            took = dict[int, tuple[float, float]]()
            for restarts in random.Random(number).sample((0, 2), 2):
                with tempfile.TemporaryDirectory() as folder:
                    took[restarts] = steps_of_run(path, plan, restarts, Path(folder))
            ratios.append((took[2][0] / took[0][0], took[2][1] / took[0][1]))
        quartiles = (statistics.quantiles(column, n=4) for column in zip(*ratios))
        cells = "   ".join(f"{middle:.3f} [{low:.3f}, {high:.3f}]" for low, middle, high in quartiles)
        lines.append(f"  {Path(path).parent.name:<14}{cells}")
    return "\n".join(lines) + "\n"


def show_starts(tables: list[dict[str, Any]]) -> str:
    lines = [
        f"time to first step, s · {tables[0]['plan']}",
        f"  {'':<14}{'--check none':>14}{'quick':>10}{'the check':>12}",
    ]
    lines += [f"  {t['example']:<14}{t['none']:>14.2f}{t['quick']:>10.2f}{t['check']:>12.2f}" for t in tables]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=("gpt", "cnn", "all"), default="all")
    parser.add_argument("--nproc", default="1,2", help="numbers of processes, as in 1,2")
    parser.add_argument("--rounds", type=int, default=20, help="of gpt; gpt-large a third, cnn five times")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--control", action="store_true", help="a second hand-written loop, for the noise")
    parser.add_argument(
        "--start", action="store_true", help="only the time to the first step, with and without the job check"
    )
    parser.add_argument("--lost", action="store_true", help="only what snapshots in memory cost")
    parser.add_argument("--recorded", action="store_true", help="only what metrics, events and spans cost")
    parser.add_argument("--json", action="store_true", help="one JSON object per table")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a forked copy of a thread pool is dead; workers choose for themselves
    if asked.start:
        for world in map(int, asked.nproc.split(",")):
            found_starts = starts(Plan(dp=world, microbatches=1 if world > 1 else 2), max(2, asked.rounds // 6))
            print(json.dumps(found_starts) if asked.json else show_starts(found_starts), flush=True)
        return 0
    if asked.lost:
        for world in map(int, asked.nproc.split(",")):
            print(ready_for_loss(Plan(dp=world), max(2, asked.rounds // 4)), flush=True)
        return 0
    for module in filter(find_spec, LIBRARIES.values()):
        import_module(module)
    with redirect_stdout(sys.stderr):  # the jobs print the files that they read
        found = workloads(asked.job)
    listener = fork.Listener(lambda _, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" else None)
    tables = []
    for world, (name, job) in product(map(int, asked.nproc.split(",")), found.items()):
        rounds = max(4, round(asked.rounds * ROUNDS[name]))
        gate = memoryview(mmap.mmap(-1, 8 * world)).cast("q")  # inherited by the forked processes
        with tempfile.TemporaryDirectory() as root:
            run = RunDirectory.create(name, Plan.parse(f"dp={world}"), {}, Path(root))
            if asked.recorded:
                target = partial(measure_records, job=job, rounds=rounds, run=run, gate=gate, asked=asked)
                ratios = fork.run_ranks(target, world, listener)[0]
                print(json.dumps(ratios) if asked.json else show_records(name, world, ratios), flush=True)
                continue
            target = partial(measure, job=job, rounds=rounds, run=run, gate=gate, asked=asked)
            tables.append(summary(name, job, world, fork.run_ranks(target, world, listener)[0]))
        print(json.dumps(tables[-1]) if asked.json else show(tables[-1]), flush=True)
    return 0 if all(table["agree"] for table in tables) else 1


if __name__ == "__main__":
    sys.exit(main())
