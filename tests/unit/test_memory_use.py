"""What a rank's memory was used for, beside the bill of its plan; how the allocator is set up. On pretended devices: tests/device."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from plait import Engine
from plait.cli.main import main
from plait.cli.train import _memory as line_of
from plait.config.plan import Plan
from plait.engine.memory import measured
from plait.engine.memory_use import MADE, MemoryUse, by_part, fullest, grown, size
from plait.engine.run_directory import RunDirectory
from plait.engine.train import asked
from plait.launch import devices
from plait.planner.dryrun.memory_table import memory_table
from plait.tensors import torch_private

MIB = 2**20
USE = MemoryUse(
    "cuda:1", {"parameters": 10 * MIB, "optimizer": 20 * MIB, "gradients": 10 * MIB}, {"optimizer": 24}, 79 * MIB, 80 * MIB, 100 * MIB, 3,
    5 * MIB, 200 * MIB, 300 * MIB, 400 * MIB,
)  # fmt: skip
BILL = {"parameters": 10 * MIB, "optimizer": 20 * MIB, "gradients": 10 * MIB, "activations": 20 * MIB, "temporary": 5 * MIB}


def test_what_follows_from_the_counts() -> None:
    assert (USE.made, USE.fragmented, USE.needed) == (50 * MIB, 21 * MIB, 105 * MIB)
    assert MemoryUse.of(json.loads(json.dumps(USE.to_dict()))) == USE
    assert USE.line() == (
        "105.0 MiB of 200.0 MiB at most: tensors 79.0 MiB, kept by the allocator beside them 21.0 MiB, 3 times it had to free its cache;"
        " context, NCCL and others 5.0 MiB"
    )
    assert MemoryUse("cpu", resident_peak=2**31).line() == "2.00 GiB of the host's memory at most"
    assert [size(n) for n in (0, 512, 3 * 2**10, 2**30)] == ["0.0 KiB", "0.5 KiB", "3.0 KiB", "1.00 GiB"]


def test_a_bill_in_what_can_be_measured() -> None:
    assert by_part(BILL) == {"parameters": 10 * MIB, "optimizer": 20 * MIB, MADE: 35 * MIB}
    assert USE.by_category() == {"parameters": 10 * MIB, "optimizer": 20 * MIB, MADE: 50 * MIB}
    table = USE.table(BILL)
    rows = {line[2:30].strip(): line[30:].split("  ") for line in table}
    assert [word.strip() for word in rows[MADE] if word.strip()] == ["50.0 MiB", "35.0 MiB"]
    assert [word.strip() for word in rows["tensors together"] if word.strip()] == ["80.0 MiB", "65.0 MiB"]
    assert {"rounded up to blocks", "fragmented of it", "context, NCCL, others", "optimizer, on the host"} <= rows.keys()
    assert not any("bill" in line for line in USE.table())


def test_what_grew_is_what_is_furthest_above_the_bill() -> None:
    assert grown(USE, BILL) == (MADE, 50 * MIB, 35 * MIB)
    assert grown(USE, BILL | {"activations": 100 * MIB}) is None
    assert grown(USE, BILL | {"activations": 100 * MIB}, more=70 * MIB) == (MADE, 120 * MIB, 115 * MIB)
    assert grown(USE, BILL | {"optimizer": 1}, 0) == ("optimizer", 20 * MIB, 1)


def test_the_fullest_rank() -> None:
    rows = {0: {"end": USE.to_dict()}, 1: {"first": USE.to_dict()}, 2: {"end": USE.to_dict() | {"beside": 9 * MIB}}}
    assert (fullest(rows) or (None,))[0] == 2 and (fullest(rows, "first") or (None,))[0] == 1 and fullest({}) is None


@pytest.mark.parametrize(
    "text, wanted",
    (("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29), ("HIP out of memory. Tried to allocate 20.00 MiB.", 20 * MIB),
     ("Tried to allocate 512 bytes", 512), ("NCCL: out of memory", 0)),
)  # fmt: skip
def test_what_the_allocator_was_asked_for(text: str, wanted: int) -> None:
    assert asked(text) == wanted


def test_processes_of_the_cpu_are_measured_too() -> None:
    job = training.job()
    engine = Engine(job, "dp=1", device="cpu")
    for _, batch in zip(range(2), engine.batches()):
        engine.step(batch)
    use, bill = measured(engine), memory_table(job, Plan()).categories
    assert {name: use.held[name] for name in ("parameters", "optimizer")} == {n: bill[n] for n in ("parameters", "optimizer")}
    assert use.total == use.allocated == 0 and 0 < use.resident <= use.resident_peak
    assert MADE not in use.by_category(), "it cannot be known there"


def test_a_run_leaves_it_and_a_report_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", training.__file__, "--steps", "3", "--device", "cpu", "--check", "none"]) == 0
    folder = next(path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    run = RunDirectory(folder)
    assert set(run.memories()) == {0} and set(run.memories()[0]) == {"step", "first", "end"} and line_of(run) == ""
    assert '"memory"' not in run.metrics.read_text(), "of the host alone there is nothing to say with the steps"
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    assert "memory      rank 0: " in capsys.readouterr().out
    assert main(["report", str(folder), "--memory", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rank"] == 0 and told["measured"]["held"]["parameters"] == told["bill"]["parameters"]
    assert main(["report", str(folder), "--memory"]) == 0
    assert "measured        bill" in capsys.readouterr().out
    run.memory(0).unlink()
    assert main(["report", str(folder), "--memory"]) == 2 and "R004" in capsys.readouterr().err


# — the allocator —


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch_private, "set_allocator", found.append)
    for name in devices.ALLOCATOR_NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return found


def test_segments_grow(told: list[str]) -> None:
    devices.settle_allocator()
    assert told == [devices.ALLOCATOR] == [os.environ["PYTORCH_ALLOC_CONF"]]
    devices.settle_allocator()
    assert len(told) == 1


@pytest.mark.parametrize("name", devices.ALLOCATOR_NAMES)
def test_the_users_own_allocator_stays(name: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    devices.settle_allocator()
    assert not told and [os.environ.get(n) for n in devices.ALLOCATOR_NAMES].count(None) == 2


def test_segments_do_not_grow_on_rocm(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    devices.settle_allocator()
    assert not told and not any(name in os.environ for name in devices.ALLOCATOR_NAMES)


def test_a_rank_sets_it_before_it_has_a_device(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.engine import build
    from plait.launch.place import Place

    monkeypatch.setattr(build, "kind_of", lambda wanted: wanted)
    monkeypatch.setattr("plait.launch.devices.cuda_names", lambda: ["one"])

    def set_device(device: Any) -> None:
        assert told == [devices.ALLOCATOR]
        raise StopIteration

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(StopIteration):
        build.pick_device("cuda", Place())
