"""Several nodes with a launcher each, as two network namespaces. Both launchers report a loss on either node."""

import contextlib
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import saved
import torch
from hosts import hosts
from launched import TEST_JOB, Command, alive, free_port, rows
from rarely import rarely
from torch.distributed import TCPStore

from plait.chaos.hosts import Host, Hosts

__all__ = ["hosts"]
PLAN = ("--plan", "dp=4")


def started(
    hosts: Hosts, folder: Path, *more: str, which: tuple[int, ...] = (0, 1), at: int = 0, **own: str
) -> list[Command]:
    """Starts the same command on the hosts."""
    master = f"{hosts[0].address}:{at or free_port()}"
    flags = ("--nnodes", "2", "--master", master)
    return [
        Command(
            "train", TEST_JOB, *PLAN, *more, *flags, "--node-rank", str(k), folder=folder, environment=own, host=hosts[k].enter
        )
        for k in which
    ]  # fmt: skip


def ranks(command: Command) -> list[int]:
    """The last two processes that it forked. The earlier ones are a gate or a tunnel, and the job check."""
    return command.workers()[-2:]


def at_step(folder: Path, step: int) -> bool:
    done = rows(folder)
    return bool(done) and done[-1]["step"] >= step


def test_two_machines_train_as_one(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = Command("train", TEST_JOB, *PLAN, folder=tmp_path / "one")
    assert alone.wait(120) == 0, alone.output
    first, second = started(hosts, tmp_path / "two")
    assert (first.wait(120), second.wait(120)) == (0, 0), first.output + second.output
    assert [r["loss"] for r in rows(tmp_path / "one")] == [r["loss"] for r in rows(tmp_path / "two")]
    assert "started by --nnodes: one process on each of 2 machines" in first.output
    assert "done " in first.output and "done " not in second.output


@pytest.mark.slow
def test_variables_of_a_train_job_are_enough(hosts: Hosts, tmp_path: Path) -> None:
    shared = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": hosts[0].address, "PET_MASTER_PORT": str(free_port()),
    }  # fmt: skip
    both = [
        Command(
            "train", TEST_JOB, "--steps", "3", folder=tmp_path, environment=shared | {"PET_NODE_RANK": str(k)}, host=hosts[k].enter
        )
        for k in range(2)
    ]  # fmt: skip
    assert [one.wait(120) for one in both] == [0, 0], both[0].output + both[1].output
    assert "dp=4 on 4 CPU processes" in both[0].output and "started by a Kubeflow TrainJob" in both[0].output


@pytest.mark.slow
def test_a_killed_rank_is_named_on_both(hosts: Hosts, tmp_path: Path) -> None:
    first, second = started(hosts, tmp_path, "--steps", "100000", "--max-restarts", "0")
    first.until(lambda: at_step(tmp_path, 2), 120)
    os.kill(ranks(second)[0], signal.SIGKILL)
    assert (first.wait(60), second.wait(60)) == (1, 1)
    for one in (first, second):
        assert "error[C003] rank 2 was killed (SIGKILL)" in one.output, one.output
    assert "machine 1 (ranks 2-3) on" in first.output


@pytest.mark.slow
@pytest.mark.parametrize("lost, restarts", ((0, "2"), *rarely((0, "0"), (1, "0"))))
def test_a_machine_that_is_lost_is_named_by_the_other(hosts: Hosts, tmp_path: Path, lost: int, restarts: str) -> None:
    """Node 0 hosts the store: without it no node continues."""
    both = started(hosts, tmp_path, "--steps", "100000", "--max-restarts", restarts)
    both[0].until(lambda: at_step(tmp_path, 2), 120)
    forked = both[lost].workers()
    began = time.monotonic()
    both[lost].kill()
    assert both[1 - lost].wait(60) == 1
    assert time.monotonic() - began < 40
    assert f"error[C009] machine {lost} (ranks {2 * lost}-{2 * lost + 1})" in both[1 - lost].output, both[
        1 - lost
    ].output
    both[lost].wait(10)
    both[1 - lost].until(lambda: not any(map(alive, forked)), 10)  # killed, and gone once their memory is freed


def ended(folder: Path, steps: int) -> tuple[list[int], list[float], dict[str, torch.Tensor]]:
    """Steps, their losses, and the weights at the end."""
    done = rows(folder)
    weights = saved.read_checkpoint_tensors(folder / "runs" / "latest" / f"checkpoints/step-{steps:06d}")
    return [row["step"] for row in done], [row["loss"] for row in done], weights


def near(one: Path, other: Path, steps: int, within: float) -> None:
    """Every step once, with the same loss, and the same weights at the end."""
    (steps1, losses1, weights1), (steps2, losses2, weights2) = ended(one, steps), ended(other, steps)
    assert steps1 == steps2 == list(range(1, steps + 1))
    assert max(abs(a - b) for a, b in zip(losses1, losses2)) <= within
    assert weights1.keys() == weights2.keys()
    assert all(float((weights1[name].double() - weights2[name].double()).abs().max()) <= within for name in weights1)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """An undisturbed run of 40 steps on one machine."""
    (tmp_path / "alone").mkdir()
    command = Command("train", TEST_JOB, *PLAN, "--steps", "40", folder=tmp_path / "alone")
    assert command.wait(120) == 0, command.output
    return tmp_path / "alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, which", (("dp=4", 1), *rarely(("dp=4", 0), ("fsdp=4", 1), ("dp=2 tp=2", 1), ("dp=2 pp=2", 0)))
)
def test_a_rank_that_is_lost_is_replaced_on_all(
    hosts: Hosts, tmp_path: Path, alone: Path, plan: str, which: int
) -> None:
    flags = ("--steps", "40", "--save-every", "10", "--job.pause", "0.02", "--plan", plan)
    both = started(hosts, tmp_path, *flags)
    both[0].until(lambda: at_step(tmp_path, 15), 120)
    os.kill(ranks(both[which])[1], signal.SIGKILL)
    assert [one.wait(120) for one in both] == [0, 0], both[0].output + both[1].output
    near(alone, tmp_path, 40, 0.0 if plan == "dp=4" else 1e-9)
    assert "restarting (1 of 2 at this step)" in both[0].output
    (at,) = (line for line in both[0].output.splitlines() if "resuming from step" in line)
    if plan.startswith("dp"):
        assert int(at.partition("step ")[2].partition(",")[0]) >= 15, "copies outlive it: no step is lost"


@pytest.mark.slow
@pytest.mark.parametrize("which", (1, *rarely(0)))
def test_shards_outlive_their_machine(hosts: Hosts, tmp_path: Path, alone: Path, which: int) -> None:
    """No replicas and no checkpoint on disk: a snapshot is in the memory of the other node. A node is lost, or a rank."""
    both = started(hosts, tmp_path, "--steps", "40", "--save-every", "1000", "--job.pause", "0.1", "--plan", "fsdp=4")
    both[0].until(lambda: at_step(tmp_path, 8), 120)
    if which:
        both[1].kill()
        both[1].wait(10)
    else:
        os.kill(ranks(both[0])[0], signal.SIGKILL)
    both[0].until(lambda: "resuming from step" in both[0].output, 60)
    assert "resuming from step 0" not in both[0].output, both[0].output
    assert [one.wait(120) for one in both[: 2 - which]] == [0, 0][: 2 - which], both[0].output
    near(alone, tmp_path, 40, 1e-9)


@pytest.mark.slow
def test_a_machine_is_lost_and_comes_back(hosts: Hosts, tmp_path: Path, alone: Path) -> None:
    at = free_port()
    flags = ("--steps", "40", "--job.pause", "0.4")  # a launcher that restarts takes seconds
    both = started(hosts, tmp_path, *flags, at=at)
    both[0].until(lambda: at_step(tmp_path, 8), 120)
    both[1].kill()
    both[1].wait(10)
    both[0].until(lambda: "on 2 ranks" in both[0].output, 60)
    both[0].until(lambda: at_step(tmp_path, 14), 60)
    (back,) = started(hosts, tmp_path, *flags, which=(1,), at=at)
    both[0].until(lambda: "dp=4 on 4 ranks" in both[0].output, 60)
    assert (both[0].wait(120), back.wait(60)) == (0, 0), both[0].output + back.output
    near(alone, tmp_path, 40, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGUSR1, *rarely(signal.SIGTERM)))
def test_a_request_to_stop_on_one_stops_both(hosts: Hosts, tmp_path: Path, number: int) -> None:
    both = started(hosts, tmp_path, "--steps", "100000")
    both[0].until(lambda: at_step(tmp_path, 2), 120)
    os.kill(both[1].pid, number)
    assert [one.wait(60) for one in both] == [75, 75], both[0].output + both[1].output
    assert "continue with\n    the same command --resume" in both[0].output


def test_what_one_refuses_ends_the_other(hosts: Hosts, tmp_path: Path) -> None:
    both = started(hosts, tmp_path, "--resume", "nothing")
    assert [one.wait(60) for one in both] == [2, 2], both[0].output + both[1].output
    assert all("error[K001]" in one.output for one in both)


@pytest.mark.slow
def test_strangers_are_refused_and_the_run_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    """One sends nothing, one sends garbage, one has a different secret."""
    at = free_port()
    (first,) = started(hosts, tmp_path, "--steps", "5", which=(0,), at=at)
    (rogue,) = started(hosts, tmp_path, "--steps", "5", which=(1,), at=at, PLAIT_SECRET="guessed-and-wrong-secret")
    assert rogue.wait(60) == 1 and "error[L008]" in rogue.output, rogue.output
    rogues = os.fork()
    if rogues == 0:
        hosts[1].enter()
        held = [socket.create_connection((hosts[0].address, at), 5) for _ in range(3)]
        for other, nonsense in zip(held, (b"\0" * 5_000_000, b"GET / HTTP/1.1\r\n\r\n")):
            with contextlib.suppress(OSError):
                other.sendall(nonsense)
        time.sleep(30)
        os._exit(0)
    (second,) = started(hosts, tmp_path, "--steps", "5", which=(1,), at=at)
    assert (first.wait(120), second.wait(120)) == (0, 0), first.output + second.output
    os.kill(rogues, signal.SIGKILL)
    os.waitpid(rogues, 0)


@pytest.mark.prove
def test_a_machine_that_is_not_there_is_told_soon(hosts: Hosts, tmp_path: Path) -> None:
    nobody = (Host("10.78.0.9"), hosts[1]) if hosts[0].namespace else (Host("192.0.2.1"), hosts[1])
    (second,) = started(nobody, tmp_path, which=(1,))
    assert second.wait(40) == 1
    assert "error[L007] number 0 of this job cannot be reached at" in second.output, second.output
    assert "port" in second.output and "through" in second.output


def test_a_port_in_use_is_told(hosts: Hosts, tmp_path: Path) -> None:
    at = free_port()
    pipe, ready = os.pipe()
    busy = os.fork()
    if busy == 0:
        hosts[0].enter()
        taken = socket.socket()
        taken.bind((hosts[0].address, at))
        taken.listen()
        os.write(ready, b".")
        time.sleep(60)
        os._exit(0)
    os.read(pipe, 1)
    (first,) = started(hosts, tmp_path, which=(0,), at=at)
    code = first.wait(60)
    os.kill(busy, signal.SIGKILL)
    os.waitpid(busy, 0)
    assert code == 1 and f"port {at} of" in first.output and "is in use" in first.output, first.output


def test_ranks_that_do_not_share_equally_are_refused(hosts: Hosts, tmp_path: Path) -> None:
    (first,) = started(hosts, tmp_path, "--plan", "dp=3", which=(0,))
    assert first.wait(60) == 2 and "error[L006] 3 ranks cannot be divided equally among 2 machines" in first.output, first.output


def write_into_store(host: Host, key: str, value: str) -> None:
    """Writes until the store is gone, like a program of the same user that found the port where the node's processes reach the store."""
    pid = os.fork()
    if pid == 0:
        host.enter()
        table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        wrote = 0
        ports = [int(row[1].partition(":")[2], 16) for row in table if row[3] == "0A" and row[1].startswith("0100007F:")]
        for port in ports:
            with contextlib.suppress(Exception):
                store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
                while store.check(["launcher/0"]):
                    store.set(key, value)
                    wrote += 1
        os._exit(0 if wrote else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "at, key, value",
    (
        (1, "launcher/1", '{"host": "h", "life": "1", "state": "runs", "round": 0, "beat": 7}'),
        *rarely((0, "launcher/0", "nonsense"), (1, "launcher/0", "[]"), (0, "launcher/1", "\x1b[31m")),
    ),
)  # fmt: skip
def test_who_writes_into_the_store_is_no_machine_that_is_gone(hosts: Hosts, tmp_path: Path, at: int, key: str, value: str) -> None:
    both = started(hosts, tmp_path, "--steps", "100000")
    both[0].until(lambda: at_step(tmp_path, 2), 120)
    write_into_store(hosts[at], key, value)
    assert [one.wait(60) for one in both] == [1, 1]
    for one in both:
        assert "error[L009] another program has written into this run's store" in one.output and "is gone" not in one.output, one.output
        assert key in one.output and "\x1b" not in one.output
    assert rows(tmp_path)[-1]["step"] >= 2
