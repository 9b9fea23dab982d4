"""What a rank that failed says of it: the exception's type, its text, where it was raised, and what kind of failure it is.

Nothing of an exception is trusted. Its text may be 50 MB long, hold unpaired surrogates or control characters, or raise
when it is asked for. What is shown is short and printable; the whole text goes to the rank's log, in pieces.
"""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from plait.config.errors import FAILED, PlaitError, Problem, text_of
from plait.config.job import user_line
from plait.config.library import PLAIT

SHOWN = 400
"""Characters of an exception's text that a message shows."""
SEARCHED = 100_000
"""Characters of it that are searched for the words below."""
KEPT = 20_000
"""Characters of a traceback that travel with the failure, for `-v`."""
PIECE = 1 << 16
"""Characters of a log message."""

PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Write error",
    "Connection refused",
    "Timed out waiting",
    "remote process exited",
    "Watchdog caught collective operation timeout",
    "NCCL communicator was aborted",
    "ncclRemoteError",
)
"""What gloo and NCCL say on a rank that lost another one."""
NETWORKS = ("gloo", "NCCL", "nccl")
"""Who says so: shards are gathered inside the user's forward, so a line of the user's proves nothing."""
MEMORY = ("can't allocate memory", "Cannot allocate memory")
FILES = ("Too many open files",)
THREAD = "can't start new thread"
FORKS, LOCKS = ("multiprocessing.popen_fork", "subprocess"), ("multiprocessing.synchronize",)
"""Modules that start processes, and that make locks, which are in shared memory."""
NO_SEMAPHORES = (errno.ENOSPC, errno.EROFS, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSYS)
"""What the system says when /dev/shm is full, cannot be written, or is missing."""
SHARED = (
    "unable to write to file </torch_",
    "unable to resize file </torch_",
    "unable to allocate shared memory",
    "unable to open shared memory",
    "out of shared memory",
    "creating shared memory segment",
    "/dev/shm",
)
"""What torch and NCCL say when /dev/shm has no room."""


FORKED = ("in combination with fork-based multiprocessing", "Cannot re-initialize CUDA in forked subprocess")
"""What autograd and CUDA say in a process whose parent had used them."""


class LoaderError(Exception):
    """What the job's data raised in a loader process, told in the rank that wanted the samples."""

    def __init__(self, told: dict[str, Any], worker: int):
        self.told, self.worker = told, worker
        super().__init__(f"{titled(told)} (in loader worker {worker}; {located(told)})")


def described(error: BaseException) -> dict[str, Any]:
    """All that the launcher needs to know of an exception, as JSON values of bounded size."""
    if isinstance(error, LoaderError):
        return error.told | {"worker": error.worker}
    whole, where = text_of(error), user_line(error)
    if not isinstance(error, PlaitError) and any(sign in whole[:SEARCHED] for sign in FORKED):
        error = PlaitError(unforkable(short(whole))).with_traceback(error.__traceback__)
    problems = [vars(problem) for problem in error.problems] if isinstance(error, PlaitError) else []
    return {
        "type": type(error).__name__,
        "text": short(whole),
        "where": shortened(where, 1000),
        "module": module_of(error.__traceback__),
        "called": called(error.__traceback__),
        "sort": sort_of(error, whole[:SEARCHED], where),
        "problems": problems,
        "exit_code": error.exit_code if isinstance(error, PlaitError) else FAILED,
        "trace": cut(trace_of(error), KEPT),
    }


def unforkable(why: str) -> Problem:
    """H011: what was done in a process before plait was to fork it."""
    fix = (
        "call plait before the first backward pass and the first use of torch.cuda",
        "torchrun …    plait joins its processes",
    )
    return Problem("H011", "plait cannot start processes from this one", why=why, fix=fix)


def titled(message: dict[str, Any]) -> str:
    """`KeyError: 'x'` of what `described` told."""
    return f"{message['type']}: {message['text']}" if message["text"] else message["type"]


def located(message: dict[str, Any]) -> str:
    """Where it was raised: the user's own line and the module, as far as there are any, else what plait had called."""
    inner = "(" in message["module"] or not message["where"]  # a line of the user's says more than the whole model
    module = f"module {message['module']}" if message["module"] and inner else ""
    place = ", ".join(part for part in (message["where"], module) if part) or message["called"]
    return place if message["where"] else f"{place}; -v shows the traceback".removeprefix("; ")


def trace_of(error: BaseException) -> str:
    if isinstance(error, LoaderError):
        return error.told["trace"]
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # groups of exceptions in each other deeper than Python follows
        return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {text_of(error)}\n"


def pieces(text: str) -> Iterator[str]:
    """A text of any length as parts that travel one by one."""
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def short(text: str) -> str:
    """The first line of a text, printable, cut where it is too long to read."""
    first = next((line for line in text[:SEARCHED].splitlines() if line.strip()), "")
    more = len(text) > SEARCHED and len(first) == SEARCHED
    return shortened(printable(first[: 2 * SHOWN]) + first[2 * SHOWN :], SHOWN, len(text) if more else len(first))


def shortened(text: str, most: int, length: int = 0) -> str:
    """A text of at most so many characters, with the number of those it had."""
    length = max(length, len(text))
    return text if length <= most else f"{text[:most]}… ({length:,} characters)".replace(",", " ")


def cut(text: str, most: int) -> str:
    """The beginning and, mostly, the end of a text: what matters of a traceback."""
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters left out, the rank's log has them …\n{text[-most * 3 // 4 :]}"


def printable(text: str) -> str:
    """A text without what a terminal would obey or cannot show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def sort_of(error: BaseException, text: str, where: str) -> str:
    """What kind of failure an exception is: memory, files, shared, processes, loader, peer, or an empty string."""
    if text.startswith("DataLoader worker (pid"):
        return "shared" if "Bus error" in text else "loader"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "files"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return "memory"
    if not isinstance(error, (OSError, RuntimeError)):
        return ""
    if isinstance(error, OSError) and error.errno in NO_SEMAPHORES and not error.filename and _raised_in(error, *LOCKS):
        return "shared"
    if THREAD in text or (isinstance(error, OSError) and error.errno == errno.EAGAIN and _raised_in(error, *FORKS)):
        return "processes"
    if any(sign in text for sign in PEER) and (not where or any(name in text for name in NETWORKS)):
        return "peer"
    said = (("files", FILES), ("shared", SHARED), ("memory", MEMORY))
    return next((name for name, signs in said if any(sign in text for sign in signs)), "")


def _raised_in(error: BaseException, *modules: str) -> bool:
    """Whether an exception passed through code of one of these modules."""
    return any(frame.f_globals.get("__name__") in modules for frame, _ in traceback.walk_tb(error.__traceback__))


def module_of(trace: TracebackType | None) -> str:
    """`layers.1 (Linear)`: the innermost module whose code an exception passed through, named by the outermost one."""
    from torch import nn

    methods = [frame for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_varnames[:1] == ("self",)]
    inside = [it for frame in methods if isinstance(it := frame.f_locals.get("self"), nn.Module)]
    if not inside:
        return ""
    kind = type(inside[-1]).__name__
    for outer in inside:
        name = next((name for name, module in outer.named_modules() if module is inside[-1]), None)
        if name is not None:
            return f"{name} ({kind})" if name else kind
    return kind


def called(trace: TracebackType | None) -> str:
    """`nll_loss (torch/nn/functional.py:3035)`: what plait called when a library raised that knows no code of the user's."""
    place = ""
    before = True
    for frame, line in traceback.walk_tb(trace):
        mine = frame.f_code.co_filename.startswith(PLAIT)
        if before and not mine and not frame.f_code.co_filename.startswith("<"):
            place = f"{frame.f_code.co_qualname} ({_library(frame.f_code.co_filename)}:{line})"
        before = mine
    return place


def _library(path: str) -> str:
    """The part of a file's path that an import names: a virtual environment may lie inside another folder that is imported from."""
    roots = (f"{root}{os.sep}" for root in sys.path if root)
    return path.removeprefix(max((root for root in roots if path.startswith(root)), key=len, default=""))
