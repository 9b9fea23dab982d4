"""`plait train` in the launcher: create a run directory, fork ranks, restart them after failures, and report the end."""

import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from plait.checkpoint.foreign_weights import open_weights
from plait.cli import async_run, fallback_plans
from plait.cli.console import Console
from plait.cli.restart_loop import RestartLoop
from plait.cli.train_request import TrainRequest
from plait.config.errors import RESUMABLE, PlaitError, Problem
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.data.batch import split_by_weights
from plait.engine import external_ranks
from plait.engine.build import pick_device
from plait.engine.elastic import SnapshotPeers, SnapshotStore
from plait.engine.memory_use import find_fullest
from plait.engine.rank_start import RankOptions
from plait.engine.resume import AUTO, RunStart, translate_write_errors
from plait.engine.run_directory import RunDirectory
from plait.engine.train import train_rank
from plait.launch import attempts, fork, nccl
from plait.launch.devices import check_devices, describe_kind, list_cuda_devices, list_unused_kinds, resolve_kind
from plait.launch.launchers import Membership
from plait.launch.nodes import Node
from plait.launch.place import (
    Place,
    find_node_membership,
    find_place,
    find_rank_membership,
    is_launched_rank,
    note_unused_allocation,
)
from plait.launch.round import Round
from plait.launch.stopping import StopRequest, StopRequested, convert_stop, end_waits_on_stop, rebuild_command
from plait.model.sketch import Sketch
from plait.planner.refusals import validate_plan
from plait.proof.job import check as jobcheck
from plait.tensors.rows import split_evenly

SNAPSHOT_GRACE_S = 10.0
"""Seconds for the other ranks to notice a failed rank and to store their snapshots."""
MAX_CHECKED_RUNS = 8
"""Number of a job's newest runs whose job check result is reused."""


def launch_run(request: TrainRequest, console: Console | None = None) -> tuple[int, dict[str, Any]]:
    """Run the request: fork its processes here, or join those a launcher started. Returns (exit code, summary)."""
    console = console or Console(request.shown_ranks, request.verbose)
    if is_launched_rank():
        async_run.refuse_launchers(request.plan, "another launcher started this process")
        with end_waits_on_stop():
            return _run_under_launcher(request, console)
    member = find_node_membership()
    if member is not None:
        async_run.refuse_launchers(request.plan, f"the run has {member.count} nodes")
    node = Node.join(member, request.plan.world, console.print_lines) if member is not None else Node.make_single(request.plan.world)
    if member is not None:
        console.print_lines(member.describe())
    with node.report_exit(), convert_stop():
        return _run_on_node(request, console, node)


def _run_on_node(request: TrainRequest, console: Console, node: Node) -> tuple[int, dict[str, Any]]:
    """Fork and supervise the ranks of this node."""
    plan, first = request.plan, node.index == 0
    check_devices(resolve_kind(request.device), node.ranks_per_node - plan.server_count)
    sketch = validate_plan(request.job, plan, resolve_kind(request.device))
    _refuse_shrink(request)
    if request.job.weights and request.resume is None:
        open_weights(Path(request.job.weights))  # unreadable weights are reported before the start
    checked = _check_job(request) if first else jobcheck.CheckResult("none")
    made = _RunOwner(request, checked)
    run = external_ranks.agree_on_nodes(node, made.make) if node.count > 1 else made.make()
    output = _RankOutput(console, run)
    if first:
        console.print_lines(format_headline(request))
        several = ["note  node 0 has the store: if node 0 is lost, the run ends; continue it with --resume"] if node.count > 1 else []
        for note in (*request.notes, *_list_notes(request), *made.list_start_notes(), *checked.lines, *several):
            console.print_lines(note)

    memory = SnapshotStore() if request.max_restarts and not plan.server_count else None
    listener = fork.Listener(output.handle_message, output.write_text, console.show_pending, console.print_lines, logs=True)
    loop = RestartLoop(request, run, memory, node, listener)
    try:
        if plan.server_count:
            results = async_run.fork_groups(request, run, listener, output.open_logs)
        else:
            results = _run_ranks(request, sketch, loop, listener, output)
    except BaseException as error:
        if isinstance(error, StopRequested):
            error = loop.build_stop_error(error)
        made.record_failure(error, console)
        if isinstance(error, PlaitError):
            raise fallback_plans.add_fitting_plan(error, request, run, console.print_lines) from error.__cause__
        raise error
    finally:
        output.close()
        made.close()
        loop.close()
        external_ranks.remove_node_token(node, run)
        if memory is not None:
            memory.close()
    if not results:
        console.print_lines("the run finished on the other nodes")
        return 0, {}
    result = results[0] | {"skipped": sum(one.get("skipped", 0) for one in results)}  # one rank of each replica group counts them
    if first:
        return _finish(console, run, result, request)
    return (RESUMABLE if result["stopped"] else 0), {"run": str(run.path), **result}


def _run_ranks(
    request: TrainRequest, sketch: Sketch | None, loop: RestartLoop, listener: fork.Listener, output: "_RankOutput"
) -> list[dict[str, Any]]:
    """Fork the ranks, round after round. Returns the results of the last round, or nothing if this node was not in it.

    `sketch` belongs to the request's plan.
    """
    now, memory, node = loop.start(), loop.memory, loop.node
    stop = StopRequest.get_current()
    leaves = memory is not None and not request.plan.rarely
    began, logs = time.time(), loop.run.get_log_path(0).parent
    shown, results = listener.on_tick, list[dict[str, Any]]()

    def tick() -> None:
        shown()
        loop.tick()

    listener.on_tick = tick
    while now is not None:
        plan = Plan.parse(now.plan)
        output.open_logs(node.ranks)
        listener.on_hang = partial(nccl.request_flight_records, logs, node.ranks)
        handing = SNAPSHOT_GRACE_S if memory is not None and plan.along(plan.replica_axes) > 1 else 0.0
        if memory is not None:
            memory.begin()
        options = build_rank_options(replace(request, plan=plan), sketch if plan == request.plan else None)
        target = partial(_train_rank, options, output.run, memory.path if memory is not None else None, now)
        try:
            with stop.mark_training():
                results = fork.run_ranks(
                    target, plan.world, listener, hang_timeout=request.hang_timeout, uniform=plan.pp == 1, snapshot_grace=handing,
                    node=node if node.count > 1 else None, devices=now.devices[node.index], can_leave=leaves,
                )  # fmt: skip
        except PlaitError as error:
            results, now = [], loop.restart_after_failure(nccl.add_record_hint(error, logs, began))
        else:
            now = loop.continue_after_end(results)
    return results


def _train_rank(options: RankOptions, run: RunDirectory, memory: Path | None, now: Round, place: Place) -> dict[str, Any]:
    neighbours = None
    if len(now.devices) > 1:
        neighbours = SnapshotPeers(*now.neighbors_of(place.rank), now.count_kept_ranks(now.node_of(place.rank)))
    return train_rank(options, run, place, memory=memory, peers=neighbours, is_restart=now.number > 0)


def build_rank_options(request: TrainRequest, sketch: Sketch | None = None) -> RankOptions:
    """Select the fields of a request that ranks need, with the sketch of the request's plan if it is known."""
    names = (one.name for one in fields(RankOptions) if one.name != "sketch")
    return RankOptions(**{name: getattr(request, name) for name in names}, sketch=sketch)


class _RankOutput:
    """Sends the output of ranks to the terminal and to one log per rank."""

    def __init__(self, console: Console, run: RunDirectory):
        self.console, self.run, self.logs = console, run, dict[int, IO[bytes]]()

    def open_logs(self, ranks: range) -> None:
        """Open the logs of these ranks, which are about to start."""
        with translate_write_errors(self.run.path):
            for rank in ranks:
                if rank not in self.logs:
                    self.logs[rank] = open(self.run.get_log_path(rank), "ab", buffering=0)  # noqa: SIM115

    def write_text(self, rank: int, data: bytes) -> None:
        self.logs[rank].write(data)
        self.console.add_output(rank, data)

    def handle_message(self, rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "status":
            self.console.show_status(message["value"])
        elif message["kind"] in ("log", "warning"):
            self.logs[rank].write(message["text"].encode("utf-8", "backslashreplace"))
            if message["kind"] == "warning":
                self.console.count_warning(rank, message["short"])
        else:
            self.console.print_lines(message["text"])

    def close(self) -> None:
        self.console.close()
        for file in self.logs.values():
            file.close()


class _RunOwner:
    """Creates and locks the run directory, on the node that owns it, and handles a failed run."""

    def __init__(self, request: TrainRequest, check_result: jobcheck.CheckResult):
        self.request, self.check_result = request, check_result
        self.start: RunStart | None = None
        self.lock: IO[bytes] | None = None

    def make(self) -> RunDirectory:
        """Create a run directory, or open the one that is resumed."""
        _refuse_inexact(self.request, self.check_result)
        start = self.start = RunStart.create_or_resume(
            self.request.name, self.request.plan, self.request.arguments, self.request.runs, self.request.resume
        )
        with translate_write_errors(start.run.path):
            self.lock = start.run.lock()
            jobcheck.write_result(start.run.path, self.check_result)
        return start.run

    def list_start_notes(self) -> list[str]:
        """Return the notes on the start of the run."""
        return [self.start.note] if self.start is not None and self.start.note else []

    def record_failure(self, error: BaseException, console: Console) -> None:
        said = self.start.handle_failure(error) if self.start is not None else None
        if said:
            console.print_lines(said)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def _run_under_launcher(request: TrainRequest, console: Console) -> tuple[int, dict[str, Any]]:
    place, member, run = find_place(), find_rank_membership(), None
    place.meet()
    checked = _check_job(request) if place.rank == 0 else jobcheck.CheckResult("none")  # before connections exist that a fork would copy
    made = _RunOwner(request, checked)
    try:
        with external_ranks.report_failures(place, lambda: run.get_log_path(place.rank) if run is not None else None):
            device = pick_device(request.device, place)
            group = place.connect(device, single_messages=request.plan.pp > 1)
            runs = RunDirectory.list_runs(request.name, request.runs)
            starts, before = external_ranks.find_earlier_run(place, group, device, runs)
            if before is not None:
                request = made.request = replace(request, resume=before)
            run = external_ranks.agree_run_directory(place, group, device, made.make)
            if place.rank == 0:
                external_ranks.record_starts(run, starts)
                first = [member.describe(), *attempts.describe_restart_limits(member)] if member is not None else []
                for line in (*first, format_headline(request), *checked.lines):
                    console.print_lines(line)
                place.report = lambda message: (
                    console.show_status(message["value"]) if message["kind"] == "status" else console.print_lines(message["text"])
                )
            result = train_rank(build_rank_options(request), run, place)
    except BaseException as error:
        made.record_failure(error, console)
        raise
    finally:
        console.close()
        made.close()
    if place.rank == 0:
        return _finish(console, run, result, request, member)
    return (RESUMABLE if result["stopped"] else 0), {"run": str(run.path), **result}


def _check_job(request: TrainRequest) -> jobcheck.CheckResult:
    """Run the job check, or return its result from one of the job's last runs."""
    words: dict[str, Any] = {"workers": request.workers}
    if request.has_job_file:
        before = tuple(RunDirectory.list_runs(request.name, request.runs)[:MAX_CHECKED_RUNS])
        words |= {"name": request.name, "arguments": request.arguments, "before": before}
    return jobcheck.check_job(request.job, request.plan, request.check, **words)


def _refuse_inexact(request: TrainRequest, checked: jobcheck.CheckResult) -> None:
    if checked.problems and not request.allow_inexact:
        first, *rest = checked.problems
        anyway = "--allow-inexact    trains anyway, and the run records it"
        raise PlaitError([replace(first, fix=(*first.fix, anyway)), *rest])


def _refuse_shrink(request: TrainRequest) -> None:
    """Raise P065 for `--allow-shrink` if fewer ranks cannot use the state of the ranks."""
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
    console: Console, run: RunDirectory, result: dict[str, Any], request: TrainRequest, member: Membership | None = None
) -> tuple[int, dict[str, Any]]:
    summary, resume = {"run": str(run.path), **result}, request.resume
    if result["stopped"] and request.is_from_python:
        console.print_lines(f'stopped at step {result["step"]} · saved {result["checkpoint"]}: resume="{run.path}" continues')
        return RESUMABLE, summary
    if result["stopped"]:
        saved = f"stopped at step {result['step']} · saved {result['checkpoint']}"
        launcher = f"{member.launcher.partition(' (')[0]} … " if member is not None else ""
        named = resume if resume not in (None, "", AUTO) else ""
        again = rebuild_command(*(["--resume"] if resume is None else []), resume=named, to=str(run.path))
        console.print_lines(f"{saved} · exit code {RESUMABLE}: continue with\n    {launcher}{again}")
        return RESUMABLE, summary
    if result["device_bytes"]:
        each = " · ".join(f"{n / 2**20:.1f}" for n in result["device_bytes"])
        console.print_lines(f"memory per device (MiB): {each}   device 0 also has the optimizer state and all outputs")
    if not result["made"]:
        more = (
            f"resume=True, steps={2 * result['step']}" if request.is_from_python else f"--resume --steps {2 * result['step']}"
        )
        if result.get("ended"):
            console.print_lines(f"stopped early at step {result['step']}: {result['ended']}")
        console.print_lines(f"complete at step {result['step']}: nothing was left to do · continue with {more}")
        return 0, summary
    if result["skipped"]:
        console.print_lines(f"{result['skipped']} steps were left out: nothing was updated in them")
    if result.get("ended"):
        console.print_lines(f"stopped early at step {result['step']}: {result['ended']}")
    if memory := _format_memory(run):
        console.print_lines(memory)
    console.print_lines(console.format_summary(run.path, result["checkpoint"]))
    return 0, summary


def _format_memory(run: RunDirectory) -> str:
    """Format the memory of the fullest rank; empty without devices."""
    found = find_fullest(run.read_memories())
    return f"memory  rank {found[0]}: {found[1].summarize()}" if found is not None and found[1].total else ""


def _list_notes(request: TrainRequest) -> list[str]:
    import torch

    kind, notes = resolve_kind(request.device), note_unused_allocation()
    if request.plan.precision == "fp16" and kind == "cpu":
        notes.append("note  fp16 matmuls on a CPU are many times slower than fp32; use bf16 on a CPU")
    if kind == "cpu" and request.device == "auto":
        notes += [
            f"note  {other} is not supported yet; running on CPU" for other in list_unused_kinds()
        ]
    if request.plan.precision == "tf32" and kind == "cpu":
        notes.append("note  precision=tf32 has an effect only on GPUs; these processes compute in fp32")
    if request.plan.precision == "fp32" and kind == "cuda" and torch.get_float32_matmul_precision() == "highest":
        notes.append("note  matmuls run in full fp32; use precision=tf32 or bf16 for tensor cores")
    count = len(list_cuda_devices()) if kind == "cuda" else 0
    if count > request.plan.devices == 1:
        told = f"--nproc {count} uses all, --plan auto chooses a plan for them"
        notes.append(f"note  one of {count} devices is used; {told}")
    return notes


def format_headline(request: TrainRequest) -> str:
    """Format the first line of a run: plait 0.1 · stdlib_gpt · dp=2 on 2 CPU processes (gloo) · batch 32 = 16 per device"""
    job, plan = request.job, request.plan
    kind, library = describe_kind(resolve_kind(request.device))
    backend = f" ({library})" if plan.world > 1 else ""
    where = f"{plan.world} {kind} process" + ("es" if plan.world > 1 else "") + backend
    held = [split_evenly(job.batch, plan.replica_groups, group)[1] for group in range(plan.replica_groups)]
    shares = [n for size in held for n in split_by_weights(size, plan.parts or (1,) * plan.shares, plan.microbatches)]
    share = " or ".join(map(str, sorted(set(shares), reverse=True))) + (" per portion" if plan.server_count else " per device")
    if plan.server_count:
        where = f"{plan.devices} {kind} groups and {plan.server_count} server" + ("s" if plan.server_count > 1 else "")
    if plan.parts:
        share = ", ".join(map(str, shares)) + " for the ranks with different samples"
    elif plan.batch_split == "auto":
        share += " until speeds are measured"
    parts = f", in {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
    name = Path(request.name.partition(":")[0])
    title = name.parent.name if name.stem == "job" and name.parent.name else name.stem
    return f"plait {__version__} · {title} · {plan} on {where} · batch {job.batch} = {share}{parts}"
