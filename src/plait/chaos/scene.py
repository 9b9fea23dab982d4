"""The scene of one fault: its folder, its runs, and the checks of their outcome.

A fault (`Fault`) has a function that injects it and an expected outcome. A row (`Row`) of the table has the measured outcome.
"""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plait.chaos.hosts import Hosts
from plait.chaos.strike import Mark, Strike, add_strikes, read_marks
from plait.chaos.watched_run import ChildSetup, RunRecord, WaitTimeout, WatchedRun, reap_orphans
from plait.config.command_options import TrainOptions, format_words
from plait.config.errors import RESUMABLE
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.child import fork_process
from plait.launch.place import count_cores, count_threads, fix_threads


class CannotPose(Exception):
    """This machine, job or plan does not allow the fault; the text has the reason."""


@dataclass
class Outcome:
    """The measured outcome of one fault."""

    detected: float | None = None
    """Seconds from the fault to the first line that reports it."""
    again: float | None = None
    """Seconds from the fault to the end of the next new step."""
    resumed: bool = False
    """A person had to start the run again: `again` counts from that start."""
    lost: int | None = None
    """Completed steps that were computed again."""
    equal: str = ""
    """Whether losses, samples and weights equal those of the run without faults."""
    drawn: list[str] = field(default_factory=list)
    """Random choices: ranks, steps, bytes of a file."""
    short: list[str] = field(default_factory=list)
    """Differences from the expected outcome."""
    said: str = ""
    """The line that reported the fault."""
    output: str = ""
    """The end of the runs' output, if the outcome was not as expected."""


REPORT_SECONDS = 5.0
"""Seconds in which plait must report a lost rank; more if ranks share cores."""
SHARED_MEMORY = Path("/dev/shm")
SLOW_STRIKE = Strike("slow", "forward", rank=0, times=999, text="0.1")
"""Slows down steps, for faults that are injected from outside into jobs with steps of milliseconds."""


@dataclass
class Setting:
    """Settings shared by all faults of one command."""

    main: Callable[[list[str], Job], int]
    """The command line: (words, job) -> exit code."""
    train: TrainOptions
    """Options of `plait train`: job, plan, steps."""
    job: Job
    plan: Plan
    seed: int
    mounts: bool
    """True if file systems can be mounted for this process alone."""
    hosts: Hosts | None = None
    """Two hosts, if the system allows network namespaces."""
    reference: RunRecord | None = None
    """Record of the run without faults."""
    run: Path | None = None
    """Directory of that run."""
    hang_timeout: float = 4.0
    """Seconds for `--hang-timeout`: more on a machine where runs start slowly."""

    @property
    def steps(self) -> int:
        return self.train.steps or self.job.steps

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        return self.train.save_every

    @property
    def has_replicas(self) -> bool:
        """True if ranks have replicas of the full state: no completed step may be lost with one of them."""
        return self.plan.along(self.plan.replica_axes) > 1 and self.plan.shards == 1


class Scene:
    """The folder, runs and checks of one fault."""

    def __init__(self, setting: Setting, name: str, folder: Path):
        self.setting, self.folder, self.runs = setting, folder, folder / "runs"
        self.rng = random.Random(f"{setting.seed} {name}")
        self.outcome = Outcome()
        self.watched: list[WatchedRun] = []
        self.helpers: list[int] = []
        self.undo: list[Callable[[], object]] = []
        self.world = setting.plan.world
        folder.mkdir(parents=True)

    # — random choices —

    def draw_rank(self) -> int:
        return self.draw_number("rank", range(self.world))

    def draw_step(self) -> int:
        """Draw the number of completed steps before the fault: after a checkpoint, and before the next."""
        return self.draw_number("step", range(self.setting.save_every + 1, 2 * self.setting.save_every))

    def draw_number(self, what: str, among: range) -> int:
        """Draw a random number and record it in the row."""
        number = self.rng.choice(among)
        self.outcome.drawn.append(f"{what} {number}")
        return number

    def require(self, missing: str, there: bool) -> None:
        """Raise `CannotPose` with the text `missing` unless `there`."""
        if not there:
            raise CannotPose(missing)

    @property
    def hang_flags(self) -> tuple[str, ...]:
        """Options for faults whose default limits are minutes."""
        return ("--hang-timeout", f"{self.setting.hang_timeout:.0f}")

    def require_ranks(self) -> None:
        """Require a plan with more than one rank."""
        self.require("the plan has one rank", self.world > 1)

    def require_other_plans(self) -> None:
        """Require a plan whose run can continue under another one with the same result."""
        self.require("weights and optimizer states of replica groups cannot continue under another plan", not self.setting.plan.rarely)

    # — runs —

    def start(
        self,
        *more: str,
        strikes: tuple[Strike, ...] = (),
        before: Callable[[], None] = lambda: None,
        train: TrainOptions | None = None,
        job: Job | None = None,
    ) -> WatchedRun:
        """Start `plait train` with additional words. `train`: options instead of the default ones; `job`: an edited job."""
        strikes = strikes or (SLOW_STRIKE,)
        words = ["train", *format_words(train or self.setting.train), "--runs", str(self.runs), *more]
        main, job = self.setting.main, job or self.setting.job

        def prepare() -> None:
            fix_threads(count_threads(self.world))
            before()

        around = add_strikes(strikes, self.folder, self.rng.randrange(1 << 30), self.setting.plan.world)
        run = WatchedRun(lambda words: main(words, job), words, self.runs, ChildSetup(around, prepare))
        self.watched.append(run)
        return run

    def start_helper(self, work: Callable[[], None]) -> int:
        """Run `work` in its own process, which is killed at the end of the scene."""
        pid = fork_process()
        if pid == 0:
            with contextlib.suppress(BaseException):
                work()
            os._exit(0)
        self.helpers.append(pid)
        return pid

    def find_mark(self) -> Mark:
        found = [mark for mark in read_marks(self.folder) if mark.act != "mark"]
        if not found:
            raise WaitTimeout("the step or phase of the fault did not come")
        return found[0]

    def close(self) -> None:
        """End all runs. Processes and files left behind are a shortfall."""
        for run in self.watched:
            run.poll()
            run.kill()
        for pid in self.helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        left = reap_orphans() + self.list_shared_files()
        if left:
            self.add_shortfall(f"left behind: {', '.join(left)}")
        if self.outcome.short:
            self.outcome.output = "\n".join(run.output for run in self.watched)[-4000:]
        while self.undo:
            self.undo.pop()()

    def list_shared_files(self) -> list[str]:
        """Names of the runs' files in shared memory."""
        return [p.name for run in self.watched for p in SHARED_MEMORY.glob(f"plait-*-{run.pid}-*")] if SHARED_MEMORY.is_dir() else []

    # — checks —

    def add_shortfall(self, why: str) -> None:
        self.outcome.short.append(why)

    def expect(self, holds: bool, why: str) -> bool:
        """Add a shortfall unless `holds`."""
        if not holds:
            self.add_shortfall(why)
        return holds

    def expect_lines(self, run: WatchedRun, since: float, *says: str, within: float = REPORT_SECONDS) -> None:
        """Expect these lines in a run's output after the fault, the first of them within `within` seconds."""
        for number, words in enumerate(says):
            found = run.find_line(words, since)
            if found is None:
                last = next((line for _, line in reversed(run.lines) if "error[" in line), "")
                self.add_shortfall(f"the run did not print `{words}`" + (f", but `{last[:90]}`" if last else ""))
            elif number == 0:
                self.outcome.detected, self.outcome.said = found[0] - since, found[1]
                late = within * max(1.0, self.world / count_cores())
                self.expect(found[0] - since <= late, f"reported after {found[0] - since:.1f} s, not within {late:.0f}")

    def measure_recovery(self, run: WatchedRun, since: float | None = None) -> None:
        """Measure the time of the next new step and the lost steps in a run that continued by itself. `since`: time of a fault that was
        injected from outside."""
        struck_at, lost = [mark for mark in read_marks(self.folder) if mark.act != "mark"], 0
        if since is not None:
            struck_at = [Mark(since, max((n for t, n in run.steps if t <= since), default=0), 0, "outside")]
        for when, line in run.lines:
            if "resuming from step" not in line:
                continue
            step = int(line.partition("resuming from step ")[2].partition(",")[0])
            before = [mark for mark in struck_at if mark.time < when]
            if before:  # a loader process has no step number
                written = max((n for t, n in run.steps if t <= before[-1].time), default=0)
                lost += max(0, before[-1].step - step, written - step)
            made = next((t for t, n in run.steps if t > when and n == step + 1), None)
            if made is not None and before and self.outcome.again is None:
                self.outcome.again = made - before[-1].time
        self.outcome.lost = lost

    def expect_lost_at_most(self, most: int) -> None:
        lost = self.outcome.lost
        self.expect(lost is not None and lost <= most, f"{lost} steps were lost; the limit is {most}")

    def expect_equal(self) -> None:
        """Expect the newest run to equal the run without faults bit for bit."""
        assert self.setting.reference is not None
        try:
            wrong = RunRecord.from_run(self.runs / "latest").list_differences(self.setting.reference)
        except Exception as error:  # any damage of the run's files
            wrong = [f"the run's files cannot be read: {type(error).__name__}: {error}"]
        self.outcome.equal = "no" if wrong else "yes"
        for why in wrong:
            self.add_shortfall(why)

    def expect_close(self) -> None:
        """Expect the newest run to equal the run without faults, except for the order of sums under another plan."""
        assert self.setting.reference is not None
        try:
            share, wrong = RunRecord.from_run(self.runs / "latest").compare_close(self.setting.reference)
        except Exception as error:  # any damage of the run's files
            share, wrong = 1.0, [f"the run's files cannot be read: {type(error).__name__}: {error}"]
        self.outcome.equal = "no" if wrong else f"to {share:.0e}"
        for why in wrong:
            self.add_shortfall(why)

    def resume(self, *more: str, strikes: tuple[Strike, ...] = (), lost: int | None = None) -> WatchedRun:
        """Resume with --resume to the end. The result must equal the run without faults."""
        before = max((run.step for run in self.watched), default=0)
        run = self.start("--resume", *more, strikes=strikes)
        code = run.wait()
        self.expect(code == 0, f"--resume ended with exit code {code}: {_find_error(run)}")
        found = run.find_line("resumed from")
        at, since = (int(found[1].rpartition("at step ")[2]), found[0]) if found is not None else (0, run.began)
        self.outcome.lost = (self.outcome.lost or 0) + max(0, before - at)
        self.outcome.resumed = True
        self.outcome.again = next((t - run.began for t, n in run.steps if t > since and n == at + 1), None)
        if lost is not None:
            self.expect_lost_at_most(lost)
        if code == 0:
            self.expect_equal()
        return run

    # — the two outcomes of most faults —

    def expect_recovery(
        self,
        *strikes: Strike,
        says: tuple[str, ...],
        flags: tuple[str, ...] = (),
        lost: int | None = None,
        within: float = REPORT_SECONDS,
    ) -> Outcome:
        """Expect the run to continue by itself and to equal the run without faults."""
        run = self.start(*flags, strikes=strikes)
        code = run.wait()
        self.expect_lines(run, self.find_mark().time, *says, within=within)
        if self.expect(code == 0, f"the run ended with exit code {code}: {_find_error(run)}"):
            self.measure_recovery(run)
            self.expect_equal()
            self.expect_lost_at_most(self.allowed_loss if lost is None else lost)
        return self.outcome

    @property
    def allowed_loss(self) -> int:
        """Steps that may be lost with one rank."""
        return 0 if self.setting.has_replicas else self.checkpoint_loss

    @property
    def checkpoint_loss(self) -> int:
        """Steps that may be lost since the last complete checkpoint: the next one may still be in progress."""
        return 2 * self.setting.save_every

    def expect_ending(
        self, *strikes: Strike, says: tuple[str, ...], flags: tuple[str, ...] = (), code: int = 1, within: float = REPORT_SECONDS
    ) -> Outcome:
        """Expect the run to report the fault and end. A resume without the fault must equal the run without faults."""
        run = self.start(*flags, strikes=strikes)
        got = run.wait()
        self.expect_lines(run, self.find_mark().time, *says, within=within)
        self.expect(got == code, f"exit code {got}, not {code}: {_find_error(run)}")
        self.resume(lost=self.checkpoint_loss)
        return self.outcome

    def expect_stop(self, run: WatchedRun, since: float) -> None:
        """Expect a run to save and stop with exit code 75, and a resume to lose no step."""
        code = run.wait()
        self.expect_lines(run, since, "stopped at step", within=3 * REPORT_SECONDS)
        self.expect(code == RESUMABLE, f"exit code {code}, not {RESUMABLE}: {_find_error(run)}")
        self.resume(lost=0)


def _find_error(run: WatchedRun) -> str:
    """The last error line of a run, else its last line."""
    lines = [line for _, line in run.lines if line.strip()]
    found = next((line for line in lines if "error[" in line), lines[-1] if lines else "no output")
    return found[:120]


AS_EXPECTED, NOT_AS_EXPECTED, NOT_RUN, NO_PROMISE = "as expected", "not as expected", "not run", "no guarantee"
"""Verdicts. `NO_PROMISE`: plait guarantees nothing; the outcome is measured all the same."""


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    injection: str
    """The fault, as a noun phrase or a short sentence."""
    promise: str
    """The expected outcome, which `pose` checks; "none: …" if plait guarantees nothing."""
    pose: Callable[[Scene], Outcome]


@dataclass(frozen=True)
class Row:
    """A fault that was tried, or could not be."""

    fault: Fault
    verdict: str
    why: str
    outcome: Outcome
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        told = {"name": self.fault.name, "done": self.fault.injection, "promise": self.fault.promise}
        return told | {"verdict": self.verdict, "why": self.why, "seconds": self.seconds} | asdict(self.outcome)
