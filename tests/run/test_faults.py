"""One rank fails: all end within seconds, one message names the failed rank and the cause, and no process is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from launched import TEST_JOB, Command, alive, rows
from rarely import sampled

from plait.chaos.strike import POSED_FILE
from plait.launch.failures import Failure, classify_error
from plait.launch.progress import Progress

CASES = {
    "raise": ("C005", "rank 1 raised ValueError: the user's own mistake", f"{POSED_FILE}:"),
    "kill": ("C003", "rank 1 was killed (SIGKILL) at step", "not a communication fault"),
    "stop": ("C001", "rank 1 was stopped", "SIGSTOP"),
    "allocate": ("M002", "out of memory on rank 1 at step 5, forward", f"{POSED_FILE}:"),
    "exit": ("C003", "rank 1 ended with exit code 7", "the job, or a library"),
    "segv": ("C003", "rank 1 was killed (SIGSEGV)", "compiled code"),
}


@pytest.mark.parametrize("fault", sampled(5, CASES))
def test_guilty_rank_is_named(fault: str, tmp_path: Path) -> None:
    code, what, more = CASES[fault]
    flags = ("--nproc", "3", "--max-restarts", "0", "--job.fault", fault, "--job.pause", "0.05")
    command = Command("train", TEST_JOB, *flags, folder=tmp_path)
    command.until(lambda: len(rows(tmp_path)) >= 3)
    workers = command.workers()
    began = time.monotonic()
    assert command.wait(20) == 1
    assert time.monotonic() - began < 6.0
    assert f"error[{code}] {what}" in command.output and more in command.output, command.output
    assert command.output.count("error[") == 1 and "Traceback" not in command.output
    assert not any(alive(pid) for pid in workers)


@pytest.mark.slow
def test_workers_die_with_the_launcher(tmp_path: Path) -> None:
    command = Command(
        "train", TEST_JOB, "--nproc", "3", "--workers", "1", "--job.pause", "0.05", "--steps", "500", folder=tmp_path
    )
    command.until(lambda: len(rows(tmp_path)) >= 3)
    workers = command.workers()
    loaders = [int(p) for w in workers for p in Path(f"/proc/{w}/task/{w}/children").read_text().split()]
    assert len(loaders) == 3
    os.kill(command.pid, signal.SIGKILL)
    end = time.monotonic() + 3
    while any(alive(pid) for pid in [*workers, *loaders]):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("argv, code, words", [
    (["train", "nowhere.py"], 2, ["error[J001]"]),
    (["train", TEST_JOB, "--plan", "ddp=2 precision=bf17"], 2, ["did you mean  dp ?", "did you mean  bf16 ?"]),
    (["train", TEST_JOB, "--plan", "dp=16 microbatches=9"], 2, ["error[P012]"]),
    (["train", TEST_JOB, "--plan", "dp=2 microbatches=9"], 2, ["error[P014]", "8 / 2"]),
    (["train", TEST_JOB, "--plan", "dp=2", "--nproc", "3"], 2, ["error[P001]", "--nproc 2"]),
    (["train", TEST_JOB, "--plan", "ddp=2", "--job.nothing", "3"], 2, ["error[T001]", "error[J005]"]),
    (["train", TEST_JOB, "--device", "cuda"], 1, ["error[H001]"]),
    (["train", TEST_JOB, "--resume"], 2, ["error[K001]"]),
    (["train"], 2, ["error[U001]"]),
    (["help", "P999"], 2, ["error[U003]"]),
    (["help", "p012"], 0, ["P012 the global batch"]),
])  # fmt: skip
def test_command_line_errors(argv: list[str], code: int, words: list[str], tmp_path: Path) -> None:
    command = Command(*argv, folder=tmp_path)
    assert command.wait(20) in (code, 2), command.output
    for word in words:
        assert word in command.output, command.output
    assert "Traceback" not in command.output
    assert not (tmp_path / "runs").exists() or "--device" in argv


@pytest.mark.parametrize(
    "text, where, victim",
    (
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
            "",
            True,
        ),
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer", "job.py:32", True),
        ("[Errno 104] Connection reset by peer", "job.py:32 in __getitem__", False),
    ),
)
def test_who_lost_a_peer_is_a_victim_also_inside_the_users_forward(text: str, where: str, victim: bool) -> None:
    sort = classify_error(RuntimeError(text), text, where)
    told = {"type": "RuntimeError", "text": text, "where": where, "module": "", "called": "", "sort": sort}
    message = told | {"problems": [], "trace": ""}
    assert Failure.from_report(0, Progress(9, "forward", 0.0), message).victim is victim
