"""What only a CUDA GPU can show, in one call: does plait compute the right numbers there, and how fast.

    python bench/gpu.py                          the first GPU; on a machine without one, as --device cpu
    python bench/gpu.py --peak 989 --json        MFU against this many TFLOP/s; a JSON line after the table
    python bench/gpu.py --device cpu             tiny sizes: keeps this script working, its speeds mean nothing

Checks: `plait verify` in float64 of the GPT (with dropout), the digits CNN, the compiled and the recomputed GPT, FSDP2
on one rank and offloading (first: they fork, which a process that has used CUDA cannot); `plait train`; a process group
of one rank (NCCL on CUDA) with plait's all-reduces; and that the loss falls in 20 steps, by number format and compiled.

Measurements: training steps of a GPT by `Engine` and by a hand-written loop with the same weights, samples and choices
(fused AdamW, clipping, schedule), which reads the loss in every step, as plait does, or never. The variants take blocks
of steps in turn, in an order shuffled every round, the device idle before and after each block; plait's time is divided
by another's of the *same* round, and printed is the median with its quartiles. MFU counts the operations of forward and
backward once, causal attention in full, over the format's dense peak (fp32 without TF32); it is 0 where the peak is not
known. Memory is the peak of the tensors that a variant adds on the GPU.
"""

import argparse
import contextlib
import gc
import json
import mmap
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from overhead import EXAMPLES, Order, whole_batches
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch.devices import kind_of
from plait.launch.place import Place
from plait.model.make import make_model
from plait.parallel.data import strategy as data_parallel
from plait.parallel.precision import autocast, plan_format
from plait.proof.verify import verify

PEAKS = {"H200$": (67.0, 989.5), "H100.*HBM3$": (67.0, 989.5), "H100 PCIe": (51.0, 756.5), "A100": (19.5, 312.0)}
"""Pattern of a device's name -> dense TFLOP/s (fp32, 16 bits), from NVIDIA's data sheets. Others: --peak."""

GPT, CNN = str(EXAMPLES / "stdlib_gpt" / "job.py"), str(EXAMPLES / "digits" / "job.py")
SIZES = {
    "cuda": {"depth": 12, "width": 768, "heads": 12, "length": 1024, "batch": 16},
    "cpu": {"depth": 2, "width": 32, "heads": 2, "length": 32, "batch": 4},
}
MODES = ("dp=1", "precision=bf16", "precision=bf16 compile=true")
COLUMNS = ("ms", "tokens/s", "MFU %", "memory GiB")
WARM, BLOCK = 5, 5
"""Steps of every variant before timing, whose losses are compared; and steps between two looks at the clock."""


def gpt(size: dict[str, int], **more: Any) -> Job:
    with contextlib.redirect_stdout(sys.stderr):  # the job says what it reads
        return whole_batches(load_job(GPT, {name: str(value) for name, value in {**size, **more}.items()}))


def equal(job: Job, plan: str, kind: str) -> str:
    seen = mmap.mmap(-1, 1)  # shared with the processes that verify forks

    def compiles(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        seen[0] = 1
        return compile_fx(graph, inputs)

    with patch.object(torch, "compile", partial(torch.compile, backend=compiles)):
        verdict = verify(job, Plan.parse(plan), device=kind)
    assert verdict.equal, f"{verdict.first_wrong}: {verdict.cause}"
    assert bool(seen[0]) == ("compile" in plan), "nothing was compiled"
    return "; ".join((f"worst {max(probe.worst for probe in verdict.probes):.1e}", *verdict.inexact))


def command_line(kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "plait", "train", CNN, "--steps", "20", "--device", kind, "--runs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stderr or done.stdout).strip()[-300:]
    return done.stdout.strip().splitlines()[-1].partition(" · checkpoint")[0]


def one_rank(device: torch.device) -> str:
    """plait's own way of connecting, an all-reduce in it, and steps with all that two ranks would do, against steps alone."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(store=lambda: dist.FileStore(f"{folder}/store", 1), joined=True)
        group = place.connect(device)
        numbers = torch.arange(5.0, device=device)
        dist.all_reduce(numbers)
        assert numbers.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        alone, ranked = (Engine(load_job(CNN), "dp=1", place=place, device=device.type) for _ in range(2))
        ranked.built.peers = group
        data_parallel.apply(ranked.built)
        losses = [[e.step(batch).loss for batch, _ in zip(e.batches(), range(3))] for e in (alone, ranked)]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0.0)
        backends = dist.get_backend_config(group)
        ranked.close()
        return f"{backends}: all-reduce, buckets, batch norm; loss {losses[1][0]:.4f} → {losses[1][-1]:.4f}"


def falls(plan: str, size: dict[str, int], device: torch.device) -> str:
    engine = Engine(gpt(size), plan, device=device.type)
    steps = [engine.step(batch) for batch, _ in zip(engine.batches(), range(20))]
    first, last = steps[0].loss, statistics.mean(s.loss for s in steps[-5:])
    skipped = sum(s.skipped for s in steps)
    assert last < first and skipped < 10, f"loss {first:.3f} → {last:.3f}, {skipped} steps skipped"
    return f"loss {first:.3f} → {last:.3f}" + (f", {skipped} steps skipped" if skipped else "")


def checks(kind: str) -> list[dict[str, Any]]:
    small = {"depth": 2, "width": 64, "heads": 2, "length": 64, "batch": 8}
    device, rows = torch.device(kind), []
    looks: dict[str, Callable[[], str]] = {
        "verify gpt, dropout 0.1, dp=1": lambda: equal(gpt(small, dropout=0.1), "dp=1", kind),
        "verify cnn, dp=1": lambda: equal(load_job(CNN), "dp=1", kind),
        "verify gpt, dropout 0.1, compile=true": lambda: equal(gpt(small, dropout=0.1), "compile=true", kind),
        "verify gpt, recompute=full": lambda: equal(gpt(small, dropout=0.1), "recompute=full", kind),
        "verify gpt, recompute=selective": lambda: equal(gpt(small, dropout=0.1), "recompute=selective", kind),
        "verify gpt, FSDP2 on one rank": lambda: equal(gpt(small, dropout=0.1), "offload=all microbatches=2", kind),
        "verify gpt, offload=optimizer": lambda: equal(gpt(small, dropout=0.1), "offload=optimizer", kind),
        f"plait train cnn --device {kind}": lambda: command_line(kind),
        "process group of one rank": lambda: one_rank(device),
    }
    plans = ("dp=1", "precision=bf16", "precision=fp16", "compile=true", "offload=all precision=bf16")
    looks |= {f"20 steps, {plan}": partial(falls, plan, small, device) for plan in plans}
    for name, look in looks.items():
        began, row = perf_counter(), {"check": name, "ok": True}
        try:
            row["saw"] = look()
        except Exception as error:
            row |= {"ok": False, "saw": f"{type(error).__name__}: {error}"}
        row["seconds"] = round(perf_counter() - began, 1)
        print(f"  {'✓' if row['ok'] else '✗'} {name:<40}{row['saw']}  ({row['seconds']} s)", flush=True)
        rows.append(row)
    return rows


def by_engine(job: Job, plan: Plan, device: torch.device) -> Callable[[], float]:
    engine = Engine(job, plan, device=device.type)
    source = engine.batches()
    return lambda: engine.step(next(source)).loss


def by_hand(job: Job, plan: Plan, device: torch.device, read: bool = True) -> Callable[[], float]:
    """The training loop as one writes it. `read`: look at the loss, and so wait for the device, in every step."""
    model = make_model(job).to(device)
    optimizer = job.optimizer(list(model.parameters()))
    if plan.compile:
        model.compile()
    loader = DataLoader(job.data(), job.batch, sampler=Order(job))
    source, dtype, seen = (pair for _ in iter(int, 1) for pair in loader), plan_format(plan), 0
    rates = [group["lr"] for group in optimizer.param_groups]

    def take() -> float:
        nonlocal seen
        inputs, targets = (t.to(device, non_blocking=True) for t in next(source))
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * (job.schedule(seen) if job.schedule else 1.0)
        with autocast(device.type, dtype):
            loss = job.loss(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), job.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += job.batch
        return loss.item() if read else 0.0

    return take


VARIANTS = {"plait": by_engine, "hand-written": by_hand, "hand-written, loss not read": partial(by_hand, read=False)}


def flops(job: Job, length: int) -> float:
    """Floating-point operations of forward and backward of one batch, counted on tensors without numbers."""
    model, tokens = job.model().to("meta"), torch.zeros(job.batch, length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        job.loss(model(tokens), tokens).backward()
    return float(counter.get_total_flops())


def measure(plan: Plan, kind: str, rounds: int, peak: float | None) -> dict[str, Any]:
    """All variants built and warmed up one after the other, then timed in turn."""
    gc.collect()
    torch.compiler.reset()
    job, device, length = gpt(SIZES[kind]), torch.device(kind), SIZES[kind]["length"]
    gpu, wait = kind == "cuda", torch.cuda.synchronize if kind == "cuda" else int
    takes, losses, memory, seconds = {}, {}, {}, {name: [] for name in VARIANTS}
    for name, build in VARIANTS.items():
        before = torch.cuda.memory_allocated() if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        takes[name] = build(job, plan, device)
        losses[name] = [takes[name]() for _ in range(WARM)]
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else 0.0
    for i in range(rounds):
        for name in random.Random(i).sample(list(takes), len(takes)):
            wait()
            began = perf_counter()
            for _ in range(BLOCK):
                takes[name]()
            wait()
            seconds[name].append((perf_counter() - began) / BLOCK)
    apart = max(abs(a - b) for a, b in zip(losses["plait"], losses["hand-written"]))
    print(f"  {plan}   (losses of plait and of the hand-written loop in {WARM} steps apart by {apart:.1e})")
    rows, work = {}, flops(job, length)
    for name, times in seconds.items():
        middle = statistics.median(times)
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(seconds["plait"], times)], n=4)
        mfu = work / middle / (peak * 1e12) if peak else 0.0
        row = middle * 1e3, job.batch * length / middle, mfu * 100, memory[name]
        rows[name] = {**dict(zip(COLUMNS, row)), "plait_over_it": [ratio, low, high]}
        cells = "{:>12.2f}{:>12,.0f}{:>8.1f}{:>12.2f}".format(*row)
        print(f"    {name:<30}{cells}   {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {"plan": str(plan), "flops": work, "peak": peak, "apart": apart, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--peak", type=float, help="dense TFLOP/s of the device in 16 bits, for MFU")
    parser.add_argument("--peak-fp32", type=float, help="TFLOP/s of the device in fp32")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of timing (20)")
    parser.add_argument("--json", action="store_true", help="everything as one JSON line at the end")
    options = parser.parse_args()
    kind = kind_of(options.device)
    torch.set_num_threads(1)  # a forked copy of a thread pool is dead
    print(f"torch {torch.__version__} · {kind}\nchecks", flush=True)
    seen = checks(kind)
    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    known = next((p for part, p in PEAKS.items() if re.search(part, name)), (None, None))
    peaks = (options.peak_fp32 or known[0], options.peak or known[1])
    print(f"gpt {SIZES[kind]} on {name} · {options.rounds} rounds of {BLOCK} steps · peaks {peaks} TFLOP/s")
    print(f"    {'':<30}" + "{:>12}{:>12}{:>8}{:>12}".format(*COLUMNS) + "   plait over it", flush=True)
    measured = [measure(p, kind, options.rounds, peaks[plan_format(p) is not None]) for p in map(Plan.parse, MODES)]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "device": name, "checks": seen, "measured": measured}))
    return 0 if all(row["ok"] for row in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
