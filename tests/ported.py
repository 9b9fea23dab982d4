"""Compare the two forms of a port: the script of its framework, and the job. Both must train the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import Command, rows

from plait.randomness.keyed import make_permutation

PORTS = Path(__file__).parents[1] / "examples" / "ports"


def before(name: str, seed: int, samples: int) -> list[float]:
    """The losses of the script on the samples of the first epoch, in the order of a job with that seed."""
    code = f"import json, before; print(json.dumps(before.main({make_permutation(seed, 0, samples).tolist()})))"
    told = subprocess.run([sys.executable, "-c", code], cwd=PORTS / name, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def after(name: str, plan: str, folder: Path) -> list[dict]:
    """The result of each step of the job, trained under a plan."""
    command = Command("train", str(PORTS / name / "job.py"), "--plan", plan, folder=folder)
    assert command.wait() == 0, command.output
    return rows(folder)


def first_epoch_is_the_same(name: str, plan: str, seed: int, samples: int, folder: Path) -> None:
    """The script and the job have equal losses on equal samples. Both train in float32."""
    script, steps = before(name, seed, samples), after(name, plan, folder)
    assert len(steps) == len(script)
    same = sum(row["samples"] <= samples for row in steps)
    assert same > 4
    assert [row["loss"] for row in steps[:same]] == pytest.approx(script[:same], rel=2e-4)


def equal(name: str, plan: str, folder: Path) -> None:
    """Assert that `plait verify` finds the job equal."""
    command = Command("verify", str(PORTS / name / "job.py"), "--plan", plan, folder=folder)
    assert command.wait(120) == 0 and "EQUAL" in command.output, command.output
