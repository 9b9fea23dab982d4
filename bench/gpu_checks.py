"""Checks that plait computes correctly on a device: environment, `plait verify`, a process group, and several ranks on one GPU."""

import ctypes
import importlib.metadata
import json
import mmap
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_carried import sharing
from gpu_looks import Look, Row, Setting
from overhead import EXAMPLES, whole_batches

from plait.config.errors import PlaitError
from plait.config.job import Job, load_job
from plait.config.keys import DATA_AXES
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import detect, devices, fork, forkable
from plait.launch.place import Place
from plait.parallel.data import strategy as data_parallel
from plait.parallel.mesh import Mesh
from plait.proof.probes import TOLERANCE
from plait.proof.verify import verify

GPT, CNN, LLAMA = (str(EXAMPLES / name / "job.py") for name in ("stdlib_gpt", "digits", "llama"))
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives, under names for which the installed torch prints no warning."""
SMALL = {"depth": 2, "width": 64, "heads": 2, "length": 64, "batch": 8, "dropout": 0.1}
LIBRARIES = (
    "triton",
    "torchao",
    "transformers",
    "numpy",
    "psutil",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu13",
)
ASKED = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
    "compute_mode",
)


def has(library: str) -> bool:
    return find_spec(library) is not None


def gpt(**more: Any) -> Job:
    return whole_batches(load_job(GPT, {name: str(value) for name, value in {**SMALL, **more}.items()}))


def left_open() -> Job:
    """The job with an AdamW without a kernel setting: plait fuses it, and with offload it runs on the host."""
    return replace(gpt(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def llama(size: str = "tiny", **more: Any) -> Job:
    return whole_batches(load_job(LLAMA, {name: str(value) for name, value in {"size": size, **more}.items()}))


def mixture(length: int = 32) -> Job:
    """The llama's text, with a mixture of four experts in every layer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        num_local_experts=4, max_position_embeddings=length, use_cache=False, experts_implementation="eager",
    )  # fmt: skip
    return replace(llama(length=length, batch=8), model=lambda: MixtralForCausalLM(config))


# — environment —


def environment(setting: Setting) -> dict[str, Look]:
    looks: dict[str, Look] = {
        "versions": versions,
        "machine": partial(machine, setting),
        "forks": partial(forks, setting),
    }
    if setting.gpu:
        looks |= {"device": device, "a fork after CUDA": late_fork, "a fork after the driver": partial(late_fork, started)}
    if shutil.which("nvidia-smi"):
        looks["driver"] = smi
    return looks | {"plait train": partial(command_line, setting)}


def versions() -> Row:
    there = {}
    for name in LIBRARIES:
        try:
            there[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    toolkit = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "no CUDA"
    )
    said = f"Python {platform.python_version()}, torch {torch.__version__}, {toolkit}"
    return {"saw": ", ".join((said, *(f"{name} {version}" for name, version in there.items())))}


def machine(setting: Setting) -> Row:
    """Return the machine that plait detects: the driver's name of the device, and its data sheet in src/plait/machines/."""
    found = detect.detect_machine(setting.kind)
    peaks = {name: rate for name in ("fp32", "tf32", "fp16", "bf16", "fp8") if (rate := found.device.peak.for_precision(name))}
    told = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in peaks.items()) or "not known"
    memory = f"{found.device.memory / 2**30:.0f} GiB, {found.cores} cores"
    return {"saw": f"{found}, {memory}, peaks in TFLOP/s: {told}", "data": {"toml": found.to_toml()}}


def device() -> Row:
    """Return the properties that CUDA reports."""
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.hip is None else "RCCL"
    said = f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} multiprocessors, NCCL {nccl}"
    context = total - free - torch.cuda.memory_reserved()
    return {
        "saw": f"{said}, cuDNN {torch.backends.cudnn.version()}",
        "context MiB": context / 2**20,
        "memory GiB": total / 2**30,
    }


def smi() -> Row:
    """Return the driver's report: idle clocks and limits."""
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    rows = [dict(zip(ASKED, line.split(", "))) for line in done.stdout.strip().splitlines()]
    return {
        "saw": "; ".join(", ".join(f"{k} {v}" for k, v in row.items() if k != "name") for row in rows),
        "data": {"devices": rows},
    }


def forks(setting: Setting) -> Row:
    """Check that a rank that is forked after all imports and queries up to here can use the device."""
    why = forkable.find_fork_obstacle(on_devices=True)
    assert not why, why

    def rank(place: Place) -> Row:
        x = torch.ones(8, device=setting.kind, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None
        return {"sum": float(x.grad.sum())}

    (told,) = fork.run_ranks(rank, 1)
    assert told["sum"] == 16.0
    assert not torch.cuda.is_initialized()
    return {"saw": "this process has not touched the device; a rank forked from it computes there"}


def used() -> None:
    torch.ones(1, device="cuda")


def started() -> None:
    """Start CUDA's driver, as other libraries do."""
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0


def late_fork(before: Callable[[], None] = used) -> Row:
    """Return plait's error if CUDA is used before the fork."""
    before()
    try:
        devices.check_devices("cuda", 1)
    except PlaitError as error:
        assert "H011" in error.codes, error
        return {"saw": "refused with H011"}
    raise AssertionError("a process whose copies cannot use CUDA was forked")


def command_line(setting: Setting) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", "20", "--device", setting.kind, "--runs", folder]
        command = [sys.executable, "-m", "plait", "train", CNN, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, (done.stderr or done.stdout).strip()[-600:]
    return {"saw": done.stdout.strip().splitlines()[-1].partition(" · checkpoint")[0]}


# — verify —


def equal(make: Any, plan: str, kind: str) -> Row:
    """Run `plait verify`; under compile=true a graph must have been compiled."""
    seen = mmap.mmap(-1, 1)  # inherited by the processes that verify forks

    def compiles(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        seen[0] = 1
        return compile_fx(graph, inputs)

    with patch.object(torch, "compile", partial(torch.compile, backend=compiles)), forkable.use_fork_answers():
        verdict = verify(make(), Plan.parse(plan), device=kind)
    assert verdict.equal, f"{verdict.first_wrong}: {verdict.cause}"
    assert bool(seen[0]) == ("compile=true" in plan), "nothing was compiled"
    worst = max(probe.worst for probe in verdict.probes if probe.tolerance <= TOLERANCE)
    row: Row = {"saw": "; ".join(("EQUAL", *verdict.inexact)), "float64, apart": f"{worst:.1e}"}
    rounded = [probe for probe in verdict.probes if probe.tolerance > TOLERANCE]
    row |= {"own formats, of the tolerance": max(p.worst / p.tolerance for p in rounded)} if rounded else {}
    return row | {"data": verdict.to_dict()}


ONE = (
    "dp=1", "microbatches=2", "activation_checkpointing=full", "activation_checkpointing=selective", "compile=true",
    "compile=true activation_checkpointing=full", "precision=bf16",
    "precision=fp16", "precision=tf32", "offload=optimizer", "offload=all microbatches=2", "offload=all activation_checkpointing=full precision=bf16",
)  # fmt: skip


def one_device(setting: Setting) -> dict[str, Look]:
    """Verify every strategy that one device allows."""
    plans = [plan for plan in ONE if setting.gpu or "tf32" not in plan]
    plans += ["precision=fp8"] if has("torchao") and setting.gpu else []
    looks: dict[str, Look] = {f"gpt, {plan}": partial(equal, gpt, plan, setting.kind) for plan in plans}
    looks |= {f"gpt, AdamW left open, {plan}": partial(equal, left_open, plan, setting.kind) for plan in ("dp=1", "offload=optimizer")}
    looks["cnn, dp=1"] = partial(equal, partial(load_job, CNN), "dp=1", setting.kind)
    if has("transformers"):
        tiny = partial(llama, length=32, batch=8)
        looks |= {f"llama, {plan}": partial(equal, tiny, plan, setting.kind) for plan in ("dp=1", "compile=true")}
        looks["mixture, dp=1"] = partial(equal, mixture, "dp=1", setting.kind)
    return looks


AXES = (
    "dp=2", "dp=2 microbatches=2", "fsdp=2", "fsdp=2 zero_stage=1", "tp=2", "pp=2 microbatches=2", "pp=2 microbatches=4 schedule=zb", "cp=2",
    "cp=2 cp_method=ulysses",
)  # fmt: skip


def shared(make: Any, plan: str, kind: str) -> Row:
    with sharing(Plan.parse(plan).world):
        return equal(make, plan, kind)


def two_ranks(setting: Setting) -> dict[str, Look]:
    """Verify two ranks on one device, with communication through the host, because NCCL allows one rank per device."""
    looks: dict[str, Look] = {f"gpt, {plan}": partial(shared, gpt, plan, setting.kind) for plan in AXES}
    looks["gpt, AdamW left open, fsdp=2"] = partial(shared, left_open, "fsdp=2", setting.kind)
    looks["cnn, dp=2"] = partial(shared, partial(load_job, CNN), "dp=2", setting.kind)
    if has("transformers"):
        looks["llama, tp=2"] = partial(shared, partial(llama, length=32, batch=8), "tp=2", setting.kind)
        looks["mixture, ep=2"] = partial(shared, mixture, "ep=2", setting.kind)
    return looks


# — a process group of one rank, and training —


def one_rank(setting: Setting) -> dict[str, Look]:
    plans = ["dp=1", "precision=bf16", "precision=fp16", "compile=true", "offload=all precision=bf16"]
    plans += ["precision=fp8"] if has("torchao") and setting.gpu else []
    looks: dict[str, Look] = {
        "collectives": partial(collectives, setting),
        "buckets, batch norm": partial(connected, setting),
    }
    return looks | {f"20 steps, {plan}": partial(falls, plan, setting) for plan in plans}


def _connected(setting: Setting, folder: str) -> tuple[Place, Any]:
    """Connect in plait's own way."""
    place = Place(store=lambda: dist.FileStore(f"{folder}/store", 1), joined=True)
    return place, place.connect(setting.device)


def collectives(setting: Setting) -> Row:
    """Check every collective that plait uses with one rank, where each is a copy, and measure the communicator's device memory."""
    x = torch.arange(6.0, device=setting.device)
    free = torch.cuda.mem_get_info()[0] if setting.gpu else 0
    with tempfile.TemporaryDirectory() as folder:
        _, group = _connected(setting, folder)
        dist.all_reduce(x)
        taken = free - torch.cuda.mem_get_info()[0] if setting.gpu else 0
        for work in (ALL_GATHER, REDUCE_SCATTER, dist.all_to_all_single):
            made = torch.zeros_like(x)
            work(made, x)
            assert made.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], work
        dist.broadcast(x, 0)
        dist.barrier()
        row = {
            "saw": f"{dist.get_backend_config(group)}: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, barrier"
        }
        dist.destroy_process_group()
    return row | ({"communicator MiB": taken / 2**20} if setting.gpu else {})


def connected(setting: Setting) -> Row:
    """Compare steps with all communication of two ranks with plain steps."""
    with tempfile.TemporaryDirectory() as folder:
        place, group = _connected(setting, folder)
        alone, ranked = (Engine(load_job(CNN), "dp=1", place=place, device=setting.kind) for _ in range(2))
        mesh = Mesh(ranked.plan, 0, group)
        mesh.connect(*DATA_AXES)
        ranked.active_phase.reducer.sums = data_parallel.apply(replace(ranked.rank_model, mesh=mesh)).techniques.sums[""]
        losses = [[e.step(batch).loss for batch, _ in zip(e.batches(), range(3))] for e in (alone, ranked)]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0.0)
        ranked.close()
    return {"saw": f"loss {losses[1][0]:.4f} → {losses[1][-1]:.4f}"}


def falls(plan: str, setting: Setting) -> Row:
    """Check that the loss decreases in 20 steps."""
    engine = Engine(gpt(), plan, device=setting.kind)
    steps = [engine.step(batch) for batch, _ in zip(engine.batches(), range(20))]
    first, last = steps[0].loss, sum(s.loss for s in steps[-5:]) / 5
    skipped = sum(s.skipped for s in steps)
    assert last < first and skipped < 10, f"loss {first:.3f} → {last:.3f}, {skipped} steps skipped"
    data = {"losses": json.loads(json.dumps([s.loss for s in steps]))}
    return {"saw": f"loss {first:.3f} → {last:.3f}" + (f", {skipped} steps skipped" if skipped else ""), "data": data}
