"""The job check reports how a plan changes the training before the first step, and reports nothing for ordinary jobs.

The reference decides whether a plan changes a job's training: the job is trained on one device and under the plan, in float64.
"""

import errno
import json
import os
import signal
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs_treacherous
import pytest
import torch
import training
from launched import Command
from rarely import crossed, sampled

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.supervisor import Listener
from plait.proof.job import check
from plait.proof.verify import verify

JOBS = Path(jobs_treacherous.__file__)
PLANS = ("dp=2", "microbatches=2", "dp=2 microbatches=2", "fsdp=2", "dp=3", "tp=2", "pp=2 microbatches=2")
STEPS, SAME = 4, 1e-6
TREACHEROUS, ORDINARY = jobs_treacherous.TREACHEROUS, jobs_treacherous.ORDINARY
SOME = (
    ("root", "dp=2", "J030"), ("tokens_without_weight", "microbatches=2", "J030"), ("flooding", "dp=2", "J030"),
    ("normalised_by_its_past", "dp=2", "J030"), ("standardised", "dp=2", "J031"), ("early_exit", "dp=2", "J031"),
    ("noise_without_a_seed", "dp=2", "J033"), ("data_with_a_generator", "dp=2", "J032"), ("mixup", "dp=2", "J034"),
    ("stateful", "dp=2", "J035"), ("data_by_rank", "tp=2", "J032"), ("data_that_counts", "pp=2 microbatches=2", "J032"),
)  # fmt: skip


@cache
def trained(name: str, plan: str) -> dict[str, Any]:
    """Losses, weights and the names of inexact parts from a few steps in float64, on rank 0."""

    def run(place: Any) -> dict[str, Any]:
        engine = Engine(job(name), Plan.parse(plan), device="cpu", place=place, cast=torch.float64)
        losses = [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(STEPS))]
        return {"losses": losses, "inexact": engine.inexact}

    return fork.run_ranks(run, Plan.parse(plan).world, Listener(on_note=lambda text: None))[0]


def job(name: str) -> Any:
    return getattr(jobs_treacherous, name)()


def differs(name: str, plan: str) -> bool:
    pairs = zip(trained(name, "dp=1")["losses"], trained(name, plan)["losses"])
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs) > SAME


def codes(name: str, plan: str) -> list[str]:
    found = check.check_job(job(name), Plan.parse(plan))
    assert found.compared, found.unchecked
    return [problem.code for problem in found.problems]


@pytest.mark.parametrize(("name", "plan", "code"), sampled(4, SOME))
def test_what_a_plan_changes_is_said(name: str, plan: str, code: str) -> None:
    assert differs(name, plan)
    assert codes(name, plan) == [code]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan", "code"), [row for row in SOME if row[0] != "stateful"])
def test_verify_says_the_same(name: str, plan: str, code: str) -> None:
    """For `stateful` the check cannot name the cause, and `verify` names the first unit that differs."""
    verdict = verify(job(name), Plan.parse(plan))
    assert not verdict.equal and [problem.code for problem in verdict.problems] == [code], verdict


@pytest.mark.slow
def test_an_example_that_a_rank_reads_while_building_is_no_sample_of_its_steps() -> None:
    """Its random numbers are not keyed, so the example differs between processes."""
    assert not check.check_job(training.job(), Plan.parse("dp=2")).problems


@pytest.mark.parametrize("name", ["contrastive_of_all", "transformer", "augmented", "classes_with_weight", "guarded"])
def test_of_an_ordinary_job_nothing_is_said(name: str) -> None:
    assert not codes(name, "dp=2")


@pytest.mark.prove
@pytest.mark.parametrize("name, plan", crossed(2, TREACHEROUS, PLANS))
def test_treacherous_jobs(name: str, plan: str) -> None:
    """A report exactly for the jobs whose training differs, unless the plan is rejected or a strategy names the cause."""
    try:
        named = bool(trained(name, plan)["inexact"])
    except PlaitError as error:
        assert error.codes[0][0] in "PJC", error  # rejected, or it raises
        return
    if not (named and differs(name, plan)):
        assert bool(codes(name, plan)) == differs(name, plan)


@pytest.mark.prove
@pytest.mark.parametrize("name, plan", crossed(2, ORDINARY, PLANS))
def test_ordinary_jobs(name: str, plan: str) -> None:
    assert not codes(name, plan)


@pytest.mark.slow
def test_a_sample_that_goes_by_the_loader_process() -> None:
    """Read in the processes where loader workers will read, and in a full check."""
    job_, plan = job("data_by_loader"), Plan.parse("dp=2")
    assert not check.check_job(job_, plan).problems
    for found in (check.check_job(job_, plan, workers=2), check.check_job(job_, plan, "full")):
        assert [p.code for p in found.problems] == ["J032"] and "loader process" in str(found.problems[0].why)
    assert not check.check_job(job("plain"), plan, workers=2).problems


@pytest.mark.slow
def test_training_is_refused_and_allowed(tmp_path: Path) -> None:
    words = (f"{JOBS}:root", "--plan", "dp=2", "--steps", "2")
    refused = Command("train", *words, folder=tmp_path)
    assert refused.wait() == 2, refused.output
    assert refused.output.startswith("error[J030]") and "plait.global_mean" in refused.output
    assert "--allow-inexact" in refused.output and not (tmp_path / "runs").exists()
    allowed = Command("train", *words, "--allow-inexact", folder=tmp_path)
    assert allowed.wait() == 0, allowed.output
    assert "note  not exact: the loss of a batch is not the mean" in allowed.output
    kept = json.loads((tmp_path / "runs" / "latest" / "check.json").read_text())
    assert kept["problems"][0]["code"] == "J030" and kept["compared"]


@pytest.mark.parametrize(
    ("name", "words"),
    (
        ("batch_normed", "batch statistics in 1 are computed per micro-batch"),
        ("contrastive_of_all", "global_mean or global_batch is over one micro-batch"),
    ),
)
def test_what_only_another_stage_knows_is_said_once(name: str, words: str, tmp_path: Path) -> None:
    found = Command("train", f"{JOBS}:{name}", "--plan", "pp=2 microbatches=2", "--steps", "2", folder=tmp_path)
    assert found.wait() == 0, found.output
    assert sum("note  not exact" in line and words in line for line in found.output.splitlines()) == 1, found.output


@pytest.mark.slow
def test_a_result_is_taken_again_while_nothing_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from jobs_treacherous import plain as job\n")
    name, plan = str(file), Plan.parse("dp=2")
    first = check.check_job(job("plain"), plan, name=name)
    check.write_result(tmp_path, first)
    assert not first.reused and first.key
    again = check.check_job(job("plain"), plan, name=name, before=(tmp_path,))
    assert again.reused and again == first
    for other in (
        check.check_job(job("plain"), Plan.parse("dp=3"), name=name, before=(tmp_path,)),
        check.check_job(job("plain"), plan, name=name, arguments={"width": "8"}, before=(tmp_path,)),
        check.check_job(job("images"), plan, "full", name=name, before=(tmp_path,)),
    ):
        assert not other.reused and other.key != first.key


def test_nothing_is_asked_where_nothing_is_split() -> None:
    for found in (check.check_job(job("root"), Plan()), check.check_job(job("root"), Plan(dp=2), "none")):
        assert found.equal and not found.compared and not found.seconds


def test_the_command_checks_without_training(tmp_path: Path) -> None:
    sound = Command("check", f"{JOBS}:plain", "--plan", "dp=2", folder=tmp_path)
    assert sound.wait() == 0 and "no difference found" in sound.output, sound.output
    unsound = Command("check", f"{JOBS}:dice", "--plan", "microbatches=2", "--json", folder=tmp_path)
    assert unsound.wait() == 2 and "error[J030]" in unsound.output, unsound.output
    assert not (tmp_path / "runs").exists()


def test_a_check_that_could_not_run_is_a_warning_and_of_a_full_check_an_error() -> None:
    class Large(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such kernel")

    job_ = jobs_treacherous.made(model=Large)
    found = check.check_job(job_, Plan(dp=2))
    assert found.equal and not found.compared and "no such kernel" in found.failed
    assert found.lines[0].startswith("WARNING  the job check could not run")
    full = check.check_job(job_, Plan(dp=2), "full")
    assert [p.code for p in full.problems] == ["J050"] and "no such kernel" in full.problems[0].what


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["killed", "files", "processes", "memory"])
def test_whatever_stops_the_check_is_said(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        if cause == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EMFILE if cause == "files" else errno.EAGAIN, "refused by the system")

    if cause == "memory":
        monkeypatch.setattr(check.psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
    else:
        monkeypatch.setattr(check if cause == "killed" else fork, "_compare_points" if cause == "killed" else "run_ranks", stopped)
    found = check.check_job(job("plain"), Plan(dp=2))
    assert found.failed and not found.compared and found.equal, found
    assert [p.code for p in check.check_job(job("plain"), Plan(dp=2), "full").problems] == ["J050"]


@pytest.mark.slow
def test_training_without_a_check_warns_and_records_it(tmp_path: Path) -> None:
    """The model ends the process that computes in float64, as the check does."""
    file = tmp_path / "ends.py"
    file.write_text(ENDS)
    trained_ = Command("train", str(file), "--plan", "dp=2", "--steps", "1", folder=tmp_path)
    assert trained_.wait() == 0, trained_.output
    assert "WARNING  the job check could not run" in trained_.output
    assert json.loads((tmp_path / "runs" / "latest" / "check.json").read_text())["failed"]
    refused = Command("train", str(file), "--plan", "dp=2", "--steps", "1", "--check", "full", folder=tmp_path)
    assert refused.wait() == 2 and refused.output.startswith("error[J050]"), refused.output


ENDS = """
import os, torch, jobs_treacherous

class Ends(torch.nn.Linear):
    def forward(self, x):
        if self.weight.dtype == torch.float64:
            os._exit(7)
        return super().forward(x)

def job():
    return jobs_treacherous.made(model=lambda: Ends(6, 5))
"""
