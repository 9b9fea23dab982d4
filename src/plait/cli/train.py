"""`plait train`: one rank of a run, and the launcher's side of it."""

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from plait.checkpoint import optimizer_state
from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.weights import open_weights
from plait.cli.console import Console
from plait.config.errors import FAILED, RESUMABLE, PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.data.batch import Batch
from plait.engine import joined_ranks
from plait.engine.build import broadcast_text, inexact, pick_device
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.passes import Step
from plait.engine.resume import Start, writing
from plait.engine.run_directory import RunDirectory
from plait.launch import fork
from plait.launch.devices import check, cuda_names, kind_of
from plait.launch.failure_report import short
from plait.launch.nodes import Node
from plait.launch.place import Place, current, joined, joining, on_nodes, unused_allocation
from plait.parallel.context.sequences import opened_units
from plait.parallel.tensor import choose
from plait.planner.refusals import foresee
from plait.tensors.finite import number
from plait.tensors.rows import split
from plait.verify.job import check as jobcheck

Note = Callable[[str], None]
"""Says a line beside training, on the terminal of who started it."""
LOOKED_AT = 8
"""Of so many runs of a job the result of the job check is taken again."""


@dataclass(frozen=True)
class Request:
    """What `plait train` was asked for."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    arguments: dict[str, str]
    runs: Path = Path("runs")
    resume: str | None = None
    """The run or checkpoint to continue; empty: the job's newest run."""
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
    allow_changes: bool = False
    """Continue although the job changed such that its place in the data means something else."""
    patience: float | None = None
    """Seconds without progress after which a rank is ended; None: chosen by what it does (see `launch/hangs.py`)."""
    on_nan: str = "stop"
    """What to do in a step whose loss or gradient norm is not finite: stop, or skip it."""
    check: str = "quick"
    """How the job is checked before the first step: none, quick, full (see `verify/job/check.py`)."""
    allow_inexact: bool = False
    """Train although the job check found that the plan makes another training of the job."""


def launch(request: Request, out: TextIO | None = None) -> tuple[int, dict[str, Any]]:
    """Run the request: fork its processes here, or join those a launcher started. Returns (exit code, summary)."""
    console = Console(request.shown, request.verbose, out)
    if joining():
        return _joined(request, console)
    member = on_nodes()
    node = None if member is None else Node.join(member, request.plan.world, console.say)
    if member is not None:
        console.say(member.told())
    with node.telling() if node is not None else nullcontext():
        return _watched(request, console, node)


def _watched(request: Request, console: Console, node: Node | None) -> tuple[int, dict[str, Any]]:
    """Fork this machine's ranks, and watch over them."""
    plan, first = request.plan, node is None or node.index == 0
    ranks = range(plan.world) if node is None else node.ranks
    check(kind_of(request.device), len(ranks))
    foresee(request.job, plan, kind_of(request.device))
    if request.weights:
        open_weights(Path(request.weights))  # what cannot be read is said before a start
    checked = _checked(request) if first else jobcheck.Checked("none")
    made = _Made(request, checked)
    run = made.make() if node is None else joined_ranks.meet_on_nodes(node, made.make)
    with writing(run.path):
        logs = {rank: open(run.log(rank), "ab", buffering=0) for rank in ranks}  # noqa: SIM115
    if first:
        console.say(headline(request))
        for note in (*request.notes, *_notes(request), *made.notes(), *_told(checked)):
            console.say(note)

    def text(rank: int, data: bytes) -> None:
        logs[rank].write(data)
        console.text(rank, data)

    def message(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "status":
            console.status(message["value"])
        elif message["kind"] in ("log", "warning"):
            logs[rank].write(message["text"].encode("utf-8", "backslashreplace"))
            if message["kind"] == "warning":
                console.warning(rank, message["short"])
        else:
            console.say(message["text"])

    try:
        listener = fork.Listener(message, text, console.tick, console.say)
        results = fork.run(
            lambda place: train(request, run, place), plan.world, listener, patience=request.patience, alike=plan.pp == 1,
            node=node,
        )  # fmt: skip
    except BaseException as error:
        made.failed(error, console)
        raise
    finally:
        console.close()
        for log in logs.values():
            log.close()
        made.close()
    if first:
        return _finish(console, run, results[0])
    return (RESUMABLE if results[0]["stopped"] else 0), results[0]


class _Made:
    """The run directory, on the machine that makes it: the lock on it, and what becomes of it when the run fails."""

    def __init__(self, request: Request, checked: jobcheck.Checked):
        self.request, self.checked = request, checked
        self.start: Start | None = None
        self.lock: IO[bytes] | None = None

    def make(self) -> RunDirectory:
        """A new one, or the one that is resumed."""
        _refuse(self.request, self.checked)
        start = self.start = Start.of(
            self.request.name, self.request.plan, self.request.arguments, self.request.runs, self.request.resume
        )
        with writing(start.run.path):
            self.lock = start.run.lock()
            jobcheck.store(start.run.path, self.checked)
        return start.run

    def notes(self) -> list[str]:
        """What there is to say of where the run starts from."""
        return [self.start.note] if self.start is not None and self.start.note else []

    def failed(self, error: BaseException, console: Console) -> None:
        """Say what becomes of it."""
        said = self.start.failed(error) if self.start is not None else None
        if said:
            console.say(said)

    def close(self) -> None:
        """Release it."""
        if self.lock is not None:
            self.lock.close()


def _joined(request: Request, console: Console) -> tuple[int, dict[str, Any]]:
    place, member, run = current(), joined(), None
    place.meet()
    checked = _checked(request) if place.rank == 0 else jobcheck.Checked("none")  # before there are connections to fork
    made = _Made(request, checked)
    try:
        with joined_ranks.telling(place, lambda: run.log(place.rank) if run is not None else None):
            device = pick_device(request.device, place)
            run = joined_ranks.meet(place, place.connect(device), device, made.make)
            if place.rank == 0:
                for line in (*([member.told()] if member is not None else []), headline(request), *_told(checked)):
                    console.say(line)
                place.report = lambda message: (
                    console.status(message["value"]) if message["kind"] == "status" else console.say(message["text"])
                )
            result = train(request, run, place)
    except BaseException as error:
        made.failed(error, console)
        raise
    finally:
        console.close()
        made.close()
    if place.rank == 0:
        return _finish(console, run, result)
    return (RESUMABLE if result["stopped"] else 0), result


def _checked(request: Request) -> jobcheck.Checked:
    """What the job check says, or said in one of the job's last runs."""
    before = tuple(RunDirectory.all(request.name, request.runs)[:LOOKED_AT])
    words = {"name": request.name, "arguments": request.arguments, "before": before, "workers": request.workers}
    return jobcheck.check(request.job, request.plan, request.check, **words)


def _refuse(request: Request, checked: jobcheck.Checked) -> None:
    if checked.problems and not request.allow_inexact:
        first, *rest = checked.problems
        anyway = "--allow-inexact    trains all the same, and the run says so"
        raise PlaitError([dataclasses.replace(first, fix=(*first.fix, anyway)), *rest])


def _told(checked: jobcheck.Checked) -> list[str]:
    """What of the job check is said beside the headline: what is not exact, and what was not looked at."""
    unchecked = [f"note  job check: {line}" for line in checked.unchecked]
    return [f"note  not exact: {line}" for line in checked.inexact] + unchecked


def _finish(console: Console, run: RunDirectory, result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    summary = {"run": str(run.path), **result}
    if result["stopped"]:
        saved = f"stopped at step {result['step']} · saved {result['checkpoint']}"
        console.say(f"{saved} · continue with the same command and --resume")
        return RESUMABLE, summary
    if result["device_bytes"]:
        each = " · ".join(f"{n / 2**20:.1f}" for n in result["device_bytes"])
        console.say(f"memory per device (MiB): {each}   device 0 also holds the optimizer state and all outputs")
    if not result["made"]:
        more = f"--resume --steps {2 * result['step']}"
        console.say(f"complete at step {result['step']}: nothing was left to do · go on with {more}")
        return 0, summary
    if result["skipped"]:
        console.say(f"{result['skipped']} steps were left out: nothing was updated in them")
    console.say(console.done(run.path, result["checkpoint"]))
    return 0, summary


def _notes(request: Request) -> list[str]:
    kind, notes = kind_of(request.device), unused_allocation()
    if request.plan.precision == "fp16" and kind == "cpu":
        notes.append("note  fp16 products on a CPU are many times slower than fp32; bf16 is the format for a CPU")
    count = len(cuda_names()) if kind == "cuda" else 0
    if count > request.plan.devices == 1:
        told = f"--nproc {count} uses all, --plan auto chooses a plan for them"
        notes.append(f"note  one of {count} devices is used; {told}")
    return notes


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


def train(request: Request, run: RunDirectory, place: Place) -> dict[str, Any]:
    """Train one rank to the end, or until somebody asks to stop."""
    report = place.report or (lambda message: None)
    note = lambda text: report({"kind": "note", "text": text})  # noqa: E731
    if place.report is not None and not place.joined:
        warnings.showwarning = _reporter(report)
    engine = _engine(request, run, place)
    named: set[str] = set()
    _inexact(engine, note, named)
    _whole(engine, note)
    resumed = _resume(engine, request, run, note) if request.resume is not None else None
    if request.weights and resumed is None:
        engine.load_weights(request.weights)
    status = lambda value: report({"kind": "status", "value": value})  # noqa: E731
    recorder = Recorder(engine, run, status, list(request.mirrors), note)
    saved, stopped, loss, skipped, made = resumed, False, None, 0, 0
    try:
        if resumed is not None and _owed(engine, run):
            _evaluate(engine, recorder, engine.position.step)
        for batch in engine.batches():
            step = _step(engine, batch, recorder, request.keep)
            recorder.step(batch, step)
            skipped, made = skipped + step.skipped, made + 1
            _sound(engine, step, note)
            if loss is None:
                _inexact(engine, note, named)
            loss = step.loss
            last = step.stop or step.step == engine.job.steps
            if last or step.step % request.save_every == 0:
                recorder.flush()
                saved = engine.save(request.keep, wait=last)
            _evaluate(engine, recorder, step.step)
            stopped = step.stop and step.step < engine.job.steps
        poisoned = engine.guard.poisoned(engine, engine.position.step, "found at the end of the run")
        if poisoned is not None:
            raise PlaitError(poisoned, FAILED)
    finally:
        recorder.close()
    return {
        "step": engine.position.step, "loss": None if loss is None else number(loss), "skipped": skipped, "made": made,
        "stopped": stopped, "checkpoint": str(saved) if saved else None, "device_bytes": recorder.device_bytes,
    }  # fmt: skip


def _engine(request: Request, run: RunDirectory, place: Place) -> Engine:
    """The engine of the request. What checkpoints will say of the job is found out here, not beside a step."""
    engine = Engine(
        request.job, request.plan, device=request.device, workers=request.workers, place=place, on_nan=request.on_nan
    )
    engine.checkpoints, engine.arguments = Checkpoints(run.checkpoints), request.arguments
    optimizer_state.check(engine)
    place.beat(engine.position.step, "data")
    engine.fingerprint.get("data")
    return engine


def _step(engine: Engine, batch: Batch, recorder: Recorder, keep: int) -> Step:
    """One step. If it is not finite and the run stops, the state before it, which is good, is saved first."""
    try:
        return engine.step(batch)
    except PlaitError as error:
        if error.codes[0] not in ("N001", "N002") or not engine.position.step:
            raise
        recorder.flush()
        first, *rest = error.problems
        fix = (f"the state before it is saved in {engine.save(keep)}", *first.fix)
        raise PlaitError([dataclasses.replace(first, fix=fix), *rest], error.exit_code) from None


def _sound(engine: Engine, step: Step, note: Note) -> None:
    """Tell of a step that was left out, and of checkpoints whose numbers are not finite."""
    if engine.place.rank:
        return
    if step.trouble is not None:
        note("note  left out " + f"{step.trouble.what}\n{step.trouble.why}".replace("\n", "\n      "))
    while engine.checkpoints.marked:
        problem = engine.checkpoints.marked.pop(0)
        note(f"note  {problem.what}: {problem.why}")


def _whole(engine: Engine, note: Note) -> None:
    """Say what of the model ranks hold, or compute, whole under tp and cp."""
    lines = [choose.summary(engine.built.whole)] if engine.built.plan.tp > 1 else []
    for line in (*lines, *opened_units(engine.built.whole)) if engine.place.rank == 0 else ():
        note(f"note  {line}")


def _inexact(engine: Engine, note: Note, named: set[str]) -> None:
    """Say what cannot equal one device; some of it shows in the first step, and what losses ask for on the last stage only."""
    built = engine.built
    first = not any(place for axis, place in built.at.items() if axis != "pp")
    for line in inexact(built) if engine.place.rank == 0 else built.sharers.inexact if first else ():
        if line not in named:
            note(f"note  not exact: {line}")
            named.add(line)


def _resume(engine: Engine, request: Request, run: RunDirectory, note: Note) -> Path | None:
    path = engine.resume(missing_ok=not request.resume, allow_changes=request.allow_changes)
    if engine.place.rank == 0:
        for problem in engine.checkpoints.refused:
            note(f"refused {problem.what}: {problem.why}")
        resumed = f"resumed from {path} at step {engine.position.step}"
        note(resumed if path else "nothing saved yet: starting from step 0")
        for line in engine.checkpoints.changed:
            note(f"changed  {line}")
        with writing(run.path):
            run.describe(request.name, request.plan, request.arguments)
            run.cut(engine.position.step)
    if engine.built.group is not None:
        broadcast_text("cut", engine.place.rank, engine.built.group, engine.built.device)  # nobody appends before
    return path


def _evaluate(engine: Engine, recorder: Recorder, step: int) -> None:
    wanted = engine.job.evaluate
    if wanted is None or not (step == engine.job.steps or (wanted.every and step % wanted.every == 0)):
        return
    recorder.evaluated(step, engine.evaluate())


def _owed(engine: Engine, run: RunDirectory) -> bool:
    """Whether the run had ended before the evaluation of the step that it goes on from was done. All ranks call it."""
    rank = engine.place.rank
    word = "" if rank else "done" if run.evaluated(engine.position.step) else "owed"
    return broadcast_text(word, rank, engine.built.group, engine.built.device) == "owed"


def _reporter(report: Callable[[dict[str, Any]], None]):
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        report({"kind": "warning", "text": text, "short": f"{category.__name__}: {short(str(message))}"})

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
        told = "learning rate unchanged (--scale-lr linear or sqrt changes it)"
        return changed, (f"note  global batch {job.batch} → {batch}; {told}",)
    factor = ratio if rule == "linear" else ratio**0.5

    def optimizer(parameters: list[Any]) -> Any:
        made = job.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] = group["lr"] * factor
        return made

    words = f"{rule}: batch {job.batch} → {batch}" + (", √" if rule == "sqrt" else ", ") + f"{ratio:.4g}"
    return dataclasses.replace(changed, optimizer=optimizer), (f"note  learning rate × {factor:.4g}  ({words})",)
