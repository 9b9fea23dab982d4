"""Find the rank that hangs, from the launcher's observation of ranks that make no progress.

A slow rank must not be ended, and a hung one must be found. Missing progress alone does not distinguish them. So the launcher observes a
silent rank: whether its process tree uses CPU, disk or network, its Python stack, and whether the other ranks wait for it. It then acts in
two stages.

First it *reports* the rank after `REPORT_AFTER`: step and phase, the user's line, busy or idle, and the ranks that wait for it. The rank's
stack goes to its log. For a busy rank the CPU time counts, because a busy machine makes every rank slow. A report ends nothing.

Later it *ends* the run, after a limit that depends on the evidence (`compute_limit`). If all others wait in a collective that this rank has
not entered, in a phase that the others passed quickly, the limit is a few seconds. While a rank reads, saves or compiles, it is ten minutes
for an idle rank and an hour for a busy one. Every limit grows with the slowest duration of the same phase, on any rank; `--hang-timeout`
replaces all limits. A rank that a signal has stopped ends the run after `STOPPED_LIMIT`.

The host of a GPU queues work and then waits for its device. The device may compute, or wait in a collective for other devices. Both look
the same from outside, and the wait may sleep or spin. Such a rank counts as waiting, so a rank whose host is elsewhere is blamed first. Its
own limit is that of a busy rank.

Python stacks are requested by signals.

A process gets up to two signals. Python itself answers the first one between two bytecode instructions, if it sleeps, waits for a lock or
loops. If it is in compiled code, it does not answer, and gets the second signal, which `faulthandler` answers at once. faulthandler reads
the stack from memory. This is safe while Python stands still; while Python runs, it occasionally crashed a healthy rank.

Each rank writes to its own file, which the launcher made before the fork. A process without a handler gets no signal, since the signal
would end it.
"""

import faulthandler
import fcntl
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType
from typing import IO

from plait.config.library import PLAIT_FOLDER, STDLIB_FOLDERS, is_library
from plait.launch.activity import ActivityHistory, is_stopped, read_activity
from plait.launch.progress import BETWEEN_PHASES, READ_PHASES, Progress, ProgressBoard

_COMPILED_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_PYTHON_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""Signals for processes in compiled code and in Python; real-time signals that programs rarely use, if the system has any."""
_FRAME_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_LAUNCHER = str(Path(__file__).with_name("fork.py"))
_COMPILING = (
    "_dynamo/convert_frame.py", "_inductor/compile_fx.py", "_inductor/codecache.py", "_inductor/async_compile.py",
    "_inductor/cpp_builder.py", "_functorch/aot_autograd.py", "triton/compiler/",
)  # fmt: skip
"""Files of torch that are on the stack during compilation, and not while compiled code runs."""
_DEVICE_FILES = tuple(f"{os.sep}torch{os.sep}{name}" for name in ("cuda/streams.py", "cuda/__init__.py", "accelerator/__init__.py"))
"""Files of torch whose `synchronize` functions wait for the device."""


@dataclass(frozen=True)
class StackFrame:
    """One call on a stack."""

    file: str
    line: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"

    @property
    def owner(self) -> str:
        """Owner of the code: `user`, `plait`, `torch.distributed`, `python`, or `library`."""
        if self.file.startswith(PLAIT_FOLDER):
            return "plait"
        if f"torch{os.sep}distributed{os.sep}" in self.file:
            return "torch.distributed"
        if "site-packages" in self.file or "dist-packages" in self.file:
            return "library"
        if self.file.startswith(("<", *STDLIB_FOLDERS)):
            return "python"
        return "library" if is_library(self.file) else "user"

    @property
    def is_awaiting_device(self) -> bool:
        """Whether the call is torch's wait for a device: for an event, a stream, or all queued work."""
        return self.name == "synchronize" and self.file.endswith(_DEVICE_FILES)


@dataclass(frozen=True)
class Stack:
    """Stack of a process's main thread, innermost call first; empty if the process did not answer."""

    frames: tuple[StackFrame, ...] = ()
    text: str = ""

    @property
    def where(self) -> str:
        """The innermost line of the user's code, else of a library, else of Python; torch's wait for a device is skipped."""
        for wanted in (("user",), ("library", "plait", "torch.distributed"), ("python",)):
            found = next((frame for frame in self.frames if frame.owner in wanted and not frame.is_awaiting_device), None)
            if found:
                return str(found)
        return ""

    @property
    def is_communicating(self) -> bool:
        """Whether the innermost call is plait's or torch.distributed's, as while waiting for other ranks."""
        inner = next((f.owner for f in self.frames if f.owner != "python"), "")
        return inner in ("plait", "torch.distributed")

    @property
    def is_awaiting_device(self) -> bool:
        """Whether the innermost call waits for the device."""
        inner = next((f for f in self.frames if f.owner != "python"), None)
        return inner is not None and inner.is_awaiting_device

    @property
    def is_user_collective(self) -> bool:
        """Whether the user's own code called torch.distributed, so the wait is intended. The innermost calls may be plait's wait for it."""
        owners = (f.owner for f in self.frames if f.owner in ("user", "plait", "torch.distributed"))
        outer = [*dropwhile(lambda owner: owner == "plait", owners)]
        return outer[:1] == ["torch.distributed"] and next((owner for owner in outer if owner != "torch.distributed"), "") == "user"

    @property
    def is_compiling(self) -> bool:
        return any(part in frame.file for frame in self.frames for part in _COMPILING)


class Stacks:
    """Files for the ranks' stacks, one per rank, so that a late answer goes to the right rank. Create it before the fork."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._files = {rank: self._make_file() for rank in ranks}

    @staticmethod
    def _make_file() -> IO[bytes]:
        in_memory = hasattr(os, "memfd_create")  # Linux: also when the disk is full
        file = os.fdopen(os.memfd_create("plait-stacks"), "rb+") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)  # independent of the writer's file offset
        return file

    def install_handlers(self, rank: int) -> None:
        """Install handlers in this rank's process that write its stack.

        Only the main thread's stack is written, because reading the stack of a running thread may crash.
        """
        end = self._files[rank].fileno()

        def write_stack(number: int, frame: FrameType | None) -> None:
            lines = [_HEADER]
            while frame is not None:
                lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
                frame = frame.f_back
            os.write(end, ("\n".join(lines) + "\n").encode(errors="replace"))

        signal.signal(_PYTHON_SIGNAL, write_stack)
        signal.siginterrupt(_PYTHON_SIGNAL, False)  # so that no read in compiled code fails with EINTR
        faulthandler.register(_COMPILED_SIGNAL, file=end, all_threads=False)

    def request_stacks(self, pids: Mapping[int, int], patience: float = 0.5) -> dict[int, Stack]:
        """Return the stacks of ranks' processes, within two times `patience` seconds; `pids`: process of each rank.

        A stack is empty if its process has no handlers, or cannot run.
        """
        texts = dict.fromkeys(pids, "")
        for rank in pids:
            os.ftruncate(self._files[rank].fileno(), 0)
        for number in (_PYTHON_SIGNAL, _COMPILED_SIGNAL):
            waiting = {rank for rank, pid in pids.items() if not texts[rank] and _send_signal(pid, number)}
            end = time.monotonic() + patience
            while waiting and time.monotonic() < end:
                time.sleep(0.02)
                for rank in [*waiting]:
                    before, texts[rank] = texts[rank], self._read_text(rank)
                    if texts[rank] and texts[rank] == before:
                        waiting.remove(rank)
        return {rank: parse_stack(text[max(text.rfind(_HEADER), 0) :]) for rank, text in texts.items()}

    def _read_text(self, rank: int) -> str:
        """Return what a rank has written since the last request; empty until a stack's header is there."""
        file = self._files[rank].fileno()
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        return text if _HEADER in text else ""

    def close(self) -> None:
        for file in self._files.values():
            file.close()


_HEADER = "Stack (most recent call first):"
"""First line of a stack, as faulthandler writes it."""


def _send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process that has a handler for it; whether it has one."""
    if not _has_handler(pid, number):
        return False
    os.kill(pid, number)
    return True


def parse_stack(text: str) -> Stack:
    """Parse a stack in faulthandler's format, without the frames that called the launcher (a script or a notebook)."""
    matches = (_FRAME_LINE.match(line) for line in text.splitlines())
    frames = (StackFrame(m["file"], m["line"], m["name"]) for m in matches if m)
    return Stack(tuple(takewhile(lambda frame: frame.file != _LAUNCHER, frames)), text)


def _has_handler(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. Systems other than Linux do not show it; there the answer is True."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)


STOPPED_LIMIT = 2.0
"""Seconds in the stopped state (SIGSTOP, a debugger) after which the run is ended."""
OBSERVE_AFTER, STACK_AFTER, REPORT_AFTER = 3.0, 8.0, 30.0
"""Seconds without progress after which the launcher observes a rank's activity, requests its stack, and reports it."""
REPEAT_FACTOR = 4.0
"""Factor on the silent time between two reports of a rank. The first report also waits this many times the phase's slowest duration."""
AWAITED_LIMIT, AWAITED_BUSY_LIMIT = 10.0, 12.0
"""Seconds for which all others may wait for an idle rank, and for a rank that has had this much CPU time."""
IDLE_LIMIT, BUSY_LIMIT, FIRST_STEP_LIMIT = 120.0, 300.0, 3600.0
"""Seconds without progress while no rank is known to wait: for an idle rank, for a busy one, and for a busy one in the build or first step.

In the build and the first step torch and libraries compile and download.
"""
READ_LIMIT, READ_BUSY_LIMIT = 600.0, 3600.0
"""Seconds without progress while a rank reads samples, saves or compiles: for an idle rank and for a busy one."""
GROWTH_FACTOR = 10.0
"""Minimum ratio of a limit to the slowest duration of the same phase on any rank."""


@dataclass
class RankObservation:
    """Observation of one silent rank."""

    rank: int
    progress: Progress
    silent_seconds: float
    """Seconds since its last progress."""
    is_busy: bool = False
    """Its process tree uses CPU, disk or network."""
    stack: Stack = field(default_factory=Stack)
    idle_seconds: float = 0.0
    """Seconds since it became idle; 0 if it is busy."""
    cpu_seconds: float = 0.0
    """Seconds of CPU time since its last progress."""

    @property
    def is_waiting(self) -> bool:
        """It waits for another rank, or for its device."""
        if self.is_busy or self.stack.is_awaiting_device:
            return self.stack.is_awaiting_device
        return self.stack.is_communicating or (self.progress.phase == "reduce" and not self.stack.frames)


@dataclass(frozen=True)
class Hang:
    """A rank that blocks a run."""

    suspect: RankObservation
    others: tuple[str, ...]
    """Phases of the other ranks."""
    is_stopped: bool = False
    on_devices: bool = False
    """All ranks on this node wait, some of them for their devices."""


def compute_limit(
    suspect: RankObservation, others: list[RankObservation], uniform: bool, seen: float, hang_timeout: float | None
) -> tuple[float, float]:
    """Return (the limit for `suspect` in seconds, the seconds of it that have passed).

    `others`: observations of all other running ranks. `uniform`: ranks do equal work in a phase, so the others' times apply to this rank.
    `seen`: the slowest duration of this phase so far.
    """
    phase, busy = suspect.progress.phase, suspect.is_busy
    building = phase in ("start", "build")
    passed = suspect.silent_seconds if busy else suspect.idle_seconds
    allowed = (FIRST_STEP_LIMIT if building or suspect.progress.step < 1 else BUSY_LIMIT) if busy else IDLE_LIMIT
    reads = suspect.stack.is_compiling or phase in READ_PHASES or phase == "checkpoint"
    if reads:
        allowed = READ_BUSY_LIMIT if busy else READ_LIMIT
    if hang_timeout is not None:
        return hang_timeout, passed
    allowed = max(allowed, GROWTH_FACTOR * seen)
    waiting = [look for look in others if look.is_waiting and not look.stack.is_awaiting_device]  # a device may still compute
    awaited = bool(others) and len(waiting) == len(others) and not any(o.stack.is_user_collective for o in waiting)
    if reads or not awaited or not (uniform or building) or (busy and (building or suspect.cpu_seconds < AWAITED_BUSY_LIMIT)):
        return allowed, passed
    awaited_passed = min(passed, *(look.idle_seconds for look in waiting))
    seen = max(seen, *(look.silent_seconds - look.idle_seconds for look in waiting))
    awaited_allowed = max(AWAITED_BUSY_LIMIT if busy else AWAITED_LIMIT, GROWTH_FACTOR * seen)
    return min((allowed, passed), (awaited_allowed, awaited_passed), key=lambda limit: limit[0] - limit[1])


class HangDetector:
    """Observes the progress of the ranks on this node. `has_remote_ranks`: the run has ranks on other nodes."""

    def __init__(
        self, board: ProgressBoard, pids: dict[int, int], stacks: Stacks, hang_timeout: float | None, uniform: bool,
        has_remote_ranks: bool = False,
    ):  # fmt: skip
        self.has_remote_ranks = has_remote_ranks
        self.board, self.pids, self.stacks, self.hang_timeout, self.uniform = board, pids, stacks, hang_timeout, uniform
        self.stopped_since: dict[int, float] = {}
        self.slowest: dict[str, float] = {}
        """Slowest duration of each phase on any rank."""
        self.last: dict[int, Progress] = {}
        self.activities: dict[int, ActivityHistory] = {}
        """Activity of silent ranks."""
        self.observations: list[RankObservation] = []
        self.next_report: dict[int, float] = {}
        self.checked_at = self.observed_at = self.awake_since = 0.0

    def check(self) -> Hang | None:
        """Return the rank that blocks the run and must be ended, or None. Observes at most ten times a second."""
        now = time.monotonic()
        if now - self.checked_at < 0.1:
            return None
        if self.checked_at and now - self.checked_at > 2.0:  # the launcher itself was suspended: its clock proves nothing
            self.stopped_since.clear()
            self.activities.clear()
            self.awake_since = now
        hang = self._find_hang(now)
        self.checked_at = time.monotonic()  # not `now`: observing many ranks takes seconds
        return hang

    def _find_hang(self, now: float) -> Hang | None:
        self._read_progress()
        held = self._find_stopped(now)
        if held is not None:
            return Hang(RankObservation(held, self.last[held], now - self.last[held].since), self._describe_others(held), True)
        if self.stopped_since or now - self.observed_at < min(1.0, self._scale_time(OBSERVE_AFTER)):
            return None
        self.observed_at = now
        self.observations = self._observe_ranks(now)
        return self._find_culprit()

    def list_silent_groups(self) -> Iterator[tuple[list[RankObservation], list[RankObservation]]]:
        """Yield groups of the last observation: (ranks that have been silent at the same place for long, ranks that wait for them)."""
        looks, self.observations = self.observations, []  # each observation is reported once
        waiting = [look for look in looks if look.is_waiting]
        together = len(waiting) == len(looks)
        groups: dict[tuple[object, ...], list[RankObservation]] = {}
        for look in looks:
            seen = self.slowest.get(look.progress.phase, 0.0)
            due = self.next_report.get(look.rank, max(self._scale_time(REPORT_AFTER), REPEAT_FACTOR * seen))
            passed = min(look.silent_seconds, look.cpu_seconds) if look.is_busy and not together else look.silent_seconds
            if passed >= due and (not look.is_waiting or together):
                self.next_report[look.rank] = REPEAT_FACTOR * look.silent_seconds
                where = (look.progress.step, look.progress.phase, look.is_busy, look.stack.where)
                key = ("all",) if together else where
                groups.setdefault(key, []).append(look)
        for group in groups.values():
            yield sorted(group, key=_guilt_key), [look for look in waiting if look not in group]

    def _scale_time(self, seconds: float) -> float:
        """Scale an observation time down if the hang timeout is short."""
        return seconds if self.hang_timeout is None else min(seconds, self.hang_timeout / 3)

    def _read_progress(self) -> None:
        """Read the progress of all ranks, and update the slowest duration of each phase."""
        for rank in self.board.ranks:
            row, before = self.board.read(rank), self.last.get(rank)
            if before is not None and row != before:
                took = row.since - before.since
                self.slowest[before.phase] = max(self.slowest.get(before.phase, 0.0), took)
                self.activities.pop(rank, None)
                self.next_report.pop(rank, None)
            self.last[rank] = row

    def _find_stopped(self, now: float) -> int | None:
        for rank, pid in self.pids.items():
            if is_stopped(pid):
                if now - self.stopped_since.setdefault(rank, now) > STOPPED_LIMIT:
                    return rank
            else:
                self.stopped_since.pop(rank, None)
        return None

    def _observe_ranks(self, now: float) -> list[RankObservation]:
        """Return an observation of each running rank, with its activity and its stack if it is silent."""
        looks = [
            RankObservation(rank, row, now - max(row.since, self.awake_since)) for rank, row in self.last.items() if row.phase != "end"
        ]
        for look in looks:
            if look.silent_seconds < self._scale_time(OBSERVE_AFTER):
                look.is_busy = True
                continue
            history = self.activities.setdefault(look.rank, ActivityHistory(now - look.silent_seconds))
            history.measurements.append(read_activity(self.pids[look.rank]))
            look.is_busy, look.idle_seconds, look.cpu_seconds = history.is_busy, history.idle_seconds, history.cpu_seconds
        silent = {look.rank: self.pids[look.rank] for look in looks if look.silent_seconds >= self._scale_time(STACK_AFTER)}
        stacks = self.stacks.request_stacks(silent) if silent else {}
        for look in looks:
            look.stack = stacks.get(look.rank, look.stack)
        return looks

    def _find_culprit(self) -> Hang | None:
        """Return the rank that has exceeded its limit."""
        suspects = [look for look in self.observations if not look.is_waiting]
        if not suspects:
            return self._check_deadlock()
        for suspect in sorted(suspects, key=lambda look: (look.progress.step, -look.silent_seconds)):
            others = [look for look in self.observations if look is not suspect]
            seen = self.slowest.get(suspect.progress.phase, 0.0)
            allowed, passed = compute_limit(suspect, others, self.uniform, seen, self.hang_timeout)
            if passed >= allowed:
                return Hang(suspect, self._describe_others(suspect.rank))
        return None

    def _check_deadlock(self) -> Hang | None:
        """Return the hang if all ranks wait, for each other or in a collective that the user's code calls on some ranks only.

        If other nodes have ranks, one of those may block these ranks; its own launcher finds it.
        """
        on_devices = any(look.stack.is_awaiting_device for look in self.observations)
        if not self.observations or (self.has_remote_ranks and not on_devices):
            return None
        first = min(self.observations, key=_guilt_key)
        phases = {look.progress.phase for look in self.observations}
        allowed = READ_LIMIT if phases & {*READ_PHASES, "checkpoint"} else AWAITED_LIMIT if len(self.observations) > 1 else IDLE_LIMIT
        if on_devices:
            allowed = max(allowed, FIRST_STEP_LIMIT if min(look.progress.step for look in self.observations) < 1 else BUSY_LIMIT)
        measured = phases if on_devices else phases - {"reduce"} or {""}
        seen = max(self.slowest.get(phase, 0.0) for phase in measured)
        allowed = max(allowed, GROWTH_FACTOR * seen) if self.hang_timeout is None else self.hang_timeout
        if min(look.silent_seconds if on_devices else look.idle_seconds for look in self.observations) < allowed:
            return None
        return Hang(first, self._describe_others(first.rank), on_devices=on_devices and len(self.observations) > 1)

    def _describe_others(self, rank: int) -> tuple[str, ...]:
        on_devices = {look.rank for look in self.observations if look.stack.is_awaiting_device}
        does = {r: row.phase + ", waiting for its device" * (r in on_devices) for r, row in self.last.items()}
        return tuple(f"rank {r} in {words}" for r, words in does.items() if r != rank)


def _guilt_key(look: RankObservation) -> tuple[bool, int, float]:
    """Sort key with the likeliest cause first: ranks in a collective of the user's own code, then ranks with the fewest steps."""
    return (not look.stack.is_user_collective, look.progress.step, -look.silent_seconds)


def format_silent_ranks(group: list[RankObservation], waiting: list[RankObservation], names: Mapping[int, str], logs: bool) -> str:
    """Format a console line for ranks that have been silent at the same place.

    `names`: of processes that are not ranks of the plan; `logs`: ranks have logs.
    """
    look = group[0]
    on_devices = [one.stack.is_awaiting_device for one in group]
    ranks = sorted(one.rank for one in group)
    who = names.get(ranks[0], "") if len(ranks) == 1 else ""
    who = who or format_ranks(ranks)
    verb = "has" if len(group) == 1 else "have"
    if look.stack.is_compiling:
        does = "running torch.compile"
    elif any(on_devices):
        mixed = "waiting for their devices or for each other"
        does = mixed if not all(on_devices) else "waiting for their devices" if len(group) > 1 else "waiting for its device"
    elif look.is_busy:
        does = "at work"
    elif look.is_waiting:
        does = "waiting for each other" if len(group) > 1 else "waiting for other ranks"
    else:
        does = "using no CPU, disk or network"
    at = f": {look.stack.where}" + f" on rank {look.rank}" * (len(group) > 1 and look.is_waiting) if look.stack.where else ""
    waits = (
        f"; {format_ranks([one.rank for one in waiting])} wait{'s' * (len(waiting) == 1)} for it" if waiting else ""
    )
    log = f" (stack in logs/rank{look.rank}.log)" if logs else ""
    return f"note  {who} {verb} made no progress for {look.silent_seconds:.0f} s {format_moment(look.progress)}, {does}{at}{waits}{log}"


def format_moment(progress: Progress) -> str:
    """Format a moment: `at step 5, forward`, `after step 5, evaluate`, or `during build`."""
    step, phase = progress.step, progress.phase
    if step < 0:
        return f"during {phase}"
    return f"after step {step}, {phase}" if phase in BETWEEN_PHASES else f"at step {step + 1}, {phase}"


def format_ranks(ranks: list[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0-7` or `ranks 0,2,5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ",".join(map(str, ranks))
