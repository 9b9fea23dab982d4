"""Tests that each port must pass: the loop by hand runs, the job trains on two ranks and equals one device."""

import runpy
from pathlib import Path

import pytest
from launched import Command, rows

from plait.config.job import load_job
from plait.config.plan import Plan
from plait.proof.verify import verify

PORTS = Path(__file__).parents[1] / "examples" / "ports"


def by_hand(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the script, which prints a line for each step."""
    runpy.run_path(str(PORTS / name / "before.py"), run_name="__main__")
    assert "step 20 " in capsys.readouterr().out


def trained(name: str, folder: Path) -> None:
    """Train the job on two ranks: the loss falls."""
    command = Command("train", str(PORTS / name / "job.py"), "--plan", "dp=2", "--check", "none", folder=folder)
    assert command.wait() == 0, command.output
    losses = [row["loss"] for row in rows(folder)]
    assert sum(losses[-5:]) < sum(losses[:5])


def equal(name: str, plan: str) -> None:
    """Prove the job in float64."""
    verdict = verify(load_job(str(PORTS / name / "job.py")), Plan.parse(plan), seconds=0.0)
    assert verdict.equal and not verdict.inexact, (verdict.code, verdict.parameter, verdict.cause)
