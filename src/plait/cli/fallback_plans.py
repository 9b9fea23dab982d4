"""Plans that replace the given plan, each searched in a separate process.

[Note: Fewer ranks]
Plans for a run whose number of ranks changes: they are searched while the run trains.

A process with the lowest priority searches for each plan, as `--plan auto` does, so that a plan is ready when a rank fails. The number
format stays the same. The planner chooses how the ranks split the work, and each plan passes the same checks as the first one. So the
training result is the same under all of them.

[Note: A full device]
A report on a device without free memory: its measured use, the predicted use, and a plan that fits.

The rank reports the counters of its allocator (`engine/train.py`). The launcher then starts a process that repeats the prediction. That
process searches for a plan with a memory limit divided by the prediction's error.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from plait.cli.train_request import TrainRequest
from plait.config.errors import FAILED, PlaitError, Problem, parse_problem
from plait.config.plan import Plan
from plait.engine.memory_use import MemoryUse, find_largest_excess, format_bytes
from plait.engine.run_directory import RunDirectory
from plait.launch import fork
from plait.launch.child import fork_process, run_child
from plait.launch.detect import read_machine
from plait.launch.devices import resolve_kind
from plait.launch.place import Place
from plait.launch.scratch import ScratchFolder
from plait.planner.answer import find_answer
from plait.planner.dryrun.memory_table import make_memory_table
from plait.planner.plan_request import PlanRequest
from plait.planner.refusals import validate_plan
from plait.proof.job import check as jobcheck

MAX_CHECKED = 3
"""Number of plans that are checked before plans for fewer ranks are searched."""


class FallbackPlans:
    """The plans of one request by number of ranks, starting with the request's own plan."""

    def __init__(self, request: TrainRequest):
        self.request = request
        self._known: dict[int, dict[str, Any]] = {request.plan.world: {"plan": str(request.plan)}}
        self._searches = dict[int, tuple[int, Path]]()
        self._folder = ScratchFolder("plans")

    def close(self) -> None:
        """End all running searches."""
        for pid, _ in self._searches.values():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        self._folder.close()

    def prepare(self, world: int) -> None:
        """Start the search for a plan of `world` ranks, or of the largest smaller number that has one."""
        if world < 1 or world in self._known or world in self._searches:
            return
        result, parent = self._folder.path / f"{world}.json", os.getpid()
        pid = fork_process()
        if pid == 0:
            run_child(lambda: _search(self.request, world, result), parent)
        self._searches[world] = (pid, result)

    def is_ready(self, world: int) -> bool:
        """Return True if the search is finished; start it if necessary."""
        self.prepare(world)
        if world in self._searches:
            pid, result = self._searches[world]
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._searches[world]
                self._known[world] = _read_answer(result)
        return world in self._known

    def wait_for(self, world: int, waiting: Callable[[], object]) -> Plan:
        """Wait for the plan of `world` ranks, or of the largest smaller number that has one. Calls `waiting` in the meantime.

        Raises M001, or the first error of the search, if no plan exists.
        """
        while not self.is_ready(world):
            waiting()
            time.sleep(0.02)
        found = self._known[world]
        if "problem" in found:
            raise PlaitError(parse_problem(found["problem"]), FAILED)
        return Plan.parse(found["plan"])


def _read_answer(result: Path) -> dict[str, Any]:
    try:
        return json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"problem": vars(Problem("M001", "the search for a plan with fewer ranks ended without a result"))}


def _search(request: TrainRequest, world: int, result: Path) -> int:
    """Search in the child process, and write the answer to a file."""
    os.nice(19)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer: dict[str, Any] = {}
    for ranks in range(world, 0, -1):
        try:
            answer = {"plan": str(_find_best(request, ranks))}
            break
        except PlaitError as error:
            answer = answer or {"problem": vars(error.problems[0])}
    beside = result.with_suffix(".tmp")
    beside.write_text(json.dumps(answer), encoding="utf-8")
    os.rename(beside, result)
    return 0


def _find_best(request: TrainRequest, ranks: int) -> Plan:
    """Return the fastest plan that fits and trains the same. Raises `PlaitError` if there is none."""
    if ranks == 1 and resolve_kind(request.device) == "cpu":
        return _check_plan(request, replace(Plan(), precision=request.plan.precision))
    asked = PlanRequest.from_job(request.job, request.name, read_machine("here").resize(ranks), split=ranks > 1)
    found = find_answer(asked, {"precision": request.plan.precision}, devices=ranks)
    refused: PlaitError | None = None
    for row in [row for row in found.rows if row.fits][:MAX_CHECKED]:
        try:
            return _check_plan(request, _adapt_batch_split(request.plan, row.plan))
        except PlaitError as error:
            refused = refused or error
    raise refused or PlaitError(Problem("M001", f"no plan fits on {ranks} devices"))


def _adapt_batch_split(given: Plan, plan: Plan) -> Plan:
    """Split the batch by measured speed if the request does not split it equally. The request's ratio belongs to other ranks."""
    return replace(plan, batch_split="auto") if given.batch_split != "equal" and plan.ranks > 1 else plan


def _check_plan(request: TrainRequest, plan: Plan) -> Plan:
    validate_plan(request.job, plan, resolve_kind(request.device))
    checked = jobcheck.check_job(request.job, plan, request.check, workers=request.workers)
    if checked.problems and not request.allow_inexact:
        raise PlaitError(list(checked.problems))
    return plan


def add_fitting_plan(error: PlaitError, request: TrainRequest, run: RunDirectory, say: Callable[[str], None]) -> PlaitError:
    """Add the predicted memory and a plan that fits to an out-of-memory error of a GPU. Returns other errors unchanged."""
    full = [(rank, row["failed"]) for rank, row in run.read_memories().items() if "failed" in row]
    if "M002" not in error.codes or resolve_kind(request.device) == "cpu" or request.plan.server_count or not full:
        return error
    rank, row = max(full, key=lambda pair: pair[1]["needed"] + pair[1]["wanted"])
    say("note  a device is out of memory: comparing with the prediction, and searching for a plan that fits")
    try:
        found = fork.run_ranks(partial(_search_fitting_plan, request, row), 1, fork.Listener(on_note=lambda text: None))[0]
    except PlaitError:  # a dry run of the job is impossible
        return error
    first, *rest = error.problems
    why, fix = f"{first.why}\n{_compare_memory(rank, row, found)}", (*_suggest_plan(found), *first.fix)
    return PlaitError([replace(first, why=why, fix=fix), *rest], error.exit_code, error.trace)


def _search_fitting_plan(request: TrainRequest, row: dict[str, Any], place: Place) -> dict[str, Any]:
    """Predict the memory of the request's plan, and find the best plan that fits if the prediction has the same error."""
    place.beat(-1, "build")
    plan, ranks = request.plan, request.plan.devices
    bill = make_memory_table(request.job, plan).categories
    wrong = max(1.0, (row["allocated"] + row["wanted"]) / max(1, sum(bill.values())))
    question = PlanRequest.from_job(request.job, request.name, read_machine("here").resize(ranks), split=ranks > 1)
    pins = {"precision": plan.precision, "compile": plan.compile}  # other values change the memory
    answer = find_answer(question, pins, row["total"] / wrong, devices=ranks)
    found: dict[str, Any] = {"bill": bill, "room": row["total"], "wrong": wrong}
    for candidate in (each for each in answer.rows if each.fits):
        if candidate.estimate is not None and str(candidate.plan) != str(plan):
            found |= {"plan": str(candidate.plan), "takes": round(candidate.estimate.reserved * wrong)}
            break
    return found


def _compare_memory(rank: int, row: dict[str, Any], found: dict[str, Any]) -> str:
    """Compare the predicted memory with the measured one."""
    bill, use = found["bill"], MemoryUse.from_row(row)
    said = f"the plan's predicted memory was {format_bytes(sum(bill.values()))}"
    above = find_largest_excess(use, bill, row["wanted"])
    if above is None:
        return f"{said}, more than rank {rank} allocated for tensors: other uses of the device took the rest"
    name, n, billed = above
    more = f", with {format_bytes(row['wanted'])} that it requested" if row["wanted"] and name not in use.held else ""
    return f"{said}; {name}: {format_bytes(billed)} predicted, {format_bytes(n)} on rank {rank}{more}"


def _suggest_plan(found: dict[str, Any]) -> tuple[str, ...]:
    if "plan" not in found:
        return ("use more devices: no other plan fits into the memory of these devices",)
    by = f", if its prediction is too low by the same factor of {found['wrong']:.2f}" if found["wrong"] > 1 else ""
    return (f'--plan "{found["plan"]}"    takes {format_bytes(found["takes"])} of {format_bytes(found["room"])}{by}',)
