"""Which rank hangs: the launcher's view of ranks that say nothing for a while.

A rank that is slow must not be ended, and one that is dead must be found. Silence alone does not tell them apart, so
the launcher looks closer at a rank that has been silent: does its process tree use processor, disk or network, where is
its Python stack, and do the others wait for it? From that it does two things at two times.

It *names* such a rank after a while (`NAMED`; of one that computes its processor time counts, for a busy machine makes any rank slow):
which step and phase, the user's line, whether it computes or sleeps, who waits for it; its stack goes to its log. Nothing is ended by that.

It *ends* the run late, and the sooner the surer it is (`limit`). All others wait in a collective that this rank has not
entered, in a phase that took the others next to no time: a few seconds. It reads, saves or compiles, which may take
minutes at any moment: ten minutes without using anything, an hour when it is at work. Every limit grows with what the
same phase took before, on any rank; `--hang-timeout` overrules all of them. A rank that a signal has stopped is ended for
after `STOPPED`.

The host of a GPU queues work and then waits for its device, which may compute, or wait in a collective for the devices of
others: from outside these look alike, and the wait may sleep or spin. Such a rank waits, so that it is not blamed beside one
whose host is elsewhere; but nothing is ended for it before the time that a rank has which computes.

Where a process is: its Python stack, asked for by a signal.

A process is asked twice. One signal is answered by Python itself, between two of its instructions, when it sleeps, waits for a
lock or loops. Who stands in compiled code does not come to that, and is asked by a second signal, which `faulthandler`
answers at once. It reads the stack as it lies in memory: safe while Python stands still, and not while it runs, when it
crashed a healthy rank now and then.

Each rank writes to a file of its own that the launcher made before the fork. A process that does not catch a signal is not asked: the
signal would end it.
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
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import IO

from plait.config.library import PLAIT, STANDARD, is_library
from plait.launch.activity import Activity, activity, stopped
from plait.launch.progress import BETWEEN, READING, Progress, ProgressBoard

_STANDING = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_RUNNING = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""The signals for those in compiled code, and for those in Python: some that programs do not use, where the system has any."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_LAUNCHER = str(Path(__file__).with_name("fork.py"))
_COMPILING = (
    "_dynamo/convert_frame.py", "_inductor/compile_fx.py", "_inductor/codecache.py", "_inductor/async_compile.py",
    "_inductor/cpp_builder.py", "_functorch/aot_autograd.py", "triton/compiler/",
)  # fmt: skip
"""Files of torch that are on the stack while it compiles, and not while compiled code runs."""
_DEVICE = tuple(f"{os.sep}torch{os.sep}{name}" for name in ("cuda/streams.py", "cuda/__init__.py", "accelerator/__init__.py"))
"""Files of torch in which a host waits for its device, in functions called `synchronize`."""


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
        """Whose code it is: `user`, `plait`, `torch.distributed`, `python`, or `library`."""
        if self.file.startswith(PLAIT):
            return "plait"
        if f"torch{os.sep}distributed{os.sep}" in self.file:
            return "torch.distributed"
        if "site-packages" in self.file or "dist-packages" in self.file:
            return "library"
        if self.file.startswith(("<", *STANDARD)):
            return "python"
        return "library" if is_library(self.file) else "user"

    @property
    def awaits_device(self) -> bool:
        """Whether it is torch's wait for what was queued to a device: for an event, a stream, or all of it."""
        return self.name == "synchronize" and self.file.endswith(_DEVICE)


@dataclass(frozen=True)
class Stack:
    """The stack of a process's main thread, innermost call first; empty when the process did not answer."""

    frames: tuple[StackFrame, ...] = ()
    text: str = ""

    @property
    def where(self) -> str:
        """The innermost line of the user's code, else the innermost line of any but Python's own, and torch's where it waits for a device."""
        for wanted in (("user",), ("library", "plait", "torch.distributed"), ("python",)):
            found = next((frame for frame in self.frames if frame.owner in wanted and not frame.awaits_device), None)
            if found:
                return str(found)
        return ""

    @property
    def communicates(self) -> bool:
        """Whether the call that has not returned is plait's or torch.distributed's: what waits for others is there."""
        inner = next((f.owner for f in self.frames if f.owner != "python"), "")
        return inner in ("plait", "torch.distributed")

    @property
    def awaits_device(self) -> bool:
        """Whether the call that has not returned waits for the device."""
        inner = next((f for f in self.frames if f.owner != "python"), None)
        return inner is not None and inner.awaits_device

    @property
    def asked_by_user(self) -> bool:
        """Whether the user's own code called torch.distributed, so that waiting is what it wants."""
        owners = [f.owner for f in self.frames if f.owner in ("user", "plait", "torch.distributed")]
        caller = next((owner for owner in owners if owner != "torch.distributed"), "")
        return owners[:1] == ["torch.distributed"] and caller == "user"

    @property
    def compiles(self) -> bool:
        return any(part in frame.file for frame in self.frames for part in _COMPILING)


class Stacks:
    """The files that ranks write their stacks to, one each: an answer that comes late is no other rank's. Make it before the fork."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._files = {rank: self._file() for rank in ranks}

    @staticmethod
    def _file() -> IO[bytes]:
        in_memory = hasattr(os, "memfd_create")  # Linux: also when the disk is full
        file = os.fdopen(os.memfd_create("plait-stacks"), "rb+") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)  # whoever has which offset
        return file

    def answer(self, rank: int) -> None:
        """From now on this process, which is that of a rank, writes its stack when asked.

        Only that of the main thread: reading the stack of a thread that runs on may crash.
        """
        end = self._files[rank].fileno()

        def tell(number: int, frame: FrameType | None) -> None:
            lines = [_HEADER]
            while frame is not None:
                lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
                frame = frame.f_back
            os.write(end, ("\n".join(lines) + "\n").encode(errors="replace"))

        signal.signal(_RUNNING, tell)
        signal.siginterrupt(_RUNNING, False)  # compiled code need not know that its read was interrupted
        faulthandler.register(_STANDING, file=end, all_threads=False)

    def ask(self, rank: int, pid: int, patience: float = 0.5) -> Stack:
        """The stack of a rank's process. Empty when it does not catch the signals, or cannot run."""
        end = self._files[rank].fileno()
        os.ftruncate(end, 0)
        return parse(_answered(end, pid, _RUNNING, patience) or _answered(end, pid, _STANDING, patience))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


_HEADER = "Stack (most recent call first):"
"""As faulthandler has it."""


def _answered(end: int, pid: int, number: int, patience: float) -> str:
    """What a process writes when it gets the signal."""
    if not _catches(pid, number):
        return ""
    os.kill(pid, number)
    text, ends = "", time.monotonic() + patience
    while time.monotonic() < ends:
        time.sleep(0.02)
        before, text = text, os.pread(end, os.fstat(end).st_size, 0).decode(errors="replace")
        if text and text == before:
            break
    return text[text.rfind(_HEADER) :] if _HEADER in text else ""


def parse(text: str) -> Stack:
    """A stack as faulthandler prints it.

    What called the launcher is not part of it: a script or a notebook, which is nobody's training.
    """
    matches = (_FRAME.match(line) for line in text.splitlines())
    frames = (StackFrame(m["file"], m["line"], m["name"]) for m in matches if m)
    return Stack(tuple(takewhile(lambda frame: frame.file != _LAUNCHER, frames)), text)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. Only Linux says; elsewhere it is believed."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)


STOPPED = 2.0
"""Seconds a process may be in the stopped state (SIGSTOP, a debugger) before the run is ended."""
LOOK, STACK, NAMED = 3.0, 8.0, 30.0
"""Seconds of silence after which the launcher looks at what a rank uses, and at its stack, and after which it names it."""
AGAIN = 4.0
"""A rank is named again once it has been silent this many times as long; and first, this many times the slowest seen."""
AWAITED, AWAITED_BUSY = 10.0, 12.0
"""Seconds for which all others may wait for a rank that uses nothing, and for one that computes: if it has had a processor for as long."""
IDLE, BUSY, FIRST = 120.0, 300.0, 3600.0
"""Seconds without progress where nobody is known to wait: using nothing; computing; computing in the build or the first
step, where torch and libraries compile and fetch."""
READS, READS_BUSY = 600.0, 3600.0
"""Seconds without progress while a rank reads samples, saves or compiles: using nothing, and at work."""
GROWTH = 10.0
"""A limit is at least this many times what the same phase has taken so far on any rank."""


@dataclass
class Look:
    """What the launcher knows of one silent rank."""

    rank: int
    progress: Progress
    silent: float
    """Seconds since it last said something."""
    busy: bool = False
    """Its process tree uses processor, disk or network."""
    stack: Stack = field(default_factory=Stack)
    waited: float = 0.0
    """Seconds for which it has used nothing."""
    worked: float = 0.0
    """Seconds of processor time that it has used while it said nothing."""

    @property
    def waits(self) -> bool:
        """It waits for another rank, or for its device."""
        if self.busy or self.stack.awaits_device:
            return self.stack.awaits_device
        return self.stack.communicates or (self.progress.phase == "reduce" and not self.stack.frames)


@dataclass(frozen=True)
class _Usage:
    """What a silent rank had used at the first look and at the last one."""

    first: Activity
    last: Activity
    idle_from: float
    """Since when it uses nothing (`time.monotonic`)."""


@dataclass(frozen=True)
class Hang:
    """A rank that holds a run up."""

    look: Look
    others: tuple[str, ...]
    """What the others do."""
    stopped: bool = False
    devices: bool = False
    """Nobody is elsewhere: all ranks here wait, some of them for their devices."""


def limit(suspect: Look, others: list[Look], alike: bool, seen: float, patience: float | None) -> tuple[float, float]:
    """(seconds for which `suspect` may go on, seconds of them that have passed).

    `others`: the looks at all other running ranks. `alike`: what ranks do in a phase is alike, so that the others'
    time is a measure for this one's. `seen`: the longest that this phase took so far.
    """
    phase, busy = suspect.progress.phase, suspect.busy
    building = phase in ("start", "build")
    waiting = [look for look in others if look.waits and not look.stack.awaits_device]  # a device may still compute
    awaited = bool(others) and len(waiting) == len(others) and not any(o.stack.asked_by_user for o in waiting)
    passed, allowed = suspect.silent, (FIRST if building or suspect.progress.step < 1 else BUSY) if busy else IDLE
    if suspect.stack.compiles or phase in READING or phase == "checkpoint":
        allowed = READS_BUSY if busy else READS
    elif awaited and (alike or building) and (not busy or (not building and suspect.worked >= AWAITED_BUSY)):
        passed = min(passed, *(look.waited for look in waiting))
        seen = max(seen, *(look.silent - look.waited for look in waiting))
        allowed = AWAITED_BUSY if busy else AWAITED
    return (max(allowed, GROWTH * seen) if patience is None else patience), passed


class HangDetector:
    """Looks at the progress of the ranks on this machine and says what is worth saying. `elsewhere`: there are others."""

    def __init__(
        self, board: ProgressBoard, pids: dict[int, int], stacks: Stacks, patience: float | None, alike: bool,
        elsewhere: bool = False,
    ):  # fmt: skip
        self.elsewhere = elsewhere
        self.board, self.pids, self.stacks, self.patience, self.alike = board, pids, stacks, patience, alike
        self.stopped_since: dict[int, float] = {}
        self.slowest: dict[str, float] = {}
        """By phase, the longest that a rank said nothing in it and then went on."""
        self.last: dict[int, Progress] = {}
        self.used: dict[int, _Usage] = {}
        """Of silent ranks."""
        self.looks: list[Look] = []
        self.named: dict[int, float] = {}
        self.checked = self.looked = self.awake = 0.0

    def check(self) -> Hang | None:
        """The rank that holds everyone up and is to be ended for, or None. Looks at most ten times a second."""
        now = time.monotonic()
        if now - self.checked < 0.1:
            return None
        if self.checked and now - self.checked > 2.0:  # the launcher itself was suspended: its clock proves nothing
            self.stopped_since.clear()
            self.used.clear()
            self.awake = now
        self.checked = now
        self._follow()
        held = self._stopped(now)
        if held is not None:
            return Hang(Look(held, self.last[held], now - self.last[held].since), self._others(held), True)
        if self.stopped_since or now - self.looked < min(1.0, self._scale(LOOK)):
            return None
        self.looked = now
        self.looks = list(self._look(now))
        return self._judged()

    def names(self) -> Iterator[tuple[list[Look], list[Look]]]:
        """Of the last look: (ranks that have been silent for long in the same place, those that wait for them)."""
        looks, self.looks = self.looks, []  # each look is told of once
        waiting = [look for look in looks if look.waits]
        together = len(waiting) == len(looks)
        groups: dict[tuple[object, ...], list[Look]] = {}
        for look in looks:
            seen = self.slowest.get(look.progress.phase, 0.0)
            due = self.named.get(look.rank, max(self._scale(NAMED), AGAIN * seen))
            passed = min(look.silent, look.worked) if look.busy and not together else look.silent
            if passed >= due and (not look.waits or together):
                self.named[look.rank] = AGAIN * look.silent
                where = (look.progress.step, look.progress.phase, look.busy, look.stack.where)
                key = ("all",) if together else where
                groups.setdefault(key, []).append(look)
        for group in groups.values():
            yield sorted(group, key=_guilt), [look for look in waiting if look not in group]

    def _scale(self, seconds: float) -> float:
        """A time of looking, shorter where the user has less patience."""
        return seconds if self.patience is None else min(seconds, self.patience / 3)

    def _follow(self) -> None:
        """Read all rows; learn how long phases take."""
        for rank in self.board.ranks:
            row, before = self.board.read(rank), self.last.get(rank)
            if before is not None and row != before:
                took = row.since - before.since
                self.slowest[before.phase] = max(self.slowest.get(before.phase, 0.0), took)
                self.used.pop(rank, None)
                self.named.pop(rank, None)
            self.last[rank] = row

    def _stopped(self, now: float) -> int | None:
        for rank, pid in self.pids.items():
            if stopped(pid):
                if now - self.stopped_since.setdefault(rank, now) > STOPPED:
                    return rank
            else:
                self.stopped_since.pop(rank, None)
        return None

    def _look(self, now: float) -> Iterator[Look]:
        """A look at each running rank; a close one at those that are silent."""
        for rank, row in self.last.items():
            if row.phase == "end":
                continue
            since = max(row.since, self.awake)
            look = Look(rank, row, now - since)
            if look.silent < self._scale(LOOK):
                look.busy = True
            else:
                look.busy, used = self._updated_usage(rank, since)
                look.waited = 0.0 if look.busy else now - used.idle_from
                look.worked = used.last.seconds - used.first.seconds
                if look.silent >= self._scale(STACK):
                    look.stack = self.stacks.ask(rank, self.pids[rank])
            yield look

    def _updated_usage(self, rank: int, since: float) -> "tuple[bool, _Usage]":
        """(whether a silent rank does anything, its usage until now)."""
        found, before = activity(self.pids[rank]), self.used.get(rank)
        busy = before is None or found.busy_since(before.last)  # one look shows no movement
        if before is None:
            self.used[rank] = _Usage(found, found, since)
        else:
            self.used[rank] = _Usage(before.first, found, found.at if busy else before.idle_from)
        return busy, self.used[rank]

    def _judged(self) -> Hang | None:
        """The rank that has been silent for longer than it may."""
        suspects = [look for look in self.looks if not look.waits]
        if not suspects:
            return self._deadlock()
        for suspect in sorted(suspects, key=lambda look: (look.progress.step, -look.silent)):
            others = [look for look in self.looks if look is not suspect]
            seen = self.slowest.get(suspect.progress.phase, 0.0)
            allowed, passed = limit(suspect, others, self.alike, seen, self.patience)
            if passed >= allowed:
                return Hang(suspect, self._others(suspect.rank))
        return None

    def _deadlock(self) -> Hang | None:
        """All ranks wait, so nobody will ever come: for each other, or for a call that the user's code makes on some.

        Where there are ranks on other machines, it may be one of those that holds these up, which its own launcher finds.
        """
        on_devices = any(look.stack.awaits_device for look in self.looks)
        if not self.looks or (self.elsewhere and not on_devices):
            return None
        first = min(self.looks, key=_guilt)
        phases = {look.progress.phase for look in self.looks}
        allowed = READS if phases & {*READING, "checkpoint"} else AWAITED if len(self.looks) > 1 else IDLE
        if on_devices:
            allowed = max(allowed, FIRST if min(look.progress.step for look in self.looks) < 1 else BUSY)
        measured = phases if on_devices else phases - {"reduce"} or {""}
        seen = max(self.slowest.get(phase, 0.0) for phase in measured)
        allowed = max(allowed, GROWTH * seen) if self.patience is None else self.patience
        if min(look.silent if on_devices else look.waited for look in self.looks) < allowed:
            return None
        return Hang(first, self._others(first.rank), devices=on_devices and len(self.looks) > 1)

    def _others(self, rank: int) -> tuple[str, ...]:
        on_devices = {look.rank for look in self.looks if look.stack.awaits_device}
        does = {r: row.phase + ", waiting for its device" * (r in on_devices) for r, row in self.last.items()}
        return tuple(f"rank {r} in {words}" for r, words in does.items() if r != rank)


def _guilt(look: Look) -> tuple[bool, int, float]:
    """Sorts the likeliest culprit first: a rank whose user asked for a collective of its own, then who has come least far."""
    return (not look.stack.asked_by_user, look.progress.step, -look.silent)


def told(group: list[Look], waiting: list[Look], names: Mapping[int, str], logs: bool) -> str:
    """One line on ranks that have been silent in the same place, for the console. `names`: of processes that are no ranks of the plan;
    `logs`: ranks have logs."""
    look = group[0]
    on_devices = [one.stack.awaits_device for one in group]
    ranks = sorted(one.rank for one in group)
    who = names.get(ranks[0], "") if len(ranks) == 1 else ""
    who = who or ranks_in_words(ranks)
    verb = "has" if len(group) == 1 else "have"
    if look.stack.compiles:
        does = "torch.compile is at work"
    elif any(on_devices):
        mixed = "waiting for their devices or for each other"
        does = mixed if not all(on_devices) else "waiting for their devices" if len(group) > 1 else "waiting for its device"
    elif look.busy:
        does = "at work"
    elif look.waits:
        does = "waiting for each other" if len(group) > 1 else "waiting for other ranks"
    else:
        does = "using no processor, disk or network"
    at = f": {look.stack.where}" + f" on rank {look.rank}" * (len(group) > 1 and look.waits) if look.stack.where else ""
    waits = (
        f"; {ranks_in_words([one.rank for one in waiting])} wait{'s' * (len(waiting) == 1)} for it" if waiting else ""
    )
    log = f" (stack in logs/rank{look.rank}.log)" if logs else ""
    return f"note  {who} {verb} made no progress for {look.silent:.0f} s {moment(look.progress)}, {does}{at}{waits}{log}"


def moment(progress: Progress) -> str:
    """`at step 5, forward`, `after step 5, evaluate`, or `during build`."""
    step, phase = progress.step, progress.phase
    if step < 0:
        return f"during {phase}"
    return f"after step {step}, {phase}" if phase in BETWEEN else f"at step {step + 1}, {phase}"


def ranks_in_words(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-7` or `ranks 0,2,5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ",".join(map(str, ranks))
