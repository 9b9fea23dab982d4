"""plait train with outer_sync=async: the files of a run, a killed group, a killed server, a request to stop, errors."""

import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched import TEST_JOB, Command, rows
from rarely import rarely
from saved import read_checkpoint_tensors

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.launch import fork, supervisor
from plait.launch.place import Place

SYNC = "replica_groups=3 outer_sync=async"


def train(folder: Path, plan: str, *more: str) -> Command:
    words = ("--check", "none", "--save-every", "10", "--job.pause", "0.01")
    return Command("train", TEST_JOB, "--plan", plan, *words, *more, folder=folder)


def ledger(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs/latest/ledger.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if "seq" in row]


def samples_of(folder: Path) -> Counter[tuple[int, int]]:
    return Counter((row["clock"], row["first"] + k) for row in ledger(folder) for k in range(len(row["ids"])))


def same(folder: Path, other: Path) -> float:
    a, b = (read_checkpoint_tensors(each / "runs/latest/checkpoints/step-000030") for each in (folder, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    assert train(folder, "dp=1").wait(300) == 0
    return folder


def struck(folder: Path, plan: str, rank: int, *more: str) -> str:
    """The output of a run in which a rank is killed after some steps."""
    command = train(folder, plan, *more)
    try:
        command.until(lambda: len(rows(folder)) >= 12, 300)
        os.kill(command.workers()[rank], signal.SIGKILL)
        assert command.wait(300) == 0, command.output
    except BaseException:
        command.kill()
        raise
    assert set(samples_of(folder).values()) == {1} and len(samples_of(folder)) == 5 * 41
    return command.output


@pytest.mark.parametrize("plan, rank", ((f"{SYNC} servers=2", 1), *rarely((SYNC, 0), (f"{SYNC} microbatches=2", 2))))
def test_a_killed_group_is_started_again(tmp_path: Path, one_device: Path, plan: str, rank: int) -> None:
    """Other groups compute its samples, each sample is used once, and without staleness the weights equal those of one device."""
    said = struck(tmp_path, plan, rank)
    assert f"group {rank} was lost" in said and "restarting it (" in said
    assert same(tmp_path, one_device) < 1e-12


@pytest.mark.prove
def test_a_run_goes_on_without_a_group(tmp_path: Path, one_device: Path) -> None:
    said = struck(tmp_path, SYNC, 1, "--max-restarts", "0")
    assert "continuing with 2 of 3 groups" in said
    assert same(tmp_path, one_device) < 1e-12
    assert {row["group"] for row in ledger(tmp_path)[-9:]} == {0, 2}


@pytest.mark.prove
@pytest.mark.parametrize("rank", (3, 4))
def test_after_a_servers_death_all_go_on_from_the_checkpoint(tmp_path: Path, one_device: Path, rank: int) -> None:
    said = struck(tmp_path, f"{SYNC} servers=2", rank)
    assert "restarting all processes from step-000010" in said
    assert same(tmp_path, one_device) < 1e-12


@pytest.mark.prove
def test_a_stale_run_with_a_death_keeps_every_sample_and_the_bound(tmp_path: Path) -> None:
    struck(tmp_path, f"{SYNC} staleness=2", 1)
    assert max(row["version_made"] - 1 - row["version_read"] for row in ledger(tmp_path)) <= 2


@pytest.mark.slow
def test_a_request_to_stop_saves_and_the_run_goes_on(tmp_path: Path, one_device: Path) -> None:
    command = train(tmp_path, SYNC)
    try:
        command.until(lambda: len(rows(tmp_path)) >= 3, 300)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(300) == 75, command.output
        again = train(tmp_path, SYNC, "--resume")
        command = again
        assert again.wait(300) == 0, again.output
    except BaseException:
        command.kill()
        raise
    assert same(tmp_path, one_device) < 1e-12
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 31))
    assert set(samples_of(tmp_path).values()) == {1} and len(samples_of(tmp_path)) == 5 * 41
    assert [row["seq"] for row in ledger(tmp_path)] == list(range(len(ledger(tmp_path))))


@pytest.mark.prove
def test_what_the_job_raises_in_a_group_ends_the_run(tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, "--check", "none", "--plan", SYNC, "--job.fault", "sample", folder=tmp_path)
    assert command.wait(300) == 1
    assert "sample 30 cannot be read" in command.output and "error[C014]" in command.output


@pytest.mark.parametrize(
    "plan, word",
    (
        ("replica_groups=2 dp=2 outer_sync=async", "outer_sync=local"),
        ("replica_groups=2 tp=2 outer_sync=async", "tp=2"),
        ("replica_groups=2 outer_sync=async precision=fp16", "bf16"),
        ("replica_groups=2 outer_sync=async quorum=3", "quorum=1"),
        ("replica_groups=2 outer_sync=async quorum=1 server_update=nesterov", "server_update=clock"),
        ("replica_groups=9 outer_sync=async", "--batch 9"),
        ("replica_groups=2 outer_sync=async offload=optimizer", "leave out offload"),
    ),
)
def test_impossible_mixes_are_refused_with_what_to_use(plan: str, word: str) -> None:
    import jobs

    with pytest.raises(PlaitError) as caught:
        check_plan(replace(jobs.mlp(), batch=8), Plan.parse(plan))
    assert set(caught.value.codes) <= {"P060", "P014"}
    assert word in "\n".join(map(str, caught.value.problems))


def test_keys_of_a_server_need_one() -> None:
    import jobs

    with pytest.raises(PlaitError) as caught:
        check_plan(jobs.mlp(), Plan.parse("replica_groups=2 staleness=3"))
    assert caught.value.codes == ["P030"]


def test_a_group_that_waits_for_servers_that_have_returned_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was forked again after the last step, connected to a socket that no process reads, and the run did not end."""
    monkeypatch.setattr(supervisor, "SPARE_EXIT_S", 0.3)

    def work(place: Place) -> dict[str, Any]:
        if place.rank == 0:
            time.sleep(1000)
        return {"rank": place.rank}

    spare = supervisor.SpareRanks(lambda rank: rank == 0, lambda rank, failure: pytest.fail("no rank was lost"))
    assert fork.run_ranks(work, 2, spare=spare) == [{}, {"rank": 1}]
