"""Ranks that fail in unusual ways, and machines that lack a resource: the error names the right rank, is short, and comes within seconds."""

import gc
import os
import resource
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
import torch.distributed as dist
from launched import Command
from torch import nn

from plait.config.errors import PlaitError
from plait.launch import fork as here
from plait.launch import limits
from plait.launch.failures import describe_error
from plait.launch.place import Place

JOB = hostile.__file__


def fails(fault: str) -> tuple[PlaitError, dict[int, bytearray]]:
    """The launcher's output if rank 1 of two does `fault`, and the contents of the ranks' logs."""
    logs = defaultdict[int, bytearray](bytearray)

    def message(rank: int, message: dict[str, Any]) -> None:
        logs[rank] += message["text"].encode("utf-8", "backslashreplace")

    def target(place: Place) -> dict[str, Any]:
        place.connect(torch.device("cpu"))
        if place.rank == 1:
            hostile.strike(fault)
        dist.barrier()
        return {}

    began = time.monotonic()
    with pytest.raises(PlaitError) as caught:
        here.run_ranks(target, 2, here.Listener(message, lambda rank, text: logs[rank].extend(text)))
    assert time.monotonic() - began < 20.0
    return caught.value, logs


SAID = {
    "long": ("C005", "rank 1 raised ValueError: xxxx", "hostile.py:36 in strike"),
    "lines": ("C005", "rank 1 raised ValueError: the first line", "hostile.py"),
    "surrogate": ("C005", r"rank 1 raised ValueError: before \ud800 after", "hostile.py"),
    "control": ("C005", r"rank 1 raised ValueError: a\x1b[31mred\x00\x07", "hostile.py"),
    "unspeakable": ("C005", "rank 1 raised Unspeakable: (its text cannot be read", "hostile.py"),
    "deep": ("C005", "rank 1 raised RecursionError", "in deeper"),
    "chained": ("C005", "rank 1 raised ValueError: link 4999", "hostile.py"),
    "exits": ("C005", "rank 1 raised SystemExit: 3", "hostile.py"),
    "interrupted": ("C005", "rank 1 raised KeyboardInterrupt", "hostile.py"),
    "closes": ("C005", "rank 1 raised ValueError: after closing its output", "hostile.py"),
    "closes everything": ("C003", "rank 1 ", ""),
}


@pytest.mark.parametrize("fault", SAID)
def test_whatever_a_rank_raises_is_told_shortly(fault: str) -> None:
    code, what, where = SAID[fault]
    error, logs = fails(fault)
    assert error.codes == [code] and what in str(error) and where in str(error), str(error)
    assert len(str(error)) < 2_000 and len(error.trace) < 30_000
    if fault == "long":
        assert "50 000 000 characters" in str(error) and len(logs[1]) > 50_000_000
    if fault == "lines":
        assert logs[1].count(b"more\n") == 1_000_000


@pytest.mark.parametrize(
    "fault", (*SAID, "prints lines", "prints a line", "prints bytes", "prints surrogates", "closes quietly")
)
@pytest.mark.prove
def test_whole_runs_with_hostile_ranks(fault: str, tmp_path: Path) -> None:
    command = Command("train", JOB, "--nproc", "2", "--log-ranks", "0,1", "--job.fault", fault, folder=tmp_path)
    assert command.wait(60) == (1 if fault in SAID else 0), command.output[:5_000]
    assert "Traceback" not in command.output
    if fault in SAID:
        assert SAID[fault][1] in command.output and command.output.count("error[") == 1
    if fault.startswith("prints"):
        assert ("ff" in command.output) == (fault == "prints bytes") or "�" in command.output or fault != "prints bytes"


def test_much_output_of_a_rank_stops_nobody(tmp_path: Path) -> None:
    command = Command("train", JOB, "--nproc", "2", "--log-ranks", "1", "--job.fault", "prints a line", folder=tmp_path)
    assert command.wait(60) == 0, command.output[:5_000]
    assert "[rank 1] xxx" in command.output and "characters more in logs/rank1.log)" in command.output
    assert len(command.output) < 20_000
    assert (tmp_path / "runs/latest/logs/rank1.log").stat().st_size == 20_000_001


def test_what_a_loader_worker_raised_is_told_as_it_was(tmp_path: Path) -> None:
    command = Command("train", JOB, "--nproc", "2", "--workers", "2", "--job.fault", "key", folder=tmp_path)
    assert command.wait(60) == 1, command.output
    assert "error[C014] sample" in command.output and "raised KeyError: 'no such key'" in command.output
    assert "hostile.py:" in command.output and "in __getitem__" in command.output and "Caught" not in command.output
    assert "Traceback" not in command.output and command.output.count("error[") == 1


@pytest.mark.parametrize("fault, words", (
    ("width", ("raised RuntimeError: mat1 and mat2", "module 0 (Linear)")),
    ("loss", ("raised RuntimeError", "nll_loss (torch/nn/functional.py:")),
))  # fmt: skip
def test_a_failure_without_a_line_of_the_users_names_the_module(
    fault: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    command = Command("train", JOB, "--nproc", "2", "--job.fault", fault, folder=tmp_path)
    assert command.wait(60) == 1, command.output
    for word in ("error[C005]", *words):
        assert word in command.output, command.output


def test_the_module_beside_the_users_line() -> None:
    model = hostile.Model("")
    model.body[2] = nn.Linear(17, 1)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(3, 6))
    told = describe_error(caught.value)
    assert told["module"] == "body.2 (Linear)" and "in forward" in told["where"]


def test_the_launcher_leaves_the_garbage_collector_as_it_was() -> None:
    here.run_ranks(lambda place: {}, 1)
    assert gc.get_freeze_count() == 0


@pytest.fixture
def few_files():
    """A process that can open few more files. The limit is restored afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))

    def limit(room: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + room, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_open_files_are_told_before_a_start(few_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MIN_OPEN_FILES", 0)
    few_files(8)
    with pytest.raises(PlaitError, match="too many open files: a process may have") as caught:
        here.run_ranks(lambda place: {}, 2)
    assert caught.value.codes == ["H006"] and caught.value.exit_code == 1


def test_a_low_soft_limit_is_raised(few_files: Any) -> None:
    few_files(8)
    assert here.run_ranks(lambda place: {"at": place.rank}, 2) == [{"at": 0}, {"at": 1}]


def test_a_rank_that_opens_too_many_files() -> None:
    def target(place: Place) -> dict[str, Any]:
        opened = []
        while True:
            opened.append(os.dup(0))

    with pytest.raises(PlaitError, match=r"rank 0 during start: .*Too many open files") as caught:
        here.run_ranks(target, 1)
    assert caught.value.codes == ["H006"] and "test_hostile.py" in str(caught.value)


def test_a_machine_that_starts_no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, forks = os.fork, iter(range(9))

    def none_left() -> int:
        if next(forks) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", none_left)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PlaitError, match="rank 1 of 2 could not be started") as caught:
        here.run_ranks(lambda place: {}, 2)
    assert caught.value.codes == ["H006"] and set(os.listdir("/proc/self/fd")) == before


def test_no_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*address: Any) -> Any:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(PlaitError, match="ip link set lo up") as caught:
        here.run_ranks(lambda place: {}, 2)
    assert caught.value.codes == ["H007"]
    assert here.run_ranks(lambda place: {}, 1) == [{}]


def test_full_shared_memory() -> None:
    from multiprocessing import synchronize

    def target(place: Place) -> dict[str, Any]:
        raise RuntimeError("unable to write to file </torch_12_34_0>: No space left on device (28)")

    with pytest.raises(PlaitError, match="MiB free, and loader processes") as caught:
        here.run_ranks(target, 1)
    assert caught.value.codes == ["H008"]
    assert synchronize.SemLock and sys.platform == "linux"


def test_dead_loader_process() -> None:
    def target(place: Place) -> dict[str, Any]:
        raise RuntimeError("DataLoader worker (pid(s) 77) exited unexpectedly")

    with pytest.raises(PlaitError, match="a loader process of rank 0 died") as caught:
        here.run_ranks(target, 1)
    assert caught.value.codes == ["C008"]


@pytest.mark.parametrize("said", (
    "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error",
    "Rank 0 Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "NCCL communicator was aborted on rank 0.",
))  # fmt: skip
def test_who_lost_a_peer_on_nccl_is_a_victim(said: str) -> None:
    def target(place: Place) -> dict[str, Any]:
        if place.rank == 0:
            raise dist.DistBackendError(said + " NCCL version 2.27.3")
        time.sleep(0.3)
        raise ValueError("the cause")

    with pytest.raises(PlaitError, match="rank 1 raised ValueError: the cause"):
        here.run_ranks(target, 2)


def test_a_watchdogs_abort_is_not_the_cause_when_another_rank_failed() -> None:
    def target(place: Place) -> dict[str, Any]:
        if place.rank == 0:
            os.abort()
        time.sleep(0.3)
        raise ValueError("the cause")

    with pytest.raises(PlaitError, match="rank 1 raised ValueError: the cause"):
        here.run_ranks(target, 2)


def test_an_abort_alone_is_told() -> None:
    with pytest.raises(PlaitError, match="rank 0 aborted itself") as caught:
        here.run_ranks(lambda place: os.abort(), 1)
    assert caught.value.codes == ["C003"]


def test_a_task_of_slurm_does_not_train_alone(tmp_path: Path) -> None:
    environment = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    command = Command("train", JOB, folder=tmp_path, environment=environment)
    assert command.wait(60) == 2 and "error[L002] srun started this process as rank 1 of 2" in command.output
    assert not (tmp_path / "runs").exists()
