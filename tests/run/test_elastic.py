"""A rank is lost and the run continues: the same samples, the same weights, nothing left behind."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import saved
import torch
from launched import TEST_JOB, Command, alive, rows
from rarely import rarely, sampled

from plait.cli.rank_failures import HostDevice, RankFailures
from plait.config.errors import PlaitError, Problem

KEPT = Path("/dev/shm")


def kept(command: Command) -> list[Path]:
    """A launcher's files in shared memory."""
    return list(KEPT.glob(f"plait-*-{command.pid}-*"))


def start(folder: Path, plan: str, steps: int, *more: str) -> Command:
    folder.mkdir(exist_ok=True)
    return Command("train", TEST_JOB, "--plan", plan, "--steps", str(steps), *more, folder=folder)


def step_of(folder: Path) -> int:
    done = rows(folder)
    return int(done[-1]["step"]) if done else 0


def ended(folder: Path, steps: int) -> tuple[object, ...]:
    """Losses by step, the samples of each step, and the weights at the end."""
    run = folder / "runs" / "latest"
    used: dict[int, set[tuple[int, ...]]] = {}
    for path in (run / "events").glob("*.jsonl"):
        events = list(map(json.loads, path.read_text().splitlines()))
        assert len({row["step"] for row in events}) == len(events), "a step is there twice"
        for row in events:
            used.setdefault(row["step"], set()).add((row["epoch"], row["start"], row["size"]))
    return [(r["step"], r["loss"]) for r in rows(folder)], used, saved.read_checkpoint_tensors(run / f"checkpoints/step-{steps:06d}")


def same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Compares bit for bit."""
    (losses, samples, weights), (losses2, samples2, weights2) = one, other
    assert isinstance(weights, dict) and isinstance(weights2, dict)
    equal = weights.keys() == weights2.keys() and all(torch.equal(t, weights2[name]) for name, t in weights.items())
    return losses == losses2 and samples == samples2 and equal


def kill_once(command: Command, folder: Path, rank: int, delay: float) -> None:
    """Kills a rank after some time, during any activity, and waits until ranks were forked again."""
    time.sleep(delay)
    before = command.workers()
    if len(before) > rank and alive(command.pid):
        os.kill(before[rank], signal.SIGKILL)
        command.until(lambda: command.workers() != before or not alive(command.pid))


MORE = rarely(("dp=2 pp=2", True), ("dp=2 fsdp=2", True), ("dp=2 fsdp=2 zero_stage=1", True))


@pytest.mark.parametrize("plan, lossless", sampled(2, (("dp=2", True), ("fsdp=2", False), *MORE)))
def test_a_killed_rank_is_replaced(plan: str, lossless: bool, tmp_path: Path) -> None:
    steps = 30
    whole = start(tmp_path / "whole", plan, steps)
    assert whole.wait(120) == 0, whole.output
    command = start(tmp_path / "killed", plan, steps, "--job.pause", "0.02")
    command.until(lambda: step_of(tmp_path / "killed") >= 8, 120)
    kill_once(command, tmp_path / "killed", 1, 0.0)
    command.until(lambda: step_of(tmp_path / "killed") >= 20, 120)
    kill_once(command, tmp_path / "killed", 0, 0.0)
    assert command.wait(120) == 0, command.output
    assert same(ended(tmp_path / "whole", steps), ended(tmp_path / "killed", steps)), command.output
    told = [line for line in command.output.splitlines() if "restarting" in line or "resuming from" in line]
    assert len(told) == 4 and all("rank" in line and "was killed (SIGKILL)" in line for line in told[::2]), (
        command.output
    )
    if lossless:
        at = [int(line.partition("from step ")[2].partition(",")[0]) for line in told[1::2]]
        assert at[0] >= 8 and at[1] >= 20, told
    assert not kept(command)


LOST = """
import os, signal
from pathlib import Path
import plait

class Lost(plait.Callback):
    def on_step(self, engine, step):
        if step.step == 6 and engine.place.rank == 1 and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def callbacks():
    return [Lost()]
"""


def test_a_rank_that_is_lost_between_the_last_step_and_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(LOST)
    command = start(tmp_path, "dp=2", 6, "--callbacks", "lost.py:callbacks")
    assert command.wait(120) == 0, command.output
    assert "resuming from step 6, from an in-memory snapshot" in command.output, command.output
    losses, _, weights = ended(tmp_path, 6)
    assert isinstance(losses, list) and len(losses) == 6 and weights


def test_the_same_error_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """The error is the job's own: the same error at the same line on the same sample is retried once, and then ends the run."""
    command = start(tmp_path, "dp=2", 30, "--job.fault", "sample", "--check", "none")
    assert command.wait(120) == 1
    assert command.output.count("restarting") == 1, command.output
    assert "error[C014] sample 30 of epoch 0 raised ValueError: sample 30 cannot be read" in command.output, command.output


def test_a_rank_that_was_not_to_be_replaced(tmp_path: Path) -> None:
    command = start(tmp_path, "dp=2", 1000, "--max-restarts", "0")
    command.until(lambda: step_of(tmp_path) >= 3, 120)
    os.kill(command.workers()[1], signal.SIGKILL)
    assert command.wait(60) == 1 and "error[C003] rank 1 was killed" in command.output, command.output


def test_memory_goes_with_the_launcher(tmp_path: Path) -> None:
    command = start(tmp_path, "dp=2", 100_000)
    command.until(lambda: step_of(tmp_path) >= 3, 120)
    assert len(kept(command)) == 1
    command.kill()
    command.wait(10)
    end = time.monotonic() + 10
    while kept(command) and time.monotonic() < end:
        time.sleep(0.05)
    assert not kept(command)


def test_only_failures_at_the_same_step_are_counted() -> None:
    killed, raised = PlaitError(Problem("C003", "killed")), PlaitError(Problem("C005", "raised"))
    failures = RankFailures(2)
    assert [failures.can_restart(killed, step) for step in (28, 20, 28, 3, 4)] == [True] * 5
    assert failures.can_restart(killed, 3) is False, "the third in a row at one step, or beside it"
    failures = RankFailures(2)
    assert [failures.can_restart(killed, step) for step in (17, -1, 0)] == [True, True, False], "restarts that complete no step"
    assert failures.can_restart(raised, 50) and not failures.can_restart(raised, 0)
    assert not failures.can_restart(PlaitError(Problem("N001", "the loss is nan")), 60) and not failures.can_restart(ValueError(), 70)


def test_a_device_that_fails_alone_at_one_step_is_left_out() -> None:
    killed, raised = PlaitError(Problem("C003", "killed")), PlaitError(Problem("C005", "raised"))
    one, two = HostDevice("here", 1), HostDevice("here", 2)
    failures = RankFailures(2)
    assert [failures.can_restart(killed, 7, one) for _ in range(3)] == [True] * 3 and failures.should_exclude_device
    failures.exclude_device()
    assert [failures.can_restart(killed, 7, two) for _ in range(3)] == [True, True, False], "it is not the device"
    failures = RankFailures(2)
    assert [failures.can_restart(killed, 7, device) for device in (one, two, one)] == [True, True, False]
    assert not RankFailures(0).can_restart(killed, 7, one)
    failures = RankFailures(2)
    assert [failures.can_restart(killed, 7, one, can_exclude=False) for _ in range(3)] == [True, True, False], "it is the only one"
    failures = RankFailures(2)
    assert [failures.can_restart(raised, 7, one) for _ in range(3)] == [True, True, False], "an exception is the job's own"
    failures = RankFailures(1, allow_shrink=True)
    assert failures.can_restart(killed, 7, one) and failures.should_exclude_device
    assert failures.format_warning(one) is None
    for step in (20, 40):
        failures.can_restart(killed, step, one)
    assert failures.format_warning(one) == "note  3 ranks failed on here, device 1. Check that device."


def near(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Every step and every sample once, losses and weights within 1e-9 of each other, because ranks sum in another order."""
    (losses, samples, weights), (losses2, samples2, weights2) = one, other
    assert isinstance(losses, list) and isinstance(losses2, list)
    assert isinstance(weights, dict) and isinstance(weights2, dict) and weights.keys() == weights2.keys()
    assert covered(samples) == covered(samples2)
    steps = [a[0] == b[0] and abs(a[1] - b[1]) <= 1e-9 for a, b in zip(losses, losses2, strict=True)]
    apart = max(float((t.double() - weights2[name].double()).abs().max()) for name, t in weights.items() if t.numel())
    return all(steps) and apart <= 1e-9


def covered(samples: object) -> dict[int, list[tuple[int, int]]]:
    """By step: the epochs and positions of its samples. Ranks with the same part count once."""
    assert isinstance(samples, dict)
    return {
        step: sorted((e, i) for e, start, size in parts for i in range(start, start + size))
        for step, parts in samples.items()
    }


def kill_for_good(command: Command, folder: Path, rank: int, delay: float) -> None:
    """Kills a rank after some time, and waits until the next attempt has started."""
    time.sleep(delay)
    rounds = command.output.count("note  round")
    command.until(lambda: len(ranks_of(command)) > 1 or "on 1 rank" in command.output or not alive(command.pid))
    forked = ranks_of(command)
    if len(forked) > 1 and alive(command.pid):
        os.kill(forked[rank % len(forked)], signal.SIGKILL)
        command.until(lambda: command.output.count("note  round") > rounds or not alive(command.pid), 120)


def ranks_of(command: Command) -> list[int]:
    """Its ranks. A search for plans has the lowest priority."""
    return [pid for pid in command.workers() if os.getpriority(os.PRIO_PROCESS, pid) < 19]


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    steps = 30
    whole = start(tmp_path / "whole", "dp=2", steps)
    assert whole.wait(120) == 0, whole.output
    command = start(tmp_path / "fewer", "dp=2", steps, "--allow-shrink", "--job.pause", "0.02")
    command.until(lambda: step_of(tmp_path / "fewer") >= 8, 120)
    kill_for_good(command, tmp_path / "fewer", 0, 0.0)
    assert command.wait(120) == 0, command.output
    assert near(ended(tmp_path / "whole", steps), ended(tmp_path / "fewer", steps)), command.output
    assert "restarting with fewer ranks" in command.output and "note  round 1: dp=1 on 1 rank" in command.output
    assert not kept(command)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", ("dp=4", "fsdp=4", "tp=4", "dp=2 pp=2", "fsdp=2 tp=2"))
def test_three_ranks_are_lost_for_good(plan: str, seed: int, tmp_path: Path) -> None:
    """Four ranks, then three, two, one, each time under another plan. If no plan has three ranks, the run continues with fewer at once."""
    steps, chance = 60, random.Random(f"fewer {plan} {seed}")
    flags, folder = ("--save-every", "15"), tmp_path / "fewer"
    whole = start(tmp_path / "whole", plan, steps, *flags)
    assert whole.wait(300) == 0, whole.output
    command = start(folder, plan, steps, *flags, "--allow-shrink", "--job.pause", "0.2")  # this process may get little processor time
    command.until(lambda: step_of(folder) > 0 or not alive(command.pid), 120)
    for _ in range(3):
        at = step_of(folder)
        if chance.random() < 0.7:
            command.until(lambda at=at: step_of(folder) > at or not alive(command.pid), 120)
        kill_for_good(command, folder, chance.randrange(12), chance.random() * 0.4)
    assert command.wait(300) == 0, command.output
    assert near(ended(tmp_path / "whole", steps), ended(folder, steps)), command.output
    assert "on 1 rank" in command.output, command.output


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("plan", ("dp=4", "fsdp=4", "tp=4", "dp=2 pp=2", "fsdp=2 tp=2", "dp=2 fsdp=2"))
def test_ten_kills_at_any_moment(plan: str, seed: int, tmp_path: Path) -> None:
    """Of 120 kills in total: at the start, in a step, in a save, in an evaluation."""
    steps, chance = 150, random.Random(f"{plan} {seed}")
    flags = ("--save-every", "15", "--max-restarts", "10")
    whole = start(tmp_path / "whole", plan, steps, *flags)
    assert whole.wait(300) == 0, whole.output
    command = start(tmp_path / "killed", plan, steps, *flags, "--job.pause", "0.01")
    folder = tmp_path / "killed"
    for _ in range(10):
        at = step_of(folder)
        if chance.random() < 0.7:
            command.until(lambda at=at: step_of(folder) > at or not alive(command.pid), 120)
        kill_once(command, folder, chance.randrange(4), chance.random() * 0.4)
    assert command.wait(300) == 0, command.output
    assert same(ended(tmp_path / "whole", steps), ended(folder, steps)), command.output
