"""A `plait train` in a process of its own, seen from outside: what it said when, which steps it wrote down when, how it ended.

It is forked from this process, which has imported torch, in a session of its own, and ends with this process. What it starts
and leaves behind becomes a child of this process (Linux), where it is found.

What a run left: losses, the samples of every step, evaluations, weights and optimizer state, to be held against another's.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.reading import tensors
from plait.launch.child import die_with_parent
from plait.launch.place import AROUND, Place

Main = Callable[[list[str]], int]
"""A command line: words to exit code."""
PATIENCE = 90.0
"""Seconds after which whatever a fault waits for has not come."""
_ADOPT = 36
"""Linux's PR_SET_CHILD_SUBREAPER."""


class NotInTime(Exception):
    """What was waited for did not come."""


@dataclass(frozen=True)
class Beginning:
    """What is done in the new process before the command."""

    around: Callable[[Place], Place] = lambda place: place
    before: Callable[[], None] = lambda: None


class Watched:
    """A running command."""

    def __init__(self, main: Main, words: list[str], runs: Path, start: Beginning):
        self.runs, self.began = runs, time.monotonic()
        self.code: int | None = None
        self.lines: list[tuple[float, str]] = []
        self.steps: list[tuple[float, int]] = []
        """When the last row of the metrics became that of which step."""
        self._rest, self._seen = b"", (0, 0)
        reading, writing = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _live(main, words, start, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self._reading = reading

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def step(self) -> int:
        """The last step that it wrote down."""
        return self.steps[-1][1] if self.steps else 0

    def look(self) -> None:
        """Take in what is new."""
        if self._reading < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reading, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.lines += [(time.monotonic(), line.decode("utf-8", "replace")) for line in lines]
        with contextlib.suppress(OSError):
            path = self.runs / "latest" / "metrics.jsonl"
            stat = path.stat()
            if self._seen != (stat.st_mtime_ns, stat.st_size):
                self._seen = (stat.st_mtime_ns, stat.st_size)
                step = _last(path.read_bytes())
                if step != self.step:
                    self.steps.append((time.monotonic(), step))
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.look()

    def until(self, ready: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Wait, and look meanwhile; raises `NotInTime`."""
        end = time.monotonic() + patience
        while True:
            self.look()
            if ready():
                return
            if time.monotonic() > end:
                raise NotInTime(f"{what} did not come within {patience:.0f} s")
            time.sleep(0.004)

    def reaches(self, step: int) -> None:
        """Wait for a step to be done."""
        self.until(lambda: self.step >= step or self.code is not None, f"step {step}")

    def wait(self, patience: float = PATIENCE) -> int:
        """The exit code."""
        self.until(lambda: self.code is not None, "the end", patience)
        assert self.code is not None
        return self.code

    def told(self, words: str, since: float = 0.0) -> tuple[float, str] | None:
        """The first line after a moment that has these words, and when it came."""
        return next(((when, line) for when, line in self.lines if when >= since and words in line), None)

    def forked(self) -> list[int]:
        """Processes that it forked, in order."""
        with contextlib.suppress(OSError):
            return sorted(int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        return []

    def end(self) -> None:
        """End everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1


def _last(content: bytes) -> int:
    for line in reversed(content.splitlines()):
        with contextlib.suppress(ValueError, KeyError):
            row = json.loads(line)
            if "loss" in row:
                return int(row["step"])
    return 0


def _live(main: Main, words: list[str], start: Beginning, writing: int) -> None:
    """The life of the process that runs the command; never returns."""
    code = 99
    try:
        os.setsid()
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (writing, 1), (writing, 2)):
            os.dup2(descriptor, target)
        os.close(writing)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        start.before()
        AROUND.set(start.around)
        code = main(words)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def adopt() -> None:
    """Have processes that are left behind by those that this one starts become its children (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT, 1)


def orphans(patience: float = 3.0) -> list[str]:
    """Children that are still there after some seconds, which are ended then; those that have ended are taken in."""
    end = time.monotonic() + patience
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = psutil.Process().children(recursive=True)
        if not left or time.monotonic() > end:
            break
        time.sleep(0.01)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return [f"process {process.pid}" for process in left]


ALIKE = 1e-3
"""How far the losses of a run may lie from those of another plan's, as a share: sums are in another order from then on."""


@dataclass(frozen=True)
class Record:
    """Of one run."""

    losses: dict[int, object]
    samples: dict[int, set[tuple[int, ...]]]
    evaluations: dict[int, object]
    tensors: dict[str, Tensor]
    twice: list[int]
    """Steps of which there are two rows."""

    @staticmethod
    def of(run: Path) -> "Record":
        """Read it from the run's directory."""
        losses, evaluations, twice = dict[int, object](), dict[int, object](), list[int]()
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            if "loss" in row:
                twice += [row["step"]] * (row["step"] in losses)
                losses[row["step"]] = row["loss"]
            elif "evaluation" in row:
                evaluations[row["step"]] = row["evaluation"]
        samples: dict[int, set[tuple[int, ...]]] = {}
        for path in (run / "events").glob("*.jsonl"):
            for row in map(json.loads, path.read_text().splitlines()):
                samples.setdefault(row["step"], set()).add((row["epoch"], row["start"], row["size"]))
        found = Checkpoints(run / "checkpoints").found()
        return Record(losses, samples, evaluations, tensors(found[0]) if found else {}, twice)

    def differs(self, other: "Record") -> list[str]:
        """In what it is not the other, bit for bit."""
        wrong = [f"step {self.twice[0]} was written down twice"] if self.twice else []
        if self.samples != other.samples:
            wrong.append("samples differ")
        if self.losses != other.losses:
            wrong.append("losses differ")
        if self.evaluations != other.evaluations:
            wrong.append("evaluations differ")
        same = self.tensors.keys() == other.tensors.keys()
        if not same or not all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items()):
            wrong.append("weights or optimizer state differ")
        return wrong

    def close(self, other: "Record") -> tuple[float, list[str]]:
        """As under another plan: (largest difference of a loss, as a share; in what it is another training)."""
        wrong = ["samples differ"] if self.samples != other.samples else []
        if self.losses.keys() != other.losses.keys():
            return 1.0, [*wrong, "other steps"]
        pairs = [(float(str(loss)), float(str(other.losses[step]))) for step, loss in self.losses.items()]
        share = max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)
        return share, wrong + [f"a loss differs by {share:.1e}"] * (share > ALIKE)
