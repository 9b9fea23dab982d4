"""A `plait train` in its own process, observed from outside: its output lines and metrics rows with times, and its exit code.

It is forked from this process, which has imported torch, and runs in its own session. It ends with this process. Orphaned processes of the
run become children of this process (Linux), which finds them.

The record of a run has losses, samples of every step, evaluations, weights and optimizer state, for comparison with another run.
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

from plait.checkpoint.checkpoint_reader import read_checkpoint_tensors
from plait.checkpoint.checkpoints import Checkpoints
from plait.launch.child import die_with_parent, end_process, fork_process
from plait.launch.place import PLACE_WRAPPER, Place

CommandLine = Callable[[list[str]], int]
"""A command line: words -> exit code."""
WAIT_SECONDS = 90.0
"""Time limit for any event that a fault waits for."""
_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER."""


class WaitTimeout(Exception):
    """An expected event did not occur in time."""


@dataclass(frozen=True)
class ChildSetup:
    """Functions that run in the new process before the command."""

    around: Callable[[Place], Place] = lambda place: place
    before: Callable[[], None] = lambda: None


class WatchedRun:
    """A running command."""

    def __init__(self, main: CommandLine, words: list[str], runs: Path, start: ChildSetup):
        self.runs, self.began = runs, time.monotonic()
        self.code: int | None = None
        self.lines: list[tuple[float, str]] = []
        self.steps: list[tuple[float, int]] = []
        """(time, step) of each change of the last metrics row."""
        self._rest, self._seen = b"", (0, 0)
        reading, writing = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = fork_process()
        if self.pid == 0:
            os.close(reading)
            _run_child(main, words, start, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self._reading = reading

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def step(self) -> int:
        """The last step in the metrics."""
        return self.steps[-1][1] if self.steps else 0

    def poll(self) -> None:
        """Read new output and metrics."""
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
                step = _read_last_step(path.read_bytes())
                if step != self.step:
                    self.steps.append((time.monotonic(), step))
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.poll()

    def wait_until(self, ready: Callable[[], bool], what: str, patience: float = WAIT_SECONDS) -> None:
        """Wait and poll until `ready`; raises `WaitTimeout`."""
        end = time.monotonic() + patience
        while True:
            self.poll()
            if ready():
                return
            if time.monotonic() > end:
                raise WaitTimeout(f"timeout: {what} did not occur within {patience:.0f} s")
            time.sleep(0.004)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is completed, or the run has ended."""
        self.wait_until(lambda: self.step >= step or self.code is not None, f"step {step}")

    def wait(self, patience: float = WAIT_SECONDS) -> int:
        """Wait for the end of the run and return its exit code."""
        self.wait_until(lambda: self.code is not None, "the end", patience)
        assert self.code is not None
        return self.code

    def find_line(self, words: str, since: float = 0.0) -> tuple[float, str] | None:
        """The first line after `since` that contains these words, and its time."""
        return next(((when, line) for when, line in self.lines if when >= since and words in line), None)

    def list_forked(self) -> list[int]:
        """Processes forked by the run, in order."""
        with contextlib.suppress(OSError):
            return sorted(int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        return []

    def kill(self) -> None:
        """Kill all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1


def _read_last_step(content: bytes) -> int:
    for line in reversed(content.splitlines()):
        with contextlib.suppress(ValueError, KeyError):
            row = json.loads(line)
            if "loss" in row:
                return int(row["step"])
    return 0


def _run_child(main: CommandLine, words: list[str], start: ChildSetup, writing: int) -> None:
    """Run the command in the child process; never returns."""
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
        PLACE_WRAPPER.set(start.around)
        code = main(words)
    finally:
        end_process(code)


def adopt_orphans() -> None:
    """Let orphaned descendants become children of this process (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def reap_orphans(patience: float = 3.0) -> list[str]:
    """Wait for the children to end, and kill those that remain after `patience` seconds. Returns their names."""
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


LOSS_TOLERANCE = 1e-3
"""Largest relative difference between losses of a run and those under another plan, where sums have another order."""


@dataclass(frozen=True)
class RunRecord:
    """The results of one run."""

    losses: dict[int, object]
    samples: dict[int, set[tuple[int, ...]]]
    evaluations: dict[int, object]
    tensors: dict[str, Tensor]
    repeated_steps: list[int]
    """Steps with two rows."""

    @staticmethod
    def from_run(run: Path) -> "RunRecord":
        """Read the record from a run directory."""
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
        found = Checkpoints(run / "checkpoints").list_published()
        return RunRecord(losses, samples, evaluations, read_checkpoint_tensors(found[0]) if found else {}, twice)

    def list_differences(self, other: "RunRecord") -> list[str]:
        """Differences from another record, bit for bit."""
        wrong = [f"step {self.repeated_steps[0]} has two rows"] if self.repeated_steps else []
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

    def compare_close(self, other: "RunRecord") -> tuple[float, list[str]]:
        """Compare with a record under another plan: (largest relative difference of a loss, differences)."""
        wrong = ["samples differ"] if self.samples != other.samples else []
        if self.losses.keys() != other.losses.keys():
            return 1.0, [*wrong, "steps differ"]
        pairs = [(float(str(loss)), float(str(other.losses[step]))) for step, loss in self.losses.items()]
        share = max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)
        return share, wrong + [f"a loss differs by {share:.1e}"] * (share > LOSS_TOLERANCE)
