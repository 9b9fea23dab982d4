"""Runs a few steps of a `plait train` command in a temporary run, and measures wall-clock time."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from plait.config.command_options import TrainOptions, format_words
from plait.launch.scratch import ScratchFolder
from plait.planner.trial import TRIAL_STEPS, WARMUP_STEPS
from plait.report.summary import read_metric_rows


@dataclass(frozen=True)
class TrialRun:
    """Times of a run after its warm-up: the median per step, and the mean per sample. `failed` is the reason if there are none."""

    seconds: float = 0.0
    seconds_per_sample: float = 0.0
    failed: str = ""


def measure_trial(options: TrainOptions, steps: int = TRIAL_STEPS) -> TrialRun:
    """Train `steps` steps in a temporary folder, without trackers and exports."""
    with ScratchFolder("try") as folder:
        run = replace(
            options, steps=steps, runs=Path(folder), json=True, resume=None, tracker=(), export_every=None, export_dir=None, early_stop=None,
            check="none",
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "plait", "train", *format_words(run)], capture_output=True, text=True)
        if done.returncode:
            return TrialRun(failed=(done.stderr.strip().splitlines() or ["no error output"])[0])
        rows = [row for row in read_metric_rows(next(Path(folder).glob("*/metrics.jsonl"))) if "loss" in row]
    took, samples = [row["seconds"] for row in rows[WARMUP_STEPS:]], rows[-1]["samples"] - rows[WARMUP_STEPS - 1]["samples"]
    return TrialRun(median(took), sum(took) / samples)
