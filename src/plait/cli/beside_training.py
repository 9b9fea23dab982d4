"""The options of `plait train` that give what it makes to others while it runs: metrics to trackers, weights to whoever uses them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.errors import PlaitError, Problem, too_small
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.engine.metrics import MetricsFollower


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    tracked = "also give the metrics to these: tensorboard, wandb, mlflow, trackio"
    add("--to", action="append", default=[], metavar="TRACKERS", help=tracked)
    exported = "write the weights as a Hugging Face folder every N steps, while it trains; a multiple of --save-every"
    add("--export-every", type=int, metavar="N", help=exported)
    add("--export-to", type=Path, metavar="DIR", help="where these folders go (export in the run directory)")


def problems(options: argparse.Namespace) -> list[Problem]:
    """U002 for values that they cannot have."""
    found = []
    if options.to:
        from plait.integrations.trackers.packages import unknown

        found += unknown(options.to)
    every = options.export_every
    if every is not None and every < 1:
        found.append(too_small("--export-every", every, 1))
    elif every is not None and options.save_every >= 1 and every % options.save_every:
        why = f"what is exported is a checkpoint, and there is one every {options.save_every} steps"
        fix = (f"--export-every {every} --save-every {every}",)
        found.append(Problem("U002", f"--export-every {every} is no multiple of --save-every", why=why, fix=fix))
    if options.export_to is not None and every is None:
        fix = (f"--export-every {options.save_every} --export-to {options.export_to}",)
        found.append(Problem("U002", "--export-to does nothing without --export-every", fix=fix))
    return found


def refuse(options: argparse.Namespace, plan: Plan) -> None:
    """H020 where a server makes the steps, and no rank."""
    given = ["--to"] * bool(options.to) + ["--export-every"] * bool(options.export_every)
    if given and plan.sync == "async":
        why = "rank 0 starts trackers and exports, and under sync=async a server makes the steps"
        fix = ("train without them; metrics.jsonl and checkpoints are there", "sync=diloco")
        raise PlaitError(Problem("H020", f"{given[0]} does not work with sync=async", why=why, fix=fix))


def trackers(options: argparse.Namespace) -> "tuple[MetricsFollower, ...]":
    """Those of `--to`. H004."""
    from plait.integrations.trackers.follow import chosen

    return chosen(options.to)
