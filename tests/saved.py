"""Inspect checkpoints: each byte checked, each tensor gathered."""

from pathlib import Path

import torch
from launched import TEST_JOB, Command, rows

from plait.checkpoint.checkpoint_reader import read_checkpoint_tensors
from plait.checkpoint.manifest import Manifest, read_manifest

__all__ = ["manifest", "read_checkpoint_tensors", "whole_and_killed"]


def manifest(path: Path) -> Manifest:
    return read_manifest(path)


def whole_and_killed(folder: Path, plan: str, told: str, *options: str) -> list[dict[str, torch.Tensor]]:
    """Return the last checkpoint of each of two runs that save every four of 24 steps. The second was killed on the way and resumed. Both
    print `told`."""
    argv = (
        "train",
        TEST_JOB,
        "--plan",
        plan,
        "--save-every",
        "4",
        "--job.steps",
        "24",
        "--job.pause",
        "0.01",
        *options,
    )
    ends = []
    for run, killed in ((folder / "whole", False), (folder / "killed", True)):
        run.mkdir()
        command = Command(*argv, folder=run)
        if killed:
            command.until(lambda run=run: len(rows(run)) >= 10)
            command.kill()
            command.wait()
            command = Command(*argv, "--resume", folder=run)
        assert command.wait() == 0, command.output
        assert told in command.output
        ends.append(read_checkpoint_tensors(run / "runs/latest/checkpoints/step-000024"))
    return ends
