"""torchrun restarts lost ranks: an attempt continues from the last save of the previous one, in a store with keys of dead ranks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from hosts import hosts
from launched import TEST_JOB, Command, alive, free_port, rows

from plait.chaos.hosts import Host, Hosts
from plait.config.errors import PlaitError
from plait.launch import attempts, fork, place

__all__ = ["hosts"]
TESTS = Path(__file__).parents[1]
SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
TORCHRUN = SHARED | {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one",
    "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def attempt(store: dist.Store, world: int, late: int | None = None) -> list[int]:
    """The epoch of each rank of one attempt. Rank `late` joins after the others."""
    said: dict[int, int] = {}

    def rank(r: int) -> None:
        time.sleep(0.3 if r == late else 0.0)
        said[r] = attempts.agree_on_epoch(store, r, world, lambda: False, timeout=20)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [said[r] for r in range(world)]


def test_an_attempt_agrees_whatever_was_left_in_the_store() -> None:
    store = dist.HashStore()
    assert attempt(store, 3) == [1, 1, 1]
    assert attempt(store, 3, late=1) == [2, 2, 2]
    assert attempt(store, 2, late=0) == [3, 3]  # one node was lost
    store.set("plait/came/2", "somebody who died before he was heard")
    assert attempt(store, 4, late=3) == [4, 4, 4, 4]
    assert attempt(store, 1) == [5]


def test_who_does_not_come_is_named_and_so_is_the_variable() -> None:
    store = dist.HashStore()
    store.set("plait/came/1", "dead")
    with pytest.raises(PlaitError, match=r"(?s)L020.*rank 1, 2 did not arrive.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        attempts.agree_on_epoch(store, 0, 3, lambda: False, timeout=0.1)
    with pytest.raises(PlaitError, match=r"L020.*rank 0 did not arrive"):
        attempts.agree_on_epoch(store, 1, 3, lambda: False, timeout=0.1)
    with pytest.raises(PlaitError, match=r"received a request to stop") as stopped:
        attempts.agree_on_epoch(store, 1, 3, lambda: True)
    assert stopped.value.exit_code == 75


def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in (TORCHRUN | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(attempts, "JOIN_TIMEOUT_S", 0.5)
    with pytest.raises(PlaitError, match=rf"L020\] torchrun's store at 127.0.0.1:{port} cannot be reached"):
        place.find_place().meet()


def test_a_rank_meets_under_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (TORCHRUN | {"MASTER_PORT": str(server.port)}).items():
        monkeypatch.setenv(name, value)
    for epoch in (1, 2):
        here = place.find_place()
        here.meet()
        assert here.store is not None
        here.store().set("address", "mine")
        assert server.get(f"plait/{epoch}/address") == b"mine"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # the store is new in every attempt
    assert place.find_place().store is None


def test_a_start_is_known_again() -> None:
    assert attempts.find_start_ids({}) == []
    assert attempts.find_start_ids({attempts.START_VARIABLE: "sweep-7"}) == ["PLAIT_START sweep-7"]
    (said,) = fork.run_ranks(lambda place: {"starts": attempts.find_start_ids({"TORCHELASTIC_RUN_ID": "one"})}, 1)
    (start,) = said["starts"]  # this process has no such variable, and is the parent of the one that looked it up
    assert start.startswith("torchrun one ") and f" {os.getpid()} " in start


@contextmanager
def agent(folder: Path, *words: str, host: Host | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A real torchrun. Its output and that of its workers is in `said-PORT.txt` of the folder."""
    start = [sys.executable, "-m", "torch.distributed.run", *words]
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path[:1], *filter(None, sys.path)])}
    with open(folder / f"said-{host.address if host else 'here'}.txt", "w") as said:
        process = subprocess.Popen(
            start, cwd=folder, env=own | environment, stdout=said, stderr=said, text=True, start_new_session=True,
            preexec_fn=host.enter if host else None,
        )  # fmt: skip
        try:
            yield process
        finally:
            for pid in (process.pid, *workers(process)):
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def workers(process: "subprocess.Popen[str]") -> list[int]:
    """The ranks of an agent, in order."""
    try:
        return sorted(int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    except OSError:
        return []


def until(ready: object, folder: Path, timeout: float = 60.0) -> None:
    """Waits for a condition."""
    end = time.monotonic() + timeout
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end, "\n".join(p.read_text() for p in folder.glob("said-*.txt"))
        time.sleep(0.02)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(folder)]


def weights(folder: Path) -> list[str]:
    """Digests of the tensors in the last checkpoint."""
    manifest = json.loads(
        (sorted((folder / "runs/latest/checkpoints").glob("step-*"))[-1] / "manifest.json").read_text()
    )
    return sorted(str(entry) for entry in manifest["tensors"].items())


JOB = ("-m", "plait", "train", TEST_JOB, "--job.pause", "0.05", "--save-every", "5")


def undisturbed(folder: Path, plan: str, *more: str) -> Path:
    """The same training without interruption."""
    (folder / "alone").mkdir()
    alone = Command(*JOB[2:4], "--save-every", "5", "--plan", plan, *more, folder=folder / "alone")
    assert alone.wait(100) == 0, alone.output
    return folder / "alone"


def saved(folder: Path) -> int:
    """The step of the newest checkpoint of all runs."""
    return max((int(p.name[5:]) for p in folder.glob("runs/training-*/checkpoints/step-??????")), default=0)


def killed(folder: Path, *before: str, times: int = 1, **environment: str) -> str:
    """Returns torchrun's output for a run whose rank 1 is killed several times, each time after one more checkpoint."""
    (folder / "torchrun").mkdir()
    words = ("--nproc-per-node", "2", "--max-restarts", "3", *before, *JOB, "--plan", "dp=2")
    with agent(folder / "torchrun", *words, **environment) as process:
        for k in range(times):
            until(
                lambda k=k: saved(folder / "torchrun") >= 5 + 5 * k and len(workers(process)) == 2,
                folder / "torchrun",
            )
            os.kill(workers(process)[1], signal.SIGKILL)
            until(lambda: len(workers(process)) < 2 or process.poll() is not None, folder / "torchrun")
        code = process.wait(100)
    said = (folder / "torchrun/said-here.txt").read_text()
    assert code == 0, said
    return said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_of_torchrun_ends_with_the_same_weights(tmp_path: Path) -> None:
    said = killed(tmp_path, "--standalone")
    assert (
        said.count("started by torchrun: 2 ranks") == 2 and "resumed from runs/training-1/checkpoints/step-0000" in said
    )
    alone = undisturbed(tmp_path, "dp=2")
    assert losses(tmp_path / "torchrun") == losses(alone) and len(losses(alone)) == 30
    assert weights(tmp_path / "torchrun") == weights(alone)
    assert [p.name for p in (tmp_path / "torchrun/runs").glob("training-*")] == ["training-1"]


@pytest.mark.prove
def test_ranks_of_a_torchrun_that_is_killed_save_and_end(tmp_path: Path) -> None:
    words = ("--standalone", "--nproc-per-node", "2", *JOB, "--plan", "dp=2", "--steps", "1000")
    with agent(tmp_path, *words) as process:
        until(lambda: len(rows(tmp_path)) > 6, tmp_path)
        ranks = workers(process)
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, ranks)), tmp_path, 20)
    last = rows(tmp_path)[-1]["step"]
    assert (tmp_path / f"runs/latest/checkpoints/step-{last:06d}").is_dir()


@pytest.mark.prove
@pytest.mark.parametrize("shared", ("0", "1"))
@pytest.mark.parametrize("rendezvous", ("standalone", "static"))
def test_workers_killed_twice(tmp_path: Path, rendezvous: str, shared: str) -> None:
    start = (
        ("--standalone",)
        if rendezvous == "standalone"
        else ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    )
    killed(tmp_path, *start, times=2, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shared)
    assert losses(tmp_path / "torchrun") == losses(undisturbed(tmp_path, "dp=2"))


def elastic(hosts: Hosts, which: int, at: int) -> list[str]:
    """The command of an agent of one or two nodes. The first node hosts the rendezvous."""
    fast = f"is_host={int(which == 0)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "elastic",
        "--rdzv-endpoint", f"{hosts[0].address}:{at}", "--rdzv-conf", fast, "--local-addr", hosts[which].address,
    ]  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("shared", ("0", "1"))
def test_a_machine_is_lost_and_comes_back(hosts: Hosts, tmp_path: Path, shared: str) -> None:
    """The remaining node continues with fewer ranks and the same global batch. The lost node joins again."""
    if not hosts[0].namespace:
        pytest.skip("no network namespaces here")
    words, at = [*JOB, "--plan", "dp=*", "--steps", "400"], free_port()
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared}
    with agent(tmp_path, *elastic(hosts, 0, at), *words, host=hosts[0], **apart) as first:
        with agent(tmp_path, *elastic(hosts, 1, at), *words, host=hosts[1], **apart) as second:
            until(lambda: len(rows(tmp_path)) > 12 and workers(second), tmp_path, 90)
        lost = rows(tmp_path)[-1]["step"]
        until(lambda: rows(tmp_path)[-1]["step"] > lost + 8, tmp_path, 90)
        said = (tmp_path / f"said-{hosts[0].address}.txt").read_text()
        assert "dp=2 on 2 CPU processes" in said and "batch 8 = 8 per device" in said, said
        (tmp_path / f"said-{hosts[1].address}.txt").rename(tmp_path / "said-lost.txt")
        if shared == "0":  # torchrun's agents would wait for each other forever, and plait has printed this
            assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said and first.wait(150) == 0, said
        else:
            with agent(tmp_path, *elastic(hosts, 1, at), *words, host=hosts[1], **apart) as second:
                assert (first.wait(150), second.wait(30)) == (0, 0), "\n".join(
                    p.read_text() for p in tmp_path.glob("said-*")
                )
    said = (tmp_path / f"said-{hosts[0].address}.txt").read_text()
    assert said.count("dp=2 on 2 CPU processes") == (2 if shared == "1" else 1), said
    alone = losses(undisturbed(tmp_path, "dp=2", "--steps", "400"))
    assert [step for step, _ in losses(tmp_path)] == [step for step, _ in alone] == list(range(1, 401))
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx([loss for _, loss in alone], abs=1e-9)


@pytest.mark.prove
def test_the_machine_of_the_rendezvous_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """No node can continue without torchrun's store, so the other node ends with an error."""
    if not hosts[0].namespace:
        pytest.skip("no network namespaces here")
    words, at = [*JOB, "--plan", "dp=*", "--steps", "400"], free_port()
    with agent(tmp_path, *elastic(hosts, 1, at), *words, host=hosts[1]) as second:
        with agent(tmp_path, *elastic(hosts, 0, at), *words, host=hosts[0]):
            until(lambda: len(rows(tmp_path)) > 12, tmp_path, 90)
        assert second.wait(90) != 0
        said = tmp_path / f"said-{hosts[1].address}.txt"
        until(lambda: "error[C004] rank" in said.read_text(), tmp_path, 20)  # torchrun does not wait for its ranks here
