"""`plait train`: one rank of a run, and the launcher's side of it."""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait import __version__, chosen
from plait.build import broadcast_text, check_plan, pick_device
from plait.checkpoint import Checkpoints
from plait.console import Console
from plait.data import split
from plait.engine import Engine
from plait.errors import RESUMABLE
from plait.job import Job
from plait.launch import here
from plait.launch.devices import kind_of
from plait.launch.place import Place, current, joining
from plait.plan import Plan
from plait.record import Recorder
from plait.run import Run
from plait.weights import open_weights


@dataclass(frozen=True)
class Request:
    """What `plait train` was asked for."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    arguments: dict[str, str]
    runs: Path = Path("runs")
    resume: bool = False
    device: str = "auto"
    workers: int = 0
    save_every: int = 100
    keep: int = 3
    mirrors: tuple[str, ...] = ()
    shown: tuple[int, ...] = (0,)
    verbose: bool = False
    notes: tuple[str, ...] = ()
    weights: str | None = None
    """What to start from instead of the job's own initial weights."""


def launch(request: Request, out: Any = None) -> tuple[int, dict[str, Any]]:
    """Run the request: fork its processes here, or join those a launcher started. Returns (exit code, summary)."""
    console = Console(request.shown, request.verbose, out)
    if joining():
        return _joined(request, console)
    check_plan(request.job, request.plan, kind_of(request.device))
    if request.weights:
        open_weights(Path(request.weights))  # what cannot be read is said before a start
    run = _directory(request)
    lock = run.lock()
    console.say(headline(request))
    for note in (*request.notes, *_notes(request)):
        console.say(note)
    logs = [open(run.log(rank), "ab", buffering=0) for rank in range(request.plan.world)]  # noqa: SIM115

    def text(rank: int, data: bytes) -> None:
        logs[rank].write(data)
        console.text(rank, data)

    def message(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "status":
            console.status(message["value"])
        elif message["kind"] in ("log", "warning"):
            logs[rank].write(message["text"].encode())
            if message["kind"] == "warning":
                console.warning(rank, message["short"])
        else:
            console.say(message["text"])

    try:
        listener = here.Listener(message, text, console.tick)
        results = here.run(lambda place: train(request, run, place), request.plan.world, listener)
    finally:
        console.close()
        for log in logs:
            log.close()
        lock.close()
    return _finish(console, run, results[0])


def _joined(request: Request, console: Console) -> tuple[int, dict[str, Any]]:
    place = current()
    group = place.connect(pick_device(request.device, place))
    run, lock = None, None
    if place.rank == 0:
        run = _directory(request)
        lock = run.lock()
        console.say(headline(request))
        place.report = lambda message: (
            console.status(message["value"]) if message["kind"] == "status" else console.say(message["text"])
        )
    path = broadcast_text(str(run.path) if run else "", place.rank, group, pick_device(request.device, place))
    try:
        result = train(request, Run(Path(path)), place)
    finally:
        console.close()
        if lock is not None:
            lock.close()
    if place.rank == 0:
        return _finish(console, Run(Path(path)), result)
    return (RESUMABLE if result["stopped"] else 0), result


def _directory(request: Request) -> Run:
    if not request.resume:
        return Run.create(request.name, request.plan, request.arguments, request.runs)
    run = Run.latest(request.name, request.runs)
    run.point()
    run.describe(request.name, request.plan, request.arguments)
    return run


def _finish(console: Console, run: Run, result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    summary = {"run": str(run.path), **result}
    if result["stopped"]:
        console.say(
            f"stopped at step {result['step']} · saved {result['checkpoint']} · continue with the same command and --resume"
        )
        return RESUMABLE, summary
    if result["device_bytes"]:
        each = " · ".join(f"{n / 2**20:.1f}" for n in result["device_bytes"])
        console.say(f"memory per device (MiB): {each}   device 0 also holds the optimizer state and all outputs")
    console.say(console.done(run.path, result["checkpoint"]))
    return 0, summary


def _notes(request: Request) -> list[str]:
    if request.plan.precision == "fp16" and kind_of(request.device) == "cpu":
        return ["note  fp16 products on a CPU are many times slower than fp32; bf16 is the format for a CPU"]
    return []


def headline(request: Request) -> str:
    """plait 0.1 · stdlib_gpt · dp=2 on 2 CPU processes (gloo) · batch 32 = 16 per device"""
    job, plan = request.job, request.plan
    kind = kind_of(request.device).upper()
    backend = f" ({'nccl' if kind == 'CUDA' else 'gloo'})" if plan.world > 1 else ""
    where = f"{plan.world} {kind} process" + ("es" if plan.world > 1 else "") + backend
    shares = sorted({split(job.batch, plan.shares, i)[1] for i in range(plan.shares)}, reverse=True)
    share = " or ".join(map(str, shares)) + " per device"
    parts = f", in {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
    name = Path(request.name.partition(":")[0])
    title = name.parent.name if name.stem == "job" and name.parent.name else name.stem
    return f"plait {__version__} · {title} · {plan} on {where} · batch {job.batch} = {share}{parts}"


def train(request: Request, run: Run, place: Place) -> dict[str, Any]:
    """Train one rank to the end, or until somebody asks to stop."""
    report = place.report or (lambda message: None)
    if place.report is not None and not place.joined:
        warnings.showwarning = _reporter(report)
    engine = Engine(request.job, request.plan, device=request.device, workers=request.workers, place=place)
    engine.checkpoints = Checkpoints(run.checkpoints)
    named: set[str] = set()
    _inexact(engine, report, named)
    if request.plan.tp > 1 and place.rank == 0:
        report({"kind": "note", "text": f"note  {chosen.told(engine.built.whole)}"})
    resumed = _resume(engine, run, report) if request.resume else None
    if request.weights and resumed is None:
        engine.load_weights(request.weights)
    recorder = Recorder(
        engine,
        run,
        lambda value: report({"kind": "status", "value": value}),
        list(request.mirrors),
        lambda text: report({"kind": "note", "text": text}),
    )
    saved, stopped, loss = None, False, None
    try:
        for batch in engine.batches():
            step = engine.step(batch)
            recorder.step(batch, step)
            if loss is None:
                _inexact(engine, report, named)
            loss = step.loss
            _evaluate(engine, recorder, step.step)
            last = step.stop or step.step == engine.job.steps
            if last or step.step % request.save_every == 0:
                recorder.flush()
                saved = engine.save(request.keep, wait=last)
            stopped = step.stop and step.step < engine.job.steps
    finally:
        recorder.close()
    return {
        "step": engine.position.step, "loss": loss, "stopped": stopped, "checkpoint": str(saved) if saved else None,
        "device_bytes": recorder.device_bytes,
    }  # fmt: skip


def _inexact(engine: Engine, report: Callable[[dict[str, Any]], None], named: set[str]) -> None:
    """Say what cannot equal one device; some of it shows in the first step."""
    for line in engine.built.inexact:
        if engine.place.rank == 0 and line not in named:
            report({"kind": "note", "text": f"note  not exact: {line}"})
            named.add(line)


def _resume(engine: Engine, run: Run, report: Callable[[dict[str, Any]], None]) -> Path | None:
    path = engine.resume(missing_ok=True)
    if engine.place.rank == 0:
        for problem in engine.checkpoints.refused:
            report({"kind": "note", "text": f"refused {problem.what}: {problem.why}"})
        report(
            {
                "kind": "note",
                "text": f"resumed from {path} at step {engine.position.step}"
                if path
                else "nothing saved yet: starting from step 0",
            }
        )
        run.cut(engine.position.step)
    if engine.built.group is not None:
        broadcast_text("cut", engine.place.rank, engine.built.group, engine.built.device)  # nobody appends before
    return path


def _evaluate(engine: Engine, recorder: Recorder, step: int) -> None:
    wanted = engine.job.evaluate
    if wanted is None or not (step == engine.job.steps or (wanted.every and step % wanted.every == 0)):
        return
    recorder.evaluated(step, engine.evaluate())


def _reporter(report: Callable[[dict[str, Any]], None]):
    def show(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        lines = str(message).splitlines() or [""]
        report({"kind": "warning", "text": text, "short": f"{category.__name__}: {lines[0]}"})

    return show


def scaled(job: Job, batch: int | None, rule: str | None) -> tuple[Job, tuple[str, ...]]:
    """The job with another global batch and, only when a rule is asked for, another learning rate; and the rule in words.

    linear: times batch / job.batch (Goyal et al. 2017). sqrt: times its square root (Krizhevsky 2014), the usual
    choice for Adam.
    """
    if batch is None or batch == job.batch:
        return job, ()
    ratio = batch / job.batch
    changed = dataclasses.replace(job, batch=batch)
    if rule is None:
        return changed, (
            f"note  global batch {job.batch} → {batch}; learning rate unchanged (--scale-lr linear or sqrt changes it)",
        )
    factor = ratio if rule == "linear" else ratio**0.5

    def optimizer(parameters: list[Any]) -> Any:
        made = job.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] = group["lr"] * factor
        return made

    words = f"{rule}: batch {job.batch} → {batch}" + (", √" if rule == "sqrt" else ", ") + f"{ratio:.4g}"
    return dataclasses.replace(changed, optimizer=optimizer), (f"note  learning rate × {factor:.4g}  ({words})",)
