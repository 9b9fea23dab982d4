"""`plait chaos`: its report matches the facts, nothing stays behind, and a violated guarantee is detected."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import TEST_JOB, Command, alive

from plait.chaos import matrix
from plait.chaos.scene import AS_EXPECTED, NOT_AS_EXPECTED, NOT_RUN, CannotPose, Fault, Outcome, Scene, Setting
from plait.chaos.watched_run import adopt_orphans
from plait.config.command_options import TrainOptions
from plait.config.job import Job, load_job
from plait.config.plan import Plan

FEW = ("kill-build", "kill-backward", "raise-first", "sigterm-start", "checkpoint-flip", "memory-full")


def chaos(folder: Path, *words: str, plan: str = "dp=2", job: str = TEST_JOB) -> Command:
    temporary = folder / "temporary"
    temporary.mkdir()
    return Command("chaos", job, "--plan", plan, *words, folder=folder, environment={"TMPDIR": str(temporary)})


def left(folder: Path) -> list[str]:
    """Files that a command left in its temporary folder."""
    return [path.name for path in (folder / "temporary").iterdir()]


@pytest.mark.slow
def test_a_few_faults(tmp_path: Path) -> None:
    only = [word for name in FEW for word in ("--only", name)]
    command = chaos(tmp_path, *only, "--json", "--output", "faults.md", "--seed", "3")
    assert command.wait(100) == 0, command.output
    told = json.loads(next(line for line in command.output.splitlines() if line.startswith('{"plan"')))
    rows = {row["name"]: row for row in told["faults"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    if verdicts["memory-full"] == NOT_RUN:  # mounting a file system needs root
        del verdicts["memory-full"]
    assert sorted(rows) == sorted(FEW) and set(verdicts.values()) == {AS_EXPECTED}, command.output
    assert told["ok"] and rows["kill-backward"]["equal"] == "yes" and rows["kill-backward"]["lost"] == 0
    assert 0 < rows["kill-backward"]["detected"] < rows["kill-backward"]["again"]
    assert "was killed (SIGKILL)" in rows["kill-backward"]["said"]
    page = (tmp_path / "faults.md").read_text()
    assert all(f"| `{name}` |" in page for name in FEW) and f"{len(FEW)} faults" in page and "not as expected" not in page
    assert not left(tmp_path)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = chaos(tmp_path, "--only", "hang", "--only", "kill-data")
    command.until(lambda: "kill-data" in command.output, 100)
    command.until(lambda: len(command.workers()) > 0, 30)
    forked = command.workers()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(20) == 130, command.output
    end = time.monotonic() + 3
    while any(map(alive, forked)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(alive, forked)) and not left(tmp_path)


@pytest.mark.parametrize("words, says", (
    (("--only", "kil-forward"), "error[U002] --only kil-forward matches no fault        did you mean  kill-forward ?"),
    (("--steps", "3"), "error[U002] --steps 3"),
    (("--batch", "0"), "error[U002] --batch 0"),
    (("--plan", "replica_groups=2 outer_sync=async"), "plait chaos does not support outer_sync=async"),
))  # fmt: skip
def test_words_that_are_wrong(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    command = chaos(tmp_path, *words)
    assert command.wait(30) == 2 and says in command.output, command.output


@pytest.mark.slow
def test_a_job_that_does_not_train(tmp_path: Path) -> None:
    command = chaos(tmp_path, "--only", "segv", "--job.fault", "raise", "--job.at", "2")
    assert command.wait(60) == 1 and "error[R008] the job fails without injected faults" in command.output, command.output
    assert "the user's own mistake" in command.output and not left(tmp_path)


def _judged(pose: Callable[[Scene], Outcome], main: Callable[[list[str], Job], int], folder: Path) -> tuple[str, str]:
    """(verdict, why) of a fault, in a separate process that adopts the processes left behind."""
    job = load_job(TEST_JOB, {})
    setting = Setting(main, TrainOptions(job=TEST_JOB, steps=12, save_every=4), job, Plan.parse("dp=2"), 0, False)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        adopt_orphans()
        row = matrix._try_fault(setting, Fault("posed", "something", "all", pose), folder / "posed")
        os.write(writing, json.dumps([row.verdict, row.why, matrix.format_row(row)]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    verdict, why, line = json.loads(os.read(reading, 1 << 16))
    assert verdict in line
    return verdict, why


def _waits(scene: Scene) -> Outcome:
    scene.start().wait(20)
    return scene.outcome


def _cannot(scene: Scene) -> Outcome:
    raise CannotPose("there is no disk")


def _promised(scene: Scene) -> Outcome:
    run = scene.start()
    run.wait(20)
    scene.expect_lines(run, run.began, "a line that does not come")
    return scene.outcome


def _leaves_a_process(words: list[str], job: Job) -> int:
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
    return 0


@pytest.mark.slow
def test_what_falls_short_is_never_kept(tmp_path: Path) -> None:
    say = lambda words, job: 0  # noqa: E731
    verdicts = [
        _judged(pose, main, tmp_path / str(n))
        for n, (pose, main) in enumerate(((_waits, say), (_cannot, say), (_promised, say), (_waits, _leaves_a_process)))
    ]
    assert [verdict for verdict, _ in verdicts] == [AS_EXPECTED, NOT_RUN, NOT_AS_EXPECTED, NOT_AS_EXPECTED]
    assert verdicts[1][1] == "there is no disk" and "a line that does not come" in verdicts[2][1]
    assert "left behind: process" in verdicts[3][1]


def test_the_matrix_is_large_and_its_names_are_names() -> None:
    names = [fault.name for fault in matrix.FAULTS]
    assert len(names) == len(set(names)) >= 40
    assert all(fault.injection and fault.promise for fault in matrix.FAULTS)


PARTS = 4
"""Number of parts of the matrix. The full matrix takes half an hour, and longer on a loaded machine."""
GPT = str(Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "job.py")


@pytest.mark.prove
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    "plan, job", (("dp=2", TEST_JOB), ("fsdp=2", TEST_JOB), ("dp=2 tp=2", GPT), ("pp=2 microbatches=2", GPT))
)
def test_the_whole_matrix(plan: str, job: str, part: int, tmp_path: Path) -> None:
    only = [word for fault in matrix.FAULTS[part::PARTS] for word in ("--only", fault.name)]
    command = chaos(tmp_path, *only, plan=plan, job=job)
    assert command.wait(1700) == 0, command.output
    assert not left(tmp_path)
