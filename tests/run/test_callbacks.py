"""Callbacks of a run: they are called on all ranks and kept in checkpoints. The callbacks that plait includes."""

import json
from pathlib import Path

import pytest
from launched import Command

JOB = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import jobs, jobs_logged
import torch.distributed as dist
import plait

class Heard(plait.Callback):
    def __init__(self):
        self.steps = 0

    def on_start(self, engine):
        print("begins after", self.steps, flush=True)

    def on_step(self, engine, step):
        self.steps += 1
        engine.log("heard", self.steps)
        if os.environ.get("RAISE") and step.step == 2:
            raise ValueError("of the user")
        if os.environ.get("KILL") and step.step == 5 and engine.place.rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os._exit(9)
        if os.environ.get("STOP") and step.step == 2 and engine.place.rank == 1:
            engine.stop("rank 1 has enough")

    def on_evaluation(self, engine, values):
        print("evaluated", engine.position.step, flush=True)

    def on_save(self, engine, path):
        print("saved", path.name, flush=True)

    def on_end(self, engine):
        print("ends after", self.steps, flush=True)

    def state_dict(self):
        return {{"steps": self.steps}}

    def load_state_dict(self, state):
        self.steps = state["steps"]

class Teacher(plait.Callback):

    def on_start(self, engine):
        self.average = [p.detach().clone() for p in jobs_logged.job(6, 2).model().parameters()]

    def on_step(self, engine, step):
        import torch
        with torch.no_grad():
            for kept, parameter in zip(self.average, engine.model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)

def mine():
    return [Heard()]

def teaching():
    return [Teacher()]

def classes():
    return [Heard]

def job(steps: int = 6, every: int = 2, rate: float = 0.01) -> plait.Job:
    import dataclasses, torch
    def groups(parameters):
        return torch.optim.SGD([{{"params": parameters[:2], "lr": 2 * rate}}, {{"params": parameters[2:], "name": "rest"}}], lr=rate)
    return dataclasses.replace(jobs_logged.job(steps, every), optimizer=groups)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "odd.py").write_text(JOB)
    return tmp_path


def run(folder: Path, *more: str, code: int = 0, nproc: str = "2", **variables: str) -> str:
    command = Command("train", "odd.py", "--nproc", nproc, *more, folder=folder, environment=variables)
    assert command.wait() == code, command.output
    return command.output


def metrics(folder: Path) -> list[dict[str, object]]:
    return [json.loads(row) for row in (folder / "runs/latest/metrics.jsonl").read_text().splitlines()]


def heard(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("begins", "evaluated", "saved", "ends"))]


@pytest.mark.slow
def test_callbacks_are_called_in_order_and_go_on_under_another_plan(folder: Path) -> None:
    first = run(folder, "--callbacks", "odd.py:mine", "--steps", "4", "--group-norms")
    told = ["begins after 0", "evaluated 2", "saved step-000004", "evaluated 4", "ends after 4"]
    assert heard(first) == told
    rows = [row for row in metrics(folder) if "loss" in row]
    assert [row["logged"]["heard"] for row in rows] == [1, 2, 3, 4]  # type: ignore[index]
    assert rows[0]["lrs"] == [0.02, 0.01]
    for row in rows:
        norms = row["norms"]
        assert isinstance(norms, dict) and list(norms) == ["0", "rest"]
        assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(row["norm"], rel=1e-5)
    again = run(folder, "--callbacks", "odd.py:mine", "--resume", "--plan", "fsdp=2", "--group-norms")
    assert heard(again) == ["begins after 4", "evaluated 4", "saved step-000006", "evaluated 6", "ends after 6"]
    row = metrics(folder)[-2]
    assert sum(n**2 for n in row["norms"].values()) ** 0.5 == pytest.approx(row["norm"], rel=1e-5)  # type: ignore[attr-defined]
    without = run(folder, "--resume", "--steps", "7", nproc="1")
    assert "callback Heard: ignored its state in the checkpoint" in without


@pytest.mark.slow
def test_a_rank_may_end_the_run_and_errors_name_the_callback(folder: Path) -> None:
    output = run(folder, "--callbacks", "odd.py:mine", "--job.every", "5", STOP="1")
    assert "stopped early at step 3: rank 1 has enough" in output and "evaluated 3" in output
    assert "ends after 3" in output and (folder / "runs/latest/checkpoints/step-000003").is_dir()
    again = run(folder, "--callbacks", "odd.py:mine", "--job.every", "5", "--resume")
    assert "complete at step 3" in again and "rank 1 has enough" in again
    assert "ends after 5" in run(folder, "--callbacks", "odd.py:mine", "--resume", "--steps", "5")
    output = run(folder, "--callbacks", "odd.py:mine", code=1, RAISE="1")
    assert "error[U013] the callback Heard.on_step raised ValueError: of the user" in output and "odd.py:" in output


@pytest.mark.slow
def test_a_callback_that_wants_whole_weights_is_told_that_there_are_parts(folder: Path) -> None:
    run(folder, "--callbacks", "odd.py:teaching", "--plan", "dp=2")
    for plan in ("fsdp=2", "tp=2", "pp=2"):
        output = run(folder, "--callbacks", "odd.py:teaching", "--plan", plan, code=1)
        assert "error[U013] the callback Teacher.on_step raised" in output and f"under {plan} `engine.model` has the local shard" in output, output
        assert "Job.ema" in output


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--callbacks", "odd.py:min"), ("U011", "did you mean  mine ?")),
        (("--callbacks", "nowhere.py:mine"), ("U011", "the Python file nowhere.py does not exist")),
        (("--callbacks", "odd.py:classes"), ("U011", "the class Heard")),
        (("--best", "accuracy"), ("U002", "--best max:accuracy")),
        (("--early-stop", "2"), ("U002", "needs --best")),
        (("--profile", "3:2"), ("U002", "--profile 10:13")),
        (
            ("--callbacks", "odd.py:mine", "--plan", "replica_groups=2 outer_sync=async", "--nproc", "3"),
            ("U015", "outer_sync=async"),
        ),
    ],
)
def test_wrong_callbacks_are_refused(folder: Path, argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    output = run(folder, *argv, code=2, nproc="1")
    assert all(word in output for word in words), output


def test_the_best_checkpoint_is_kept_and_a_run_that_gets_worse_ends(folder: Path) -> None:
    wanted = ("--best", "min:error", "--early-stop", "2", "--job.every", "1", "--keep", "1", "--save-every", "1")
    output = run(folder, *wanted, "--job.rate", "0.6", "--steps", "60", "--on-nan", "skip")
    assert "stopped early at step" in output and "error has not improved for 2 evaluations" in output
    rows = metrics(folder)
    errors = {row["step"]: row["evaluation"]["error"] for row in rows if "evaluation" in row}  # type: ignore[index]
    known = {step: error for step, error in errors.items() if error is not None}
    best = min(known, key=lambda step: known[step])
    assert [path.name for path in (folder / "runs/latest/best").iterdir()] == [f"step-{best:06d}"]
    assert max(errors) == best + 2  # type: ignore[operator,call-overload]
    last = folder / f"runs/latest/checkpoints/step-{max(errors):06d}"  # type: ignore[call-overload,str-format]
    assert last.is_dir()
    assert "complete at step" in run(folder, *wanted, "--job.rate", "0.6", "--resume")
    path = str((folder / "runs/latest/best").resolve())
    checked = Command("checkpoint", "verify", path, folder=folder)
    assert checked.wait() == 0, checked.output
    run(folder, "--weights", path, "--steps", "1")
    resumed = run(folder, "--resume", path, "--steps", str(best + 1), "--job.every", "1")  # type: ignore[operator]
    assert f"starts from {path}" in resumed and metrics(folder)[-1]["step"] == best + 1  # type: ignore[operator]


def test_a_metric_that_is_not_there_is_told_with_the_nearest(folder: Path) -> None:
    output = run(folder, "--best", "max:eror", code=1)
    assert "error[U012]" in output and "did you mean  error ?" in output


def test_steps_are_traced_on_every_rank(folder: Path) -> None:
    run(folder, "--profile", "2:3", "--steps", "4")
    for rank in range(2):
        trace = json.loads((folder / f"runs/latest/profile/rank{rank}.json").read_text())
        assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.slow
def test_callbacks_go_on_from_their_state_when_a_rank_is_lost(folder: Path) -> None:
    output = run(folder, "--callbacks", "odd.py:mine", "--steps", "8", KILL="1")
    assert "resuming from step" in output
    rows = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["logged"]["heard"] for row in rows] == list(range(1, 9))  # type: ignore[index]
