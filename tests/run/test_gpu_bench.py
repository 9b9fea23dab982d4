"""The scripts for one GPU and for several also run their lines on a CPU, keep their results, and report failures."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu
import gpu_checks
import gpu_kernels
import gpu_looks
import gpu_speed
import gpu_steps
import gpus
from gpu_looks import Part, Setting

from plait.config.plan import Plan

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def here(tmp_path: Path) -> Setting:
    return Setting("cpu", tmp_path, 0.02, ranks=2)


def test_every_plan_that_a_gpu_is_asked_for_is_one() -> None:
    """Includes those that a CPU skips."""
    for plan in (*gpu_checks.ONE, *gpu_checks.AXES):
        assert str(Plan.parse(plan))


# — probes —


def fails() -> Any:
    raise ValueError("told")


def dies() -> Any:
    os.write(2, b"last words")
    os._exit(7)


def hangs() -> Any:
    time.sleep(1000)


def test_whatever_comes_of_a_look_is_a_row_and_the_others_go_on(
    here: Setting, capfd: pytest.CaptureFixture[str]
) -> None:
    looks = {"fails": fails, "dies": dies, "hangs": hangs, "sees": lambda: {"saw": "a | b", "ms": 1234.5}}
    parts = {"looks": Part("all of them", lambda setting: looks, limit=1.0)}
    assert gpu_looks.run(here, parts) and not gpu_looks.report(here, parts)
    rows = gpu_looks.known(here, "looks")
    assert [row["ok"] for row in rows.values()] == [False, False, False, True]
    assert rows["fails"]["error"] == "ValueError: told" and "in fails" in rows["fails"]["trace"]
    assert "exit code 7" in rows["dies"]["error"] and "last words" in rows["dies"]["log"]
    assert "not answered in 1 s" in rows["hangs"]["error"]
    assert "| sees | ✓ | a / b | 1,234 |" in (here.out / "table.md").read_text()
    assert "✗ looks: hangs" in capfd.readouterr().out
    assert json.loads((here.out / "all.json").read_text())["parts"]["looks"] == rows


def test_a_call_goes_on_where_the_last_one_ended(here: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: Part(name, lambda setting: {"one": dict, "two": dict}) for name in ("a", "b")}
    monkeypatch.setattr(gpu_looks, "perf_counter", iter(range(100)).__next__)
    assert not gpu_looks.run(Setting("cpu", here.out, 0.0, ends=5.0), parts)
    seen = [(name, list(gpu_looks.known(here, name))) for name in parts]
    assert 0 < sum(len(rows) for _, rows in seen) < 4
    monkeypatch.undo()
    asked: list[Any] = []
    plain = gpu_looks.look
    monkeypatch.setattr(gpu_looks, "look", lambda *args: asked.append(args) or plain(*args))
    assert gpu_looks.run(here, parts) and len(asked) == 4 - sum(len(rows) for _, rows in seen)
    assert all(list(gpu_looks.known(here, name)) == ["one", "two"] for name in parts)
    assert gpu_looks.run(here, parts, again=True) and len(asked) > 4 - 1


def test_results_of_another_device_are_not_gone_on_with(here: Setting) -> None:
    gpu_looks.write(here.out / "a.json", {"device": "another, torch 1.0", "rows": {}})
    with pytest.raises(SystemExit, match=r"another, torch 1\.0, and this is cpu"):
        gpu_looks.known(here, "a")


def test_parts_are_chosen_by_name() -> None:
    assert list(gpu_looks.asked(gpu.PARTS, "trace,verify")) == ["verify", "trace"]
    assert gpu_looks.asked(gpu.PARTS, None) == gpu.PARTS
    with pytest.raises(SystemExit, match="no part speeed; there are environment, verify"):
        gpu_looks.asked(gpu.PARTS, "speeed")


def test_waits_are_counted_with_the_line_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's debug mode warns, plus the methods that it does not warn about."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with gpu_steps.watched("cuda") as waits:
        for _ in range(3):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp)", stacklevel=1
            )
        warnings.warn("something else", stacklevel=1)
        torch.cuda.synchronize()
    assert sorted(waits.found.values()) == [1, 3] and modes == ["warn", "default"]
    assert all("test_gpu_bench.py:" in line for line in waits.found)
    torch.cuda.synchronize()
    assert sum(waits.found.values()) == 4


def test_times_that_overlap() -> None:
    one, other = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], [(2.5, 5.5), (7.0, 8.0)]
    assert gpu_steps.covered(one) == 4.0 and gpu_steps.covered(other) == 4.0
    assert gpu_steps.shared(one, other) == gpu_steps.shared(other, one) == 1.0
    assert gpu_looks.spread([3.0, 1.0, 2.0]) == "2.000 [1.000, 3.000]"


# — the lines of the scripts —


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """In a separate process and in two calls. The second has no work left."""
    command = [
        sys.executable,
        str(ROOT / "bench" / "gpu.py"),
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--seconds",
        "0.02",
    ]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--parts", "kernels"], capture_output=True, text=True, check=False, timeout=250, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "(there)" in done.stdout and "| optimizer: AdamW | ✓ |" in done.stdout
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert list(rows) == list(gpu_kernels.looks(Setting("cpu", tmp_path, 0.02)))


ONE: dict[str, Any] = {
    "environment": (gpu_checks.environment, ("versions", "machine", "forks", "plait train")),
    "verify": (gpu_checks.one_device, ("gpt, microbatches=2", "gpt, offload=all microbatches=2")),
    "one_rank": (gpu_checks.one_rank, ("collectives", "buckets, batch norm", "20 steps, precision=bf16")),
    "two_ranks": (gpu_checks.two_ranks, ("gpt, dp=2",)),
    "waits": (gpu_steps.synchronisations, ("gpt, dp=1",)),
    "speed": (gpu_speed.looks, ("gpt, precision=bf16, dropout 0.1",)),
    "prediction": (gpu_speed.predictions, ("plait bench compute", "gpt, precision=bf16 microbatches=2")),
    "trace": (gpu_steps.traces, ("gpt, precision=bf16",)),
}
"""Probes of each part that need no compiler and little time."""


@pytest.mark.slow
@pytest.mark.parametrize("part", ONE)
def test_looks_of_one_device(part: str, here: Setting) -> None:
    looks, names = ONE[part]
    every = looks(here)
    rows = {name: gpu_looks.look(every[name], here.out, 200.0) for name in names}
    assert all(row["ok"] for row in rows.values()), rows
    if part == "trace":
        assert list(here.out.glob("trace-gpt-*.json.gz"))
    if part == "two_ranks":
        assert rows["gpt, dp=2"]["saw"] == "EQUAL"


TWO: dict[str, Any] = {
    "verify": (gpus.proofs, ("gpt, fsdp=2",)),
    "scaling": (gpus.scaling, ("dp", "pp")),
    "overlap": (gpus.overlap, ("dp=2",)),
    "bubble": (gpus.bubbles, ("1f1b", "zb")),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", TWO)
def test_looks_of_two_devices(part: str, here: Setting) -> None:
    looks, names = TWO[part]
    every = looks(here)
    rows = {name: gpu_looks.look(every[name], here.out, 200.0) for name in names}
    assert all(row["ok"] for row in rows.values()), rows
    if part == "bubble":  # a device waits for (2 − 1) micro-batches of 8, and less if weight gradients fill the wait
        assert rows["1f1b"]["the table's %"] == pytest.approx(100 / 9)
        assert 0 < rows["zb"]["the table's %"] < rows["1f1b"]["the table's %"]


def test_every_part_of_both_scripts_lists_its_looks(here: Setting) -> None:
    for parts in (gpu.PARTS, gpus.PARTS):
        for name, part in parts.items():
            assert part.looks(here), name
            assert f"    {name} " in (gpu.__doc__ if parts is gpu.PARTS else gpus.__doc__)
    wide = Setting("cpu", here.out, 0.02, ranks=8)
    assert {"dp=4 fsdp=2", "fsdp=4 tp=2"} <= {name.removeprefix("gpt, ") for name in gpus.proofs(wide)}
    assert gpus.job_of(wide, 8).batch == 8 * gpus.job_of(wide, 1).batch
