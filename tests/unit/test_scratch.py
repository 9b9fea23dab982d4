"""Files that killed processes left behind are removed by the next process of the same user. No other files are."""

import os
import signal
import time
from pathlib import Path

import pytest

from plait.config.errors import PlaitError
from plait.engine.elastic import SnapshotStore
from plait.launch import limits, scratch
from plait.launch.scratch import ScratchFolder


def left_by_a_killed_process(base: Path) -> Path:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        made = ScratchFolder("memory", base)
        (made.path / "snapshot").write_bytes(b"x" * 1000)
        if os.fork() == 0:  # a rank of it, which has the lock too
            time.sleep(600)
        os.write(writing, str(made.path).encode())
        time.sleep(600)
        os._exit(0)
    path = Path(os.read(reading, 4096).decode())
    with ScratchFolder("other", base):
        assert path.exists(), "its process lives"
    ranks = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with ScratchFolder("other", base):
        assert path.exists(), "a process that was forked from it lives"
    for rank in ranks:
        os.kill(int(rank), signal.SIGKILL)
    return path


def until(gone: Path, base: Path) -> None:
    end = time.monotonic() + 30
    while gone.exists():
        assert time.monotonic() < end
        ScratchFolder("other", base).close()


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    path = left_by_a_killed_process(tmp_path)
    until(path, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_else_is(tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "data").touch()
    (tmp_path / f"plait-{os.getuid()}-memory-link").symlink_to(kept)
    for name in (f"plait-{os.getuid() + 1}-memory-abc", f"plait-{os.getuid()}-123-abc", "plait-runs", f"plait-{os.getuid()}-memory-new"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    with ScratchFolder("memory", tmp_path) as mine:
        assert mine.stat().st_mode & 0o777 == 0o700 and sorted(tmp_path.iterdir()) == sorted([*before, mine])
    assert sorted(tmp_path.iterdir()) == before and (kept / "data").exists()
    old = time.time() - 2 * scratch.NEW_FOLDER_S
    os.utime(before[-1], (old, old))
    os.utime(tmp_path / f"plait-{os.getuid()}-memory-new", (old, old))
    ScratchFolder("memory", tmp_path).close()
    assert not (tmp_path / f"plait-{os.getuid()}-memory-new").exists(), "it never got a lock"


def test_a_start_that_finds_no_room_for_a_process_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("plait.engine.elastic._remove_at_exit", full)
    monkeypatch.setattr("plait.engine.elastic.os.access", lambda *_: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(PlaitError, match="the process that frees snapshots could not be started") as caught:
        SnapshotStore()
    assert caught.value.codes == ["H006"] and not list(tmp_path.iterdir())


def test_other_errors_of_a_fork_are_not_its() -> None:
    with pytest.raises(PermissionError), limits.catch_fork_failure("a rank"):
        raise PermissionError(1, "no")
