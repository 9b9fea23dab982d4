"""A command of the user, run with a recorder in each of its Python processes, watched, and ended with all that it started."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from plait.config.errors import PlaitError, Problem
from plait.launch.child import environment_with
from plait.scripts import sitecustomize
from plait.scripts.recordings import Recording, recordings

LOG_BYTES = 16 << 20
"""A log that grows beyond this is emptied: what a command prints last is what matters."""
OFTEN = 0.5
"""Seconds between two looks at the processes of a command."""
STEP = b'{"is": "step"'


@dataclass(frozen=True)
class ScriptCommand:
    """A command of the user, and what its processes are told."""

    side: str
    """`candidate`, or `reference`."""
    words: str
    steps: int
    patience: float
    """Seconds without a new step or batch after which the command is ended."""
    room: int
    """Bytes of tensors that a process may store."""
    float64: bool = False
    watch: bool = False
    replay: Path | None = None


class RunningCommand:
    """A command that runs. Its events are in `folder`, its output in `log`."""

    def __init__(self, command: ScriptCommand, folder: Path):
        self.command, self.folder, self.log = command, folder, folder / "log"
        folder.mkdir(parents=True)
        (folder.parent / "tensors").mkdir(exist_ok=True)
        hook = folder / "path"
        hook.mkdir()
        (hook / "sitecustomize.py").symlink_to(Path(sitecustomize.__file__).resolve())
        settings = {
            "out": str(folder), "tensors": str(folder.parent / "tensors"), "steps": command.steps, "room": command.room, "float64": command.float64,
            "watch": command.watch, "replay": str(command.replay) if command.replay else None,
        }  # fmt: skip
        (hook / sitecustomize.SETTINGS).write_text(json.dumps(settings))
        self.sizes = dict[Path, int]()
        self.counts = dict[Path, int]()
        self.changed = time.monotonic()
        self.descendants, self.counted = dict[int, psutil.Process](), 0.0
        with open(self.log, "ab") as output:
            try:
                self.process = subprocess.Popen(
                    shlex.split(command.words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    env=environment_with(hook),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                what = f"the {command.side}'s command cannot be started: {command.words}"
                fix = ('give each command as one quoted text:  plait prove "python train.py" "torchrun ... train.py"',)
                raise PlaitError(Problem("E001", what, why=str(error), fix=fix)) from error

    @property
    def steps(self) -> int:
        """Steps that the slowest process has made, of those that have written anything."""
        return min(self.counts.values(), default=0)

    def look(self) -> bool:
        """Take in what is new; whether the command still runs. It is ended when nothing new comes. E004."""
        for path in self.folder.glob("*.jsonl"):
            before = self.sizes.get(path, 0)
            with open(path, "rb") as file:
                file.seek(before)
                new = file.read()
            if new:
                self.sizes[path], self.changed = before + len(new), time.monotonic()
                self.counts[path] = self.counts.get(path, 0) + new.count(STEP)
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_BYTES:
                os.truncate(self.log, 0)
        if self.process.poll() is not None:
            return False
        if time.monotonic() - self.counted > OFTEN:
            self.count()
        if time.monotonic() - self.changed > self.command.patience:
            self.end()
            raise PlaitError(self._stuck())
        return True

    def _stuck(self) -> Problem:
        patience, longer = f"{self.command.patience:.0f} s", "--limit 600   a longer time without a step"
        if not self.counts:
            return Problem("E003", f"the {self.command.side} made no optimizer step within {patience}", why=self.last_lines(), fix=(longer,))
        why = f"its processes made {', '.join(map(str, self.counts.values()))} steps, and nothing since"
        fix = ("give all ranks as many batches: one that steps less often makes the others wait", longer)
        return Problem("E004", f"the {self.command.side} did nothing for {patience}", why=why, where=self.last_lines(), fix=fix)

    def last_lines(self, count: int = 8) -> str:
        """The last lines of the output, of a launcher's those before its own."""
        with contextlib.suppress(OSError):
            lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            of_launcher = (i for i, line in enumerate(lines) if i and re.search(r"elastic.multiprocessing.api|torch/distributed/run.py", line))
            end = next(of_launcher, len(lines))
            return "\n".join(lines[:end][-count:])
        return ""

    def count(self) -> None:
        """Remember the processes that it has started: some outlive it."""
        self.counted = time.monotonic()
        with contextlib.suppress(psutil.Error):
            self.descendants |= {each.pid: each for each in psutil.Process(self.process.pid).children(recursive=True)}

    def end(self) -> None:
        """End the command and all that it started."""
        self.count()
        if self.process.poll() is None:
            self.process.kill()
        for each in self.descendants.values():
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.process.wait()

    def recorded(self) -> tuple[Recording, ...]:
        """What its processes recorded. E001 to E003, E005, E011."""
        code, side, words = self.process.returncode, self.command.side, self.command.words
        if (unsupported := self.folder / "unsupported").exists():
            why, fix = unsupported.read_text(encoding="utf-8"), ("plait prove follows torch 2.11 to 2.13",)
            raise PlaitError(Problem("E005", "the recorder cannot follow this torch", why=why, fix=fix))
        if found := recordings(self.folder):
            counts = [len(each.rounds) for each in found]
            if code or len({*counts}) > 1:
                what = f"the {side} ended with {code} after {min(counts)} of {self.command.steps} steps"
                why = f"its processes made {', '.join(map(str, counts))} steps"
                fix = ("give all ranks as many batches",) if len({*counts}) > 1 else (f"run the command by itself:  {words}",)
                raise PlaitError(Problem("E004", what, why=why, where=self.last_lines(), fix=fix))
            return found
        if any(b'"complete": false' in path.read_bytes() for path in self.folder.glob("*.jsonl")):
            why, fix = f"those of one step take more than {self.command.room / 2**30:.3g} GiB", ("--room 64   GiB that a process may write",)
            raise PlaitError(Problem("E011", "the tensors of the first step do not fit", why=why, fix=fix))
        if code:
            raise PlaitError(Problem("E001", f"the {side} ended with {code} before its first step", why=self.last_lines(), where=words))
        if not self.counts and not [*self.folder.glob("*.jsonl")]:
            why = "no Python process of it imported torch with the recorder: `python -I` and `-E` ignore PYTHONPATH, other programs do not read it"
            raise PlaitError(Problem("E002", f"nothing of the {side} was recorded", why=why, where=words, fix=("python train.py",)))
        why = "it ended, and no torch.optim.Optimizer stepped after a forward pass in training mode"
        raise PlaitError(Problem("E003", f"the {side} made no optimizer step", why=why, where=words, fix=("train for at least one step",)))


def run(commands: Mapping[Path, ScriptCommand], show: Callable[[str, int, int], None]) -> list[tuple[Recording, ...]]:
    """Run commands at once, each in its folder, and return what each recorded. `show` gets a side, and steps done and to do."""
    running = list[RunningCommand]()
    try:
        for folder, command in commands.items():
            running.append(RunningCommand(command, folder))
        while sum(each.look() for each in running):  # all of them
            _show(running, show)
            time.sleep(0.1)
        return [each.recorded() for each in running]
    finally:
        for each in running:
            each.end()


def _show(running: Sequence[RunningCommand], show: Callable[[str, int, int], None]) -> None:
    total = sum(each.command.steps for each in running)
    show(running[0].command.side, min(total, sum(each.steps for each in running)), total)
