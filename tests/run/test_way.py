"""Few files are between the command line and the all-reduce of gradients, and docs/architecture.md names each of them."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import plait
from plait.cli import main
from plait.parallel.data.buckets import BucketSums
from plait.parallel.tensor import strategy as tensor

SOURCES = Path(plait.__file__).parent
ARCHITECTURE = SOURCES.parents[1] / "docs" / "architecture.md"
JOB = """
import plait, torch
from torch import nn

def job():
    model = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    data = lambda: torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
    return plait.Job(model=model, loss=nn.functional.mse_loss, data=data, optimizer=lambda p: torch.optim.SGD(p, 0.1), batch=8, steps=2)
"""


def test_the_way_to_the_all_reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = tmp_path / "passed"

    def spied(holder: Any, name: str) -> None:
        real = getattr(holder, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            files = [Path(frame.filename) for frame in traceback.extract_stack()]
            with passed.open("a") as lines:
                lines.write("".join(f"{file.relative_to(SOURCES)}\n" for file in files if file.is_relative_to(SOURCES)))
            return real(*args, **kwargs)

        monkeypatch.setattr(holder, name, spy)

    spied(tensor, "wire_slices")
    spied(BucketSums, "__init__")
    spied(dist, "all_reduce")
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", "job.py", "--plan", "dp=2 tp=2", "--nproc", "4", "--check", "none"]) == 0
    way = {*passed.read_text().split()}
    assert {"parallel/tensor/strategy.py", "parallel/data/strategy.py", "parallel/data/buckets.py", "engine/train_step.py"} <= way
    assert len(way) <= 25, sorted(way)
    named = ARCHITECTURE.read_text()
    assert not [file for file in way if f"`{file}`" not in named]
