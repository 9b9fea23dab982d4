"""Disks that are full or read-only, posed on small file systems that only this process and its children see. It takes root."""

import contextlib
import time
from pathlib import Path

from plait.chaos.fault import Fault, Measured
from plait.chaos.hosts import mounted, remount
from plait.chaos.ranks import undisturbed
from plait.chaos.scene import SHARED, Scene
from plait.chaos.watched import Watched

SPARE = 1 << 20
"""Bytes beside checkpoints: logs, metrics."""
ROOM = 1 << 30


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _checkpoint(scene: Scene) -> int:
    """Bytes of one."""
    assert scene.setting.run is not None
    return max(_bytes(path) for path in (scene.setting.run / "checkpoints").glob("step-*"))


def _on_a_disk(scene: Scene, size: int) -> None:
    scene.needs(it_takes_root_to_mount_a_file_system=scene.setting.mounts)
    scene.undo.append(mounted(scene.runs, size))


def _started(scene: Scene) -> Watched:
    """A run that has made its first checkpoint, and the steps after it."""
    run = scene.start()
    run.reaches(scene.step)
    run.until(lambda: any(scene.runs.glob("latest/checkpoints/step-??????")) or run.code is not None, "a checkpoint")
    return run


def _ended(scene: Scene, run: Watched, since: float, *says: str) -> Measured:
    code = run.wait()
    scene.told(run, since, *says, within=30.0)
    scene.expect(code == 1, f"exit code {code}, not 1")
    with contextlib.suppress(OSError):
        (scene.runs / "filled").unlink()
    remount(scene.runs, f"rw,size={ROOM}")
    scene.resume(lost=2 * scene.setting.every)
    return scene.measured


def _no_room(scene: Scene) -> Measured:
    """A disk that holds one checkpoint, and half of another."""
    _on_a_disk(scene, SPARE + int(1.5 * _checkpoint(scene)))
    run = scene.start()
    run.reaches(scene.setting.every)
    return _ended(scene, run, time.monotonic(), "error[K004]", "MiB")


def _full(scene: Scene) -> Measured:
    """Somebody else fills it to the last byte."""
    _on_a_disk(scene, SPARE + 4 * _checkpoint(scene))
    run = _started(scene)
    since = time.monotonic()
    with contextlib.suppress(OSError), open(scene.runs / "filled", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
    return _ended(scene, run, since, "error[")


def _read_only(scene: Scene) -> Measured:
    _on_a_disk(scene, ROOM)
    run = _started(scene)
    since = time.monotonic()
    remounted(scene)
    return _ended(scene, run, since, "error[")


def remounted(scene: Scene) -> None:
    """Read-only, as a disk with errors becomes; files that are open for writing are in the way of a plain remount."""
    with contextlib.suppress(OSError):
        remount(scene.runs, "ro")
        return
    scene.needs(files_are_open_and_the_system_has_no_forced_remount=False)


def _no_shared_memory(scene: Scene) -> Measured:
    scene.needs(it_takes_root_to_mount_a_file_system=scene.setting.mounts, there_is_no_shared_memory=SHARED.is_dir())
    scene.undo.append(mounted(SHARED, 1 << 16))
    began = time.monotonic()
    run = scene.start()
    code = run.wait()
    scene.told(run, began, "no snapshots in memory", within=30.0)
    return undisturbed(scene, code, run.told("starting again") is None)


FAULTS = (
    Fault("disk-no-room", "the disk has room for one checkpoint only",
          "refused before a byte is written, with needed and free; the one before is whole; --resume goes on", _no_room),
    Fault("disk-full", "the disk is full to the last byte amid a run",
          "named, exit 1; what was written is whole; --resume goes on", _full),
    Fault("disk-read-only", "the disk becomes read-only amid a run",
          "named, exit 1; what was written is whole; --resume goes on", _read_only),
    Fault("memory-full", "shared memory is full", "said; goes on without snapshots", _no_shared_memory),
)  # fmt: skip
