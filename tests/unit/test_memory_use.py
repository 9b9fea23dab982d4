"""A rank's memory use, compared with its plan's prediction. The configuration of the allocator. With simulated devices; see tests/device."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from plait import Engine
from plait.cli.main import main
from plait.cli.train import _format_memory as line_of
from plait.config.plan import Plan
from plait.engine.memory import measure_memory
from plait.engine.memory_use import (
    STEP_CATEGORY,
    MemoryUse,
    find_fullest,
    find_largest_excess,
    format_bytes,
    group_bill,
)
from plait.engine.run_directory import RunDirectory
from plait.engine.train import parse_requested_bytes
from plait.launch import devices
from plait.planner.dryrun.memory_table import make_memory_table
from plait.tensors import torch_private

MIB = 2**20
USE = MemoryUse(
    "cuda:1", {"parameters": 10 * MIB, "optimizer": 20 * MIB, "gradients": 10 * MIB}, {"optimizer": 24}, 79 * MIB, 80 * MIB, 100 * MIB, 3,
    5 * MIB, 200 * MIB, 300 * MIB, 400 * MIB,
)  # fmt: skip
BILL = {"parameters": 10 * MIB, "optimizer": 20 * MIB, "gradients": 10 * MIB, "activations": 20 * MIB, "temporary": 5 * MIB}


def test_what_follows_from_the_counts() -> None:
    assert (USE.made, USE.fragmented, USE.needed) == (50 * MIB, 21 * MIB, 105 * MIB)
    assert MemoryUse.from_row(json.loads(json.dumps(USE.to_dict()))) == USE
    assert USE.summarize() == (
        "105.0 MiB of 200.0 MiB at most: tensors 79.0 MiB, free but reserved by the allocator 21.0 MiB, the allocator freed its cache 3 times;"
        " context, NCCL and others 5.0 MiB"
    )
    assert MemoryUse("cpu", resident_peak=2**31).summarize() == "2.00 GiB of host memory at peak"
    assert [format_bytes(n) for n in (0, 512, 3 * 2**10, 2**30)] == ["0.0 KiB", "0.5 KiB", "3.0 KiB", "1.00 GiB"]


def test_a_bill_in_what_can_be_measured() -> None:
    assert group_bill(BILL) == {"parameters": 10 * MIB, "optimizer": 20 * MIB, STEP_CATEGORY: 35 * MIB}
    assert USE.group_by_category() == {"parameters": 10 * MIB, "optimizer": 20 * MIB, STEP_CATEGORY: 50 * MIB}
    table = USE.format_table(BILL)
    rows = {line[2:30].strip(): line[30:].split("  ") for line in table}
    assert [word.strip() for word in rows[STEP_CATEGORY] if word.strip()] == ["50.0 MiB", "35.0 MiB"]
    assert [word.strip() for word in rows["tensors together"] if word.strip()] == ["80.0 MiB", "65.0 MiB"]
    assert {"rounded up to blocks", "fragmented of it", "context, NCCL, others", "optimizer, on the host"} <= rows.keys()
    assert not any("bill" in line for line in USE.format_table())


def test_what_grew_is_what_is_furthest_above_the_bill() -> None:
    assert find_largest_excess(USE, BILL) == (STEP_CATEGORY, 50 * MIB, 35 * MIB)
    assert find_largest_excess(USE, BILL | {"activations": 100 * MIB}) is None
    assert find_largest_excess(USE, BILL | {"activations": 100 * MIB}, more=70 * MIB) == (STEP_CATEGORY, 120 * MIB, 115 * MIB)
    assert find_largest_excess(USE, BILL | {"optimizer": 1}, 0) == ("optimizer", 20 * MIB, 1)


def test_the_fullest_rank() -> None:
    rows = {0: {"end": USE.to_dict()}, 1: {"first": USE.to_dict()}, 2: {"end": USE.to_dict() | {"beside": 9 * MIB}}}
    assert (find_fullest(rows) or (None,))[0] == 2 and (find_fullest(rows, "first") or (None,))[0] == 1 and find_fullest({}) is None


@pytest.mark.parametrize(
    "text, wanted",
    (("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29), ("HIP out of memory. Tried to allocate 20.00 MiB.", 20 * MIB),
     ("Tried to allocate 512 bytes", 512), ("NCCL: out of memory", 0)),
)  # fmt: skip
def test_what_the_allocator_was_asked_for(text: str, wanted: int) -> None:
    assert parse_requested_bytes(text) == wanted


def test_processes_of_the_cpu_are_measured_too() -> None:
    job = training.job()
    engine = Engine(job, "dp=1", device="cpu")
    for _, batch in zip(range(2), engine.batches()):
        engine.step(batch)
    use, bill = measure_memory(engine), make_memory_table(job, Plan()).categories
    assert {name: use.held[name] for name in ("parameters", "optimizer")} == {n: bill[n] for n in ("parameters", "optimizer")}
    assert use.total == use.allocated == 0 and 0 < use.resident <= use.resident_peak
    assert STEP_CATEGORY not in use.group_by_category(), "it cannot be known there"


def test_a_run_leaves_it_and_a_report_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", training.__file__, "--steps", "3", "--device", "cpu", "--check", "none"]) == 0
    folder = next(path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    run = RunDirectory(folder)
    assert set(run.read_memories()) == {0} and set(run.read_memories()[0]) == {"step", "first", "end"} and line_of(run) == ""
    assert '"memory"' not in run.metrics.read_text(), "of the host alone there is nothing to say with the steps"
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    assert "memory      rank 0: " in capsys.readouterr().out
    assert main(["report", str(folder), "--memory", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rank"] == 0 and told["measured"]["held"]["parameters"] == told["bill"]["parameters"]
    assert main(["report", str(folder), "--memory"]) == 0
    assert "measured        bill" in capsys.readouterr().out
    run.get_memory_path(0).unlink()
    assert main(["report", str(folder), "--memory"]) == 2 and "R004" in capsys.readouterr().err


# — the allocator —


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch_private, "configure_allocator", found.append)
    for name in devices.ALLOCATOR_NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return found


def test_segments_grow(told: list[str]) -> None:
    devices.configure_allocator()
    assert told == [devices.ALLOCATOR_SETTING] == [os.environ["PYTORCH_ALLOC_CONF"]]
    devices.configure_allocator()
    assert len(told) == 1


@pytest.mark.parametrize("name", devices.ALLOCATOR_NAMES)
def test_the_users_own_allocator_stays(name: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    devices.configure_allocator()
    assert not told and [os.environ.get(n) for n in devices.ALLOCATOR_NAMES].count(None) == 2


def test_segments_do_not_grow_on_rocm(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    devices.configure_allocator()
    assert not told and not any(name in os.environ for name in devices.ALLOCATOR_NAMES)


def test_a_rank_sets_it_before_it_has_a_device(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.engine import build
    from plait.launch.place import Place

    monkeypatch.setattr(build, "resolve_kind", lambda wanted: wanted)
    monkeypatch.setattr("plait.launch.devices.list_cuda_devices", lambda: ["one"])

    def set_device(device: Any) -> None:
        assert told == [devices.ALLOCATOR_SETTING]
        raise StopIteration

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(StopIteration):
        build.pick_device("cuda", Place())
