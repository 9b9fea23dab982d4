"""NCCL's settings before its group is created, and the handling of its flight recorder's output. NCCL is not available here: a thread
simulates torch's, which reads a pipe and writes a file."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.config.errors import PlaitError, Problem
from plait.launch import fork, groups, nccl, place
from plait.launch.place import Place
from plait.tensors import torch_private

KINDS = ("TORCH_NCCL_", "TORCH_FR_", "NCCL_")
DEVICE, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(KINDS)]:
        monkeypatch.delenv(name)
    yield monkeypatch
    for name in [name for name in os.environ if name.startswith(KINDS) and name not in before]:
        del os.environ[name]


def said() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(KINDS)}


def test_what_is_chosen(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nccl.set_nccl_defaults(tmp_path)
    assert said() == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800", "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_trace_rank_",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/nccl_trace_rank_",
    }  # fmt: skip
    before = said()
    nccl.set_nccl_defaults(tmp_path / "other")
    assert said() == before, "what is set stays"


@pytest.mark.parametrize("names", [names for names, _ in nccl.DEFAULTS] + [nccl.RECORD_VARIABLES, nccl.PIPE_VARIABLES])
def test_what_the_user_has_set_stays_by_whatever_name(
    names: tuple[str, ...], clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in names:
        with clean.context() as patch:
            patch.setenv(name, "mine")
            nccl.set_nccl_defaults(tmp_path)
            assert [os.environ.get(n) for n in names] == ["mine" if n == name else None for n in names]
    assert all(f"`{names[0]}" in str(nccl.__doc__) for names, _ in nccl.DEFAULTS), "each is explained"


def asked_of_torch(monkeypatch: pytest.MonkeyPatch, device: torch.device, **how: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **words: given.update(words, backend=backend))
    monkeypatch.setattr(Place, "_adopt_group", lambda self: None)
    Place(1, 2, joined=how.pop("joined", False), store=lambda: dist.HashStore()).connect(device, **how)
    return given


def test_the_group_has_a_device_unless_stages_send_to_each_other(clean: pytest.MonkeyPatch) -> None:
    told = asked_of_torch(clean, DEVICE)
    assert told["backend"] == "cpu:gloo,cuda:nccl" and told["device_id"] == DEVICE
    assert told["timeout"] == timedelta(hours=2) and "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in os.environ
    assert asked_of_torch(clean, DEVICE, single_messages=True)["device_id"] is None
    assert asked_of_torch(clean, DEVICE, joined=True)["timeout"] == timedelta(minutes=30)


def test_processes_of_the_cpu_are_left_alone(clean: pytest.MonkeyPatch) -> None:
    told = asked_of_torch(clean, CPU)
    assert (told["backend"], told["device_id"], told["timeout"]) == ("gloo", None, place.LAUNCHED_TIMEOUT) and not said()


def test_patience_is_long_at_first() -> None:
    for joined, first, later in ((False, 120, 65), (True, 30, 10)):
        there = Place(joined=joined)
        assert [there.collective_timeout(DEVICE, going) for going in (False, True)] == [timedelta(minutes=m) for m in (first, later)]
        assert there.collective_timeout(CPU, True) == there.collective_timeout(CPU, False)


def test_all_groups_wait_as_long_as_is_said() -> None:
    def rank(place: Place) -> dict[str, Any]:
        place.connect(CPU)
        group = groups.new_group([0, 1])
        torch_private.set_group_timeout(timedelta(seconds=0.2))
        if place.rank == 0:
            time.sleep(1.5)  # it never arrives
            return {}
        with pytest.raises(RuntimeError, match=r"Timed out|timeout"):
            dist.all_reduce(torch.ones(1), group=group)  # type: ignore[arg-type]
        return {"gave up": True}

    assert fork.run_ranks(rank, 2, fork.Listener(on_note=lambda _: None)) == [{}, {"gave up": True}]


def test_a_mesh_keeps_a_backend_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(place: Place) -> dict[str, Any]:
        place.connect(CPU)
        plain = groups.choose_mesh_backend()
        dist.group.WORLD.bound_device_id = DEVICE  # type: ignore[union-attr]
        bound, made = groups.choose_mesh_backend(), groups.choose_backend()
        dist.group.WORLD.bound_device_id = None  # type: ignore[union-attr]
        return {"plain": plain, "bound": bound, "groups": made}

    assert fork.run_ranks(rank, 2) == [{"plain": None, "bound": "cpu:gloo,cuda:gloo", "groups": None}] * 2


# — the flight recorder's output —


def recorder(folder: Path, rank: int) -> threading.Thread:
    """As in torch: a pipe, and a file once a byte is written into the pipe."""
    pipe = folder / f"{nccl.RECORD_STEM}{rank}.pipe"
    os.mkfifo(pipe)
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def watch() -> None:
        for _ in range(200):
            try:
                heard = os.read(reads, 16)
            except BlockingIOError:
                heard = b""
            if heard:
                time.sleep(0.1)
                (folder / f"{nccl.RECORD_STEM}{rank}").write_bytes(b"what it did")
                return os.close(reads)
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_ranks_write_what_they_asked_for_before_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    threads = [recorder(tmp_path, rank) for rank in (0, 10, 2)]
    assert [path.name for path in nccl.request_flight_records(tmp_path, (0, 1, 2, 10))] == [f"{nccl.RECORD_STEM}{k}" for k in (0, 2, 10)]
    for thread in threads:
        thread.join()
    began = time.monotonic()
    assert nccl.request_flight_records(tmp_path, range(4)) == [] and time.monotonic() - began < 1.0, "nobody reads: nobody waits"


def test_the_failure_names_the_files_of_this_run(tmp_path: Path) -> None:
    error = PlaitError(Problem("C003", "rank 1 aborted itself", fix=("--resume",)), 1, "trace")
    assert nccl.add_record_hint(error, tmp_path, 0.0) is error
    for rank in (0, 1, 11):
        (tmp_path / f"{nccl.RECORD_STEM}{rank}").write_bytes(b"1")
    os.utime(tmp_path / f"{nccl.RECORD_STEM}0", (1.0, 1.0))  # of an earlier run in the same folder
    told = nccl.add_record_hint(error, tmp_path, time.time() - 60)
    assert told.exit_code == 1 and told.trace == "trace" and told.problems[0].fix[1:] == ("--resume",)
    prefix = f"torchfrtrace --prefix nccl_trace_rank_ {tmp_path}"
    line = f"{prefix}    finds the rank that did not enter a collective, from {tmp_path}/nccl_trace_rank_1 … 11"
    assert told.problems[0].fix[0] == line
