"""Plans to train with instead of the one that was given, each found in a process of its own.

[Note: Fewer ranks]
Plans for when a run has fewer ranks than it was started with, or more again: found while training goes on.

A process of its own looks for each, as `--plan auto` does, with the lowest priority, so that one is at hand when a rank is lost. The
number format stays what it is; the planner chooses how the ranks share the work, and each plan is checked as the first was: the
run is the same training under all of them.

[Note: A full device]
A device that is full: what its memory was used for, what the plan's bill had said, and which plan would fit.

The rank reports what its allocator counted (`engine/train.py`). The launcher then has a process look at the job as a dry run
does, and search for a plan with as much less room as the bill was wrong (`explained`).
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

from plait.cli.request import Request
from plait.config.errors import FAILED, PlaitError, Problem, problem_of
from plait.config.plan import Plan
from plait.engine.memory_use import MemoryUse, grown, size
from plait.engine.run_directory import RunDirectory
from plait.launch import fork
from plait.launch.child import live
from plait.launch.detect import read_machine
from plait.launch.devices import kind_of
from plait.launch.place import Place
from plait.launch.scratch import Scratch
from plait.planner.answer import ask
from plait.planner.dryrun.memory_table import memory_table
from plait.planner.question import PlanRequest
from plait.planner.refusals import foresee
from plait.proof.job import check as jobcheck

TRIED = 3
"""Plans of one number of ranks that are checked before fewer are looked at."""


class OtherPlans:
    """Of one request. The request's own plan is known from the start."""

    def __init__(self, request: Request):
        self.request = request
        self._known: dict[int, dict[str, Any]] = {request.plan.world: {"plan": str(request.plan)}}
        self._looking = dict[int, tuple[int, Path]]()
        self._folder = Scratch("plans")

    def close(self) -> None:
        """Forget what is still being looked for."""
        for pid, _ in self._looking.values():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        self._folder.close()

    def prepare(self, world: int) -> None:
        """Begin to look for a plan of so many ranks, or of the most below that have one."""
        if world < 1 or world in self._known or world in self._looking:
            return
        result, parent = self._folder.path / f"{world}.json", os.getpid()
        pid = os.fork()
        if pid == 0:
            live(lambda: _search(self.request, world, result), parent)
        self._looking[world] = (pid, result)

    def ready(self, world: int) -> bool:
        """Whether it is known by now; else it is looked for."""
        self.prepare(world)
        if world in self._looking:
            pid, result = self._looking[world]
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._looking[world]
                self._known[world] = _read(result)
        return world in self._known

    def of(self, world: int, waiting: Callable[[], object]) -> Plan:
        """The plan of so many ranks, or of the most below that have one. Waits for it, and calls `waiting` meanwhile.

        M001, or what else was in the way, when there is none.
        """
        while not self.ready(world):
            waiting()
            time.sleep(0.02)
        found = self._known[world]
        if "problem" in found:
            raise PlaitError(problem_of(found["problem"]), FAILED)
        return Plan.parse(found["plan"])


def _read(result: Path) -> dict[str, Any]:
    try:
        return json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"problem": vars(Problem("M001", "the search for a plan with fewer ranks ended without a result"))}


def _search(request: Request, world: int, result: Path) -> int:
    """The life of the process that looks. Its answer is a file."""
    os.nice(19)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer: dict[str, Any] = {}
    for ranks in range(world, 0, -1):
        try:
            answer = {"plan": str(_best(request, ranks))}
            break
        except PlaitError as error:
            answer = answer or {"problem": vars(error.problems[0])}
    beside = result.with_suffix(".tmp")
    beside.write_text(json.dumps(answer), encoding="utf-8")
    os.rename(beside, result)
    return 0


def _best(request: Request, ranks: int) -> Plan:
    """The fastest plan that fits and is the same training. PlaitError when there is none."""
    if ranks == 1 and kind_of(request.device) == "cpu":
        return _checked(request, replace(Plan(), precision=request.plan.precision))
    asked = PlanRequest.of(request.job, request.name, read_machine("here").sized(ranks), split=ranks > 1)
    found = ask(asked, {"precision": request.plan.precision}, devices=ranks)
    refused: PlaitError | None = None
    for row in [row for row in found.rows if row.fits][:TRIED]:
        try:
            return _checked(request, _shared(request.plan, row.plan))
        except PlaitError as error:
            refused = refused or error
    raise refused or PlaitError(Problem("M001", f"no plan fits on {ranks} devices"))


def _shared(given: Plan, plan: Plan) -> Plan:
    """The plan with shares of the batch by speed, where the request's has them: its parts are of other ranks."""
    return replace(plan, batch_split="auto") if given.batch_split != "equal" and plan.ranks > 1 else plan


def _checked(request: Request, plan: Plan) -> Plan:
    foresee(request.job, plan, kind_of(request.device))
    checked = jobcheck.check(request.job, plan, request.check, workers=request.workers)
    if checked.problems and not request.allow_inexact:
        raise PlaitError(list(checked.problems))
    return plan


def with_plan_that_fits(error: PlaitError, request: Request, run: RunDirectory, say: Callable[[str], None]) -> PlaitError:
    """The same failure with the plan's bill and a plan that fits. Other failures, and those of processors, as they are."""
    full = [(rank, row["failed"]) for rank, row in run.memories().items() if "failed" in row]
    if "M002" not in error.codes or kind_of(request.device) == "cpu" or request.plan.server_count or not full:
        return error
    rank, row = max(full, key=lambda pair: pair[1]["needed"] + pair[1]["wanted"])
    say("note  a device is full: looking at what the plan was to take, and for a plan that fits")
    try:
        found = fork.run(partial(_looked, request, row), 1, fork.Listener(note=lambda text: None))[0]
    except PlaitError:  # the job cannot run dry
        return error
    first, *rest = error.problems
    why, fix = f"{first.why}\n{_billed(rank, row, found)}", (*_planned(found), *first.fix)
    return PlaitError([replace(first, why=why, fix=fix), *rest], error.exit_code, error.trace)


def _looked(request: Request, row: dict[str, Any], place: Place) -> dict[str, Any]:
    """The bill of the request's plan, and the best plan that fits where the bill is as wrong as it was."""
    place.beat(-1, "build")
    plan, ranks = request.plan, request.plan.devices
    bill = memory_table(request.job, plan).categories
    wrong = max(1.0, (row["allocated"] + row["wanted"]) / max(1, sum(bill.values())))
    question = PlanRequest.of(request.job, request.name, read_machine("here").sized(ranks), split=ranks > 1)
    pins = {"precision": plan.precision, "compile": plan.compile}  # another of either takes as much
    answer = ask(question, pins, row["total"] / wrong, devices=ranks)
    found: dict[str, Any] = {"bill": bill, "room": row["total"], "wrong": wrong}
    for candidate in (each for each in answer.rows if each.fits):
        if candidate.estimate is not None and str(candidate.plan) != str(plan):
            found |= {"plan": str(candidate.plan), "takes": round(candidate.estimate.reserved * wrong)}
            break
    return found


def _billed(rank: int, row: dict[str, Any], found: dict[str, Any]) -> str:
    """What the bill had said, beside what was measured."""
    bill, use = found["bill"], MemoryUse.of(row)
    said = f"the plan's predicted memory was {size(sum(bill.values()))}"
    above = grown(use, bill, row["wanted"])
    if above is None:
        return f"{said}, more than rank {rank} allocated for tensors: other uses of the device took the rest"
    name, n, billed = above
    more = f", with {size(row['wanted'])} that it requested" if row["wanted"] and name not in use.held else ""
    return f"{said}; {name}: {size(billed)} predicted, {size(n)} on rank {rank}{more}"


def _planned(found: dict[str, Any]) -> tuple[str, ...]:
    if "plan" not in found:
        return ("use more devices: no other plan fits into the memory of these devices",)
    by = f", if its prediction is too low by the same factor of {found['wrong']:.2f}" if found["wrong"] > 1 else ""
    return (f'--plan "{found["plan"]}"    takes {size(found["takes"])} of {size(found["room"])}{by}',)
