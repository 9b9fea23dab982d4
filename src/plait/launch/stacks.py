"""Where a process is: its Python stack, asked for by a signal.

A process is asked twice. One signal is answered by Python itself, between two of its instructions, when it sleeps, waits for a
lock or loops. Who stands in compiled code does not come to that, and is asked by a second signal, which `faulthandler`
answers at once. It reads the stack as it lies in memory: safe while Python stands still, and not while it runs, when it
crashed a healthy rank now and then.

All processes write to one file that the launcher made before they were forked; the launcher asks one process at a time. A
process that does not catch a signal is not asked: the signal would end it.
"""

import faulthandler
import fcntl
import os
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

from plait.config.library import PLAIT, STANDARD, is_library

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
    """The file that processes write their stacks to. Make it before the fork, `answer` in each process."""

    def __init__(self) -> None:
        in_memory = hasattr(os, "memfd_create")  # Linux: also when the disk is full
        self._file = os.fdopen(os.memfd_create("plait-stacks"), "rb+") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
        self._end = self._file.fileno()
        fcntl.fcntl(self._end, fcntl.F_SETFL, fcntl.fcntl(self._end, fcntl.F_GETFL) | os.O_APPEND)  # whoever has which offset

    def answer(self) -> None:
        """From now on this process, and those it forks, write their stack when asked.

        Only that of the main thread: reading the stack of a thread that runs on may crash.
        """
        signal.signal(_RUNNING, self._tell)
        signal.siginterrupt(_RUNNING, False)  # compiled code need not know that its read was interrupted
        faulthandler.register(_STANDING, file=self._end, all_threads=False)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        lines = [_header(os.getpid())]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        os.write(self._end, ("\n".join(lines) + "\n").encode(errors="replace"))

    def ask(self, pid: int, patience: float = 0.5) -> Stack:
        """The stack of a process. Empty when it does not catch the signals, or cannot run."""
        os.ftruncate(self._end, 0)
        text = self._answered(pid, _RUNNING, patience)
        return parse(text or self._answered(pid, _STANDING, patience))

    def _answered(self, pid: int, number: int, patience: float) -> str:
        """What a process writes when it gets the signal; not what another one writes that was asked before."""
        if not _catches(pid, number):
            return ""
        os.kill(pid, number)
        text, end = "", time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(0.02)
            size = os.fstat(self._end).st_size
            before, text = text, os.pread(self._end, size, 0).decode(errors="replace")
            if text == before and (mine := _of(pid, text)):
                return mine
        return _of(pid, text)

    def close(self) -> None:
        self._file.close()


def _header(pid: int) -> str:
    return f"Stack of process {pid} (most recent call first):"


def _of(pid: int, text: str) -> str:
    """The part of a text that is no other process's."""
    parts = re.split(r"^(?=Stack )", text, flags=re.MULTILINE)
    mine = [part for part in parts if part.startswith((_header(pid), "Stack ("))]
    return mine[-1] if mine else ""


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
