"""Tests fork workers from this process, so it keeps to one thread; so do they, since threads of small tensors only wait."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Autograd decides at the first backward pass which devices get threads, and a process with such threads cannot fork. A torch
# with CUDA counts devices from the first fake tensor on, also where there is none: so the first pass is now.
torch.ones(1, requires_grad=True).backward()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", default="1/1", help="K/N: every N-th test, from the K-th; CI runs one slice of the long lists")
    parser.addoption("--lane", default="1/1", help="K/N: the same, of the slice; make test runs two lanes at once")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for option in ("--slice", "--lane"):
        first, step = map(int, config.getoption(option).split("/"))
        others = [item for i, item in enumerate(items) if i % step != first - 1]
        items[:] = items[first - 1 :: step]
        config.hook.pytest_deselected(items=others)
