"""Stop, kill, damage, fill the disk: a resumed run ends with the result of the uninterrupted one, bit for bit."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launched import TEST_JOB, Command, rows
from rarely import every, rarely, sampled
from saved import read_checkpoint_tensors

from run.test_train import ledger

STEPS = 40
ARGV = ("train", TEST_JOB, "--nproc", "2", "--save-every", "4", "--job.steps", str(STEPS), "--job.pause", "0.005")


def final(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint_tensors(folder / f"runs/latest/checkpoints/step-{STEPS:06d}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    command = Command(*ARGV, folder=folder)
    assert command.wait() == 0, command.output
    return final(folder)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("seed", sampled(2, every(2, range(4))))
def test_killed_at_any_moment(whole: dict[str, torch.Tensor], tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    for attempt in range(3):
        command = Command(*ARGV, *(["--resume"] if attempt else []), folder=tmp_path)
        before = len(rows(tmp_path))
        target = before + moments.randint(1, 12)
        command.until(lambda target=target: len(rows(tmp_path)) >= min(target, STEPS))
        time.sleep(moments.random() * 0.02)
        command.kill()
        command.wait()
    command = Command(*ARGV, "--resume", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert same(final(tmp_path), whole)
    assert [r["step"] for r in rows(tmp_path)] == list(range(1, STEPS + 1))
    used = ledger(tmp_path / "runs/latest")
    assert all(sorted(ids) == list(range(41)) for epoch, ids in used.items() if epoch < max(used))


@pytest.mark.parametrize("number", sampled(3, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)))
def test_stop_saves_and_says_how_to_go_on(whole: dict[str, torch.Tensor], tmp_path: Path, number: int) -> None:
    command = Command(*ARGV, "--workers", "1", folder=tmp_path)
    command.until(lambda: len(rows(tmp_path)) >= 5)
    os.killpg(command.pid, number)  # as a terminal does: launcher and ranks
    assert command.wait() == 75, command.output
    assert "--resume" in command.output
    command = Command(*ARGV, "--resume", folder=tmp_path)
    assert command.wait() == 0 and "resumed from" in command.output
    assert same(final(tmp_path), whole)


@pytest.mark.slow
def test_resume_under_another_number_of_ranks(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    command = Command(*ARGV, "--steps", "13", folder=tmp_path)
    assert command.wait() == 0
    other = [*ARGV[:2], "--plan", "dp=3 microbatches=2", *ARGV[4:], "--resume"]
    command = Command(*other, folder=tmp_path)
    assert command.wait() == 0, command.output
    for name, tensor in final(tmp_path).items():
        assert float((tensor - whole[name]).abs().max()) <= 1e-11, name


@pytest.mark.parametrize("damage", sampled(2, ("flip", *rarely("cut", "swapped", "missing"), "manifest")))
def test_damaged_checkpoint_is_refused_by_name(whole: dict[str, torch.Tensor], tmp_path: Path, damage: str) -> None:
    command = Command(*ARGV, "--steps", "12", folder=tmp_path)
    assert command.wait() == 0
    checkpoints = tmp_path / "runs/latest/checkpoints"
    newest = checkpoints / "step-000012"
    victim = newest / ("manifest.json" if damage == "manifest" else "model-00000.safetensors")
    content = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(content[:-1])
    elif damage == "swapped":
        victim.write_bytes((checkpoints / "step-000008/model-00000.safetensors").read_bytes())
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    command = Command(*ARGV, "--resume", folder=tmp_path)
    assert command.wait() == 0, command.output
    assert f"step-000012/{victim.name} is damaged" in command.output and "resumed from" in command.output
    assert "step-000008" in command.output
    assert same(final(tmp_path), whole)


@pytest.mark.slow
def test_another_job_is_refused(tmp_path: Path) -> None:
    assert Command(*ARGV, "--steps", "4", folder=tmp_path).wait() == 0
    other = tmp_path / "training.py"
    other.write_text(
        Path(TEST_JOB)
        .read_text()
        .replace("nn.Linear(6, 16)", "nn.Linear(6, 12)")
        .replace("nn.Linear(16, 1)", "nn.Linear(12, 1)")
    )
    command = Command("train", str(other), "--nproc", "2", "--resume", folder=tmp_path)
    assert command.wait() == 2
    assert "error[K003]" in command.output and "body.0.weight" in command.output


@pytest.mark.slow
def test_second_launcher_is_kept_out(tmp_path: Path) -> None:
    first = Command(*ARGV, "--job.pause", "5", folder=tmp_path)  # it trains longer than the second command takes to start, also on a busy machine
    first.until(lambda: len(rows(tmp_path)) >= 1)
    second = Command(*ARGV, "--resume", folder=tmp_path)
    assert second.wait() == 2 and "error[R001]" in second.output
    first.kill()
    first.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root, and a place that allows it")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def without_room(disk: Path, left: int) -> Command:
    """A run that is resumed on a disk with this many free bytes. Its files are unchanged."""
    runs = str(disk / "runs")
    first = Command(*ARGV, "--steps", "4", "--runs", runs, folder=disk.parent)
    assert first.wait() == 0, first.output
    (disk / "filler").write_bytes(b"x" * (_free(disk) - left))
    command = Command(*ARGV, "--runs", runs, "--resume", folder=disk.parent)
    assert command.wait() == 1, command.output
    read_checkpoint_tensors(disk / "runs/latest/checkpoints/step-000004")
    return command


@pytest.mark.slow
def test_full_disk_keeps_the_checkpoint_before(disk: Path) -> None:
    """The disk has space for metric lines, and none for a checkpoint."""
    told = without_room(disk, 20480).output
    assert "error[K004]" in told and "MiB are free" in told, told


@pytest.mark.slow
def test_no_room_for_a_line_of_metrics_is_an_error_with_a_name(disk: Path) -> None:
    told = without_room(disk, 0).output
    assert "error[R006]" in told or "error[K004]" in told, told


def _free(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
