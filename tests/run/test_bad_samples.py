"""An unreadable sample is named, the state before it is saved, and it is not retried endlessly."""

from pathlib import Path

import jobs_bad_samples
import pytest
from launched import Command, rows

from plait.cli.rank_failures import RankFailures
from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.plan import Plan
from plait.data.iterables import name_failing_samples
from plait.proof.verify import verify

JOB = str(Path(__file__).parents[1] / "jobs_bad_samples.py")


def run(folder: Path, kind: str, plan: str, *more: str) -> Command:
    command = Command("train", JOB, "--job.kind", kind, "--plan", plan, "--check", "none", *more, folder=folder)
    command.wait(120)
    return command


def test_whatever_is_raised_names_the_sample() -> None:
    for error in (KeyError("label"), StopIteration(), SystemExit(3), ValueError("x" * 10_000)):
        with pytest.raises(PlaitError) as raised, name_failing_samples([77], "of epoch 2"):
            raise error
        assert raised.value.codes == ["C014"] and "sample 77 of epoch 2 raised" in raised.value.problems[0].what
    with pytest.raises(MemoryError), name_failing_samples([77], "of epoch 2"):
        raise MemoryError


def test_the_same_sample_is_tried_once_more() -> None:
    def error(sample: int) -> PlaitError:
        return PlaitError(
            Problem("C014", f"sample {sample} of epoch 0 raised OSError", where="job.py:3 in __getitem__"), FAILED
        )

    failures = RankFailures(2)
    assert failures.can_restart(error(7), 5) and not failures.can_restart(error(7), 5)
    failures = RankFailures(2)
    assert failures.can_restart(error(7), 5) and failures.can_restart(error(8), 5)
    assert not RankFailures(2).can_restart(error(7), 0)


CASES = (
    ("key", "dp=2", (), "sample 77 of epoch 0 raised KeyError"), ("stop", "dp=2", ("--workers", "1"), "sample 77 of epoch 0 raised StopIteration"),
    ("put", "dp=1", (), "raised ZeroDivisionError: a text of no tokens"), ("stream", "dp=2", (), "sample 77 of epoch 0 raised ValueError"),
    ("evaluate", "dp=2", (), "sample 77 of Job.evaluate raised KeyError"), ("none", "fsdp=2", (), "sample 77 of epoch 0"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan, more, told", CASES)
def test_the_state_before_it_is_saved(kind: str, plan: str, more: tuple[str, ...], told: str, tmp_path: Path) -> None:
    command = run(tmp_path, kind, plan, *more)
    done = rows(tmp_path)[-1]["step"]
    assert (told in command.output and "jobs_bad_samples.py:" in command.output) or kind == "none", command.output
    assert command.output.count("restarting") == (kind != "none"), command.output
    assert f"the state before it is saved in runs/jobs_bad_samples-1/checkpoints/step-{done:06d}" in command.output, (
        command.output
    )


@pytest.mark.slow
def test_a_proof_names_the_sample() -> None:
    with pytest.raises(PlaitError, match="sample 77 of epoch 0 raised KeyError") as raised:
        verify(jobs_bad_samples.job("key"), Plan.parse("dp=2"))
    assert raised.value.codes == ["C014"]


@pytest.mark.slow
def test_a_sample_that_can_be_read_the_next_time_costs_no_step(tmp_path: Path) -> None:
    command = run(tmp_path, "once", "dp=2")
    assert command.output.count("restarting") == 1 and "done  20 steps" in command.output, command.output
