"""A plan that is invalid for the model is rejected before anything starts: exit code 2, no run directory, no rank."""

from pathlib import Path

import pytest
from launched import TEST_JOB, Command


@pytest.mark.parametrize(
    "verb, plan, code",
    [("train", "cp=2", "P040"), ("train", "pp=9", "P023"), ("train", "dp=2 ep=2", "P051"), ("verify", "cp=2", "P040")],
)
def test_what_a_model_refuses_is_said_before_a_start(tmp_path: Path, verb: str, plan: str, code: str) -> None:
    command = Command(verb, TEST_JOB, "--plan", plan, folder=tmp_path)
    assert command.wait() == 2, command.output
    assert command.output.startswith(f"error[{code}]") and "  why" in command.output and "  fix" in command.output
    assert not (tmp_path / "runs").exists() and "Traceback" not in command.output
