"""Who is guilty: the launcher's view of ranks that died, raised, or stopped making progress."""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from plait.errors import FAILED, Problem
from plait.launch.words import Words

STOPPED_FOR = 2.0
"""Seconds a process may be in the stopped state (SIGSTOP, a debugger) before the run is ended."""
PATIENCE = 30.0
"""Least seconds without any progress that count as a hang; ten times the slowest phase so far when that is longer."""
FIRST_STEP = 900.0
"""Seconds the build and the first step may take (compilation)."""

_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Write error",
    "Connection refused",
    "Timed out waiting",
)


@dataclass
class Failure:
    """What happened to one rank. `order`: the smallest is the guilty one."""

    rank: int
    order: tuple[int, int]
    problem: Problem | None = None
    problems: list[Problem] = field(default_factory=list)
    victim: bool = False
    exit_code: int = FAILED
    trace: str = ""

    @staticmethod
    def raised(rank: int, step: int, phase: str, message: dict[str, Any]) -> "Failure":
        """The rank raised an exception, told in `message` (see `here._described`)."""
        text = f"{message['type']}: {message['text']}" if message["text"] else message["type"]
        trace = message["trace"]
        if message["problems"]:
            problems = [
                Problem(p["code"], p["what"], p["why"], p["where"], tuple(p["fix"])) for p in message["problems"]
            ]
            return Failure(rank, (1, rank), problems=problems, exit_code=message["exit_code"], trace=trace)
        where = message["where"]
        if message["memory"]:
            fix = ("more micro-batches (--plan microbatches=…)", "a smaller batch (--batch …)")
            what = f"out of memory on rank {rank} {_when(step, phase)}"
            return Failure(
                rank, (1, rank), Problem("M002", what, why=message["text"], where=where, fix=fix), trace=trace
            )
        theirs = not where or "gloo" in message["text"]  # shards are gathered inside the user's forward
        if theirs and any(sign in message["text"] for sign in _PEER):
            return Failure(
                rank,
                (3, rank),
                Problem("C004", f"rank {rank} lost its connection {_when(step, phase)}", why=text),
                victim=True,
                trace=trace,
            )
        return Failure(
            rank,
            (2, rank),
            Problem(
                "C005",
                f"rank {rank} raised {text}",
                why=_when(step, phase),
                where=where or "inside a library; -v shows the traceback",
            ),
            trace=trace,
        )


class Watch:
    """Judges ranks by their progress words and their processes."""

    def __init__(self, words: Words, pids: list[int]):
        self.words, self.pids = words, pids
        self.oom_kills = _oom_kills()
        self.stopped_since: dict[int, float] = {}
        self.slowest = 0.0
        self.last: dict[int, tuple[int, str, float]] = {}
        self.checked = self.awake = 0.0

    def stalled(self) -> int | None:
        """The rank that holds everyone up, or None. Looks at most ten times a second."""
        now = time.monotonic()
        if now - self.checked < 0.1:
            return None
        if self.checked and now - self.checked > 2.0:  # the launcher itself was suspended: its clock proves nothing
            self.stopped_since.clear()
            self.awake = now
        self.checked = now
        rows = [self.words.read(rank) for rank in range(self.words.world)]
        for rank in range(len(rows)):
            if self.is_stopped(rank):
                if now - self.stopped_since.setdefault(rank, now) > STOPPED_FOR:
                    return rank
            else:
                self.stopped_since.pop(rank, None)
        for rank, row in enumerate(rows):
            before = self.last.get(rank)
            if before is not None and before[2] != row[2]:
                self.slowest = max(self.slowest, row[2] - before[2]) if before[0] > 0 else self.slowest
            self.last[rank] = row
        running = [(row[0], row[1] == "reduce", row[2], rank) for rank, row in enumerate(rows) if row[1] != "end"]
        if not running or self.stopped_since:
            return None
        newest = max(max(when for *_, when, _ in running), self.awake)
        first = min(step for step, *_ in running) < 1
        patience = FIRST_STEP if first else max(PATIENCE, 10 * self.slowest)
        if now - newest < patience:
            return None
        return min(running)[-1]  # fewest steps; of these one that is not waiting for others, quiet the longest

    def is_stopped(self, rank: int) -> bool:
        try:
            return psutil.Process(self.pids[rank]).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def stall(self, rank: int, step: int, phase: str, when: float, stopped: bool) -> Failure:
        """The verdict on the rank that `stalled` named."""
        why = f"no progress for {time.monotonic() - when:.0f} s, {_when(step, phase)}"
        others = ", ".join(f"rank {r} in {self.words.read(r)[1]}" for r in range(self.words.world) if r != rank)
        if stopped:
            what, fix = (
                f"rank {rank} was stopped (SIGSTOP or a debugger) and holds everyone up",
                ("send it SIGCONT within 2 s, or start again with --resume",),
            )
        else:
            what, fix = (
                f"rank {rank} stopped making progress and holds everyone up",
                (f"logs/rank{rank}.log ends with its stack", "--resume after mending it"),
            )
        return Failure(rank, (0, rank), Problem("C001", what, why=why + (f"; {others}" if others else ""), fix=fix))

    def died(self, rank: int, step: int, phase: str, status: int) -> Failure:
        """A rank ended without a word. status: negative signal number, or exit code."""
        if status < 0:
            name = signal.Signals(-status).name
            if status == -signal.SIGKILL and _oom_kills() > self.oom_kills:
                why, fix = (
                    "the system ran out of memory and killed it: not a communication fault",
                    ("more micro-batches", "fewer loader workers", "--resume"),
                )
            elif status == -signal.SIGKILL:
                why, fix = (
                    "somebody or the system killed it: not a communication fault",
                    ("--resume", "dmesg  tells whether memory ran out"),
                )
            else:
                why, fix = (
                    "the process crashed in compiled code",
                    (f"logs/rank{rank}.log has the Python stack", "--resume"),
                )
            return Failure(
                rank,
                (0, rank),
                Problem("C003", f"rank {rank} was killed ({name}) {_when(step, phase)}", why=why, fix=fix),
            )
        what = f"rank {rank} ended with exit code {status} {_when(step, phase)}"
        why = "the job, or a library it uses, ended the process"
        where, fix = f"logs/rank{rank}.log", ("do not call exit in a job",)
        return Failure(rank, (0, rank), Problem("C003", what, why=why, where=where, fix=fix))


def _when(step: int, phase: str) -> str:
    return f"during {phase}" if step < 0 else f"at step {step + 1}, {phase}"


def _oom_kills() -> int:
    """How often the kernel has killed for memory, in our control group or on the machine."""
    total = 0
    for path, word in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            rows = dict(line.split()[:2] for line in Path(path).read_text().splitlines())
            total += int(rows.get(word, 0))
        except (OSError, ValueError):
            continue
    return total
