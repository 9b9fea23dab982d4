"""`bench/slow_link.py`: its clock on hand-computed cases, and a short run whose bytes equal the planner's prediction."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jobs
import pytest
from torch import Tensor

import plait
from plait.config.plan import Plan

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import async_course  # noqa: E402
from virtual_clock import Recorded, Wire, replay  # noqa: E402

BYTES = 1000


def sums(*steps: list) -> Recorded:
    """Two ranks with the same events."""
    return Recorded([[list(step) for step in steps], [list(step) for step in steps]], [[1.0], [1.0]])


def begin(number: int) -> list:
    return ["begin", number, "all_reduce", BYTES, [0, 1]]


def test_a_clock_by_hand() -> None:
    """An all-reduce over two ranks sends its bytes once, in two hops: 1 s at 1,000 bytes per second, and 0.2 s."""
    wire, waits = Wire(1000.0, 0.1), sums([2.0, begin(0), ["wait", 0]], [2.0, begin(1), ["wait", 1], 1.0])
    assert replay(waits, wire, (1.0, 1.0)).ends == pytest.approx([3.2, 7.4])
    assert replay(waits, wire, (1.0, 3.0)).ends == pytest.approx([7.2, 17.4]), (
        "the slow one is waited for, and waits not"
    )
    assert replay(waits, wire, (1.0, 1.0)).sent == pytest.approx(BYTES)
    hidden = sums([2.0, begin(0), 5.0, ["wait", 0]])
    assert replay(hidden, wire, (1.0, 1.0)).ends == pytest.approx([7.0])
    queue = sums([begin(0), begin(1), ["wait", 0], ["wait", 1]])
    assert replay(queue, wire, (1.0, 1.0)).ends == pytest.approx([2.4]), "a link takes one message after the other"


def test_a_yardstick_and_repeated_steps() -> None:
    slow = Recorded([[[2.0, begin(0), ["wait", 0]]], [[2.0, begin(0), ["wait", 0]]]], [[2.0], [4.0]])
    assert replay(slow.in_yardsticks(1.0), Wire(1000.0, 0.1), (1.0, 1.0)).ends == pytest.approx([2.2])
    assert replay(slow.repeated(3), Wire(1000.0, 0.1), (1.0, 1.0)).ends == pytest.approx([3.2, 6.4, 9.6])


def test_a_server_on_the_clock_of_a_link() -> None:
    """Two groups and a server: each clock sends the weights and a gradient, and a slower link ends later."""
    job = replace(jobs.mlp(0.0), steps=6, evaluate=plait.Evaluate(data=jobs.Numbers, metrics=metrics, every=2))
    plan = Plan.parse("outer_sync=async replica_groups=2 staleness=1")
    (losses, ends, sent), (_, later, _) = (
        async_course.play(job, plan, (Wire(rate, 0.01), (1.0, 1.0), 0.1), (-1.0, 2), lambda clock: None) for rate in (1e6, 1e3)
    )
    assert len(ends) == 6 and [clock for clock, _ in losses] == [0, 2, 4, 6] and losses[-1][1] < losses[0][1]
    size = 4 * sum(p.numel() for p in job.model().parameters())
    assert sent == pytest.approx(2 * size) and later[-1] > ends[-1]


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"loss": (output - target).square().mean(1)}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "slow.svg"
    words = [sys.executable, str(BENCH / "slow_link.py"), "--quick", "--json", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=BENCH)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["settings"]) == 4 and {*found["plans"]} == {"one", "dp", "local"}
    for row in found["settings"]:
        for name, arm in row["arms"].items():
            assert arm["sent"] == pytest.approx(arm["predicted_sent"], rel=0.01), (
                name
            )  # plus a few bytes in addition to the gradients
            assert arm["step"] > 0 and arm["predicted_step"] > 0
        assert row["arms"]["local"]["step"] < row["arms"]["dp"]["step"]
        assert {*row["winners"]} == {"samples", "loss", "loss, all ranks"}
    assert ElementTree.fromstring(out.read_text()).tag.endswith("svg")
