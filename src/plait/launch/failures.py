"""Who is guilty: the launcher's verdict on ranks that died, raised, or hang.

What a rank that failed says of it: the exception's type, its text, where it was raised, and what kind of failure it is.

Nothing of an exception is trusted. Its text may be 50 MB long, hold unpaired surrogates or control characters, or raise
when it is asked for. What is shown is short and printable; the whole text goes to the rank's log, in pieces.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.config.errors import FAILED, PlaitError, Problem, problem_of, text_of
from plait.config.job import user_line
from plait.config.library import PLAIT
from plait.launch.hangs import Hang, moment
from plait.launch.limits import no_shared_memory, too_many_files, too_many_processes
from plait.launch.progress import Progress

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


LOST = ("C001", "C003", "C004", "C005", "C008")
"""Codes of a rank that is lost: it hangs, was killed, lost its connection, raised, or its loader died. Starting again may mend it."""
SAMPLE = "C014"
"""Code of what the job's data raises for a sample: every rank still holds the state of the last step."""
BETWEEN = (SAMPLE, "J007", "C011")
"""Codes of what a rank raises between two steps."""
OWN = ("C001", "C005", SAMPLE)
"""Those that in a job's first step are most likely its own code's, which starting again does not mend."""


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

    def all_problems(self) -> list[Problem]:
        """The one that the launcher found, or those that the rank raised."""
        return [self.problem] if self.problem is not None else self.problems

    def error(self) -> PlaitError:
        return PlaitError(self.all_problems() or Problem("C005", f"rank {self.rank} failed"), self.exit_code, self.trace)

    def on(self, machine: str) -> "Failure":
        """The same, with the machine named in every problem."""
        problems = [replace(p, where=f"{machine}\n{p.where}".strip()) for p in self.all_problems()]
        return replace(self, problem=None, problems=problems)

    def to_json(self) -> dict[str, Any]:
        """For the launchers of other machines."""
        problems = [vars(p) for p in self.all_problems()]
        facts = {"rank": self.rank, "order": self.order, "victim": self.victim, "exit_code": self.exit_code}
        return facts | {"problems": problems}

    @staticmethod
    def of_json(row: dict[str, Any]) -> "Failure":
        """The failure that another launcher wrote."""
        order = (int(row["order"][0]), int(row["order"][1]))
        problems = list(map(problem_of, row["problems"]))
        return Failure(row["rank"], order, problems=problems, victim=row["victim"], exit_code=row["exit_code"])

    @staticmethod
    def raised(rank: int, progress: Progress, message: dict[str, Any], name: str = "") -> "Failure":
        """The rank raised an exception, told in `message` (see `described`). `name`: of a process that is no rank of the plan."""
        who = name or f"rank {rank}"
        trace, why = message["trace"], moment(progress)
        if message["problems"]:
            problems = list(map(problem_of, message["problems"]))
            return Failure(rank, (1, rank), problems=problems, exit_code=message["exit_code"], trace=trace)
        if "worker" in message:
            why += f", in loader worker {message['worker']}"
        if message["sort"] == "peer":
            problem = Problem("C004", f"{who} lost its connection {why}", why=titled(message))
            return Failure(rank, (4, rank), problem, victim=True, trace=trace)
        known = _limits(rank, why, message)
        if known is not None:
            return Failure(rank, (1, rank), known, trace=trace)
        what = f"{who} raised {titled(message)}"
        return Failure(rank, (2, rank), Problem("C005", what, why=why, where=located(message)), trace=trace)


def _limits(rank: int, when: str, message: dict[str, Any]) -> Problem | None:
    """What a rank met that is no fault of its code: no room, or a loader process that is gone."""
    text, where = message["text"], message["where"]
    if message["sort"] == "memory":
        fix = ("more micro-batches (--plan microbatches=…)", "a smaller batch (--batch …)")
        return Problem("M002", f"out of memory on rank {rank} {when}", why=text, where=where, fix=fix)
    if message["sort"] == "files":
        return too_many_files(f"rank {rank} {when}: {text}", where)
    if message["sort"] == "processes":
        return too_many_processes(f"rank {rank} could not start one {when}", text, ("fewer --workers",), where)
    if message["sort"] == "shared":
        return no_shared_memory(f"rank {rank} has no room in shared memory {when}", text, where)
    if message["sort"] == "loader":
        fix = (
            f"logs/rank{rank}.log has what it said",
            "fewer --workers, if memory ran out",
            "--workers 0    to see an error in the rank itself",
        )
        return Problem("C008", f"a loader process of rank {rank} died {when}", why=text, where=where, fix=fix)
    return None


def hung(found: Hang) -> Failure:
    """The verdict on a rank that makes no progress."""
    look, rank = found.look, found.look.rank
    if found.stopped:
        what = f"rank {rank} was stopped (SIGSTOP or a debugger) and holds everyone up"
        does, fix = "it is stopped", ("send it SIGCONT within 2 s, or start again with --resume",)
    else:
        what = f"rank {rank} stopped making progress" + (" and holds everyone up" if found.others else "")
        if found.devices:
            what = f"rank {rank} stopped making progress: all ranks wait for their devices or for each other"
        does = "it is at work, but finishes nothing" if look.busy else "it uses no processor, disk or network"
        does = "it waits for other ranks" if look.waits else does
        does = "it waits for its device" if look.stack.awaits_device else does
        fix = (
            f"logs/rank{rank}.log ends with its stack", "--resume after mending it",
            f"--hang-timeout {max(60, 4 * look.silent):.0f}    if it only needs more time",
        )  # fmt: skip
    why = "; ".join((f"no progress for {look.silent:.0f} s, {moment(look.progress)}", does, *found.others))
    return Failure(rank, (0, rank), Problem("C001", what, why=why, where=look.stack.where, fix=fix))


class Watch:
    """Judges processes that ended without a word."""

    def __init__(self) -> None:
        self.oom_kills = _oom_kills()

    def died(self, rank: int, progress: Progress, status: int) -> Failure:
        """A rank ended without a word. status: negative signal number, or exit code."""
        if status < 0:
            name = _named(-status)
            if status == -signal.SIGABRT:
                what = f"rank {rank} aborted itself (SIGABRT) {moment(progress)}"
                fix = (f"logs/rank{rank}.log says why", "--resume")
                why = "a check in compiled code failed, or a collective's watchdog gave up waiting for another rank"
                return Failure(rank, (3, rank), Problem("C003", what, why=why, fix=fix), victim=True)
            if status == -signal.SIGKILL and _oom_kills() > self.oom_kills:
                why = "the system ran out of memory and killed it: not a communication fault"
                fix = ("more micro-batches", "fewer loader workers", "--resume")
            elif status == -signal.SIGKILL:
                why = "somebody or the system killed it: not a communication fault"
                fix = ("--resume", "dmesg  tells whether memory ran out")
            else:
                why = "the process crashed in compiled code"
                fix = (f"logs/rank{rank}.log has the Python stack", "--resume")
            what = f"rank {rank} was killed ({name}) {moment(progress)}"
            return Failure(rank, (0, rank), Problem("C003", what, why=why, fix=fix))
        what = f"rank {rank} ended with exit code {status} {moment(progress)}"
        why = "the job, or a library it uses, ended the process"
        where, fix = f"logs/rank{rank}.log", ("do not call exit in a job",)
        return Failure(rank, (0, rank), Problem("C003", what, why=why, where=where, fix=fix))


def _named(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _oom_kills() -> int:
    """How often the kernel has killed for memory, in our control group or on the machine."""
    total = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            rows = dict(line.split()[:2] for line in Path(path).read_text().splitlines())
            total += int(rows.get("oom_kill", 0))
        except (OSError, ValueError):
            continue
    return total
