"""`plait train --plan auto` and `plait plan --try` from end to end, on processes of this machine."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from plait.cli.main import main
from plait.cli.plan import try_plans
from plait.config.errors import PlaitError
from plait.config.hardware import CORES_NOTE, Device, Link, Rates
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.launch import detect
from plait.planner.answer import find_answer
from plait.planner.formulas import CoreCosts
from plait.planner.plan_request import PlanRequest
from plait.planner.trial import combine_ranks, time_plans
from tests import jobs

JOB = str(Path(__file__).parents[1] / "training.py")
TWO = Machine(
    "two", Device("core", 8 * 2**30, 8e9, Rates(fp32=4e10)), (Link("memory", 2, 2e9, 6e-5, "loopback"),), 2, cores=2,
    notes=CORES_NOTE,
)  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A current directory without a machine.toml."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine of two cores."""
    monkeypatch.setattr(detect, "detect_machine", lambda kind="auto": TWO)


@pytest.mark.timeout(60)
def test_auto_trains_what_it_chose(on_two: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", JOB, "--plan", "auto", "--nproc", "2", "--steps", "3", "--device", "cpu", "--batch", "2"]) == 0
    )
    said = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("plan "))
    chosen = Plan.load(tmp_path / "runs/latest/plan.toml")
    assert chosen.world == 2 and said.startswith(f"plan      {chosen}, chosen of ") and "ms a step predicted" in said
    assert len((tmp_path / "runs/latest/metrics.jsonl").read_text().splitlines()) >= 3


def test_auto_learns_from_the_runs_before(on_two: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`plait plan` learned from earlier runs, and `plait train --plan auto` did not."""
    command = ["train", JOB, "--plan", "auto", "--nproc", "2", "--steps", "9", "--device", "cpu", "--batch", "2"]
    assert main(command) == 0 and "corrected by" not in capfd.readouterr().err
    assert main(command) == 0 and "predicted and corrected by 1 earlier run" in capfd.readouterr().err


def test_auto_says_when_nothing_fits(on_two: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = replace(TWO, device=replace(TWO.device, memory=64))
    (tmp_path / "machine.toml").write_text(small.to_toml())
    assert main(["train", JOB, "--plan", "auto", "--nproc", "2", "--device", "cpu"]) == 2
    said = capfd.readouterr().err
    assert "M001" in said and "no plan fits" in said and not (tmp_path / "runs").exists()


@pytest.mark.timeout(60)
def test_try_orders_plans_by_what_was_measured(on_two: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", JOB, "--try", "2", "--json"]) == 0
    plans = json.loads(capfd.readouterr().out)["plans"]
    measured = [row for row in plans if "measured" in row["why"]]
    assert len(measured) == 2 and measured == plans[:2] and all(row["fits"] for row in measured)
    assert measured[0]["why"].startswith("chosen: ") and "% slower: " in measured[1]["why"]
    first, second = (float(row["why"].split(": ")[1].split(" ms")[0]) for row in measured)
    assert 0.01 < first <= second < 10_000


class Choosy(nn.Module):
    """Cannot compute six samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 6 and type(x) is Tensor and torch.is_grad_enabled() and torch.distributed.distributed_c10d.is_initialized():
            raise RuntimeError("six samples")
        return self.layers(x)


@pytest.mark.timeout(60)
def test_a_plan_that_fails_does_not_end_the_try() -> None:
    job = jobs.make(Choosy, batch=12)
    failed, took = time_plans(job, [Plan(dp=2), Plan(dp=2, microbatches=2)], 2, rounds=2)
    assert "six samples" in str(failed) and isinstance(took, float) and 0 < took < 10


@pytest.mark.timeout(60)
def test_a_plan_that_cannot_be_built_says_why() -> None:
    (why,) = time_plans(jobs.mlp(), [Plan(cp=2)], 2, rounds=1)
    assert "sequence" in str(why)


def test_failed_plans_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.planner import trial

    found = find_answer(PlanRequest.from_job(jobs.mlp(), "job.py", TWO), {})
    options = SimpleNamespace(tries=2, job="job.py", arguments={})
    plans = [str(row.plan) for row in found.rows]
    monkeypatch.setattr(trial, "time_plans", lambda job, plans, ranks: ["broke", 0.25])
    got = try_plans(found, options)
    assert got.best is not None and str(got.best.plan) == plans[1] and "250 ms measured" in got.best.why
    (row,) = (row for row in got.rows if str(row.plan) == plans[0])
    assert not row.fits and row.why == "failed: broke" and len(got.rows) == len(found.rows)
    monkeypatch.setattr(trial, "time_plans", lambda job, plans, ranks: ["broke", "too"])
    with pytest.raises(PlaitError) as error:
        try_plans(found, options)
    assert error.value.problems[0].code == "M014" and "broke" in str(error.value) and "too" in str(error.value)


def test_try_adds_waits_for_cores_to_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal processor times, `tp` is slower: its messages wait for cores."""
    from plait.planner import trial

    found = find_answer(PlanRequest.from_job(jobs.mlp(), "job.py", TWO), {}, top=100)
    rows = [next(row for row in found.rows if row.fits and (row.plan.tp, row.plan.dp) == mesh) for mesh in ((2, 1), (1, 2))]
    monkeypatch.setattr(trial, "time_plans", lambda job, plans, ranks: [0.25, 0.25])
    got = try_plans(replace(found, rows=tuple(rows)), SimpleNamespace(tries=2, job="job.py", arguments={}))
    assert got.best is not None and got.best.plan.dp == 2 and "250 ms measured" in got.best.why
    assert "250 ms measured" not in got.rows[1].why and "ms measured" in got.rows[1].why


def test_try_runs_nothing_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["plan", JOB, "--machine", "h100x8", "--try", "2"]) == 2
    said = capfd.readouterr().err
    assert "U002" in said and "--try works only with the devices of this machine" in said


def test_more_processes_than_cores_share_them() -> None:
    four = TWO.resize(4)
    assert four.devices_per_node == 4 and four.nodes == 1 and four.device.memory * 2 == TWO.device.memory
    assert CoreCosts.from_machine(four).crowd == 2 and CoreCosts.from_machine(TWO).crowd == CoreCosts.from_machine(TWO.resize(1)).crowd == 1
    alone, crowded = (
        find_answer(PlanRequest.from_job(jobs.mlp(), "", m), {"dp": m.devices}).rows[0].estimate for m in (TWO, four)
    )
    assert alone and crowded and crowded.parts["fixed"] == 2 * alone.parts["fixed"]
    assert sum(crowded.parts.values()) == pytest.approx(crowded.seconds) and crowded.seconds > alone.seconds


def test_a_slow_core_launches_slowly() -> None:
    slow = replace(TWO, operator=1e-3)
    fast, late = (find_answer(PlanRequest.from_job(jobs.mlp(), "", m), {"dp": 2}).rows[0].seconds for m in (TWO, slow))
    assert late > 50 * fast


def test_ranks_of_a_pipeline_wait_as_their_table_says() -> None:
    plan = Plan(pp=2, microbatches=2)
    did = [{"F0": 2.0, "B0": 4.0}, {"F1": 2.0, "B1": 4.0}]
    assert combine_ranks(plan, [6.5, 6.5], did) == pytest.approx(0.5 + 9.0)  # the time of three micro-batches for two
    assert combine_ranks(Plan(dp=2), [3.0, 4.0], [{}, {}]) >= 4.0
