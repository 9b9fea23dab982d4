"""A run whose last evaluation fails has its last checkpoint, and continues with that evaluation."""

import json
from pathlib import Path

import pytest
from launched import Command

JOB = f"""
import dataclasses, pathlib, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import jobs
import plait

def metrics(out, y):
    if len(out) > 2 and not pathlib.Path("mended").exists():   # not when it is tried
        raise ValueError("only with many samples")
    return {{"error": (out - y).abs()}}

def job() -> plait.Job:
    return dataclasses.replace(jobs.mlp(0.0), evaluate=plait.Evaluate(jobs.Numbers, metrics), steps=4)
"""


@pytest.mark.slow
def test_the_last_checkpoint_comes_before_the_last_evaluation(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(JOB)
    argv = ("train", "odd.py", "--nproc", "2")
    failed = Command(*argv, folder=tmp_path)
    assert failed.wait() == 1 and "only with many samples" in failed.output
    assert (tmp_path / "runs/latest/checkpoints/step-000004").is_dir()
    (tmp_path / "mended").touch()
    again = Command(*argv, "--resume", folder=tmp_path)
    assert again.wait() == 0, again.output
    told = [json.loads(row) for row in (tmp_path / "runs/latest/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in told if "evaluation" in row] == [4]
