"""Find the rank that caused a failure, among ranks that died, raised or hang.

A failed rank reports the exception's type, its text, its location, and the kind of failure.

The content of an exception is untrusted. Its text may have 50 MB, unpaired surrogates or control characters, and its `__str__` may raise.
Messages show a short printable part; the rank's log gets the full text, in chunks.
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

from plait.config.errors import FAILED, PlaitError, Problem, parse_problem, safe_str
from plait.config.job import find_user_line
from plait.config.library import PLAIT_FOLDER
from plait.launch.hangs import Hang, format_moment
from plait.launch.limits import no_shared_memory, too_many_files, too_many_processes
from plait.launch.progress import Progress

MAX_SHOWN = 400
"""Characters of an exception's text in a message."""
MAX_SEARCHED = 100_000
"""Characters of an exception's text that are searched for the patterns below."""
MAX_TRACE = 20_000
"""Characters of a traceback that are sent with the failure, for `-v`."""
LOG_CHUNK = 1 << 16
"""Characters of a log message."""

PEER_LOST_SIGNS = (
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
"""Errors of gloo and NCCL on a rank that lost a peer."""
NETWORK_LIBRARIES = ("gloo", "NCCL", "nccl")
"""Libraries that raise these errors. The user's line proves nothing, because shards are gathered inside the user's forward."""
MEMORY_SIGNS = ("can't allocate memory", "Cannot allocate memory")
FILE_LIMIT_SIGNS = ("Too many open files",)
THREAD_SIGN = "can't start new thread"
FORK_MODULES, LOCK_MODULES = ("multiprocessing.popen_fork", "subprocess"), ("multiprocessing.synchronize",)
"""Modules that start processes, and modules that create locks, which are in shared memory."""
NO_SEMAPHORES = (errno.ENOSPC, errno.EROFS, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSYS)
"""Error numbers if /dev/shm is full, read-only or missing."""
SHARED_MEMORY_SIGNS = (
    "unable to write to file </torch_",
    "unable to resize file </torch_",
    "unable to allocate shared memory",
    "unable to open shared memory",
    "out of shared memory",
    "creating shared memory segment",
    "/dev/shm",
)
"""Errors of torch and NCCL if /dev/shm is full."""


FORK_SIGNS = ("in combination with fork-based multiprocessing", "Cannot re-initialize CUDA in forked subprocess")
"""Errors of autograd and CUDA in a process whose parent had used them."""


class LoaderError(Exception):
    """An error of the job's data in a loader process, raised in the rank that requested the samples."""

    def __init__(self, report: dict[str, Any], worker: int):
        self.report, self.worker = report, worker
        super().__init__(f"{format_title(report)} (in loader worker {worker}; {format_location(report)})")


def describe_error(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the launcher, as JSON values of bounded size."""
    if isinstance(error, LoaderError):
        return error.report | {"worker": error.worker}
    whole, where = safe_str(error), find_user_line(error)
    if not isinstance(error, PlaitError) and any(sign in whole[:MAX_SEARCHED] for sign in FORK_SIGNS):
        error = PlaitError(unforkable(format_first_line(whole))).with_traceback(error.__traceback__)
    problems = [vars(problem) for problem in error.problems] if isinstance(error, PlaitError) else []
    return {
        "type": type(error).__name__,
        "text": format_first_line(whole),
        "where": truncate_text(where, 1000),
        "module": find_module(error.__traceback__),
        "called": find_plait_call(error.__traceback__),
        "sort": classify_error(error, whole[:MAX_SEARCHED], where),
        "problems": problems,
        "exit_code": error.exit_code if isinstance(error, PlaitError) else FAILED,
        "trace": truncate_middle(format_error_trace(error), MAX_TRACE),
    }


def unforkable(why: str) -> Problem:
    """H011. `why`: the use of this process that makes forking impossible."""
    fix = (
        "call plait before the first backward pass and the first use of torch.cuda",
        "torchrun …    plait joins its processes",
    )
    return Problem("H011", "plait cannot start processes from this one", why=why, fix=fix)


def format_title(message: dict[str, Any]) -> str:
    """Format an exception as `KeyError: 'x'`, from the report of `describe_error`."""
    return f"{message['type']}: {message['text']}" if message["text"] else message["type"]


def format_location(message: dict[str, Any]) -> str:
    """Return the user's line and the module where it was raised, else the library function that plait called."""
    inner = "(" in message["module"] or not message["where"]  # the user's line is more specific than the top-level module
    module = f"module {message['module']}" if message["module"] and inner else ""
    place = ", ".join(part for part in (message["where"], module) if part) or message["called"]
    return place if message["where"] else f"{place}; -v shows the traceback".removeprefix("; ")


def format_error_trace(error: BaseException) -> str:
    if isinstance(error, LoaderError):
        return error.report["trace"]
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # groups of exceptions in each other deeper than Python follows
        return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {safe_str(error)}\n"


def split_chunks(text: str) -> Iterator[str]:
    """Split a text of any length into log messages."""
    return (text[at : at + LOG_CHUNK] for at in range(0, len(text), LOG_CHUNK))


def format_first_line(text: str) -> str:
    """Return the first line of a text, printable and truncated."""
    first = next((line for line in text[:MAX_SEARCHED].splitlines() if line.strip()), "")
    more = len(text) > MAX_SEARCHED and len(first) == MAX_SEARCHED
    return truncate_text(escape_text(first[: 2 * MAX_SHOWN]) + first[2 * MAX_SHOWN :], MAX_SHOWN, len(text) if more else len(first))


def truncate_text(text: str, most: int, length: int = 0) -> str:
    """Truncate a text to `most` characters, and append its original length."""
    length = max(length, len(text))
    return text if length <= most else f"{text[:most]}… ({length:,} characters)".replace(",", " ")


def truncate_middle(text: str, most: int) -> str:
    """Keep the beginning and, mostly, the end of a text, which are the relevant parts of a traceback."""
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters left out, the rank's log has them …\n{text[-most * 3 // 4 :]}"


def escape_text(text: str) -> str:
    """Escape control sequences and unprintable characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def classify_error(error: BaseException, text: str, where: str) -> str:
    """Classify an exception: memory, files, shared, processes, loader, peer, or an empty string."""
    if text.startswith("DataLoader worker (pid"):
        return "shared" if "Bus error" in text else "loader"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "files"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return "memory"
    if not isinstance(error, (OSError, RuntimeError)):
        return ""
    if isinstance(error, OSError) and error.errno in NO_SEMAPHORES and not error.filename and _is_raised_in(error, *LOCK_MODULES):
        return "shared"
    if THREAD_SIGN in text or (isinstance(error, OSError) and error.errno == errno.EAGAIN and _is_raised_in(error, *FORK_MODULES)):
        return "processes"
    if any(sign in text for sign in PEER_LOST_SIGNS) and (not where or any(name in text for name in NETWORK_LIBRARIES)):
        return "peer"
    said = (("files", FILE_LIMIT_SIGNS), ("shared", SHARED_MEMORY_SIGNS), ("memory", MEMORY_SIGNS))
    return next((name for name, signs in said if any(sign in text for sign in signs)), "")


def _is_raised_in(error: BaseException, *modules: str) -> bool:
    """Whether an exception passed through code of one of these modules."""
    return any(frame.f_globals.get("__name__") in modules for frame, _ in traceback.walk_tb(error.__traceback__))


def find_module(trace: TracebackType | None) -> str:
    """Return the innermost module whose code an exception passed through, by its name in the outermost one: `layers.1 (Linear)`."""
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


def find_plait_call(trace: TracebackType | None) -> str:
    """Return the function that plait called if no code of the user's is in a traceback: `nll_loss (torch/nn/functional.py:3035)`."""
    place = ""
    before = True
    for frame, line in traceback.walk_tb(trace):
        mine = frame.f_code.co_filename.startswith(PLAIT_FOLDER)
        if before and not mine and not frame.f_code.co_filename.startswith("<"):
            place = f"{frame.f_code.co_qualname} ({_strip_import_root(frame.f_code.co_filename)}:{line})"
        before = mine
    return place


def _strip_import_root(path: str) -> str:
    """Return a file's path relative to its longest import root. A virtual environment may be inside another import root."""
    roots = (f"{root}{os.sep}" for root in sys.path if root)
    return path.removeprefix(max((root for root in roots if path.startswith(root)), key=len, default=""))


LOST_CODES = ("C001", "C003", "C004", "C005", "C008")
"""Codes of a lost rank: it hangs, was killed, lost its connection or raised, or its loader died. A restart may help."""
SAMPLE_CODE = "C014"
"""Code of an error in the job's data while a sample is read. Every rank still has the state of the last step."""
BETWEEN_STEP_CODES = (SAMPLE_CODE, "J007", "C011")
"""Codes of errors that a rank raises between two steps."""
JOB_CODES = ("C001", "C005", SAMPLE_CODE)
"""Codes that in a job's first step are most likely errors of the job, which a restart does not fix."""


@dataclass
class Failure:
    """Failure of one rank. The failure with the smallest `order` is the cause."""

    rank: int
    order: tuple[int, int]
    problem: Problem | None = None
    problems: list[Problem] = field(default_factory=list)
    victim: bool = False
    exit_code: int = FAILED
    trace: str = ""

    def all_problems(self) -> list[Problem]:
        """Return the problem that the launcher found, or the problems that the rank raised."""
        return [self.problem] if self.problem is not None else self.problems

    def error(self) -> PlaitError:
        return PlaitError(self.all_problems() or Problem("C005", f"rank {self.rank} failed"), self.exit_code, self.trace)

    def with_node(self, machine: str) -> "Failure":
        """Return a copy with the node named in every problem."""
        problems = [replace(p, where=f"{machine}\n{p.where}".strip()) for p in self.all_problems()]
        return replace(self, problem=None, problems=problems)

    def to_json(self) -> dict[str, Any]:
        """Serialize for the launchers of other nodes."""
        problems = [vars(p) for p in self.all_problems()]
        facts = {"rank": self.rank, "order": self.order, "victim": self.victim, "exit_code": self.exit_code}
        return facts | {"problems": problems}

    @staticmethod
    def from_json(row: dict[str, Any]) -> "Failure":
        """Deserialize a failure that another launcher wrote."""
        order = (int(row["order"][0]), int(row["order"][1]))
        problems = list(map(parse_problem, row["problems"]))
        return Failure(row["rank"], order, problems=problems, victim=row["victim"], exit_code=row["exit_code"])

    @staticmethod
    def from_report(rank: int, progress: Progress, message: dict[str, Any], name: str = "") -> "Failure":
        """Make a failure from the report of a rank (see `describe_error`). `name`: of a process that is not a rank of a plan."""
        who = name or f"rank {rank}"
        trace, why = message["trace"], format_moment(progress)
        if message["problems"]:
            problems = list(map(parse_problem, message["problems"]))
            return Failure(rank, (1, rank), problems=problems, exit_code=message["exit_code"], trace=trace)
        if "worker" in message:
            why += f", in loader worker {message['worker']}"
        if message["sort"] == "peer":
            problem = Problem("C004", f"{who} lost its connection {why}", why=format_title(message))
            return Failure(rank, (4, rank), problem, victim=True, trace=trace)
        known = _explain_limit(rank, why, message)
        if known is not None:
            return Failure(rank, (1, rank), known, trace=trace)
        what = f"{who} raised {format_title(message)}"
        return Failure(rank, (2, rank), Problem("C005", what, why=why, where=format_location(message)), trace=trace)


def _explain_limit(rank: int, when: str, message: dict[str, Any]) -> Problem | None:
    """Return a problem for a failure that the rank's code did not cause: a resource limit, or a dead loader process."""
    text, where = message["text"], message["where"]
    if message["sort"] == "memory":
        fix = ("more micro-batches (--plan microbatches=…)", "a smaller batch (--batch …)")
        return Problem("M002", f"out of memory on rank {rank} {when}", why=text, where=where, fix=fix)
    if message["sort"] == "files":
        return too_many_files(f"rank {rank} {when}: {text}", where)
    if message["sort"] == "processes":
        return too_many_processes(f"rank {rank} could not start one {when}", text, ("fewer --workers",), where)
    if message["sort"] == "shared":
        return no_shared_memory(f"rank {rank} has no free shared memory {when}", text, where)
    if message["sort"] == "loader":
        fix = (
            f"logs/rank{rank}.log has its output",
            "fewer --workers, if memory ran out",
            "--workers 0    to see an error in the rank itself",
        )
        return Problem("C008", f"a loader process of rank {rank} died {when}", why=text, where=where, fix=fix)
    return None


def describe_hang(found: Hang) -> Failure:
    """Describe a rank that makes no progress."""
    look, rank = found.suspect, found.suspect.rank
    if found.is_stopped:
        what = f"rank {rank} was stopped (SIGSTOP or a debugger) and blocks all other ranks"
        does, fix = "it is stopped", ("send it SIGCONT within 2 s, or start again with --resume",)
    else:
        what = f"rank {rank} stopped making progress" + (" and blocks all other ranks" if found.others else "")
        if found.on_devices:
            what = f"rank {rank} stopped making progress: all ranks wait for their devices or for each other"
        does = "it is busy, but completes nothing" if look.is_busy else "it uses no CPU, disk or network"
        does = "it waits for other ranks" if look.is_waiting else does
        does = "it waits for its device" if look.stack.is_awaiting_device else does
        fix = (
            f"logs/rank{rank}.log ends with its stack", "--resume    after fixing it",
            f"--hang-timeout {max(60, 4 * look.silent_seconds):.0f}    if it only needs more time",
        )  # fmt: skip
    why = "; ".join((f"no progress for {look.silent_seconds:.0f} s, {format_moment(look.progress)}", does, *found.others))
    return Failure(rank, (0, rank), Problem("C001", what, why=why, where=look.stack.where, fix=fix))


class ExitAnalyzer:
    """Explains why a process ended without a report."""

    def __init__(self) -> None:
        self.oom_kills = _count_oom_kills()

    def explain_exit(self, rank: int, progress: Progress, status: int) -> Failure:
        """Explain why a rank ended without a report. `status`: negative signal number, or exit code."""
        if status < 0:
            name = _name_signal(-status)
            if status == -signal.SIGABRT:
                what = f"rank {rank} aborted itself (SIGABRT) {format_moment(progress)}"
                fix = (f"logs/rank{rank}.log has the reason", "--resume")
                why = "a check in compiled code failed, or a collective's watchdog gave up waiting for another rank"
                return Failure(rank, (3, rank), Problem("C003", what, why=why, fix=fix), victim=True)
            if status == -signal.SIGKILL and _count_oom_kills() > self.oom_kills:
                why = "the system ran out of memory and killed it: not a communication fault"
                fix = ("more micro-batches", "fewer loader workers", "--resume")
            elif status == -signal.SIGKILL:
                why = "a user or the system killed it: not a communication fault"
                fix = ("--resume", "dmesg    shows whether memory ran out")
            else:
                why = "the process crashed in compiled code"
                fix = (f"logs/rank{rank}.log has the Python stack", "--resume")
            what = f"rank {rank} was killed ({name}) {format_moment(progress)}"
            return Failure(rank, (0, rank), Problem("C003", what, why=why, fix=fix))
        what = f"rank {rank} ended with exit code {status} {format_moment(progress)}"
        why = "the job, or a library it uses, ended the process"
        where, fix = f"logs/rank{rank}.log", ("do not call exit in a job",)
        return Failure(rank, (0, rank), Problem("C003", what, why=why, where=where, fix=fix))


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _count_oom_kills() -> int:
    """Count the kernel's out-of-memory kills, in this control group or on the machine."""
    total = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            rows = dict(line.split()[:2] for line in Path(path).read_text().splitlines())
            total += int(rows.get("oom_kill", 0))
        except (OSError, ValueError):
            continue
    return total
