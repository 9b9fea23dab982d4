"""plait's step time over the same step by hand, with Accelerate, with Fabric, and without communication.

    python bench/overhead.py                               all workloads, one process and two
    python bench/overhead.py --job gpt --nproc 2 --rounds 200 --control

All variants live in the same forked processes and take steps in turn, in an order shuffled every round. All
ranks start a step together and it takes as long as its slowest rank. plait's time is divided by the other
variant's in the *same* round, so that what else the machine does falls on both sides of the ratio; printed
are the median ratio and its quartiles in brackets. A step is all a real one holds: fetch and collate the
batch, set the learning rate, forward, backward, sum of gradients, clipping, fused AdamW, loss.item().

    plait             Engine.batches() and Engine.step: also the global loss, gradient norm and time spans
    plait train       the same with `plait.record.Recorder` writing metrics and events (but no checkpoint)
    hand-written      plain PyTorch, on two processes in DistributedDataParallel with the options in DDP below
    Accelerate        accelerator.prepare(model, optimizer, loader), .backward, .clip_grad_norm_
    Fabric            fabric.setup, .setup_dataloaders, .backward, .clip_gradients
    no communication  the hand-written loop on each rank's share without DDP: the limit, not the same training

All start from the same weights, see the same samples and make the same choices (DDP's options too). Before
timing, their global mean losses of the first three steps are compared: they depend on all gradients and
updates before. `gpt` and `cnn` are the jobs in examples/. In `cnn` a GroupNorm stands for each BatchNorm2d,
because torch's SyncBatchNorm does not run on CPUs; `cnn-bn` keeps them and gives all variants plait's own.
`cnn-augment` is `cnn` with its augmentation, for which only plait seeds the generators sample by sample, so
losses are not compared there. Data sets are cut to whole global batches.
"""

import argparse
import dataclasses
import importlib.util
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Subset

from plait.build import make_model
from plait.data import split
from plait.engine import Engine
from plait.job import Job, load_job
from plait.launch import here
from plait.launch.place import Place, cores
from plait.plan import Plan
from plait.randomness import permutation
from plait.record import Recorder
from plait.run import Run
from plait.strategies import batchnorm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DDP = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning_fabric"}
WARM = 3
"""Steps of every variant before timing; their losses are compared."""

Take = Callable[[], float]
"""Takes one step and returns its loss."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """`rounds`: how many for each one of --rounds. `compared`: all variants see the same numbers."""

    job: Job
    rounds: float
    compared: bool = True


def workloads(which: str) -> dict[str, Workload]:
    found = {}
    if which in ("gpt", "all"):
        gpt = str(EXAMPLES / "stdlib_gpt" / "job.py")
        found["gpt"] = Workload(load_job(gpt), 1)
        found["gpt-large"] = Workload(load_job(gpt, {"batch": "128"}), 1 / 4)
    if which in ("cnn", "all"):
        still, moving = (load_job(str(EXAMPLES / "digits" / "job.py"), {"augment": a}) for a in ("no", "yes"))
        found["cnn"] = Workload(group_normed(still), 5)
        found["cnn-augment"] = Workload(group_normed(moving), 5, compared=False)
        found["cnn-bn"] = Workload(still, 5)
    return {name: dataclasses.replace(w, job=whole_batches(w.job)) for name, w in found.items()}


def group_normed(job: Job) -> Job:
    """The job with a GroupNorm of groups of two channels for every BatchNorm2d."""

    def model() -> nn.Module:
        made = job.model()
        for parent in list(made.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(parent, name, nn.GroupNorm(child.num_features // 2, child.num_features))
        return made

    return dataclasses.replace(job, model=model)


def whole_batches(job: Job) -> Job:
    """The job without the samples of its short last batch and without an end; its data is read now."""
    data = job.data()
    cut = Subset(data, range(len(data) // job.batch * job.batch))
    return dataclasses.replace(job, data=lambda: cut, steps=10**9, evaluate=None)


class Order:
    """Sampler of one rank's contiguous share of each global batch, in plait's order."""

    def __init__(self, job: Job, rank: int = 0, world: int = 1):
        self.seed, self.batch, self.length, self.epoch = job.seed, job.batch, len(job.data()), -1
        self.world, (self.first, self.count) = world, split(job.batch, world, rank)

    def __len__(self) -> int:
        return self.length // self.world

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = permutation(self.seed, self.epoch, self.length)
        for start in range(self.first, self.length, self.batch):
            yield from order[start : start + self.count].tolist()


def loop(job: Job, model: Any, optimizer: Any, loader: Any, backward=Tensor.backward, clip=clip_grad_norm_) -> Take:
    """The hand-written training loop. A library brings its own `backward` and `clip`."""

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    source, rates, seen = endless(), [group["lr"] for group in optimizer.param_groups], 0

    def take() -> float:
        nonlocal seen
        inputs, targets = next(source)
        factor = job.schedule(seen)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * factor
        loss = job.loss(model(inputs), targets)
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
        batchnorm.synchronise(model, names, dist.group.WORLD)
    return model, job.optimizer(list(model.parameters()))


def by_hand(job: Job, place: Place, communicate: bool) -> Take:
    model, optimizer = made(job, communicate)
    loader = DataLoader(job.data(), job.batch // place.world, sampler=Order(job, place.rank, place.world))
    return loop(job, DistributedDataParallel(model, **DDP) if communicate else model, optimizer, loader)


def with_accelerate(job: Job, place: Place) -> Take:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**DDP)])
    assert (accelerator.num_processes, accelerator.process_index) == (place.world, place.rank)
    loader = DataLoader(job.data(), job.batch // place.world, sampler=Order(job))  # prepare() shares it out
    model, optimizer, loader = accelerator.prepare(*made(job, place.world > 1), loader)
    assert isinstance(model, DistributedDataParallel) == (place.world > 1)
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

    def clip(parameters: Any, largest: float) -> None:
        fabric.clip_gradients(model, optimizer, max_norm=largest)

    return loop(job, model, optimizer, loader, fabric.backward, clip)


def with_plait(job: Job, place: Place, run: Run | None, spans: list[dict[str, float]]) -> Take:
    engine = Engine(job, Plan.parse(f"dp={place.world}"), place=place, device="cpu")
    report = place.report or print
    recorder = Recorder(engine, run, lambda v: report({"kind": "status", "value": v}), []) if run else None
    source = engine.batches()

    def take() -> float:
        batch = next(source)
        step = engine.step(batch)
        if recorder is not None:
            recorder.step(batch, step)
        spans.append({name: seconds for name, _, seconds in step.spans})
        return step.loss

    return take


def measure(w: Workload, place: Place, rounds: int, run: Run, gate: Any, control: bool) -> dict[str, Any]:
    """One rank's part: build all variants, warm them up, take their steps in turn."""
    place.connect(torch.device("cpu"))
    job, world, threads = w.job, place.world, torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # else the libraries choose another number
    if world > 1:  # how Accelerate and Fabric learn that somebody else started the processes
        os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    spans: list[dict[str, float]] = []
    takes = {"plait": with_plait(job, place, None, spans), "plait train": with_plait(job, place, run, [])}
    takes["hand-written"] = by_hand(job, place, world > 1)
    takes |= {"hand-written, again": by_hand(job, place, world > 1)} if control else {}
    for name, build in (("Accelerate", with_accelerate), ("Fabric", with_fabric)):
        if importlib.util.find_spec(LIBRARIES[name]):
            takes[name] = build(job, place)
    takes |= {"no communication": by_hand(job, place, False)} if world > 1 else {}
    assert dist.is_initialized() == (world > 1) and torch.get_num_threads() == threads
    losses = torch.tensor([[take() for _ in range(WARM)] for take in takes.values()], dtype=torch.float64)
    spans.clear()
    seconds = torch.zeros(rounds, len(takes), dtype=torch.float64)
    for i in range(rounds):
        for j, take in random.Random(i).sample(list(enumerate(takes.values())), len(takes)):
            gate[place.rank] += 1  # a barrier that all leave within microseconds, unlike dist.barrier
            while min(gate[:world]) < gate[place.rank]:
                os.sched_yield()
            start = perf_counter()
            take()
            seconds[i, j] = perf_counter() - start
    if world > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(losses)
    middle = {name: statistics.median(s[name] for s in spans) for name in spans[0]}
    means = (losses / world).tolist()
    return {"names": list(takes), "losses": means, "seconds": seconds.tolist(), "spans": middle}


def summary(name: str, w: Workload, world: int, result: dict[str, Any]) -> dict[str, Any]:
    """Medians, paired ratios and the comparison of losses."""
    times = dict(zip(result["names"], zip(*result["seconds"])))
    losses = [row for n, row in zip(result["names"], result["losses"]) if n != "no communication"]

    def over(other: str, mine: str) -> list[float]:
        low, middle, high = statistics.quantiles((a / b for a, b in zip(times[mine], times[other])), n=4)
        return [middle, low, high]

    rows = {n: {"ms": statistics.median(t) * 1e3} for n, t in times.items()}
    for n, row in rows.items():
        row |= {mine: over(n, mine) for mine in ("plait", "plait train") if n not in (mine, "plait train")}
    return {
        "workload": name, "processes": world, "batch": w.job.batch, "rounds": len(result["seconds"]), "rows": rows,
        "apart": [max(column) - min(column) for column in zip(*losses)] if w.compared else None,
        "not_installed": [n for n in LIBRARIES if n not in times], "plait_spans": result["spans"],
    }  # fmt: skip


def show(s: dict[str, Any]) -> str:
    share = f"batch {s['batch']} = {s['batch'] // s['processes']} per process"
    lines = [f"{s['workload']} · nproc {s['processes']} · {share} · {s['rounds']} rounds"]
    lines.append(f"  {'':<20}{'ms':>8}   {'plait over it':<22}   plait train over it")
    for name, row in s["rows"].items():
        ratios = ["{:.3f} [{:.3f}, {:.3f}]".format(*row[n]) if n in row else "" for n in ("plait", "plait train")]
        lines.append(f"  {name:<20}{row['ms']:>8.2f}   {ratios[0]:<22}   {ratios[1]}".rstrip())
    lines += [f"  {name:<20}not installed" for name in s["not_installed"]]
    lines.append("  plait's spans, ms:  " + "  ".join(f"{n} {t * 1e3:.2f}" for n, t in s["plait_spans"].items()))
    if s["apart"] is None:
        return "\n".join(lines) + "\n  losses not compared: only plait keys the augmentation by sample\n"
    verdict = "agree" if max(s["apart"]) < 1e-5 else "DISAGREE"
    apart = "  ".join(f"{d:.1e}" for d in s["apart"])
    return "\n".join(lines) + f"\n  losses {verdict}: apart by at most, in steps 1 2 3:  {apart}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=("gpt", "cnn", "all"), default="all")
    parser.add_argument("--nproc", default="1,2", help="numbers of processes, as in 1,2")
    parser.add_argument("--rounds", type=int, default=24, help="of gpt; gpt-large: a quarter; cnn: five times")
    parser.add_argument("--control", action="store_true", help="a second hand-written loop, to show the noise")
    parser.add_argument("--json", action="store_true", help="one JSON object per table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked copy of a thread pool is dead; workers choose for themselves
    for module in filter(importlib.util.find_spec, LIBRARIES.values()):
        importlib.import_module(module)
    listener = here.Listener(lambda rank, m: print(m["text"], file=sys.stderr) if m["kind"] == "log" else None)
    with redirect_stdout(sys.stderr):  # the jobs say what they read
        found = workloads(arguments.job)
    good = True
    for world in map(int, arguments.nproc.split(",")):
        for name, w in found.items():
            rounds = max(4, round(arguments.rounds * w.rounds))
            with tempfile.TemporaryDirectory() as root:
                run = Run.create(name, Plan.parse(f"dp={world}"), {}, Path(root))
                gate = memoryview(mmap.mmap(-1, 8 * world)).cast("q")  # shared by the forked processes
                target = partial(measure, w, rounds=rounds, run=run, gate=gate, control=arguments.control)
                table = summary(name, w, world, here.run(target, world, listener)[0])
            good = good and max(table["apart"] or [0.0]) < 1e-5
            print(json.dumps(table) if arguments.json else show(table), flush=True)
    if not arguments.json:
        print(f"torch {torch.__version__}, {cores()} cores")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
