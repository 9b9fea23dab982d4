"""`plait plan` learns from run directories: measured steps correct predictions, their order and their uncertainty. Unusable runs are skipped."""

import json
import shutil
from math import log
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.cli.measured_runs import WARMUP_STEPS, MeasuredRuns
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory, describe_environment

JOB = '''
import torch
from torch import nn
import plait

class Data:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((16,), float(i)), i % 4

def job(width: int = 32) -> plait.Job:
    return plait.Job(model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for _ in range(4))),
                     loss=nn.functional.cross_entropy, data=Data, optimizer=torch.optim.SGD, batch=8, steps=4)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job, on a simulated machine of two cores."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(plan: str, seconds: float, steps: int = 12, job: str = "job.py", batch: int = 8, **arguments: str) -> RunDirectory:
    """A run directory with this step time for a plan. The first steps, an evaluation and a checkpoint took longer."""
    run = RunDirectory.create(job, Plan.parse(plan), arguments, Path("runs"))
    rows = list[dict[str, Any]]()
    for step in range(1, steps + 1):
        slow = 50 if step <= WARMUP_STEPS or step in (7, 8, 9) else 1
        ranks = Plan.parse(plan).devices
        rows.append({"step": step, "loss": 1.0, "samples": batch * step, "seconds": slow * seconds, "samples_per_s": 1.0, "ranks": ranks})
        rows += [{"step": 6, "evaluation": {"loss": 1.0}}] if step == 6 else []
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.checkpoints / "step-000008").mkdir()
    return run


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "job.py", "--gpus", "2", "--json", "--all", *words]) == 0
    return json.loads(capsys.readouterr().out)


def seconds_of(facts: dict[str, Any]) -> dict[str, float]:
    return {row["plan"]: row["seconds"] for row in facts["plans"] if row["fits"]}


def test_the_median_of_typical_steps_is_what_a_run_measured() -> None:
    run = ran("dp=2", 0.5)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rows = [row | {"seconds": row["seconds"] + row["step"]} if "loss" in row else row for row in rows]  # 4, 5, 6, 10, 11 and 12 are typical
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = MeasuredRuns.read(Path("runs"), describe_environment()).runs
    assert (found.path.name, found.job, found.plan, found.batch, found.seconds) == (run.path.name, "job.py", Plan(dp=2), 8, 8.5)


def test_predictions_of_other_plans_are_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    before = planned(capsys=capsys)
    assert before["learned"]["runs"] == 0
    times = seconds_of(before)
    measured = [plan for plan in times if Plan.parse(plan).devices == 2][:2]
    for plan in measured:
        ran(plan, 3 * times[plan])
    after = planned(capsys=capsys)
    assert after["learned"]["runs"] == len(measured)
    others = [plan for plan in times if plan not in measured and plan in seconds_of(after)]
    assert others
    for plan in others:
        assert seconds_of(after)[plan] == pytest.approx(3 * times[plan], rel=0.25)
    row = next(row for row in after["plans"] if row["fits"])
    assert sum(row["parts"].values()) == pytest.approx(row["seconds"])
    wide = lambda facts: log(facts["confidence"]["high"] / facts["confidence"]["low"])  # noqa: E731
    assert wide(after) < wide(before)
    assert seconds_of(planned("--learn", "none", capsys=capsys)) == times


def test_the_order_is_that_of_corrected_times_and_the_text_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    times = seconds_of(planned(capsys=capsys))
    best, *_, last = (plan for plan in times if Plan.parse(plan).devices == 2)
    assert times[best] < times[last]
    ran(best, 3 * times[last])
    ran(last, times[last])
    again = {plan: seconds for plan, seconds in seconds_of(planned(capsys=capsys)).items() if Plan.parse(plan).devices == 2}
    assert again[best] > again[last]
    assert [*again.values()][1:] == sorted([*again.values()][1:])
    assert main(["plan", "job.py", "--gpus", "2"]) == 0
    assert "learned from 2 runs in runs (predictions were" in (out := capsys.readouterr().out) and "too fast" in out


def test_a_faster_device_leaves_messages_as_slow(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that took half of its predicted time, with no messages, says nothing of messages."""
    times = planned(capsys=capsys)
    alone = next(row for row in times["plans"] if Plan.parse(row["plan"]).devices == 1)
    sliced = next(row for row in times["plans"] if Plan.parse(row["plan"]).tp == 2)
    assert sliced["parts"]["tensor"] > sliced["seconds"] / 4
    ran(alone["plan"], alone["seconds"] / 2)
    again = seconds_of(planned(capsys=capsys))
    assert again[alone["plan"]] == pytest.approx(alone["seconds"] / 2, rel=0.05)
    assert again[sliced["plan"]] > 0.55 * sliced["seconds"]


def test_what_is_unusable_is_skipped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    ran("dp=2", 0.5)
    for name, value in (("plait", "0.0.1"), ("cores", 1024), ("cuda", ["H100"]), ("torch", "1.0")):
        file = ran("dp=2", 0.5).path / "env.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    shutil.copy("job.py", "other.py")
    ran("dp=2", 0.5, job="other.py")
    ran("dp=2", 0.5, steps=4)
    (ran("dp=2", 0.5).path / "job.json").write_text('{"job": ')
    ran("dp=2", 0.5).metrics.write_text('{"step": 1, "loss": 1.0, "samples": "many"}\n')
    (ran("dp=2", 0.5).path / "plan.toml").write_text("dp = ")
    ran("dp=2", 0.5, height="3")
    torn = ran("dp=2", 0.5).metrics
    torn.write_text(torn.read_text() + '{"step": 13, "lo')  # a run that is writing
    facts = planned(capsys=capsys)["learned"]
    assert facts["runs"] == 2
    assert facts["skipped"] == {
        "damaged": 3, "of another job": 1, "of another machine": 2, "of another version": 2, "of too few steps": 1,
        "of the job with other arguments": 1,
    }  # fmt: skip


def test_runs_of_the_job_with_other_arguments_and_another_batch_count(capsys: pytest.CaptureFixture[str]) -> None:
    ran("dp=2", 0.5, width="64", batch=16)
    found = planned(capsys=capsys)["learned"]
    assert found["runs"] == 1 and not found["skipped"]


def test_other_machines_learn_nothing_from_here(capsys: pytest.CaptureFixture[str]) -> None:
    ran("dp=2", 0.5)
    assert main(["plan", "job.py", "--machine", "h100x2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["learned"] == {"runs": 0, "folder": "", "errors": [], "skipped": {}}
    assert main(["plan", "job.py", "--machine", "h100x2", "--learn", "runs"]) == 0
    assert "learned from no run in runs: 1 of another machine" in capsys.readouterr().out


def test_a_folder_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.py", "--learn", "elsewhere"]) == 2
    assert "--learn elsewhere is not a folder" in capsys.readouterr().err


def test_runs_of_one_plan_that_differ_make_predictions_less_sure(capsys: pytest.CaptureFixture[str]) -> None:
    wide = lambda facts: log(facts["confidence"]["high"] / facts["confidence"]["low"])  # noqa: E731
    third = seconds_of(planned(capsys=capsys))["dp=2"]
    for _ in range(3):
        ran("dp=2", 3 * third)
    sure = planned(capsys=capsys)
    ran("dp=2", 12 * third)
    unsure = planned(capsys=capsys)
    assert wide(unsure) > 2 * wide(sure)
    times = [seconds_of(facts)["dp=2"] for facts in (sure, unsure)]
    assert times[0] == pytest.approx(3 * third, rel=0.05) and 3 * third < times[1] < 6 * third


def test_a_report_predicts_as_plan_did_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It uses runs that started before it: not itself, and no later ones."""
    times = seconds_of(planned(capsys=capsys))
    first, second = [plan for plan in times if Plan.parse(plan).devices == 2][:2]
    runs = [ran(first, 3 * times[first]), ran(second, 30 * times[second])]
    for run, plan, factor in zip(runs, (first, second), (1, 3)):
        assert main(["report", str(run.path), "--json"]) == 0
        predicted = json.loads(capsys.readouterr().out)["runs"][0]["predicted"]
        assert predicted["seconds"] == pytest.approx(factor * times[plan], rel=0.25)
        assert sum(predicted["parts"].values()) == pytest.approx(predicted["seconds"])
