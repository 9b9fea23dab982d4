"""`plait report --try K`: the first pieces of advice, each as a run of some steps in turn with the run's own command, and what they gain."""

import shlex
from collections.abc import Sequence
from statistics import median
from typing import Any

from plait.cli.main import parsed
from plait.cli.progress import ProgressLine
from plait.cli.trial_run import TrialRun, measure
from plait.config.command_options import TrainOptions
from plait.model.table import aligned
from plait.report.advice import RunFacts
from plait.report.run_files import RunFiles

ROUNDS, STEPS = 3, 24
"""Runs of each command, and the steps of each."""


def try_advice(run: RunFiles, advice: Sequence[dict[str, Any]], say: ProgressLine) -> None:
    """Add to each piece of advice `measured`, its gain, and `note`, why there is none."""
    own, found = RunFacts(run.plan, run.job, run.command).train(), dict[str, list[TrialRun]]()
    trials = [a["command"] for a in advice if a["command"].startswith("plait train")]
    turns = [own, *dict.fromkeys(trials)] * ROUNDS if trials else []
    for k, command in enumerate(turns):
        say(f"trying advice: {k} of {len(turns)}")
        runs = found.setdefault(command, [])
        if not any(done.failed for done in (*runs, *found[own])):
            _, options = parsed(shlex.split(command)[1:])
            assert isinstance(options, TrainOptions)
            runs.append(measure(options, STEPS))
    for a in advice:
        a |= _gained(found[own], found[a["command"]]) if a["command"] in found else {"measured": None, "note": "cannot be tried by a run here"}


def _gained(own: list[TrialRun], runs: list[TrialRun]) -> dict[str, Any]:
    """Gains are of pairs of neighbouring runs: what else the machine does falls on both."""
    if failed := next((run.failed for run in (*own, *runs) if run.failed), ""):
        return {"measured": None, "note": f"failed: {failed}"}
    return {"measured": median(1 - b.per_sample / a.per_sample for a, b in zip(own, runs)), "note": ""}


def table(advice: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of predicted and measured gains."""
    rows = [("predicted", "measured", "advice")]
    for a in advice:
        measured = a["note"] if a["measured"] is None else f"{100 * a['measured']:.0f} %"
        rows.append((f"{100 * a['gain']:.0f} %", measured, a["what"]))
    return aligned(rows, right=(0,))
