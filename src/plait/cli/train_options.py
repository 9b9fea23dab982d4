"""`plait train`: what is wrong with its options, and what they ask for."""

import json
import math
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from plait.cli import run_callbacks
from plait.config import hugging_face
from plait.config.command_options import RunOptions, TrainOptions
from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.cli.request import Request


def run(options: TrainOptions) -> int:
    """Train; the exit code."""
    from plait.launch.stopping import stoppable

    return stoppable(lambda: _train(options))


def _train(options: TrainOptions) -> int:
    from plait.launch.launchers.find import say

    say(options.nnodes, options.node_rank, options.master)
    asked = requested(options)
    from plait.cli.train import launch

    code, summary = launch(asked, sys.stderr if options.json else None)
    if options.json:
        print(json.dumps(summary))
    return code


def requested(options: TrainOptions) -> "Request":
    """What the options ask for."""
    from plait.cli.plan_and_job import both
    from plait.cli.request import Request, scaled
    from plait.integrations.trackers.follow import chosen

    wrong, callbacks = problems(options), None
    try:
        callbacks = run_callbacks.wanted(options)
    except PlaitError as error:
        wrong += error.problems
    plan, job = both(options, wrong)
    run_callbacks.refuse(options, plan)
    _refuse_followers(options, plan)
    shown = _shown(options)
    beyond = [rank for rank in shown if not 0 <= rank < plan.world]
    if beyond:
        why = "the plan has " + ("rank 0 only" if plan.world == 1 else f"ranks 0 to {plan.world - 1}")
        raise PlaitError(Problem("U002", f"--ranks {options.ranks}: there is no rank {beyond[0]}", why=why))
    instead = {name: value for name in ("steps", "weights") if (value := getattr(options, name))}
    job, notes = scaled(replace(job, **instead) if instead else job, options.batch, options.scale_lr)
    return Request(
        options.job, job, plan, device=options.device, verbose=options.verbose, shown=shown, notes=notes,
        trackers=chosen(list(options.to)), callbacks=callbacks, group_norms=options.group_norms,
        **{each.name: getattr(options, each.name) for each in fields(RunOptions)},
    )  # fmt: skip


def problems(options: TrainOptions) -> list[Problem]:
    """U002 for values that options cannot have, alone or together. (`out_of_range` knows numbers that are too small.) J058."""
    found = [*hugging_face.untrainable(options.job)]
    if options.patience is not None and not 0 < options.patience < math.inf:
        what = f"--patience {options.patience} is not a number of seconds > 0"
        found.append(Problem("U002", what, fix=("--patience 600",)))
    if options.to:
        from plait.integrations.trackers.packages import unknown

        found += unknown(list(options.to))
    every = options.export_every or 0
    if every > 0 and options.save_every >= 1 and every % options.save_every:
        why = f"what is exported is a checkpoint, and there is one every {options.save_every} steps"
        fix = (f"--export-every {every} --save-every {every}",)
        found.append(Problem("U002", f"--export-every {every} is no multiple of --save-every", why=why, fix=fix))
    if options.export_to is not None and options.export_every is None:
        fix = (f"--export-every {options.save_every} --export-to {options.export_to}",)
        found.append(Problem("U002", "--export-to does nothing without --export-every", fix=fix))
    if options.scale_lr and not options.batch:
        why = "the rule compares it with the job's own batch"
        found.append(Problem("U002", f"--scale-lr {options.scale_lr} needs --batch", why=why))
    try:
        _shown(options)
    except ValueError:
        found.append(Problem("U002", f"--ranks {options.ranks} is not a list of ranks", fix=("--ranks 0,3",)))
    return [*found, *run_callbacks.problems(options)]


def _shown(options: TrainOptions) -> tuple[int, ...]:
    """The ranks whose output is shown."""
    return tuple(int(rank) for rank in options.ranks.split(","))


def _refuse_followers(options: TrainOptions, plan: Plan) -> None:
    """H020 for trackers and exports where a server makes the steps, and no rank."""
    given = ["--to"] * bool(options.to) + ["--export-every"] * bool(options.export_every)
    if given and plan.sync == "async":
        why = "rank 0 starts trackers and exports, and under sync=async a server makes the steps"
        fix = ("train without them; metrics.jsonl and checkpoints are there", "sync=diloco")
        raise PlaitError(Problem("H020", f"{given[0]} does not work with sync=async", why=why, fix=fix))
