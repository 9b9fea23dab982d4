"""The advice of `plait report`: the cause for each split of a step, the predicted gain of the change, and `--try`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cli import try_advice
from plait.cli.main import main
from plait.cli.trial_run import TrialRun
from plait.config.command_options import TrainOptions
from plait.config.plan import Plan
from plait.planner.alternatives import Alternative
from plait.report.advice import Advice, RunFacts, advise
from plait.report.step_split import RankSplit, StepSplit

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from slowdowns import SLOWDOWNS, posed

JOB = str(Path(__file__).parents[1] / "jobs.py") + ":mlp"


def split_of(*ranks: dict[str, float], **more: Any) -> StepSplit:
    """Ranks with these parts of a step that takes one second."""
    made = (RankSplit(r, 1.0, {"computing": 1.0 - sum(parts.values())} | parts) for r, parts in enumerate(ranks))
    return StepSplit(tuple(made), 8, **more)


def first(found: StepSplit, plan: str, *words: str, predicted: dict[str, float] | None = None, others: tuple[Alternative, ...] = ()) -> Advice:
    return advise(found, RunFacts(Plan.parse(plan), "job.py", ("plait", "train", "job.py", *words), predicted or {}, others, 32))[0]


def test_messages_that_all_take_as_long_are_slow_by_latency_and_others_by_bandwidth() -> None:
    usual = {"communication fsdp": 0.4}
    said = first(split_of(usual, usual, messages={"fsdp": (0.1, 0.0, 0.11, 0.09)}), "fsdp=2", predicted={"gradients": 0.1})
    assert said.cause == "slow link, latency" and said.gain == pytest.approx(0.3) and said.command == "plait bench comm"
    assert first(split_of(usual, usual, messages={"fsdp": (0.2, 0.19, 0.01)}), "fsdp=2", predicted={"gradients": 0.1}).cause == "slow link, bandwidth"


def test_sums_that_all_follow_backward_are_not_overlapped() -> None:
    """Backward takes 0.5 s, so it could hide two of the three sums."""
    usual = {"communication dp": 0.3}
    late = first(split_of(usual, usual, forward=0.2, messages={"dp": (0.1, 0.1, 0.1)}), "dp=2", predicted={"gradients": 0.1})
    assert late.cause == "no overlap" and late.gain == pytest.approx(0.2)
    small = split_of(usual, usual, forward=0.2, messages={"dp": (0.001, 0.1, 0.1, 0.1, 0.0)})
    assert first(small, "dp=2", predicted={"gradients": 0.1}).cause == "no overlap", "small sums too are no sign of overlap"
    much = split_of(usual, usual, forward=0.2, messages={"dp": (0.0,) * 5 + (0.1, 0.1, 0.1)})
    assert first(much, "dp=2", predicted={"gradients": 0.1}).cause != "no overlap", "backward hides five sums of eight, and has no room for more"
    hidden = first(split_of(usual, usual, forward=0.2, messages={"dp": (0.01, 0.02, 0.27)}), "dp=2", predicted={"gradients": 0.1})
    assert hidden.cause == "slow link"


def test_a_loader_is_given_workers_that_keep_up() -> None:
    said = first(split_of({"data": 0.6}, {"data": 0.6}), "dp=2")
    assert (said.cause, said.gain) == ("slow loader", pytest.approx(0.6)) and "--workers=2" in said.command
    more = first(split_of({"data": 0.6}, {"data": 0.6}), "dp=2", "--workers", "2")
    assert "--workers=7" in more.command and "--workers 2" not in more.command and more.gain == pytest.approx(0.6)
    most = first(split_of({"data": 0.99}), "dp=1", "--workers=8")
    assert "--workers=16" in most.command and most.gain == pytest.approx(0.5), "8 s of loading, by 16 workers"


def test_saves_callbacks_and_recomputed_activations() -> None:
    saves = first(split_of({"checkpoint": 0.2}), "dp=1", "--save-every=2")
    assert saves.cause == "checkpoint" and "--save-every=40" in saves.command and saves.gain == pytest.approx(0.19)
    calls = first(split_of({"Python": 0.3}), "dp=1", "--callbacks", "own.py:all", "--batch", "8")
    assert calls.cause == "Python" and calls.command == 'plait train job.py --batch 8 --plan "dp=1"'
    others = (Alternative("recompute", "dp=1", 32, {}),)
    again = first(split_of({}, forward=0.25), "dp=1 activation_checkpointing=full", others=others)
    assert again.cause == "recompute" and again.gain == 0.25 and again.command.endswith('--plan "dp=1"')


def test_other_plans_and_batches_save_what_the_planner_predicts() -> None:
    own = {"compute": 0.5, "fixed": 0.1}
    fewer = Alternative("micro-batches", "dp=1", 32, own | {"compute": 0.2})
    said = first(split_of({}), "dp=1 microbatches=4", predicted=own, others=(fewer,))
    assert said.cause == "too many micro-batches" and said.gain == pytest.approx(1 - 0.3 / 0.6), "half of what computing was measured to take"
    larger = Alternative("batch", "dp=1", 64, own | {"compute": 0.6})
    said = first(split_of({}), "dp=1", predicted=own, others=(larger,))
    assert said.cause == "small batch" and said.gain == pytest.approx(1 - 0.35 / 0.6) and "--batch=64" in said.command
    first_of_both = [a.cause for a in advise(split_of({"checkpoint": 0.4}), RunFacts(Plan.parse("dp=1"), "job.py", (), own, (larger,), 32))]
    assert first_of_both == ["checkpoint", "small batch"], "a larger batch gains more, and changes the training result"
    around = first(split_of({"Python": 0.5, "data": 0.1}), "dp=1", predicted={"compute": 0.4}, others=(replace(larger, parts={"compute": 0.8}),))
    assert [around.cause, around.gain] == ["Python", 0.5], "computing and loading a sample take as long in a larger batch"
    unknown = first(split_of({}), "dp=1", predicted={"compute": 0.1}, others=(replace(larger, parts={"compute": 0.1}),))
    assert unknown.gain == pytest.approx(2 * 0.1 * 0.5), "of 1 s no more than twice the predicted 0.1 s is known to be saved"


def test_a_slow_link_of_tp_is_left_by_another_plan() -> None:
    """Messages take ten times as long as predicted. Those of the other plan would too."""
    usual = {"communication tp": 0.5}
    other = Alternative("plan", "dp=2", 32, {"compute": 0.5, "gradients": 0.01})
    found = split_of(usual, usual, messages={"tp": (0.1,) * 5})
    said = first(found, "tp=2", predicted={"compute": 0.5, "tensor": 0.05}, others=(other,))
    assert said.cause == "tp over a slow link" and said.gain == pytest.approx(0.4) and said.command.endswith('--plan "dp=2"')


def test_uneven_stages_gain_what_the_longest_one_has_more() -> None:
    found = StepSplit((RankSplit(0, 1.0, {"computing": 0.9, "bubble": 0.1}), RankSplit(1, 1.0, {"computing": 0.3, "bubble": 0.7})), 8)
    said = first(found, "pp=2 microbatches=4")
    assert said.cause == "uneven stages" and "Stage 0" in said.why
    assert said.gain == pytest.approx(0.9 + 0.1 - 0.6 * 5 / 4), "balanced stages compute 0.6 s each, and a quarter of that is their bubble"


def test_a_slow_rank_is_replaced_or_given_less() -> None:
    slow = RankSplit(1, 1.0, {"computing": 0.98, "data": 0.02}, 0.6)
    quick = RankSplit(0, 1.0, {"computing": 0.38, "waiting for the slowest rank": 0.62})
    both = advise(StepSplit((quick, slow), 8), RunFacts(Plan.parse("dp=2"), "job.py"))[:2]
    assert [(a.cause, round(a.gain, 3)) for a in both] == [("slow rank", 0.6), ("slow rank", 0.432)]
    assert both[0].command == "plait bench compute" and "batch_split=auto" in both[1].command


def trained(folder: Path) -> None:
    """A run started by a separate process, so its command is recorded."""
    words = ["train", JOB, "--plan", "dp=1", "--steps", "6", "--save-every", "1"]
    subprocess.run([sys.executable, "-m", "plait", *words], cwd=folder, check=True, capture_output=True)


def test_try_prints_predicted_and_measured_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs alternate. The output names advice that no run can measure, and runs that fail."""
    trained(tmp_path)
    run, before = tmp_path / "runs" / "latest", sorted(p.name for p in (tmp_path / "runs").iterdir())
    advice = [
        Advice("checkpoint", "Save less", "", 0.5, f"plait train {JOB} --save-every=9"),
        Advice("slow rank", "Replace it", "", 0.4, "plait bench compute"),
        Advice("plan", "Another", "", 0.3, f'plait train {JOB} --plan "dp=7"'),
    ]  # fmt: skip
    monkeypatch.setattr("plait.report.figures.advise", lambda *given: [replace(a) for a in advice])
    seen = list[TrainOptions]()

    def measured(options: TrainOptions, steps: int) -> TrialRun:
        seen.append(options)
        return TrialRun(failed="P001 no") if options.plan == "dp=7" else TrialRun(1.0, 0.25 if options.save_every == 9 else 1.0)

    monkeypatch.setattr(try_advice, "measure_trial", measured)
    assert main(["report", str(run), "--try", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["advice"]
    assert [(a["gain"], a["measured"], a["note"]) for a in found] == [
        (0.5, 0.75, ""), (0.4, None, "cannot be tested by a run here"), (0.3, None, "failed: P001 no"),
    ]  # fmt: skip
    page = (run / "report.html").read_text()
    assert "measured: −75 %" in page and "With --try: cannot be tested by a run here." in page
    assert [(o.plan, o.save_every) for o in seen[:4]] == [("dp=1", 1), (None, 9), ("dp=7", 100), ("dp=1", 1)], "they take turns"
    assert main(["report", str(run), "--try", "1"]) == 0
    assert any(line.split()[:2] == ["50", "%"] and "75 %" in line for line in capsys.readouterr().out.splitlines())
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == before


@pytest.mark.slow
def test_try_runs_what_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setattr(try_advice, "ROUNDS", 1)
    said = lambda found, facts: [Advice("checkpoint", "Save less", "", 0.5, facts.make_command("--save-every=9"))]  # noqa: E731
    monkeypatch.setattr("plait.report.figures.advise", said)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    assert main(["report", str(tmp_path / "runs" / "latest"), "--try", "1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["advice"]
    assert found["note"] == "" and found["measured"] < 1
    assert before.items() <= {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()}.items(), "the run is as it was"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow loader", "Python in the step", "recompute where memory is free"])
def test_the_cause_of_a_slowdown_is_named_first(name: str) -> None:
    slowdown = next(s for s in SLOWDOWNS if s.name == name)
    assert posed(slowdown, 1, 12)["cause"] == slowdown.cause
