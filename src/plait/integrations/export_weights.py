"""The weights of a run for those who use them while it trains: a server that writes samples, an evaluation on another machine.

Every so many steps the checkpoint of a step is written once more, as a folder of safetensors that `from_pretrained`, vLLM and SGLang
open, with the model's `config.json` and its tokenizer where the run has them. Training has made the checkpoint anyway, and does not
wait: a thread of rank 0 reads it, links keeping its files alive however soon it is pruned. A folder gets its name when it is whole,
by one rename, and then `latest` points to it. A reader of `latest` finds a whole folder, or, in the instant in which a resumed run
replaces that of the same step, none.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from plait import Callback, PlaitError
from plait.checkpoint.export import Wanted, export_folder
from plait.checkpoint.saving import SaveThread, discard, sync_directory
from plait.config.errors import Problem, in_a_line
from plait.engine.callbacks import RunningEngine
from plait.engine.step import Step

LIMIT = 5 * 10**9
"""Bytes of tensors in a file, as `save_pretrained` makes them."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LINKED = ".export-"
"""How the names of folders begin in which a checkpoint's files are kept while they are read."""


class ExportWeights(Callback):
    """Writes the weights of every checkpoint whose step is a multiple of `every` as `folder/step-000500`, `folder/latest`.

    `folder`: by default `export` in the run directory. `dtype`: fp32, fp16 or bf16 instead of the weights' own. `keep`: so many
    folders stay. A checkpoint that comes while the one before is still being written is left out, unless it is the last. What
    goes wrong is said, and training goes on. U018 for values that cannot be.
    """

    def __init__(self, every: int, folder: str | Path | None = None, dtype: str | None = None, keep: int = 3):
        if every < 1 or keep < 1 or dtype not in (None, *DTYPES):
            what = f"ExportWeights(every={every}, dtype={dtype}, keep={keep}) cannot be"
            why = f"every and keep are at least 1, and dtype is one of {', '.join(DTYPES)}"
            raise PlaitError(Problem("U018", what, why=why))
        self.every, self.folder, self.keep = every, None if folder is None else Path(folder), keep
        self.wanted = Wanted(LIMIT, DTYPES[dtype] if dtype is not None else None)
        self._thread: SaveThread | None = None
        self._name = ""

    def on_start(self, engine: RunningEngine) -> None:
        """Clear away what a killed run has left."""
        if engine.place.rank == 0:
            for path in (*self._folder(engine).glob("step-*.tmp"), *engine.checkpoints.directory.glob(f"{LINKED}*")):
                shutil.rmtree(path, ignore_errors=True)

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        """Tell of an export that has ended."""
        if self._thread is not None and self._thread.state:
            self._ended()

    def on_save(self, engine: RunningEngine, path: Path) -> None:
        """Export it, if it is time."""
        if engine.place.rank != 0 or int(path.name[5:]) % self.every:
            return
        if self._thread is not None and engine.position.step >= engine.job.steps:
            self.on_end(engine)
        if self._thread is not None and not self._thread.state:
            print(f"note  the weights of {path.name} are not exported: those of {self._name} are still being written")
            return
        self._ended()
        work = partial(export_to, linked(path), self._folder(engine), path.name, self.wanted, self.keep)
        self._name, self._thread = path.name, SaveThread(work)

    def on_end(self, engine: RunningEngine) -> None:
        """Wait for the export that is being written."""
        if self._thread is not None:
            self._thread.wait(lambda: engine.place.within("checkpoint"))
            engine.place.within("checkpoint")
            self._ended()

    def _ended(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread.error is not None:
            print(f"note  the weights of {self._name} are not exported; training goes on: {in_a_line(thread.error)}")

    def _folder(self, engine: RunningEngine) -> Path:
        return engine.checkpoints.directory.parent / "export" if self.folder is None else self.folder


def linked(checkpoint: Path) -> Path:
    """A folder beside it with its files, which stays when it is pruned; itself, where files cannot be linked."""
    beside = checkpoint.with_name(f"{LINKED}{checkpoint.name[5:]}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        for file in checkpoint.iterdir():
            os.link(file, beside / file.name)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        return checkpoint
    return beside


def export_to(
    checkpoint: Path, folder: Path, name: str, wanted: Wanted, keep: int, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Write the weights of a checkpoint as `folder/name`, have `latest` point to it, and remove old ones but `keep`."""
    building, final = folder / f"{name}.tmp", folder / name
    try:
        shutil.rmtree(building, ignore_errors=True)
        export_folder(checkpoint, building, wanted, adapter=False, merge=False)
        if final.exists():
            discard(final)
        os.rename(building, final)
        beside = folder / ".latest.new"
        beside.unlink(missing_ok=True)
        beside.symlink_to(name)
        os.replace(beside, folder / "latest")
        sync_directory(folder)
        steps = sorted(p for p in folder.glob("step-*") if p.name[5:].isdecimal() and p != final)
        for old in steps[: max(0, len(steps) + 1 - keep)]:
            discard(old)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if checkpoint.name.startswith(LINKED):
            shutil.rmtree(checkpoint, ignore_errors=True)
