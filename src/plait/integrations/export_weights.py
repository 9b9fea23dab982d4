"""Export the weights during a run, for an inference server or an evaluation on another machine.

Every `every` steps the checkpoint is also written as a folder of safetensors for `from_pretrained`, vLLM and SGLang, with the model's
`config.json` and, if the run has it, its tokenizer. Training writes the checkpoint anyway, and does not wait: a thread of rank 0 reads it.
Hard links keep its files if the checkpoint is pruned.

A complete folder gets its name by one rename, and then `latest` points to it. A
reader of `latest` finds a complete folder, or briefly none while a resumed run replaces the folder of the same step.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from plait import Callback, PlaitError
from plait.checkpoint.export import ExportOptions, export_folder
from plait.checkpoint.saving import SaveThread, delete_directory, sync_directory
from plait.config.errors import Problem, summarize_error
from plait.engine.callbacks import RunningEngine
from plait.engine.step import Step

MAX_FILE_BYTES = 5 * 10**9
"""Maximum bytes of tensors per file, as in `save_pretrained`."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LINK_PREFIX = ".export-"
"""Prefix of folders with links to a checkpoint's files while it is read."""


class ExportWeights(Callback):
    """Writes the weights of every checkpoint whose step is a multiple of `every` as `folder/step-000500`, `folder/latest`.

    `folder`: by default `export` in the run directory. `dtype`: fp32, fp16 or bf16 instead of the weights' own. `keep`: number of folders to
    keep. A checkpoint during a running export is skipped, unless it is the last. Errors are printed, and training continues. Raises U018 for
    invalid values.
    """

    def __init__(self, every: int, folder: str | Path | None = None, dtype: str | None = None, keep: int = 3):
        if every < 1 or keep < 1 or dtype not in (None, *DTYPES):
            what = f"ExportWeights(every={every}, dtype={dtype}, keep={keep}) is invalid"
            why = f"every and keep are at least 1, and dtype is one of {', '.join(DTYPES)}"
            raise PlaitError(Problem("U018", what, why=why))
        self.every, self.folder, self.keep = every, None if folder is None else Path(folder), keep
        self.export_options = ExportOptions(MAX_FILE_BYTES, DTYPES[dtype] if dtype is not None else None)
        self._thread: SaveThread | None = None
        self._name = ""

    def on_start(self, engine: RunningEngine) -> None:
        """Remove leftovers of a killed run."""
        if engine.place.rank == 0:
            for path in (*self._find_folder(engine).glob("step-*.tmp"), *engine.checkpoints.directory.glob(f"{LINK_PREFIX}*")):
                shutil.rmtree(path, ignore_errors=True)

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        """Report an export that has ended."""
        if self._thread is not None and self._thread.state:
            self._report_finished()

    def on_save(self, engine: RunningEngine, path: Path) -> None:
        """Export the checkpoint, if its step is due."""
        if engine.place.rank != 0 or int(path.name[5:]) % self.every:
            return
        if self._thread is not None and engine.position.step >= engine.job.steps:
            self.on_end(engine)
        if self._thread is not None and not self._thread.state:
            print(f"note  the weights of {path.name} are not exported: those of {self._name} are still being written")
            return
        self._report_finished()
        work = partial(export_checkpoint, link_files(path), self._find_folder(engine), path.name, self.export_options, self.keep)
        self._name, self._thread = path.name, SaveThread(work)

    def on_end(self, engine: RunningEngine) -> None:
        """Wait for the running export."""
        if self._thread is not None:
            self._thread.wait(lambda: engine.place.set_phase("checkpoint"))
            engine.place.set_phase("checkpoint")
            self._report_finished()

    def _report_finished(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread.error is not None:
            print(f"note  the weights of {self._name} are not exported; training continues: {summarize_error(thread.error)}")

    def _find_folder(self, engine: RunningEngine) -> Path:
        return engine.checkpoints.directory.parent / "export" if self.folder is None else self.folder


def link_files(checkpoint: Path) -> Path:
    """Create a folder next to a checkpoint with hard links to its files; return the checkpoint itself if links are unsupported."""
    beside = checkpoint.with_name(f"{LINK_PREFIX}{checkpoint.name[5:]}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        for file in checkpoint.iterdir():
            os.link(file, beside / file.name)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        return checkpoint
    return beside


def export_checkpoint(
    checkpoint: Path, folder: Path, name: str, options: ExportOptions, keep: int, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Write the weights of a checkpoint as `folder/name`, point `latest` to it, and remove all but the last `keep` folders."""
    building, final = folder / f"{name}.tmp", folder / name
    try:
        shutil.rmtree(building, ignore_errors=True)
        export_folder(checkpoint, building, options, adapter=False, merge=False)
        if final.exists():
            delete_directory(final)
        os.rename(building, final)
        beside = folder / ".latest.new"
        beside.unlink(missing_ok=True)
        beside.symlink_to(name)
        os.replace(beside, folder / "latest")
        sync_directory(folder)
        steps = sorted(p for p in folder.glob("step-*") if p.name[5:].isdecimal() and p != final)
        for old in steps[: max(0, len(steps) + 1 - keep)]:
            delete_directory(old)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if checkpoint.name.startswith(LINK_PREFIX):
            shutil.rmtree(checkpoint, ignore_errors=True)
