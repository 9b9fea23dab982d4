"""`plait report --try K`: run the first pieces of advice alternately with the run's own command, and measure their gains."""

import shlex
from collections.abc import Sequence
from statistics import median
from typing import Any

from plait.cli.main import parse_command_line
from plait.cli.progress import ProgressLine
from plait.cli.trial_run import TrialRun, measure_trial
from plait.config.command_options import TrainOptions
from plait.model.sketch_table import align_rows
from plait.report.advice import RunFacts
from plait.report.run_files import RunFiles

ROUNDS, STEPS = 3, 24
"""Number of runs of each command, and steps per run."""


def try_advice(run: RunFiles, advice: Sequence[dict[str, Any]], say: ProgressLine) -> None:
    """Add to each piece of advice `measured`, its gain, and `note`, the reason if there is none."""
    own, found = RunFacts(run.plan, run.job, run.command).make_command(), dict[str, list[TrialRun]]()
    trials = [a["command"] for a in advice if a["command"].startswith("plait train")]
    turns = [own, *dict.fromkeys(trials)] * ROUNDS if trials else []
    for k, command in enumerate(turns):
        say(f"trying advice: {k} of {len(turns)}")
        runs = found.setdefault(command, [])
        if not any(done.failed for done in (*runs, *found[own])):
            _, options = parse_command_line(shlex.split(command)[1:])
            assert isinstance(options, TrainOptions)
            runs.append(measure_trial(options, STEPS))
    for a in advice:
        a |= _compute_gain(found[own], found[a["command"]]) if a["command"] in found else {"measured": None, "note": "cannot be tested by a run here"}


def _compute_gain(own: list[TrialRun], runs: list[TrialRun]) -> dict[str, Any]:
    """Compute the gain from pairs of adjacent runs, so that other load of the machine affects both runs of a pair."""
    if failed := next((run.failed for run in (*own, *runs) if run.failed), ""):
        return {"measured": None, "note": f"failed: {failed}"}
    return {"measured": median(1 - b.seconds_per_sample / a.seconds_per_sample for a, b in zip(own, runs)), "note": ""}


def format_gains(advice: Sequence[dict[str, Any]]) -> list[str]:
    """Format the predicted and measured gains."""
    rows = [("predicted", "measured", "advice")]
    for a in advice:
        measured = a["note"] if a["measured"] is None else f"{100 * a['measured']:.0f} %"
        rows.append((f"{100 * a['gain']:.0f} %", measured, a["what"]))
    return align_rows(rows, right=(0,))
