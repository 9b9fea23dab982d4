"""A device that is full: what its memory was used for, what the plan's bill had said, and which plan would fit.

The rank reports what its allocator counted (`engine/train.py`). The launcher then has a process look at the job as a dry run
does, and search for a plan with as much less room as the bill was wrong (`explained`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from plait.cli.request import Request
from plait.config.errors import PlaitError
from plait.engine.memory_use import MemoryUse, grown, size
from plait.engine.run_directory import RunDirectory
from plait.launch import fork
from plait.launch.detect import read_machine
from plait.launch.devices import kind_of
from plait.launch.place import Place
from plait.planner.answer import ask
from plait.planner.dryrun.memory_table import memory_table
from plait.planner.question import PlanRequest, sized


def explained(error: PlaitError, request: Request, run: RunDirectory, say: Callable[[str], None]) -> PlaitError:
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
    question = PlanRequest.of(request.job, request.name, sized(read_machine("here"), ranks), split=ranks > 1)
    pins = {"precision": plan.precision, "compile": plan.compile}  # another of either takes as much
    answer = ask(question, pins, row["total"] / wrong, devices=ranks)
    found: dict[str, Any] = {"bill": bill, "room": row["total"], "wrong": wrong}
    for candidate in (each.candidate for each in answer.rows if each.fits):
        if candidate.estimate is not None and str(candidate.plan) != str(plan):
            found |= {"plan": str(candidate.plan), "takes": round(candidate.estimate.reserved * wrong)}
            break
    return found


def _billed(rank: int, row: dict[str, Any], found: dict[str, Any]) -> str:
    """What the bill had said, beside what was measured."""
    bill, use = found["bill"], MemoryUse.of(row)
    said = f"the bill of the plan had said {size(sum(bill.values()))}"
    above = grown(use, bill, row["wanted"])
    if above is None:
        return f"{said}, more than rank {rank} had: what is beside its tensors took the rest"
    name, n, billed = above
    more = f", with {size(row['wanted'])} that it asked for" if row["wanted"] and name not in use.held else ""
    return f"{said}; {name}: {size(billed)} in the bill, {size(n)} on rank {rank}{more}"


def _planned(found: dict[str, Any]) -> tuple[str, ...]:
    if "plan" not in found:
        return ("more devices: no other plan on these takes as little as there is room for",)
    by = f", counted {found['wrong']:.2f} times, as the bill was wrong" if found["wrong"] > 1 else ""
    return (f'--plan "{found["plan"]}"    takes {size(found["takes"])} of {size(found["room"])}{by}',)
