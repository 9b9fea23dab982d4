"""Who is guilty: the launcher's verdict on ranks that died, raised, or hang."""

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.config.errors import FAILED, PlaitError, Problem, problem_of
from plait.launch.failure_report import located, titled
from plait.launch.hangs import Hang, moment
from plait.launch.limits import no_shared_memory, too_many_files, too_many_processes
from plait.launch.progress import Progress

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

    def to_json(self) -> dict[str, Any]:
        """For the launchers of other machines."""
        problems = [vars(p) for p in self.all_problems()]
        return {
            "rank": self.rank,
            "order": self.order,
            "problems": problems,
            "victim": self.victim,
            "exit_code": self.exit_code,
        }

    @staticmethod
    def of_json(row: dict[str, Any], machine: str) -> "Failure":
        """The same, on another machine, which every problem names."""
        problems = list(map(problem_of, row["problems"]))
        problems = [replace(p, where=f"{machine}\n{p.where}".strip()) for p in problems]
        order = (int(row["order"][0]), int(row["order"][1]))
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
            f"--patience {max(60, 4 * look.silent):.0f}    if it only needs more time",
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
