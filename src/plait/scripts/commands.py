"""Run a user's command with a recorder in each of its Python processes; supervise it, and end it with all processes that it started."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from plait.config.errors import PlaitError, problem_from_page
from plait.launch.child import prepend_python_path
from plait.scripts import sitecustomize
from plait.scripts.recordings import Recording, read_recordings

LOG_BYTES = 16 << 20
"""Size at which a log is emptied: only the last output of a command matters."""
Show = Callable[[str, int, int], None]
"""Shows the progress of a command: its side, the completed steps, and the total."""


@dataclass(frozen=True)
class ScriptCommand:
    """A command of the user, and the settings of the recorders in its processes."""

    side: Literal["reference", "candidate"]
    words: str
    steps: int
    limit: float
    """Seconds without a new step or batch after which the command is ended."""
    room: int
    """Maximum bytes of tensors that a process may store."""
    float64: bool = False
    watch: bool = False
    replay: Mapping[str, Any] = field(default_factory=dict)
    """For a reference: the first weights, and the `rows` as indices or their `contents`; empty for a candidate."""


class RunningCommand:
    """A running command. Its events and its output are in `folder`."""

    def __init__(self, command: ScriptCommand, folder: Path):
        self.command, self.folder, self.log = command, folder, folder / "log"
        self.hook, tensors = folder / "path", folder.parent / "tensors"
        self.hook.mkdir(parents=True)
        tensors.mkdir(exist_ok=True)
        (self.hook / "sitecustomize.py").symlink_to(Path(sitecustomize.__file__).resolve())
        (self.hook / sitecustomize.SETTINGS).write_text(json.dumps({**vars(command), "out": folder, "tensors": tensors}, default=str))
        self.sizes, self.counts, self.changed = dict[Path, int](), list[int](), time.monotonic()
        with open(self.log, "ab") as output:
            try:
                self.process = subprocess.Popen(
                    shlex.split(command.words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    env=prepend_python_path(self.hook),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                raise PlaitError(problem_from_page("E001", f"the {command.side} cannot be started: {command.words}", str(error))) from error

    def poll(self) -> bool:
        """Read new events. Returns whether the command still runs. E003, E004 if it made no progress for too long."""
        sizes = {path: path.stat().st_size for path in self.folder.glob("*.jsonl")}
        if sizes != self.sizes:
            self.sizes, self.changed = sizes, time.monotonic()
            self.counts = [path.read_bytes().count(b'{"is": "step"') for path in sizes]
        if self.log.stat().st_size > LOG_BYTES:
            os.truncate(self.log, 0)
        if self.process.poll() is not None:
            return False
        if time.monotonic() - self.changed > self.command.limit:
            what, made = f"the {self.command.side} made no progress for {self.command.limit:.0f} s", ", ".join(map(str, self.counts))
            why = f"its processes made {made} optimizer steps, and nothing since" if any(self.counts) else "it made no optimizer step"
            raise PlaitError(problem_from_page("E004" if any(self.counts) else "E003", what, why, self.last_lines()))
        return True

    def last_lines(self, count: int = 8) -> str:
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        of_launcher = (i for i, line in enumerate(lines) if i and re.search(r"elastic.multiprocessing.api|torch/distributed/run.py", line))
        return "\n".join(lines[: next(of_launcher, len(lines))][-count:])

    def end(self) -> None:
        """End the command and all its processes: its session, and processes with its environment in other sessions."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for each in (*psutil.process_iter(), *psutil.process_iter()):  # twice, for processes started meanwhile
            with contextlib.suppress(psutil.Error):
                if str(self.hook) in each.environ().get("PYTHONPATH", ""):
                    each.kill()

    def get_recordings(self) -> tuple[Recording, ...]:
        """Return the recordings of its processes. E001 to E005, E011."""
        code, side, words = self.process.returncode, self.command.side, self.command.words
        events = [path.read_bytes() for path in self.folder.glob("*.jsonl")]
        found, unsupported = read_recordings(self.folder), self.folder / "unsupported"
        counts = [len(each.rounds) for each in found]
        if unsupported.exists():
            problem = "E005", "the recorder does not support this torch version", unsupported.read_text(encoding="utf-8")
        elif found and not code and len({*counts}) == 1:
            return found
        elif found:
            what = f"the {side} ended with {code} after {min(counts)} of {self.command.steps} steps"
            problem = "E004", what, f"its processes made {', '.join(map(str, counts))} steps", self.last_lines()
        elif any(b'"complete": false' in each for each in events):
            problem = "E011", "the tensors of the first step do not fit", f"those of one step take more than {self.command.room / 2**30:.3g} GiB"
        elif code:
            problem = "E001", f"the {side} ended with {code} before its first step", self.last_lines(), words
        elif not events:
            problem = "E002", f"nothing of the {side} was recorded", "none of its Python processes imported torch with the recorder", words
        else:
            why = "it ended without a step of a torch.optim.Optimizer after a forward pass in training mode"
            problem = "E003", f"the {side} made no optimizer step", why, words
        raise PlaitError(problem_from_page(*problem))


def run_commands(commands: Mapping[Path, ScriptCommand], show: Show) -> list[tuple[Recording, ...]]:
    """Run commands concurrently, each in its folder, and return the recordings of each. E001 to E005, E011."""
    running = list[RunningCommand]()
    try:
        for folder, command in commands.items():
            running.append(RunningCommand(command, folder))
        while sum(each.poll() for each in running):  # all of them
            done = sum(min(each.command.steps, *each.counts) for each in running if each.counts)  # by the slowest process
            show(running[0].command.side, done, sum(each.command.steps for each in running))
            time.sleep(0.1)
        return [each.get_recordings() for each in running]
    finally:
        for each in running:
            each.end()
