"""Disks that are full or read-only, posed on small file systems that only this process and its children see. It takes root."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from plait.chaos.fault import Fault
from plait.chaos.hosts import mounted, ran
from plait.chaos.ranks import undisturbed
from plait.chaos.scene import SHARED, CannotPose, Outcome, Scene
from plait.chaos.watched import Watched

SPARE = 1 << 20
"""Bytes beside checkpoints: logs, metrics."""


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _checkpoint(scene: Scene) -> int:
    assert scene.setting.run is not None
    return max(_bytes(path) for path in (scene.setting.run / "checkpoints").glob("step-*"))


def _on_a_disk(scene: Scene, size: int) -> None:
    scene.needs("it takes root to mount a file system", scene.setting.mounts)
    scene.undo.append(mounted(scene.runs, size))


def _started(scene: Scene) -> Watched:
    """A run that has made its first checkpoint, and the steps after it."""
    run = scene.start()
    run.reaches(scene.a_step())
    run.until(lambda: any(scene.runs.glob("latest/checkpoints/step-??????")) or run.code is not None, "a checkpoint")
    return run


def _ended(scene: Scene, run: Watched, since: float, *says: str, undo: Callable[[], object] | None = None) -> Outcome:
    code = run.wait()
    scene.told(run, since, *says, within=30.0)
    scene.expect(code == 1, f"exit code {code}, not 1")
    if undo is not None:
        undo()
    (scene.runs / "filled").unlink(missing_ok=True)
    scene.resume(lost=scene.since_checkpoint)
    return scene.measured


def _no_room(scene: Scene) -> Outcome:
    """A disk on which half a checkpoint still fits."""
    size = _checkpoint(scene)
    scene.needs("checkpoints are too small to tell", size > 1 << 15)
    _on_a_disk(scene, SPARE + 8 * size)
    run = scene.start()
    saved = lambda: any(scene.runs.glob("latest/checkpoints/step-??????"))  # noqa: E731
    run.until(lambda: saved() or run.code is not None, "a checkpoint")
    since = time.monotonic()
    _fill(scene.runs, size // 2)
    return _ended(scene, run, since, "error[K004]", "MiB")


def _fill(folder: Path, left: int) -> None:
    """Leave so many bytes free: all at once, or nothing when somebody else has just written."""
    with open(folder / "filled", "wb") as file:
        for _ in range(100):
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - left))
                return
    raise CannotPose("the disk could not be filled")


def _full(scene: Scene) -> Outcome:
    """Somebody else fills it to the last byte."""
    _on_a_disk(scene, SPARE + 8 * _checkpoint(scene))
    run = _started(scene)
    since = time.monotonic()
    with contextlib.suppress(OSError), open(scene.runs / "filled", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
    return _ended(scene, run, since, "error[")


def _read_only(scene: Scene) -> Outcome:
    """The folder of checkpoints; a whole file system cannot become so while files are open for writing there."""
    scene.needs("it takes root to mount a file system", scene.setting.mounts)
    run = _started(scene)
    folder, since = str((scene.runs / "latest").resolve() / "checkpoints"), time.monotonic()
    ran("mount", "--bind", folder, folder)
    scene.undo.append(lambda: ran("umount", "-l", folder))
    ran("mount", "-o", "remount,bind,ro", folder)
    return _ended(scene, run, since, "error[", undo=lambda: scene.undo.pop()())


def _no_shared_memory(scene: Scene) -> Outcome:
    scene.needs("it takes root to mount a file system", scene.setting.mounts)
    scene.needs("there is no shared memory", SHARED.is_dir())
    scene.undo.append(mounted(SHARED, 1 << 16))
    began = time.monotonic()
    run = scene.start()
    code = run.wait()
    scene.told(run, began, "no snapshots in memory", within=30.0)
    return undisturbed(scene, code, run.told("starting again") is None)


FAULTS = (
    Fault("disk-no-room", "the disk has room for half a checkpoint",
          "refused before a byte is written, with needed and free; the one before is whole; --resume goes on", _no_room),
    Fault("disk-full", "the disk is full to the last byte amid a run",
          "named, exit 1; what was written is whole; --resume goes on", _full),
    Fault("disk-read-only", "the folder of checkpoints becomes read-only",
          "named, exit 1; what was written is whole; --resume goes on", _read_only),
    Fault("memory-full", "shared memory is full", "said; goes on without snapshots", _no_shared_memory),
)  # fmt: skip
