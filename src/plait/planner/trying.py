"""A few real steps of a plan, to choose between those that were predicted to be about as fast."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from plait.errors import PlaitError, Problem
from plait.plan import Plan

STEPS, WARM = 9, 3
"""Steps of a try, and those at its beginning that do not count."""


def measure(options: Any, plan: Plan) -> float:
    """Seconds of a step of the job under a plan, here: the median after a warm-up. M014 when the plan cannot run."""
    arguments = [word for name, value in options.arguments.items() for word in (f"--job.{name}", value)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "plait", "train", options.job, "--plan", str(plan), "--steps", str(STEPS), "--runs", folder,
            "--save-every", str(10**6), "--json", *arguments,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
            raise PlaitError(
                Problem(
                    "M014",
                    f"plan {plan} was tried and failed",
                    why=said,
                    fix=(f'plait train {options.job} --plan "{plan}"',),
                )
            )
        rows = [json.loads(line) for line in next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()]
    times = [row["seconds"] for row in rows if "seconds" in row][WARM:]
    return median(times)
