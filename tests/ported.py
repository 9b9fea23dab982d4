"""A port is the same training twice: a script of its framework, and a job. Here both are run and compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import Command, rows

from plait.randomness.keyed import permutation

PORTS = Path(__file__).parents[1] / "examples" / "ports"


def before(name: str, seed: int, samples: int) -> list[float]:
    """The losses of the script, given the samples of the first epoch in the order in which a job of that seed has them."""
    code = f"import json, before; print(json.dumps(before.main({permutation(seed, 0, samples).tolist()})))"
    told = subprocess.run([sys.executable, "-c", code], cwd=PORTS / name, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def after(name: str, plan: str, folder: Path) -> list[dict]:
    """What each step of the job gave, trained under a plan."""
    command = Command("train", str(PORTS / name / "job.py"), "--plan", plan, folder=folder)
    assert command.wait() == 0, command.output
    return rows(folder)


def first_epoch_is_the_same(name: str, plan: str, seed: int, samples: int, folder: Path) -> None:
    """The script and the job have the same losses as long as they have the same samples. Both train in float32."""
    script, steps = before(name, seed, samples), after(name, plan, folder)
    assert len(steps) == len(script)
    same = sum(row["samples"] <= samples for row in steps)
    assert same > 4
    assert [row["loss"] for row in steps[:same]] == pytest.approx(script[:same], rel=2e-4)


def equal(name: str, plan: str, folder: Path) -> None:
    """`plait verify` says so."""
    command = Command("verify", str(PORTS / name / "job.py"), "--plan", plan, folder=folder)
    assert command.wait(120) == 0 and "EQUAL" in command.output, command.output
