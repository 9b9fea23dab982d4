"""Compares training steps of plait with a hand-written loop, and the planner's predictions with measurements.

The hand-written loop has the same weights, samples and choices (fused AdamW, clipping, schedule). It reads the loss in every step or
never; plait's is read one step late, as in `plait train`. Variants take blocks of steps in turn, in an order shuffled every round, with
an idle device before and after each block. plait's time is divided by another's of the *same* round, and the result is the median with
its quartiles. MFU counts the operations of forward and backward once, with full causal attention, over the dense peak of the format in
src/plait/machines/. Devices without a file there have no MFU.
"""

import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gpu_checks import gpt, has, llama
from gpu_looks import Look, Row, Setting, spread, wait
from overhead import Order
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from plait.cli import measure_machine
from plait.cli.bench import add_compute
from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.engine.memory import measure_memory, reset_peaks
from plait.engine.memory_use import group_bill
from plait.launch import detect
from plait.launch.place import Place
from plait.model.build_model import make_model, run_model
from plait.parallel.precision import find_autocast_dtype, make_autocast
from plait.planner.dryrun.memory_table import make_memory_table
from plait.planner.estimate import estimate_plan
from plait.planner.plan_request import PlanRequest
from plait.tensors.torch_private import tree_leaves, tree_map_only

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "gpt": {"depth": 12, "width": 768, "heads": 12, "length": 1024, "batch": 16},
        "llama": {"size": "1b", "length": 2048, "batch": 4},
    },
    "cpu": {
        "gpt": {"depth": 2, "width": 32, "heads": 2, "length": 32, "batch": 4},
        "llama": {"size": "tiny", "length": 32, "batch": 4},
    },
}
WARM = 5
"""Steps of every variant before timing, whose losses are compared."""
GIB = 2**30
Take = Callable[[], Any]


def made(setting: Setting, model: str, **more: Any) -> Job:
    return (gpt if model == "gpt" else llama)(**{**SIZES[setting.kind][model], **more})


def models() -> tuple[str, ...]:
    return ("gpt", "llama") if has("transformers") else ("gpt",)


def looks(setting: Setting) -> dict[str, Look]:
    found: dict[str, Look] = {}
    for model in models():
        plans = ["precision=bf16", "precision=bf16 compile=true"]
        plans = ["dp=1", *plans] if model == "gpt" else plans
        for plan in plans:
            for p in (0.0, 0.1) if model == "gpt" and "bf16" in plan else (0.0,):
                more = {"dropout": p} if model == "gpt" else {}
                said = f"{model}, {plan}" + (f", dropout {p}" if more else "")
                found[said] = partial(speed, setting, model, plan, more)
    return found


# — the variants —


def by_engine(job: Job, plan: Plan, setting: Setting) -> Take:
    engine = Engine(job, plan, device=setting.kind)
    source, before = engine.batches(), []

    def take() -> Any:
        before.append(engine.step(next(source)))
        if len(before) > 1:
            _ = before.pop(0).loss
        return before[-1]

    return take


def by_hand(job: Job, plan: Plan, setting: Setting, read: bool = True) -> Take:
    """A hand-written training loop. `read`: read the loss, and thus wait for the device, in every step."""
    model = make_model(job).to(setting.device)
    optimizer = job.optimizer(list(model.parameters()))
    if plan.compile:
        model.compile()
    loader = DataLoader(job.data(), job.batch, sampler=Order(job))
    source, dtype, seen = (pair for _ in iter(int, 1) for pair in loader), find_autocast_dtype(plan), 0
    rates = [group["lr"] for group in optimizer.param_groups]
    there = partial(Tensor.to, device=setting.device, non_blocking=True)

    def step() -> Tensor:
        nonlocal seen
        inputs, targets = tree_map_only(Tensor, there, next(source))
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * (job.schedule(seen) if job.schedule else 1.0)
        with make_autocast(setting.kind, dtype):
            loss = job.loss(run_model(model, inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), job.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += job.batch
        return loss.detach()

    def take() -> Any:
        with torch.autograd.set_multithreading_enabled(True):  # the default in a process without an engine of plait
            loss = step()
        return loss.item() if read else loss

    return take


def loss_of(step: Any) -> float:
    return float(step if isinstance(step, float | Tensor) else step.loss)


def variants(model: str, plan: Plan) -> dict[str, Callable[[Job, Plan, Setting], Take]]:
    found: dict[str, Callable[[Job, Plan, Setting], Take]] = {"plait": by_engine, "hand-written": by_hand}
    return found | ({"not read": partial(by_hand, read=False)} if model == "gpt" and not plan.compile else {})


def flops(job: Job, model: str) -> float:
    """Return the floating-point operations of forward and backward of one batch, as `plait sketch` counts them, without a run."""
    request = PlanRequest.from_job(job, model, Machine.from_name("h100"), split=False)
    return estimate_plan(request.pace, Plan(), job.batch).flops


def tokens(job: Job) -> int:
    return job.batch * tree_leaves(job.data()[0][0])[0].shape[0]


def peak(setting: Setting, plan: Plan) -> float | None:
    """Return the FLOP/s of the plan's format from the device's data sheet."""
    return detect.detect_machine(setting.kind).device.peak.for_precision(plan.precision)


def timed_in_turn(takes: dict[str, Take], setting: Setting) -> dict[str, list[float]]:
    """Return the seconds of a step in every round."""
    began = perf_counter()
    for take in takes.values():
        take()
    wait(setting)
    block = max(1, min(5, round(1.0 * len(takes) / max(perf_counter() - began, 1e-3))))
    seconds: dict[str, list[float]] = {name: [] for name in takes}
    ends, i = perf_counter() + 2 * setting.seconds, 0
    while i < 4 or perf_counter() < ends:
        for name in random.Random(i).sample(list(takes), len(takes)):
            wait(setting)
            began = perf_counter()
            for _ in range(block):
                takes[name]()
            wait(setting)
            seconds[name].append((perf_counter() - began) / block)
        i += 1
    return seconds


def uncached(plan: Plan) -> AbstractContextManager[Any]:
    """Disable compile caches, because code compiled by the previous variant would speed up the first step of the next one."""
    if not plan.compile:
        return nullcontext()
    from torch._inductor import config

    return config.patch(force_disable_caches=True)


def speed(setting: Setting, model: str, plan: str, more: dict[str, Any]) -> Row:
    """Build and warm up all variants one after the other, then time them in turn."""
    job, how = made(setting, model, **more), Plan.parse(plan)
    work, takes, losses, memory, first = flops(job, model), dict[str, Take](), {}, {}, {}
    for name, build in variants(model, how).items():
        before = torch.cuda.memory_allocated() if setting.gpu else 0
        if setting.gpu:
            torch.cuda.reset_peak_memory_stats()
        began = perf_counter()
        with uncached(how):
            takes[name] = build(job, how, setting)
            losses[name] = [loss_of(takes[name]())]
        first[name] = perf_counter() - began
        losses[name] += [loss_of(takes[name]()) for _ in range(WARM - 1)]
        memory[name] = (torch.cuda.max_memory_allocated() - before) / GIB if setting.gpu else 0.0
        gc.collect()
    apart = max(abs(a - b) for a, b in zip(losses["plait"], losses["hand-written"]))
    seconds = timed_in_turn(takes, setting)
    step, most = median(seconds["plait"]), peak(setting, how)
    row: Row = {
        "ms": step * 1e3,
        "hand-written ms": median(seconds["hand-written"]) * 1e3,
        "tokens/s": tokens(job) / step,
    }
    if most:
        row |= {"MFU %": 100 * work / step / most, "by hand MFU %": 100 * work / median(seconds["hand-written"]) / most}
    row["plait / hand-written"] = spread([a / b for a, b in zip(seconds["plait"], seconds["hand-written"])])
    if "not read" in seconds:
        row["plait / not read"] = spread([a / b for a, b in zip(seconds["plait"], seconds["not read"])])
    if setting.gpu:
        row |= {"GiB": memory["plait"], "by hand GiB": memory["hand-written"]}
    if not more.get("dropout"):  # torch draws different masks
        row["losses apart"] = f"{apart:.1e}"
    data = {"flops": work, "seconds": seconds, "losses": losses, "first step": first, "memory": memory}
    return row | {"first step s": first["plait"], "by hand first step s": first["hand-written"], "data": data}


# — prediction —


def predictions(setting: Setting) -> dict[str, Look]:
    """Measure the machine as `plait bench compute` does, then predict plans with it and measure them."""
    found: dict[str, Look] = {"plait bench compute": partial(measured_machine, setting)}
    plans = {"gpt": ["dp=1", "precision=bf16", "precision=bf16 activation_checkpointing=full", "precision=bf16 microbatches=2"]}
    plans["gpt"] += ["precision=bf16 compile=true", "precision=bf16 offload=optimizer"]
    plans["llama"] = ["precision=bf16", "precision=bf16 activation_checkpointing=full"]
    for model in models():
        for plan in plans[model]:
            found[f"{model}, {plan}"] = partial(predicted, setting, model, plan)
    return found


def measured_machine(setting: Setting) -> Row:
    machine = detect.detect_machine(setting.kind).resize(1)
    machine = add_compute(machine, [measure_machine.measure_compute(Place(), setting.kind)], setting.kind)
    (setting.out / "machine.toml").write_text(machine.to_toml(), encoding="utf-8")
    rates = ((c.precision, max(p for _, p in c.points), machine.device.peak.for_precision(c.precision)) for c in machine.matmuls)
    said = ", ".join(f"{name} {part * (most or 0) / 1e12:.3g} TFLOP/s ({part:.0%})" for name, part, most in rates)
    host = f", host {machine.host / 1e9:.3g} GB/s" if machine.host else ""
    return {"saw": f"{said}, memory {(machine.device.memory_bandwidth or 0) / 1e9:.4g} GB/s{host}"}


def predicted(setting: Setting, model: str, plan: str) -> Row:
    """Predict before the measurements, without a device."""
    job, how = made(setting, model), Plan.parse(plan)
    machine = Machine.load(setting.out / "machine.toml")
    request = PlanRequest.from_job(job, model, machine, split=False)
    said, bill = estimate_plan(request.pace, how, job.batch / how.microbatches), make_memory_table(job, how).categories
    engine = Engine(job, how, device=setting.kind)
    source, last = engine.batches(), None
    for _ in range(WARM):
        last = engine.step(next(source))
    engine.settle()
    reset_peaks(engine.rank_model.device)
    times, ends = list[float](), perf_counter() + setting.seconds
    while len(times) < 5 or perf_counter() < ends:
        began = perf_counter()
        for _ in range(3):
            last = engine.step(next(source))
        wait(setting)
        times.append((perf_counter() - began) / 3)
    assert last is not None and last.loss == last.loss
    use, step = measure_memory(engine), median(times)
    row: Row = {"ms": step * 1e3, "predicted ms": said.seconds * 1e3, "predicted / measured": said.seconds / step}
    row |= {"bill GiB": sum(bill.values()) / GIB}
    if setting.gpu:
        row |= {
            "tensors GiB": use.allocated / GIB,
            "reserved GiB": use.reserved / GIB,
            "planner GiB": said.reserved / GIB,
        }
        row |= {"beside GiB": use.beside / GIB}
    both, parts = use.group_by_category(), group_bill(bill)
    names = dict.fromkeys((*both, *parts))
    row["measured (bill) GiB by category"] = ", ".join(
        f"{name} {both.get(name, 0) / GIB:.3g} ({parts.get(name, 0) / GIB:.3g})" for name in names
    )
    data = {"memory": use.to_dict(), "bill": bill, "parts": said.parts, "planner": said.memory, "seconds": times}
    return row | {"data": data}
