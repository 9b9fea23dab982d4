"""A command of the user, run with a recorder in each of its Python processes, watched, and ended with all that it started."""

import contextlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from plait.config.errors import PlaitError, Problem
from plait.scripts import recorder
from plait.scripts.recordings import Recording, recordings

LOG_BYTES = 16 << 20
"""A log that grows beyond this is emptied: what a command prints last is what matters."""
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
        (hook / "sitecustomize.py").symlink_to(Path(recorder.__file__).resolve())
        self.sizes = dict[Path, int]()
        self.counts = dict[Path, int]()
        self.changed = time.monotonic()
        self.descendants = dict[int, psutil.Process]()
        with open(self.log, "ab") as output:
            try:
                self.process = subprocess.Popen(
                    shlex.split(command.words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    env=_environment(command, folder, hook),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                fix = ("give each command as one quoted text:  plait prove \"python train.py\" \"torchrun ... train.py\"",)
                raise PlaitError(Problem("S001", f"the {command.side}'s command cannot be started: {command.words}", why=str(error), fix=fix)) from error

    @property
    def steps(self) -> int:
        """Steps that the slowest process has made, of those that have written anything."""
        return min(self.counts.values(), default=0)

    def look(self) -> bool:
        """Take in what is new; whether the command still runs. It is ended when nothing new comes. S004."""
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
        with contextlib.suppress(psutil.Error):
            self.descendants |= {each.pid: each for each in psutil.Process(self.process.pid).children(recursive=True)}
        if self.process.poll() is not None:
            return False
        if time.monotonic() - self.changed > self.command.patience:
            self.end()
            raise PlaitError(self._stuck())
        return True

    def _stuck(self) -> Problem:
        patience = f"{self.command.patience:.0f} s"
        if not self.counts:
            what = f"the {self.command.side} made no optimizer step within {patience}"
            return Problem("S003", what, why=self.last_lines(), fix=("--limit 600   a longer time without a step",))
        behind = min(self.counts, key=lambda path: self.counts[path])
        far = max(self.counts.values())
        why = f"processes made {', '.join(str(count) for count in self.counts.values())} steps; process {behind.stem} is behind"
        why = why if self.steps < far else f"all {len(self.counts)} processes made {far} steps, and nothing since"
        fix = ("a rank that steps less often than the others makes them wait: give all ranks as many batches", "--limit 600   a longer time without a step")
        return Problem("S004", f"the {self.command.side} did nothing for {patience} after step {self.steps}", why=why, where=self.last_lines(), fix=fix)

    def last_lines(self, count: int = 8) -> str:
        """The last lines of the output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace")[-4000:].strip().splitlines()[-count:])
        return ""

    def end(self) -> None:
        """End the command and all that it started."""
        with contextlib.suppress(psutil.Error):
            self.descendants |= {each.pid: each for each in psutil.Process(self.process.pid).children(recursive=True)}
        if self.process.poll() is None:
            self.process.kill()
        for each in self.descendants.values():
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.process.wait()

    def recorded(self) -> tuple[Recording, ...]:
        """What its processes recorded. S001 to S003, S005, S011."""
        code, side = self.process.returncode, self.command.side
        if (unsupported := self.folder / "unsupported").exists():
            fix = ("plait prove follows torch 2.11 to 2.13",)
            raise PlaitError(Problem("S005", "the recorder cannot follow this torch", why=unsupported.read_text(encoding="utf-8"), fix=fix))
        found = recordings(self.folder)
        if found:
            return found
        started = [*self.folder.glob("*.jsonl")]
        if any(b'"complete": false' in path.read_bytes() for path in started):
            why = f"the tensors of one step take more than {self.command.room / 2**30:.3g} GiB"
            raise PlaitError(Problem("S011", "the tensors of the first step do not fit", why=why, fix=("--room 64   GiB of a process's tensors on disk",)))
        if code:
            raise PlaitError(Problem("S001", f"the {side} ended with {code} before its first step", why=self.last_lines(), where=self.command.words))
        if not started:
            why = "no Python process of it imported torch with the recorder: `python -I` and `-E` ignore PYTHONPATH, and other programs do not read it"
            raise PlaitError(Problem("S002", f"nothing of the {side} was recorded", why=why, where=self.command.words, fix=("python train.py",)))
        why = "it ended, and no torch.optim.Optimizer was stepped after a forward pass in training mode"
        raise PlaitError(Problem("S003", f"the {side} made no optimizer step", why=why, where=self.command.words, fix=("train for at least one step",)))


def _environment(command: ScriptCommand, folder: Path, hook: Path) -> dict[str, str]:
    settings = {
        "out": str(folder), "steps": command.steps, "limit": command.room, "float64": command.float64, "watch": command.watch,
        "replay": str(command.replay) if command.replay else None,
    }  # fmt: skip
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, recorder.VARIABLE: json.dumps(settings)}


def run(commands: Mapping[Path, ScriptCommand], show: Callable[[str, int, int], None]) -> list[tuple[Recording, ...]]:
    """Run commands at once, each in its folder, and return what each recorded. `show` gets a side, and steps done and to do."""
    running = list[RunningCommand]()
    try:
        for folder, command in commands.items():
            running.append(RunningCommand(command, folder))
        while any([each.look() for each in running]):
            _show(running, show)
            time.sleep(0.05)
        return [each.recorded() for each in running]
    finally:
        for each in running:
            each.end()


def _show(running: Sequence[RunningCommand], show: Callable[[str, int, int], None]) -> None:
    total = sum(each.command.steps for each in running)
    show(running[0].command.side, min(total, sum(each.steps for each in running)), total)
