"""Configure torch for the test process. Tests fork workers from it, so it uses one thread. The workers use one too: threads only slow small
tensors."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Autograd starts its device threads at the first backward pass, and a process with such threads cannot fork. A torch build with
# CUDA counts devices as soon as the first fake tensor exists, even without a device. So the first backward pass runs here.
torch.ones(1, requires_grad=True).backward()

COSTS = Path(__file__).with_name("costs.txt")
"""The measured processor seconds of each slow test. CONTRIBUTING.md has the command that writes this file."""
SLOW, PROVE = 2.5, 8.0
"""The seconds from which a test gets the mark `slow`, and the mark `prove`, in addition to the marks in the code."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", default="1/1", help="K/N: every N-th test, from the K-th; CI runs one slice of the long lists")
    parser.addoption("--lane", default="1/1", help="K/N: the same, of the slice; make test runs two lanes at once")
    parser.addoption("--costs", help="add a line for each test to this file: seconds of processor time and the test's name")


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    seconds = _costs().get(item.nodeid, 0.0)
    if seconds > SLOW:
        item.add_marker(pytest.mark.prove if seconds > PROVE else pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for option in ("--slice", "--lane"):
        first, step = map(int, config.getoption(option).split("/"))
        others = [item for i, item in enumerate(items) if i % step != first - 1]
        items[:] = items[first - 1 :: step]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = sum(os.times()[:4])
    yield
    if file := item.config.getoption("--costs"):
        with open(file, "a") as lines:  # includes forked ranks: they have exited
            lines.write(f"{sum(os.times()[:4]) - before:.1f} {item.nodeid}\n")


@cache
def _costs() -> dict[str, float]:
    rows = (line.split(" ", 1) for line in COSTS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in rows}
