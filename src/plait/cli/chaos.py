"""`plait chaos`: the fault matrix on the user's own job."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from plait.config.errors import DIFFERENT, PlaitError, Problem, did_you_mean, shown, too_small
from plait.config.job import Job
from plait.config.plan import Plan

STEPS, LEAST = 9, 9
EACH = 2
"""Samples of a share of the batch, where `--batch` does not say it: small steps, many faults."""
Main = Callable[[list[str]], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that the command has beside job and plan."""
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help=f"optimizer steps of each run ({STEPS})")
    add("--batch", type=int, help="global batch of each run (small)")
    add(
        "--only",
        action="append",
        metavar="NAME",
        help="this fault alone, or those whose name begins so; again for more",
    )
    add("--list", action="store_true", help="list the faults and what is promised, and run none")
    add("--seed", type=int, default=0, help="chooses ranks, steps and moments (0)")
    add("--to", type=Path, metavar="FILE", help="also write the table there, as Markdown")


def run(options: argparse.Namespace, plan: Plan, job: Job, main: Main) -> int:
    """Pose the faults; 3 when plait fell short of a promise."""
    from plait.chaos import matrix, table
    from plait.chaos.fault import SHORT
    from plait.chaos.scene import Setting

    chosen = _chosen(options.only, [fault.name for fault in matrix.FAULTS])
    faults = [fault for fault in matrix.FAULTS if fault.name in chosen]
    if options.list:
        rows = [{"name": fault.name, "done": fault.done, "promise": fault.promise} for fault in faults]
        text = "\n".join(f"{fault.name:<20} {fault.done}\n{'':<20}   {fault.promise}" for fault in faults)
        print(json.dumps(rows) if options.json else text)
        return 0
    words, steps, every = _words(options, plan, job)
    setting = Setting(main, words, job, plan, steps, every, options.seed, False)
    began, out = time.monotonic(), sys.stderr if options.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    say(shown(f"{len(faults)} faults · {options.job} · {plan} · {steps} steps"))
    undisturbed = lambda seconds: say(f"{table.expected(len(faults), seconds)}\n{table.KEY}\n{table.HEAD}")  # noqa: E731
    rows = matrix.run(setting, faults, lambda row: say(table.line(row)), undisturbed)
    took = time.monotonic() - began
    say(table.summary(rows, took))
    if options.json:
        print(json.dumps(table.to_dict(setting, rows)))
    if options.to:
        options.to.write_text(table.page(setting, options.job, rows, took), encoding="utf-8")
    return DIFFERENT if any(row.verdict == SHORT for row in rows) else 0


def _chosen(only: list[str] | None, known: list[str]) -> list[str]:
    """The faults of these names, or of names that begin so. U002."""
    if not only:
        return known
    for word in only:
        if not any(name.startswith(word) for name in known):
            what = f"--only {word[:60]}: there is no such fault        {did_you_mean(word, known)}"
            raise PlaitError(Problem("U002", what, fix=("plait chaos JOB --list",)))
    begun = tuple(word for word in only if word not in known)
    return [name for name in known if name in only or name.startswith(begun)]


def _words(options: argparse.Namespace, plan: Plan, job: Job) -> tuple[list[str], int, int]:
    """The words of `plait train`, its steps, and the steps between two checkpoints."""
    from plait.launch.place import joining

    if joining():
        what = "plait chaos starts its own processes, and was itself started as one of several"
        raise PlaitError(Problem("U002", what, fix=("start it once, outside of torchrun, srun or mpirun",)))
    if options.steps < LEAST:
        raise PlaitError(too_small("--steps", options.steps, LEAST))
    if options.batch is not None and options.batch < 1:
        raise PlaitError(too_small("--batch", options.batch))
    batch = options.batch or min(job.batch, EACH * plan.shares * plan.microbatches)
    every = options.steps // 3
    words = [options.job, "--plan", str(plan), "--device", options.device, "--steps", str(options.steps)]
    words += ["--batch", str(batch), "--save-every", str(every), "--check", "none"]
    words += [word for name, value in options.arguments.items() for word in (f"--job.{name}={value}",)]
    return words, options.steps, every
