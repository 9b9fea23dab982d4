"""Storage that fails.

Checkpoints that are damaged before a resume: each is refused by name, and the one before is used.

Disks that are full or read-only, posed on small file systems that only this process and its children see. It takes root.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from plait.chaos.hosts import mounted, ran
from plait.chaos.ranks import undisturbed
from plait.chaos.scene import SHARED, CannotPose, Fault, Outcome, Scene
from plait.chaos.watched import Watched
from plait.checkpoint.manifest import MANIFEST, seal, unseal
from plait.engine.run_directory import RunDirectory

Mutation = Callable[[Scene, Path], None]
SYSTEM = b"cposix\nsystem\n(S'touch %s'\ntR."
"""A pickle that runs a command when it is loaded."""


def damaged(mutate: Mutation, says: str = "refused", everywhere: bool = False) -> Callable[[Scene], Outcome]:
    """Of the run that was stopped after its second checkpoint, damage the newer one (or both), and resume."""

    def pose(scene: Scene) -> Outcome:
        setting = scene.setting
        run = laid_out(scene)
        for step in (2 * setting.every, setting.every)[: 1 + everywhere]:
            mutate(scene, run / "checkpoints" / f"step-{step:06d}")
        began = time.monotonic()
        if everywhere:
            return _refused(scene, began)
        again = scene.resume()
        at = next((line for _, line in again.lines if "resumed from" in line), "")
        scene.told(again, began, says, within=15.0)
        scene.expect(at.endswith(f"at step {setting.every}"), f"it resumed from another step: {at[-60:] or 'none'}")
        scene.measured.lost = setting.every
        scene.expect(not canary(scene).exists(), "the content of the file was executed")
        return scene.measured

    return pose


def _refused(scene: Scene, began: float) -> Outcome:
    run = scene.start("--resume")
    code = run.wait()
    scene.told(run, began, "error[K002]", within=15.0)
    scene.expect(code == 2, f"exit code {code}, not 2")
    return scene.measured


def laid_out(scene: Scene) -> Path:
    """A copy of the undisturbed run as it was before its last checkpoint."""
    setting = scene.setting
    assert setting.run is not None
    run = scene.runs / setting.run.name
    shutil.copytree(setting.run, run, symlinks=True)
    (scene.runs / "latest").symlink_to(run.name)
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 2 * setting.every:
            shutil.rmtree(path)
    RunDirectory(run).cut(2 * setting.every)
    return run


def canary(scene: Scene) -> Path:
    """A file that is there when a checkpoint has run code."""
    return scene.folder / "executed"


def _largest(path: Path) -> Path:
    return max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def _rewritten(file: Path, content: bytes) -> None:
    file.unlink()  # it may be a link to the file of another checkpoint
    file.write_bytes(content)


def _flip(scene: Scene, path: Path) -> None:
    file = _largest(path)
    content = bytearray(file.read_bytes())
    content[scene.chosen("byte", range(len(content) // 2, len(content)))] ^= 1 << scene.chosen("bit", range(8))
    _rewritten(file, bytes(content))


def _flip_manifest(scene: Scene, path: Path) -> None:
    content = bytearray((path / MANIFEST).read_bytes())
    content[scene.chosen("byte", range(len(content)))] ^= 1 << scene.chosen("bit", range(8))
    _rewritten(path / MANIFEST, bytes(content))


def _cut(scene: Scene, path: Path) -> None:
    file = _largest(path)
    os.truncate(file, file.stat().st_size // 2)


def _missing(scene: Scene, path: Path) -> None:
    _largest(path).unlink()


def _swapped(scene: Scene, path: Path) -> None:
    """The file of the checkpoint before under the same name."""
    file = _largest(path)
    _rewritten(file, (path.parent / f"step-{scene.setting.every:06d}" / file.name).read_bytes())


def _torn(scene: Scene, path: Path) -> None:
    """As a kill amid the save leaves it: a directory that was not published, with half a file."""
    building = path.with_name(f"{path.name}.tmp-0badcafe")
    os.rename(path, building)
    (building / MANIFEST).unlink()
    _cut(scene, building)


def _outside(scene: Scene, path: Path) -> None:
    """A manifest, well sealed, that has a file outside the checkpoint read."""
    content = unseal((path / MANIFEST).read_bytes(), MANIFEST)
    name = _largest(path).name
    shutil.copy(path / name, scene.folder / "elsewhere.safetensors")
    other = os.path.relpath(scene.folder / "elsewhere.safetensors", path)
    content["files"][other] = content["files"].pop(name)
    for entry in content["tensors"].values():
        for piece in entry["pieces"]:
            piece["file"] = other if piece["file"] == name else piece["file"]
    _rewritten(path / MANIFEST, seal(content))


def _pickle(scene: Scene, path: Path) -> None:
    _rewritten(_largest(path), SYSTEM % str(canary(scene)).encode())


REJECTED = "rejected by name; resumes from the checkpoint before, with the same final weights"
CHECKPOINT_FAULTS = (
    Fault("checkpoint-flip", "one bit of a tensor in the newest checkpoint flips", REJECTED, damaged(_flip)),
    Fault("checkpoint-manifest", "one bit of the newest manifest flips", REJECTED, damaged(_flip_manifest)),
    Fault("checkpoint-cut", "a file of the newest checkpoint is truncated to half", REJECTED, damaged(_cut)),
    Fault("checkpoint-missing", "a file of the newest checkpoint is missing", REJECTED, damaged(_missing)),
    Fault("checkpoint-swapped", "a file of the newest checkpoint is that of another step", REJECTED, damaged(_swapped)),
    Fault("checkpoint-torn", "the newest checkpoint was interrupted by a kill during its save",
          "never read; resumes from the checkpoint before", damaged(_torn, "resumed from")),
    Fault("checkpoint-outside", "a manifest with a valid digest names a file outside of the checkpoint",
          f"{REJECTED}; the file outside is not read", damaged(_outside)),
    Fault("checkpoint-pickle", "a file of the newest checkpoint is a pickle that runs a command",
          f"{REJECTED}; nothing is executed", damaged(_pickle)),
    Fault("checkpoint-all", "all checkpoints are damaged",
          "rejected by name, exit 2; no new run is started", damaged(_flip, everywhere=True)),
)  # fmt: skip


SPARE = 1 << 20
"""Bytes beside checkpoints: logs, metrics."""


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _checkpoint(scene: Scene) -> int:
    assert scene.setting.run is not None
    return max(_bytes(path) for path in (scene.setting.run / "checkpoints").glob("step-*"))


def _on_a_disk(scene: Scene, size: int) -> None:
    scene.needs("mounting a file system needs root", scene.setting.mounts)
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
    scene.needs("checkpoints are too small for this fault", size > 1 << 15)
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
    scene.needs("mounting a file system needs root", scene.setting.mounts)
    run = _started(scene)
    folder, since = str((scene.runs / "latest").resolve() / "checkpoints"), time.monotonic()
    ran("mount", "--bind", folder, folder)
    scene.undo.append(lambda: ran("umount", "-l", folder))
    ran("mount", "-o", "remount,bind,ro", folder)
    return _ended(scene, run, since, "error[", undo=lambda: scene.undo.pop()())


def _no_shared_memory(scene: Scene) -> Outcome:
    scene.needs("mounting a file system needs root", scene.setting.mounts)
    scene.needs("the system has no shared memory", SHARED.is_dir())
    scene.undo.append(mounted(SHARED, 1 << 16))
    began = time.monotonic()
    run = scene.start()
    code = run.wait()
    scene.told(run, began, "no snapshots in memory", within=30.0)
    return undisturbed(scene, code, run.told("restarting") is None)


DISK_FAULTS = (
    Fault("disk-no-room", "the disk has room for half a checkpoint",
          "rejected before a byte is written, with required and free space; the checkpoint before is intact; --resume continues", _no_room),
    Fault("disk-full", "the disk becomes full during a run",
          "reported, exit 1; written checkpoints are intact; --resume continues", _full),
    Fault("disk-read-only", "the checkpoint folder becomes read-only",
          "reported, exit 1; written checkpoints are intact; --resume continues", _read_only),
    Fault("memory-full", "shared memory is full", "reported; continues without snapshots", _no_shared_memory),
)  # fmt: skip
