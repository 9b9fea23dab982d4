"""Trains jobs under plans on simulated devices, with NCCL's rules, in the process of `shadow_runs.py`.

Each rank returns its losses and norms, and the waits of its host in the last step.
"""

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import plait
from device import attention_kernels, nccl, shadow, shadow_jobs
from plait.cli import fallback_plans
from plait.cli import train as launcher
from plait.cli.console import Console
from plait.cli.train_request import TrainRequest
from plait.config.errors import PlaitError
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.engine import build
from plait.engine.engine import Engine
from plait.engine.rank_start import RankOptions
from plait.engine.run_directory import RunDirectory
from plait.engine.step import Step
from plait.engine.train import train_rank
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp import groups
from plait.parallel.fsdp.runtime import DeviceScatter
from plait.planner import plan_request
from plait.planner.dryrun.memory_table import make_memory_table
from plait.proof import full_batch, verify
from plait.report import summary
from plait.tensors import torch_private

MESSAGES = {
    "gathers": (DefaultAllGather, "__call__"), "parts": (DeviceScatter, "__call__"), "copies": (DeviceScatter, "sum_over_replicas"),
}  # fmt: skip
"""The calls by which FSDP2 gathers parameters, reduce-scatters gradients, and sums the shards over replicas."""


def trained(
    name: str, plan: str, device: str, steps: int, cast: str | None = "float64", folder: str = "", resume: bool = False,
    on_nan: str = "stop", workers: int = 0, apart: float = 0.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return each rank's results of a few steps, optionally after resuming from a checkpoint in the folder; a new one is saved. `apart`:
    the relative difference that is added between the equal gradients of tp ranks."""
    job = shadow_jobs.JOBS[name]()

    def run(place: Place) -> dict[str, Any]:
        kind = cast and getattr(torch, cast)
        engine = Engine(
            job, plan, place=place, device=device, cast=kind, directory=folder or "none", on_nan=on_nan, workers=workers
        )
        if resume:
            engine.resume()
        specs = engine.rank_model.shard_plan.specs
        sliced = {n for n, spec in specs.items() if spec.expert or spec.is_split("tp")}
        alike = [p for n, p in engine.rank_model.params.items() if n not in sliced and engine.plan.tp > 1]
        for p in alike if apart else ():
            p.register_hook(lambda grad: grad * (1 + apart * place.rank))
        most = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        source, made = engine.batches(), list[Step]()
        for _ in range(steps):  # as in `plait train`, a step's values are not read before the next one
            with shadow.WAITS.counted() as waited:
                made.append(engine.step(next(source)))
        unpinned, late = dict(shadow.WAITS.unpinned), not made[-1].known
        engine.settle()
        found = [number for step in made for number in (step.loss, step.norm)]
        with shadow.WAITS.counted() as judged:
            measured = list(engine.evaluate().values()) if job.evaluate is not None else []
        with shadow.WAITS.counted() as checked:
            build.check_replicas(engine.rank_model, steps)
        if folder:
            engine.save()
        course = [[step.skipped, step.loss_scale, step.trouble and step.trouble.what] for step in made]
        counted = sum(int(b) for b in engine.model.buffers() if not b.is_floating_point())
        wholes = [float(p.detach().double().square().sum()) for p in alike]
        average = engine.rank_model.techniques.average.tensors.values() if engine.rank_model.techniques.average is not None else ()
        held = sum(float(t.double().abs().sum()) for t in (*engine.rank_model.params.values(), *engine.model.buffers(), *average))
        fused = [group.get("fused") for group in engine.optimizer.param_groups]
        shadow.check_freed()
        gathers = {by for m in engine.model.modules() if isinstance(m, FSDPModule) for by in messages_of(m)}
        return {"numbers": found, "measured": measured, "waits": dict(waited), "judged": dict(judged), "checked": dict(checked),
                "unpinned": unpinned, "fused": fused,
                "gathers": sorted(gathers), "course": course, "held": held, "wholes": wholes, "most": most, "counted": counted, "late": late,
                "streams": {kind: sorted(numbers) for kind, numbers in streams.items()}}  # fmt: skip

    with sending_on() as streams:
        return fork.run_ranks(run, Plan.parse(plan).world, fork.Listener(lambda *_: None))


class Noting(plait.Callback):
    """Adds a value to each step's metrics, ends the run after one of them, and counts the steps that are recorded by then."""

    def __init__(self, ends: int, looks: bool, metrics: Path):
        self.ends, self.looks, self.metrics = ends, looks, metrics
        self.seen: list[float] = []
        self.recorded: list[int] = []

    def on_step(self, engine: Any, step: Step) -> None:
        if self.looks:
            self.seen.append(step.loss)
        engine.log("twice", 2.0 * step.step)
        self.recorded.append(self.metrics.read_text().count('"loss"'))
        if step.step == self.ends:
            engine.stop("it is enough")


def whole(run: str, plan: str, device: str, folder: str, ends: int = 0, looks: bool = False, **given: Any) -> list[dict[str, Any]]:
    """Return the result of `plait train` on each rank, and the metrics in the run's folder."""
    place = RunDirectory(Path(folder))
    for path in (place.path, place.checkpoints, place.get_events_path(0).parent):
        path.mkdir(parents=True, exist_ok=True)
    wanted, noting = Plan.parse(plan), [Noting(ends, looks, place.metrics)]
    place.metrics.touch()
    options = RankOptions(name=run, job=shadow_jobs.JOBS[run](), plan=wanted, arguments={}, device=device, group_norms=True,
                          callbacks=lambda: noting, **{"save_every": 3, **given})  # fmt: skip

    def run_of(rank: Place) -> dict[str, Any]:
        return {**train_rank(options, place, rank), "recorded": noting[0].recorded}

    results = fork.run_ranks(run_of, wanted.world, fork.Listener(lambda *_: None))
    rows = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    return [{"result": result, "metrics": rows} for result in results]


def messages_of(module: FSDPModule) -> list[str]:
    """Return how FSDP2 gathers and sums a module's parameters, and whether it gathers on streams of its own."""
    held = torch_private._param_groups(module._get_fsdp_state())
    names = [(type(g._all_gather_comm).__name__, type(g._reduce_scatter_comm).__name__, g.unshard_async_op) for g in held]
    return [f"{gather}, {scatter}{', asynchronous' if other else ''}" for gather, scatter, other in names]


@contextmanager
def sending_on() -> Iterator[dict[str, set[int]]]:
    """Record the numbers of the streams from which FSDP2 sends its messages."""
    found: dict[str, set[int]] = {kind: set() for kind in MESSAGES}

    def noting(kind: str, call: Any) -> Any:
        def noted(*args: Any, **given: Any) -> Any:
            if torch.cuda.is_initialized():
                found[kind].add(torch.cuda.current_stream().number)
            return call(*args, **given)

        return noted

    with ExitStack() as stack:
        for kind, (owner, name) in MESSAGES.items():
            stack.enter_context(mock.patch.object(owner, name, noting(kind, getattr(owner, name))))
        yield found


def proved(prove: str, plan: str) -> list[dict[str, Any]]:
    """Return the verdict on a job of `shadow_jobs.JOBS`."""
    verdict = verify.verify(shadow_jobs.JOBS[prove](), Plan.parse(plan), steps=2, device="cuda")
    return [{"equal": verdict.equal, "cause": str(verdict), "messages": verdict.to_dict()["probes"]["C"]["detail"]}]


def launched(launch: str, plan: str, folder: str, size: int = 0, steps: int = 3) -> list[dict[str, Any]]:
    """Return the output of `plait train` for a job, and the files of its run; `size`: bytes of each device."""
    job, said = replace(shadow_jobs.JOBS[launch](), steps=steps), io.StringIO()
    request = TrainRequest(launch, job, Plan.parse(plan), runs=Path(folder), device="cuda", check="none", save_every=10**6, max_restarts=0)
    whole = Machine.from_name("h100x2")
    machine = replace(whole, device=replace(whole.device, memory=size or whole.device.memory))
    for index in range(2):
        shadow.LENT[0].blocks_size(index, size or 1 << 36, 1 << 20)
    try:
        context = 1 << 20 if size else plan_request.CONTEXT_BYTES
        with mock.patch.object(fallback_plans, "read_machine", lambda text: machine), mock.patch.object(plan_request, "CONTEXT_BYTES", context):
            code, error = launcher.launch_run(request, Console(out=said))[0], ""
    except PlaitError as failure:
        code, error = failure.exit_code, str(failure)
    finally:
        for index in range(2):
            shadow.LENT[0].blocks_size(index, 1 << 36, 0)
    run = RunDirectory(sorted(Path(folder).glob("*-*"))[-1])
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()] if run.metrics.exists() else []
    used = torch.cuda.is_initialized()
    billed = lambda place: place.beat(-1, "build") or {"bill": make_memory_table(job, request.plan).categories}  # noqa: E731
    bill = fork.run_ranks(billed, 1)[0]["bill"] if not error else {}
    told = summary.format_run_summary(summary.summarize_run(run.path)) if rows else ""
    return [{"code": code, "said": said.getvalue(), "error": error, "memory": run.read_memories(), "bill": bill, "report": told,
             "rows": [row for row in rows if "memory" in row], "used": used}]  # fmt: skip


def spoiling(how: str) -> None:
    """Use CUDA, or call its runtime, before the fork."""
    torch.ones(2, device="cuda") if how == "used" else torch.cuda.is_available()


def in_a_fork(spoil: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a case in a forked process that first uses CUDA; this process stays unchanged."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        try:
            spoiling(spoil)
            told = tried(case)
        except BaseException as error:
            told = {"error": repr(error)}
        os.write(theirs, json.dumps(told)[:4000].encode() + b"\n")
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return json.loads(told)


def came(case: dict[str, Any]) -> list[dict[str, Any]]:
    if "launch" in case:
        return launched(**case)
    return whole(**case) if "run" in case else proved(**case) if "prove" in case else probed(**case) if "probe" in case else trained(**case)


def probed(probe: str, world: int) -> list[dict[str, Any]]:
    """Run a function of `shadow_jobs.PROBES` on each rank."""

    def run(place: Place) -> dict[str, Any]:
        torch.cuda.set_device(place.rank)
        place.connect(torch.device("cuda", place.rank))
        with shadow.WAITS.counted() as waits:
            value = shadow_jobs.PROBES[probe](place.rank)
        shadow.check_freed()
        return {"value": value, "waits": dict(waits), "unpinned": dict(shadow.WAITS.unpinned)}

    return fork.run_ranks(run, world, fork.Listener(lambda *_: None))


def nothing(*args: object) -> None:
    """Replaces a stream's waits, to test whether their absence is detected."""


def main() -> None:
    groups.GROUP_BYTES = groups.TINY_BYTES = 0
    full_batch.DEFAULT_SECONDS = 0.0
    torch.set_num_threads(1)
    attention_kernels.install()
    for line in sys.stdin:
        case = json.loads(line)
        spoil = case.pop("spoil", "")
        print(json.dumps(in_a_fork(spoil, case) if spoil else tried(case)), flush=True)


def tried(case: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a case, or its error."""
    deaf = (
        mock.patch.multiple(shadow.Stream, wait_stream=nothing, wait_event=nothing) if case.pop("deaf", False) else None
    )
    forgets = mock.patch.object(torch.Tensor, "record_stream", nothing) if case.pop("forgets", False) else None
    cut_on_host = mock.patch.object(build, "MAX_FULL_FRACTION", 0.0) if case.pop("cut_on_host", False) else None
    backend = case.pop("backend", f"cpu:gloo,cuda:{nccl.NAME}")
    try:
        with (
            deaf or nullcontext(),
            forgets or nullcontext(),
            cut_on_host or nullcontext(),
            nccl.instead_of_gloo(30.0, backend=backend, host=torch.ops.shadow.host, streams=shadow.Communicators()),
        ):
            return {"ranks": came(case)}
    except Exception as error:
        return {"error": f"{error}\n{getattr(error, 'trace', '')}"}
