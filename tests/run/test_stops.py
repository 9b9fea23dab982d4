"""A process handles a request to stop within two seconds, during any wait: three signals in each of many waits.

Before the first step the command ends at once, with 75, or 130 after a Ctrl-C. Afterwards it saves, and ends with 75.
"""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from launched import Command, alive, free_port, rows
from rarely import seldom

from plait.launch.child import fork_process
from run.test_mpi import SOURCES

JOB = str(Path(__file__).parents[1] / "waits.py")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HEARD = 2.0
"""Seconds. On a busy machine, `BUSY` is added."""
BUSY = 6.0
AT_ONCE = ("import", "data", "model", "first sample", "forward")
SAVING = ("sample", "evaluation")
PLANS = ("--plan dp=2", "--plan fsdp=2 --workers 1")
WHOM = ("launcher", "rank 0", "rank 1", "all")


def environments(port: int) -> dict[str, dict[str, str]]:
    """Environments of one process that a launcher started, where no other process joins."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    slurm = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
             "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "1"}  # fmt: skip
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    found: dict[str, dict[str, str]] = {}
    for rank in "01":
        found |= {
            f"RANK={rank}": {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, **address},
            f"SLURM_PROCID={rank}": {"SLURM_PROCID": rank, **slurm},
            f"OMPI_COMM_WORLD_RANK={rank}": {"OMPI_COMM_WORLD_RANK": rank, **mpi, **address},
        }
    return found


def waiting(folder: Path, place: str, *words: str, environment: dict[str, str] | None = None) -> Command:
    (folder / "waits").write_text(place)
    named = {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", **(environment or {})}
    return Command("train", JOB, "--check", "none", "--save-every", "3", *words, folder=folder, environment=named)


def heard(command: Command, code: tuple[int, ...], began: float) -> None:
    assert command.wait(30) in code, command.output
    took = time.monotonic() - began
    assert took < HEARD + BUSY * (os.getloadavg()[0] > 1.5), f"heard after {took:.1f} s\n{command.output}"
    assert "Traceback" not in command.output, command.output


def codes(number: int) -> tuple[int, ...]:
    """Exit codes of a command that ends before its first step."""
    return (130,) if number == signal.SIGINT else (75,)


def told(folder: Path) -> bool:
    return bool([*folder.glob("waiting-*")])


@pytest.mark.parametrize("place, number", seldom(4, itertools.product(AT_ONCE, SIGNALS)))
def test_before_the_first_step(place: str, number: int, tmp_path: Path) -> None:
    command = waiting(tmp_path, place, "--nproc", "2")
    command.until(lambda: told(tmp_path))
    began = time.monotonic()
    os.kill(command.pid, number)
    heard(command, codes(number), began)
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))


@pytest.mark.parametrize("place, number", seldom(4, itertools.product(("model", "forward"), SIGNALS)))
def test_a_rank_alone_gets_it_before_the_first_step(place: str, number: int, tmp_path: Path) -> None:
    command = waiting(tmp_path, place, "--nproc", "2")
    command.until(lambda: len([*tmp_path.glob("waiting-*")]) == 2)
    began = time.monotonic()
    os.kill(command.workers()[1], number)
    heard(command, codes(number), began)


@pytest.mark.parametrize("words, place, whom, number", seldom(7, itertools.product(PLANS, SAVING, WHOM, SIGNALS)))
def test_between_two_steps(words: str, place: str, whom: str, number: int, tmp_path: Path) -> None:
    command = waiting(tmp_path, place, *words.split())
    command.until(lambda: told(tmp_path))
    done, began = rows(tmp_path)[-1]["step"], time.monotonic()
    if whom == "all":
        os.killpg(command.pid, number)
    else:
        os.kill(command.pid if whom == "launcher" else command.workers()[int(whom[-1])], number)
    heard(command, (75,), began)
    saved = sorted(tmp_path.glob("runs/latest/checkpoints/step-*"))
    assert int(saved[-1].name[5:]) == rows(tmp_path)[-1]["step"] >= done >= 3, command.output


@pytest.mark.parametrize("name, number", seldom(5, itertools.product((*environments(0), "--node-rank 0", "--node-rank 1"), SIGNALS)))
def test_while_nobody_else_comes(name: str, number: int, tmp_path: Path) -> None:
    port = free_port()
    nodes = ("--nnodes", "2", "--master", f"127.0.0.1:{port}", "--plan", "dp=2")
    words = (*nodes, *name.split()) if name.startswith("--") else ()
    environment = {} if words else environments(port)[name]
    environment["PLAIT_SECRET"] = "of these tests alone"
    command = waiting(tmp_path, "", *words, environment=environment)
    time.sleep(2.5)  # it does not print the event that it waits for
    assert alive(command.pid), command.output
    began = time.monotonic()
    os.kill(command.pid, number)
    heard(command, codes(number), began)


@pytest.mark.parametrize("whom, number", seldom(4, itertools.product((0, 1), SIGNALS)))
def test_a_rank_of_another_launcher_waits_for_one_that_builds(whom: int, number: int, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    port, both = free_port(), list[Command]()
    for rank in "01":
        environment = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        both.append(waiting(tmp_path, "model", environment=environment | {"PLAIT_SECRET": "of these tests alone"}))
    both[0].until(lambda: len([*tmp_path.glob("waiting-*")]) == 2)
    began = time.monotonic()
    os.kill(both[whom].pid, number)
    heard(both[whom], codes(number), began)
    both[1 - whom].kill()


@pytest.mark.parametrize("number", seldom(3, SIGNALS))
def test_between_two_rounds(number: int, tmp_path: Path) -> None:
    command = waiting(tmp_path, "model of the second round", "--nproc", "2", "--save-every", "1000")
    command.until(lambda: len(rows(tmp_path)) > 4)
    (tmp_path / "killed").touch()
    os.kill(command.workers()[1], signal.SIGKILL)
    command.until(lambda: told(tmp_path))
    done, began = rows(tmp_path)[-1]["step"], time.monotonic()
    os.kill(command.pid, number)
    heard(command, (75,), began)
    saved = sorted(tmp_path.glob("runs/latest/checkpoints/step-*"))
    assert saved and int(saved[-1].name[5:]) >= done - 1, command.output


def test_a_ctrl_c_during_a_fork_is_not_lost() -> None:
    """It arrived in a hook that Python runs after a fork, and was discarded there: the command continued."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
        code = 1
        try:
            if fork_process() == 0:
                time.sleep(100)
            time.sleep(1)
        except KeyboardInterrupt:
            code = 2 if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().strip() else 130
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
