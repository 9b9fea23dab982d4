"""A few steps of a command of `plait train` in a run of its own, timed by the clock on the wall."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from plait.config.command_options import TrainOptions, words_of
from plait.launch.scratch import Scratch
from plait.planner.trial import STEPS, WARM
from plait.report.summary import metrics


@dataclass(frozen=True)
class TrialRun:
    """Steps of a run after its warm-up: the median of their seconds, and the mean of each sample's. `failed`: why there are none."""

    seconds: float = 0.0
    per_sample: float = 0.0
    failed: str = ""


def measure(options: TrainOptions, steps: int = STEPS) -> TrialRun:
    """So many steps of a training in a run of its own, in a folder that is removed: no tracker and no other folder gets anything of it."""
    with Scratch("try") as folder:
        run = replace(
            options, steps=steps, runs=Path(folder), json=True, resume=None, tracker=(), export_every=None, export_dir=None, early_stop=None,
            check="none",
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "plait", "train", *words_of(run)], capture_output=True, text=True)
        if done.returncode:
            return TrialRun(failed=(done.stderr.strip().splitlines() or ["it said nothing"])[0])
        rows = [row for row in metrics(next(Path(folder).glob("*/metrics.jsonl"))) if "loss" in row]
    took, samples = [row["seconds"] for row in rows[WARM:]], rows[-1]["samples"] - rows[WARM - 1]["samples"]
    return TrialRun(median(took), sum(took) / samples)
