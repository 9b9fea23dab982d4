"""Ranks that torchrun started: a run directory that all ranks see, common messages printed once, and failures per rank."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
import torch.distributed as dist
from launched import Command, free_port

from plait.config.errors import PlaitError, Problem
from plait.engine import external_ranks
from plait.engine.run_directory import RunDirectory
from plait.launch import attempts, fork
from plait.launch.place import Place

JOB = hostile.__file__


def met(folder: Path, make: Any, sees: Any = None) -> list[dict[str, Any]]:
    """The results of `external_ranks.agree_run_directory` on each of two ranks."""

    def target(place: Place) -> dict[str, Any]:
        os.chdir(folder)
        if sees is not None and place.rank == 1:
            external_ranks._find_directory = sees
        try:
            run = external_ranks.agree_run_directory(place, place.connect(torch.device("cpu")), torch.device("cpu"), make)
        except PlaitError as error:
            return {"said": error.said, "codes": error.codes, "code": error.exit_code, "text": str(error)}
        return {"path": str(run.path), "left": sorted(p.name for p in run.path.iterdir())}

    return fork.run_ranks(target, 2)


def made() -> RunDirectory:
    Path("runs/net-1").mkdir(parents=True)
    return RunDirectory(Path("runs/net-1"))


def refuses() -> RunDirectory:
    raise PlaitError(Problem("K001", "there is no run"))


def test_every_rank_sees_the_run_directory(tmp_path: Path) -> None:
    assert met(tmp_path, made)[1]["path"] == "runs/net-1"
    assert not (tmp_path / "runs/net-1" / external_ranks.TOKEN_FILE).exists()


def test_a_folder_of_its_own_is_told_on_every_rank(tmp_path: Path) -> None:
    ranks = met(tmp_path, made, lambda facts: None)
    for rank in ranks:
        assert rank["codes"] == ["L003"] and rank["code"] == 2
        assert "rank 1 cannot read it" in rank["text"] and "--runs" in rank["text"]


def test_what_rank_0_cannot_make_ends_all_with_its_code(tmp_path: Path) -> None:
    first, second = met(tmp_path, refuses)
    assert (first["codes"], first["said"], first["code"]) == (["K001"], False, 2)
    assert (second["said"], second["code"]) == (True, 2)


def ranks_of(folder: Path, world: int, *argv: str) -> list[Command]:
    """Commands with the environment of another launcher."""
    port = str(free_port())
    base = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return [
        Command(*argv, folder=folder / str(r), environment=base | {"RANK": str(r), "LOCAL_RANK": "0"})
        for r in range(world)
    ]


def test_each_rank_says_its_own_failure(tmp_path: Path) -> None:
    for r in range(2):
        (tmp_path / str(r)).mkdir()
    first, second = ranks_of(tmp_path, 2, "train", JOB, "--job.fault", "surrogate")
    assert second.wait(100) == 1, second.output
    assert re.search(
        r"error\[C005\] rank 1 raised ValueError: before \\ud800 after\n  why +at step 3, forward", second.output
    )
    assert "note  rank 1 was started in a different folder than rank 0" in second.output
    assert first.wait(100) == 1 and "error[C004] rank 0 lost its connection" in first.output
    assert "Traceback" not in first.output + second.output
    assert "ValueError" in (tmp_path / "0/runs/latest/logs/rank1.log").read_text()


def test_what_every_rank_would_say_is_said_once() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert [attempts.should_report("a wrong option", environment) for _ in range(3)] == [True, False, False]
    assert attempts.should_report("rank 1 has another", environment)
    assert attempts.should_report("a wrong option", environment | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert attempts.should_report("a wrong option", {}) and attempts.should_report("a wrong option", {})
    assert store.num_keys() >= 3


@pytest.mark.prove
def test_a_wrong_option_under_torchrun_is_said_once(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*start, "-m", "plait", "train", JOB, "--plan", "ddp=3"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("error[T001]") == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
