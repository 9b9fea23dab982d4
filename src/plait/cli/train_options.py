"""The options of `plait train`, and what it does with them."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import beside_training, run_callbacks
from plait.cli.options import both, common_options
from plait.config.errors import PlaitError, Problem, too_small
from plait.config.job import Job

if TYPE_CHECKING:
    from plait.cli.request import Request

CHECKS = ("none", "quick", "full")

LEAST = {"nproc": 1, "steps": 1, "batch": 1, "save_every": 1, "keep": 1, "workers": 0, "restarts": 0}
"""The smallest number that an option of `plait train` takes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    common_options(parser)
    lost = "go on when a rank is lost, N times in a row at one step; 0: never"
    add("--restarts", type=int, default=2, metavar="N", help=lost)
    add("--fewer", action="store_true", help="go on with fewer ranks when one is lost, instead of starting it again")
    add(
        "--nnodes",
        metavar="N",
        help="machines, or 1:2 for one to two; the same command is started on each, and --nproc ranks there",
    )
    add("--node-rank", type=int, metavar="N", help="which of them this is, from 0, where no launcher says it")
    add("--master", metavar="HOST:PORT", help="where machine 0 is reached, where no launcher says it")
    add("--steps", type=int, help="optimizer steps, instead of the job's")
    add("--batch", type=int, help="global batch, instead of the job's")
    add("--scale-lr", choices=("linear", "sqrt"), help="change the learning rate with --batch, by this rule")
    onward = "continue this job's newest run, or this run or checkpoint; auto: the newest, or begin where there is none"
    add("--resume", nargs="?", const="", metavar="RUN", help=onward)
    add("--allow-changes", action="store_true", help="with --resume: also with other data or another seed (K010)")
    add("--weights", metavar="PATH", help="start from these: a safetensors file, a Hugging Face folder or a checkpoint")
    add("--save-every", type=int, default=100, metavar="N", help="steps between checkpoints (100)")
    frozen = "checkpoints leave out frozen parameters that are in --weights or Job.weights (trained), or hold all"
    add("--save", choices=("trained", "all"), default="trained", help=frozen)
    add("--keep", type=int, default=3, metavar="N", help="checkpoints to keep (3)")
    add("--on-nan", choices=("stop", "skip"), default="stop", help="a step with a loss or gradient that is not finite")
    add("--check", choices=CHECKS, default="quick", help="how to check that the plan can cut the job's batches (quick)")
    add("--allow-inexact", action="store_true", help="train although the check found that the plan is another training")
    add("--workers", type=int, default=0, metavar="N", help="loader processes per rank (0)")
    add("--ranks", default="0", help="ranks whose output to show, such as 0,3 (0); logs/ has all")
    beside_training.add_options(parser)
    add("--runs", type=Path, default=Path("runs"), help="where run directories go (runs)")
    add(
        "--patience",
        type=float,
        metavar="SECONDS",
        help="end the run when a rank makes no progress for so long (by what it does, from 10 s to an hour)",
    )
    run_callbacks.add_options(parser)
    parser.set_defaults(run=lambda options: import_module("plait.launch.stopping").stoppable(run)(options))


def run(options: argparse.Namespace) -> int:
    """Train; the exit code."""
    from plait.launch.launchers.find import say

    say(options.nnodes, options.node_rank, options.master)
    asked = requested(options)
    from plait.cli.train import launch

    code, summary = launch(asked, sys.stderr if options.json else None)
    if options.json:
        print(json.dumps(summary))
    return code


def requested(options: argparse.Namespace, load: Callable[[], Job] | None = None) -> "Request":
    """What the options ask for. `load` gives the job where it does not lie in a file."""
    problems = out_of_range(options)
    try:
        shown = tuple(int(r) for r in options.ranks.split(","))
    except ValueError:
        shown = ()
        problems.append(Problem("U002", f"--ranks {options.ranks} is not a list of ranks", fix=("--ranks 0,3",)))
    callbacks = run_callbacks.wanted(options, problems)
    plan, job = both(options, problems, load)
    run_callbacks.refuse(options, plan)
    beside_training.refuse(options, plan)
    beyond = [rank for rank in shown if not 0 <= rank < plan.world]
    if beyond:
        why = "the plan has " + ("rank 0 only" if plan.world == 1 else f"ranks 0 to {plan.world - 1}")
        raise PlaitError(Problem("U002", f"--ranks {options.ranks}: there is no rank {beyond[0]}", why=why))
    from dataclasses import replace

    from plait.cli.request import Request, scaled

    if options.steps:
        job = replace(job, steps=options.steps)
    if options.weights:
        job = replace(job, weights=options.weights)
    job, notes = scaled(job, options.batch, options.scale_lr)
    return Request(
        options.job, job, plan, options.arguments, options.runs, options.resume, options.device, options.workers,
        options.save_every, options.keep, beside_training.trackers(options), shown, options.verbose, notes,
        options.allow_changes, options.patience, options.on_nan, options.check, options.allow_inexact, options.restarts,
        options.save, options.fewer, callbacks, options.group_norms, options.steps is not None,
    )  # fmt: skip


def out_of_range(options: argparse.Namespace) -> list[Problem]:
    """U002 for options of `plait train` with values that they cannot have."""
    problems = [
        too_small(f"--{name.replace('_', '-')}", getattr(options, name), least)
        for name, least in LEAST.items()
        if getattr(options, name) is not None and getattr(options, name) < least
    ]
    if options.patience is not None and not 0 < options.patience < math.inf:
        what = f"--patience {options.patience} is not a number of seconds > 0"
        problems.append(Problem("U002", what, fix=("--patience 600",)))
    problems += beside_training.problems(options)
    if options.scale_lr and not options.batch:
        why = "the rule compares it with the job's own batch"
        problems.append(Problem("U002", f"--scale-lr {options.scale_lr} needs --batch", why=why))
    return problems
