"""Checkpoints that are damaged before a resume: each is refused by name, and the one before is used."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from plait.chaos.fault import Fault
from plait.chaos.scene import Outcome, Scene
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
        scene.expect(at.endswith(f"at step {setting.every}"), f"it went on elsewhere: {at[-60:] or 'nowhere'}")
        scene.measured.lost = setting.every
        scene.expect(not canary(scene).exists(), "what was in the file was executed")
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


NAMED = "refused by name; goes on from the checkpoint before, to the same weights"
FAULTS = (
    Fault("checkpoint-flip", "one bit of a tensor in the newest checkpoint flips", NAMED, damaged(_flip)),
    Fault("checkpoint-manifest", "one bit of the newest manifest flips", NAMED, damaged(_flip_manifest)),
    Fault("checkpoint-cut", "a file of the newest checkpoint is cut in half", NAMED, damaged(_cut)),
    Fault("checkpoint-missing", "a file of the newest checkpoint is missing", NAMED, damaged(_missing)),
    Fault("checkpoint-swapped", "a file of the newest checkpoint is that of another step", NAMED, damaged(_swapped)),
    Fault("checkpoint-torn", "the newest checkpoint is what a kill amid its save leaves",
          "never read; goes on from the one before", damaged(_torn, "resumed from")),
    Fault("checkpoint-outside", "a manifest, well sealed, names a file elsewhere",
          f"{NAMED}; nothing outside is read", damaged(_outside)),
    Fault("checkpoint-pickle", "a file is a pickle that runs a command",
          f"{NAMED}; nothing is executed", damaged(_pickle)),
    Fault("checkpoint-all", "all checkpoints are damaged",
          "refused by name, exit 2: it does not start anew unasked", damaged(_flip, everywhere=True)),
)  # fmt: skip
