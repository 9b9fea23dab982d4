"""`plait train`, the launcher's side: a run directory, ranks that are forked and watched, again when one is lost, and the end."""

import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from plait.checkpoint.opening import open_weights
from plait.cli import other_plans, served
from plait.cli.console import Console
from plait.cli.request import Request
from plait.cli.restart_loop import RestartLoop
from plait.config.errors import RESUMABLE, PlaitError, Problem
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.data.batch import sizes
from plait.engine import joined_ranks
from plait.engine.build import pick_device
from plait.engine.elastic import Memory, Neighbours
from plait.engine.memory_use import fullest
from plait.engine.rank_start import RankOptions
from plait.engine.resume import AUTO, Start, writing
from plait.engine.run_directory import RunDirectory
from plait.engine.train import train
from plait.launch import attempts, fork, nccl
from plait.launch.devices import called, check, cuda_names, kind_of, unused
from plait.launch.launchers import Membership
from plait.launch.nodes import Node
from plait.launch.place import Place, current, joined, joining, on_nodes, unused_allocation
from plait.launch.round import Round
from plait.launch.stopping import Stopped, StopRequest, command, ending_waits, told
from plait.model.sketch import Sketch
from plait.planner.refusals import foresee
from plait.proof.job import check as jobcheck
from plait.tensors.rows import split

HANDING = 10.0
"""Seconds that survivors are given to notice that a rank is lost, and to put away what they hold."""
LOOKED_AT = 8
"""Of so many runs of a job the result of the job check is taken again."""


def launch(request: Request, console: Console | None = None) -> tuple[int, dict[str, Any]]:
    """Run the request: fork its processes here, or join those a launcher started. Returns (exit code, summary)."""
    console = console or Console(request.shown, request.verbose)
    if joining():
        served.refuse_launchers(request.plan, "another launcher started this process")
        with ending_waits():
            return _joined(request, console)
    member = on_nodes()
    if member is not None:
        served.refuse_launchers(request.plan, f"the run has {member.count} nodes")
    node = Node.join(member, request.plan.world, console.say) if member is not None else Node.alone(request.plan.world)
    if member is not None:
        console.say(member.told())
    with node.taking_part(), told():
        return _watched(request, console, node)


def _watched(request: Request, console: Console, node: Node) -> tuple[int, dict[str, Any]]:
    """Fork this machine's ranks, and watch over them."""
    plan, first = request.plan, node.index == 0
    check(kind_of(request.device), node.each - plan.server_count)
    sketch = foresee(request.job, plan, kind_of(request.device))
    _refuse_fewer(request)
    if request.job.weights and request.resume is None:
        open_weights(Path(request.job.weights))  # what cannot be read is said before a start
    checked = _checked(request) if first else jobcheck.Checked("none")
    made = _Made(request, checked)
    run = joined_ranks.meet_on_nodes(node, made.make) if node.count > 1 else made.make()
    output = _Output(console, run)
    if first:
        console.say(headline(request))
        several = ["note  node 0 holds the store: if it is lost, the run ends; continue it with --resume"] if node.count > 1 else []
        for note in (*request.notes, *_notes(request), *made.notes(), *checked.lines, *several):
            console.say(note)

    memory = Memory() if request.max_restarts and not plan.server_count else None
    listener = fork.Listener(output.message, output.text, console.tick, console.say, logs=True)
    loop = RestartLoop(request, run, memory, node, listener)
    try:
        if plan.server_count:
            results = served.ranks(request, run, listener, output.begin)
        else:
            results = _ranks(request, sketch, loop, listener, output)
    except BaseException as error:
        if isinstance(error, Stopped):
            error = loop.stopped(error)
        made.failed(error, console)
        if isinstance(error, PlaitError):
            raise other_plans.with_plan_that_fits(error, request, run, console.say) from error.__cause__
        raise error
    finally:
        output.close()
        made.close()
        loop.close()
        joined_ranks.left_by_nodes(node, run)
        if memory is not None:
            memory.close()
    if not results:
        console.say("the run ended on the other machines")
        return 0, {}
    if first:
        return _finish(console, run, results[0], request)
    return (RESUMABLE if results[0]["stopped"] else 0), {"run": str(run.path), **results[0]}


def _ranks(
    request: Request, sketch: Sketch | None, loop: RestartLoop, listener: fork.Listener, output: "_Output"
) -> list[dict[str, Any]]:
    """Fork the ranks, round after round. What those of the last one returned; nothing where it was without this machine. `sketch`: of
    the request's plan."""
    now, memory, node = loop.first(), loop.memory, loop.node
    stop = StopRequest.of_process()
    leaves = memory is not None and not request.plan.rarely
    began, logs = time.time(), loop.run.log(0).parent
    shown, results = listener.tick, list[dict[str, Any]]()

    def tick() -> None:
        shown()
        loop.tick()

    listener.tick = tick
    while now is not None:
        plan = Plan.parse(now.plan)
        output.begin(node.ranks)
        listener.hung = partial(nccl.ask_for_records, logs, node.ranks)
        handing = HANDING if memory is not None and plan.along(plan.replica_axes) > 1 else 0.0
        if memory is not None:
            memory.begin()
        options = rank_options(replace(request, plan=plan), sketch if plan == request.plan else None)
        target = partial(_trained, options, output.run, memory.path if memory is not None else None, now)
        try:
            with stop.training():
                results = fork.run(
                    target, plan.world, listener, patience=request.hang_timeout, alike=plan.pp == 1, handing=handing,
                    node=node if node.count > 1 else None, devices=now.devices[node.index], leaves=leaves,
                )  # fmt: skip
        except PlaitError as error:
            results, now = [], loop.after_loss(nccl.named(error, logs, began))
        else:
            now = loop.after_end(results)
    return results


def _trained(options: RankOptions, run: RunDirectory, memory: Path | None, now: Round, place: Place) -> dict[str, Any]:
    neighbours = None
    if len(now.devices) > 1:
        neighbours = Neighbours(*now.neighbours_of(place.rank), now.kept_by(now.machine_of(place.rank)))
    return train(options, run, place, memory=memory, neighbours=neighbours, again=now.number > 0)


def rank_options(request: Request, sketch: Sketch | None = None) -> RankOptions:
    """What of a request each rank needs: its fields of the same names; and the sketch of the request's plan, if it is known."""
    names = (one.name for one in fields(RankOptions) if one.name != "sketch")
    return RankOptions(**{name: getattr(request, name) for name in names}, sketch=sketch)


class _Output:
    """What the ranks print and report: to the terminal, and into a log for each."""

    def __init__(self, console: Console, run: RunDirectory):
        self.console, self.run, self.logs = console, run, dict[int, IO[bytes]]()

    def begin(self, ranks: range) -> None:
        """These ranks are about to start."""
        with writing(self.run.path):
            for rank in ranks:
                if rank not in self.logs:
                    self.logs[rank] = open(self.run.log(rank), "ab", buffering=0)  # noqa: SIM115

    def text(self, rank: int, data: bytes) -> None:
        self.logs[rank].write(data)
        self.console.text(rank, data)

    def message(self, rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "status":
            self.console.status(message["value"])
        elif message["kind"] in ("log", "warning"):
            self.logs[rank].write(message["text"].encode("utf-8", "backslashreplace"))
            if message["kind"] == "warning":
                self.console.warning(rank, message["short"])
        else:
            self.console.say(message["text"])

    def close(self) -> None:
        self.console.close()
        for file in self.logs.values():
            file.close()


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
        said = self.start.failed(error) if self.start is not None else None
        if said:
            console.say(said)

    def close(self) -> None:
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
            group = place.connect(device, single_messages=request.plan.pp > 1)
            runs = RunDirectory.all(request.name, request.runs)
            starts, before = joined_ranks.earlier(place, group, device, runs)
            if before is not None:
                request = made.request = replace(request, resume=before)
            run = joined_ranks.meet(place, group, device, made.make)
            if place.rank == 0:
                joined_ranks.remember(run, starts)
                first = [member.told(), *attempts.told(member)] if member is not None else []
                for line in (*first, headline(request), *checked.lines):
                    console.say(line)
                place.report = lambda message: (
                    console.status(message["value"]) if message["kind"] == "status" else console.say(message["text"])
                )
            result = train(rank_options(request), run, place)
    except BaseException as error:
        made.failed(error, console)
        raise
    finally:
        console.close()
        made.close()
    if place.rank == 0:
        return _finish(console, run, result, request, member)
    return (RESUMABLE if result["stopped"] else 0), {"run": str(run.path), **result}


def _checked(request: Request) -> jobcheck.Checked:
    """What the job check says, or said in one of the job's last runs."""
    words: dict[str, Any] = {"workers": request.workers}
    if request.by_file:
        before = tuple(RunDirectory.all(request.name, request.runs)[:LOOKED_AT])
        words |= {"name": request.name, "arguments": request.arguments, "before": before}
    return jobcheck.check(request.job, request.plan, request.check, **words)


def _refuse(request: Request, checked: jobcheck.Checked) -> None:
    if checked.problems and not request.allow_inexact:
        first, *rest = checked.problems
        anyway = "--allow-inexact    trains anyway, and the run records it"
        raise PlaitError([replace(first, fix=(*first.fix, anyway)), *rest])


def _refuse_fewer(request: Request) -> None:
    """P065 for `--allow-shrink` where what ranks keep is no use to fewer of them."""
    plan = request.plan
    if request.allow_shrink and (plan.replica_groups > 1 or plan.grad_compression != "none"):
        groups = plan.replica_groups > 1
        word = f"replica_groups={plan.replica_groups}" if groups else f"grad_compression={plan.grad_compression}"
        kept = (
            "each group has its own weights and optimizer state"
            if groups
            else "each replica has its own residuals"
        )
        fix = ("leave out --allow-shrink    a failed rank is restarted",)
        raise PlaitError(
            Problem("P065", f"--allow-shrink does not work with {word}", why=f"{kept}, which fewer ranks cannot continue", fix=fix)
        )


def _finish(
    console: Console, run: RunDirectory, result: dict[str, Any], request: Request, member: Membership | None = None
) -> tuple[int, dict[str, Any]]:
    summary, resume = {"run": str(run.path), **result}, request.resume
    if result["stopped"] and request.python:
        console.say(f'stopped at step {result["step"]} · saved {result["checkpoint"]}: resume="{run.path}" goes on')
        return RESUMABLE, summary
    if result["stopped"]:
        saved = f"stopped at step {result['step']} · saved {result['checkpoint']}"
        launcher = f"{member.launcher.partition(' (')[0]} … " if member is not None else ""
        named = resume if resume not in (None, "", AUTO) else ""
        again = command(*(["--resume"] if resume is None else []), resume=named, to=str(run.path))
        console.say(f"{saved} · exit code {RESUMABLE}: run me again with\n    {launcher}{again}")
        return RESUMABLE, summary
    if result["device_bytes"]:
        each = " · ".join(f"{n / 2**20:.1f}" for n in result["device_bytes"])
        console.say(f"memory per device (MiB): {each}   device 0 also holds the optimizer state and all outputs")
    if not result["made"]:
        more = (
            f"resume=True, steps={2 * result['step']}" if request.python else f"--resume --steps {2 * result['step']}"
        )
        if result.get("ended"):
            console.say(f"stopped early at step {result['step']}: {result['ended']}")
        console.say(f"complete at step {result['step']}: nothing was left to do · go on with {more}")
        return 0, summary
    if result["skipped"]:
        console.say(f"{result['skipped']} steps were left out: nothing was updated in them")
    if result.get("ended"):
        console.say(f"stopped early at step {result['step']}: {result['ended']}")
    if memory := _memory(run):
        console.say(memory)
    console.say(console.done(run.path, result["checkpoint"]))
    return 0, summary


def _memory(run: RunDirectory) -> str:
    """A line on the memory of the rank that needed most; nothing where there are no devices."""
    found = fullest(run.memories())
    return f"memory  rank {found[0]}: {found[1].line()}" if found is not None and found[1].total else ""


def _notes(request: Request) -> list[str]:
    import torch

    kind, notes = kind_of(request.device), unused_allocation()
    if request.plan.precision == "fp16" and kind == "cpu":
        notes.append("note  fp16 products on a CPU are many times slower than fp32; bf16 is the format for a CPU")
    if kind == "cpu" and request.device == "auto":
        notes += [
            f"note  torch can use {other} here, and plait does not yet: these are CPU processes" for other in unused()
        ]
    if request.plan.precision == "tf32" and kind == "cpu":
        notes.append("note  tf32 is a format in which GPUs multiply; these processes compute in fp32")
    if request.plan.precision == "fp32" and kind == "cuda" and torch.get_float32_matmul_precision() == "highest":
        notes.append("note  matrix products are made in full fp32, without a GPU's fastest units; precision=tf32 or bf16 uses them")
    count = len(cuda_names()) if kind == "cuda" else 0
    if count > request.plan.devices == 1:
        told = f"--nproc {count} uses all, --plan auto chooses a plan for them"
        notes.append(f"note  one of {count} devices is used; {told}")
    return notes


def headline(request: Request) -> str:
    """plait 0.1 · stdlib_gpt · dp=2 on 2 CPU processes (gloo) · batch 32 = 16 per device"""
    job, plan = request.job, request.plan
    kind, library = called(kind_of(request.device))
    backend = f" ({library})" if plan.world > 1 else ""
    where = f"{plan.world} {kind} process" + ("es" if plan.world > 1 else "") + backend
    held = [split(job.batch, plan.replica_groups, group)[1] for group in range(plan.replica_groups)]
    shares = [n for size in held for n in sizes(size, plan.parts or (1,) * plan.shares, plan.microbatches)]
    share = " or ".join(map(str, sorted(set(shares), reverse=True))) + (" per portion" if plan.server_count else " per device")
    if plan.server_count:
        where = f"{plan.devices} {kind} groups and {plan.server_count} server" + ("s" if plan.server_count > 1 else "")
    if plan.parts:
        share = ", ".join(map(str, shares)) + " for the ranks with samples of their own"
    elif plan.batch_split == "auto":
        share += " until speeds are known"
    parts = f", in {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
    name = Path(request.name.partition(":")[0])
    title = name.parent.name if name.stem == "job" and name.parent.name else name.stem
    return f"plait {__version__} · {title} · {plan} on {where} · batch {job.batch} = {share}{parts}"
