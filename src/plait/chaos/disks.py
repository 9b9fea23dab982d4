"""Storage faults.

Checkpoints are damaged before a resume: each must be rejected by name, and the previous one used.

Full and read-only disks are small file systems that only this process and its children see. They need root.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from plait.chaos.hosts import mount_tmpfs, run_command
from plait.chaos.ranks import expect_undisturbed
from plait.chaos.scene import SHARED_MEMORY, CannotPose, Fault, Outcome, Scene
from plait.chaos.watched_run import WatchedRun
from plait.checkpoint.manifest import MANIFEST_NAME, seal_json, unseal_json
from plait.engine.elastic import NO_SNAPSHOTS
from plait.engine.run_directory import RunDirectory

Mutation = Callable[[Scene, Path], None]
PICKLE_COMMAND = b"cposix\nsystem\n(S'touch %s'\ntR."
"""A pickle that runs a command when it is loaded."""


def pose_damage(mutate: Mutation, says: str = "refused", everywhere: bool = False) -> Callable[[Scene], Outcome]:
    """Damage the newer checkpoint (or both) of a run that was stopped after its second checkpoint, and resume."""

    def pose(scene: Scene) -> Outcome:
        setting = scene.setting
        run = copy_reference_run(scene)
        for step in (2 * setting.save_every, setting.save_every)[: 1 + everywhere]:
            mutate(scene, run / "checkpoints" / f"step-{step:06d}")
        began = time.monotonic()
        if everywhere:
            return _expect_rejection(scene, began)
        again = scene.resume()
        at = next((line for _, line in again.lines if "resumed from" in line), "")
        scene.expect_lines(again, began, says, within=15.0)
        scene.expect(at.endswith(f"at step {setting.save_every}"), f"it resumed from another step: {at[-60:] or 'none'}")
        scene.outcome.lost = setting.save_every
        scene.expect(not get_canary_path(scene).exists(), "the content of the file was executed")
        return scene.outcome

    return pose


def _expect_rejection(scene: Scene, began: float) -> Outcome:
    run = scene.start("--resume")
    code = run.wait()
    scene.expect_lines(run, began, "error[K002]", within=15.0)
    scene.expect(code == 2, f"exit code {code}, not 2")
    return scene.outcome


def copy_reference_run(scene: Scene) -> Path:
    """Copy the run without faults, in its state before the last checkpoint."""
    setting = scene.setting
    assert setting.run is not None
    run = scene.runs / setting.run.name
    shutil.copytree(setting.run, run, symlinks=True)
    (scene.runs / "latest").symlink_to(run.name)
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 2 * setting.save_every:
            shutil.rmtree(path)
    RunDirectory(run).truncate(2 * setting.save_every)
    return run


def get_canary_path(scene: Scene) -> Path:
    """Path of a file that exists if a checkpoint has executed code."""
    return scene.folder / "executed"


def _find_largest(path: Path) -> Path:
    return max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def _rewrite_file(file: Path, content: bytes) -> None:
    file.unlink()  # it may be a link to the file of another checkpoint
    file.write_bytes(content)


def _flip_tensor_bit(scene: Scene, path: Path) -> None:
    file = _find_largest(path)
    content = bytearray(file.read_bytes())
    content[scene.draw_number("byte", range(len(content) // 2, len(content)))] ^= 1 << scene.draw_number("bit", range(8))
    _rewrite_file(file, bytes(content))


def _flip_manifest_bit(scene: Scene, path: Path) -> None:
    content = bytearray((path / MANIFEST_NAME).read_bytes())
    content[scene.draw_number("byte", range(len(content)))] ^= 1 << scene.draw_number("bit", range(8))
    _rewrite_file(path / MANIFEST_NAME, bytes(content))


def _truncate_file(scene: Scene, path: Path) -> None:
    file = _find_largest(path)
    os.truncate(file, file.stat().st_size // 2)


def _delete_file(scene: Scene, path: Path) -> None:
    _find_largest(path).unlink()


def _swap_file(scene: Scene, path: Path) -> None:
    """Replace a file by the file of the same name in the previous checkpoint."""
    file = _find_largest(path)
    _rewrite_file(file, (path.parent / f"step-{scene.setting.save_every:06d}" / file.name).read_bytes())


def _interrupt_save(scene: Scene, path: Path) -> None:
    """Leave the state of a kill during the save: an unpublished directory with half a file."""
    building = path.with_name(f"{path.name}.tmp-0badcafe")
    os.rename(path, building)
    (building / MANIFEST_NAME).unlink()
    _truncate_file(scene, building)


def _reference_outside(scene: Scene, path: Path) -> None:
    """Write a manifest with a valid digest that names a file outside the checkpoint."""
    content = unseal_json((path / MANIFEST_NAME).read_bytes(), MANIFEST_NAME)
    name = _find_largest(path).name
    shutil.copy(path / name, scene.folder / "elsewhere.safetensors")
    other = os.path.relpath(scene.folder / "elsewhere.safetensors", path)
    content["files"][other] = content["files"].pop(name)
    for entry in content["tensors"].values():
        for piece in entry["pieces"]:
            piece["file"] = other if piece["file"] == name else piece["file"]
    _rewrite_file(path / MANIFEST_NAME, seal_json(content))


def _write_pickle(scene: Scene, path: Path) -> None:
    _rewrite_file(_find_largest(path), PICKLE_COMMAND % str(get_canary_path(scene)).encode())


REJECTED = "rejected by name; resumes from the previous checkpoint, with the same final weights"
CHECKPOINT_FAULTS = (
    Fault("checkpoint-flip", "one bit of a tensor in the newest checkpoint flips", REJECTED, pose_damage(_flip_tensor_bit)),
    Fault("checkpoint-manifest", "one bit of the newest manifest flips", REJECTED, pose_damage(_flip_manifest_bit)),
    Fault("checkpoint-cut", "a file of the newest checkpoint is truncated to half", REJECTED, pose_damage(_truncate_file)),
    Fault("checkpoint-missing", "a file of the newest checkpoint is missing", REJECTED, pose_damage(_delete_file)),
    Fault("checkpoint-swapped", "a file of the newest checkpoint is that of another step", REJECTED, pose_damage(_swap_file)),
    Fault("checkpoint-torn", "the newest checkpoint was interrupted by a kill during its save",
          "never read; resumes from the previous checkpoint", pose_damage(_interrupt_save, "resumed from")),
    Fault("checkpoint-outside", "a manifest with a valid digest names a file outside of the checkpoint",
          f"{REJECTED}; the file outside is not read", pose_damage(_reference_outside)),
    Fault("checkpoint-pickle", "a file of the newest checkpoint is a pickle that runs a command",
          f"{REJECTED}; nothing is executed", pose_damage(_write_pickle)),
    Fault("checkpoint-all", "all checkpoints are damaged",
          "rejected by name, exit 2; no new run is started", pose_damage(_flip_tensor_bit, everywhere=True)),
)  # fmt: skip


SPARE_BYTES = 1 << 20
"""Bytes for logs and metrics, in addition to checkpoints."""


def _measure_file(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _measure_checkpoint(scene: Scene) -> int:
    assert scene.setting.run is not None
    return max(_measure_file(path) for path in (scene.setting.run / "checkpoints").glob("step-*"))


def _mount_runs(scene: Scene, size: int) -> None:
    scene.require("mounting a file system needs root", scene.setting.mounts)
    scene.undo.append(mount_tmpfs(scene.runs, size))


def _start_to_checkpoint(scene: Scene) -> WatchedRun:
    """Start a run and wait for its first checkpoint and some steps after it."""
    run = scene.start()
    run.wait_for_step(scene.draw_step())
    run.wait_until(lambda: any(scene.runs.glob("latest/checkpoints/step-??????")) or run.code is not None, "a checkpoint")
    return run


def _expect_failure(scene: Scene, run: WatchedRun, since: float, *says: str, undo: Callable[[], object] | None = None) -> Outcome:
    code = run.wait()
    scene.expect_lines(run, since, *says, within=30.0)
    scene.expect(code == 1, f"exit code {code}, not 1")
    if undo is not None:
        undo()
    (scene.runs / "filled").unlink(missing_ok=True)
    scene.resume(lost=scene.checkpoint_loss)
    return scene.outcome


def _pose_no_room(scene: Scene) -> Outcome:
    """A disk with room for half a checkpoint."""
    size = _measure_checkpoint(scene)
    scene.require("checkpoints are too small for this fault", size > 1 << 15)
    _mount_runs(scene, SPARE_BYTES + 8 * size)
    run = scene.start()
    saved = lambda: any(scene.runs.glob("latest/checkpoints/step-??????"))  # noqa: E731
    run.wait_until(lambda: saved() or run.code is not None, "a checkpoint")
    since = time.monotonic()
    _fill_disk(scene.runs, size // 2)
    return _expect_failure(scene, run, since, "error[K004]", "MiB")


def _fill_disk(folder: Path, left: int) -> None:
    """Leave `left` bytes free, in one step; try again if another process writes at the same time."""
    with open(folder / "filled", "wb") as file:
        for _ in range(100):
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - left))
                return
    raise CannotPose("the disk could not be filled")


def _pose_full_disk(scene: Scene) -> Outcome:
    """Another process fills the disk completely."""
    _mount_runs(scene, SPARE_BYTES + 8 * _measure_checkpoint(scene))
    run = _start_to_checkpoint(scene)
    since = time.monotonic()
    with contextlib.suppress(OSError), open(scene.runs / "filled", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
    return _expect_failure(scene, run, since, "error[")


def _pose_read_only(scene: Scene) -> Outcome:
    """Make the checkpoint folder read-only. A full file system cannot be remounted while files are open for writing."""
    scene.require("mounting a file system needs root", scene.setting.mounts)
    run = _start_to_checkpoint(scene)
    folder, since = str((scene.runs / "latest").resolve() / "checkpoints"), time.monotonic()
    run_command("mount", "--bind", folder, folder)
    scene.undo.append(lambda: run_command("umount", "-l", folder))
    run_command("mount", "-o", "remount,bind,ro", folder)
    return _expect_failure(scene, run, since, "error[", undo=lambda: scene.undo.pop()())


def _pose_full_memory(scene: Scene) -> Outcome:
    scene.require("mounting a file system needs root", scene.setting.mounts)
    scene.require("the system has no shared memory", SHARED_MEMORY.is_dir())
    scene.undo.append(mount_tmpfs(SHARED_MEMORY, 1 << 16))
    began = time.monotonic()
    run = scene.start()
    code = run.wait()
    scene.expect_lines(run, began, NO_SNAPSHOTS, within=30.0)
    return expect_undisturbed(scene, code, run.find_line("restarting") is None)


DISK_FAULTS = (
    Fault("disk-no-room", "the disk has room for half a checkpoint",
          "rejected before a byte is written, with required and free space; the previous checkpoint is intact; --resume continues", _pose_no_room),
    Fault("disk-full", "the disk becomes full during a run",
          "reported, exit 1; written checkpoints are intact; --resume continues", _pose_full_disk),
    Fault("disk-read-only", "the checkpoint folder becomes read-only",
          "reported, exit 1; written checkpoints are intact; --resume continues", _pose_read_only),
    Fault("memory-full", "shared memory is full", "reported; continues without snapshots", _pose_full_memory),
)  # fmt: skip
