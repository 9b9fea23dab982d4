"""Where a fault is posed: a folder of its own, runs that are started there, and how what they do is judged.

A fault (`Fault`): how it is posed and what plait promises then; a row of the table says what came of it.
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
from plait.chaos.strike import Mark, Strike, marks, struck
from plait.chaos.watched import Beginning, NotInTime, Record, Watched, orphans
from plait.config.command_options import TrainOptions, words_of
from plait.config.errors import RESUMABLE
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.place import cores, fix_threads, threads


class CannotPose(Exception):
    """This machine, job or plan cannot be given the fault; the text says why."""


@dataclass
class Outcome:
    """What was seen of one fault."""

    detected: float | None = None
    """Seconds from the fault to the first line that reports it."""
    again: float | None = None
    """Seconds from the fault to the end of the next new step."""
    resumed: bool = False
    """A person had to start the run again: `again` counts from that start."""
    lost: int | None = None
    """Completed steps that had to be computed again."""
    equal: str = ""
    """Whether losses, samples and weights are those of the undisturbed run."""
    drawn: list[str] = field(default_factory=list)
    """What chance chose: ranks, steps, bytes of a file."""
    short: list[str] = field(default_factory=list)
    """Where plait fell short of its promise."""
    said: str = ""
    """The line that told of it."""
    output: str = ""
    """The end of what its runs said, where plait fell short."""


SOON = 5.0
"""Seconds in which plait is to say that a rank is lost; more where ranks share cores."""
SHARED = Path("/dev/shm")
UNHURRIED = Strike("slow", "forward", rank=0, times=999, text="0.1")
"""For faults that are posed from outside, also when the job's steps take milliseconds."""


@dataclass
class Setting:
    """What all faults of one command have in common."""

    main: Callable[[list[str], Job], int]
    """The command line: words, and the job that they name, to exit code."""
    train: TrainOptions
    """What `plait train` is asked for: job, plan, steps."""
    job: Job
    plan: Plan
    seed: int
    mounts: bool
    """File systems can be mounted, for this process alone."""
    hosts: Hosts | None = None
    """Two machines, where the system allows network namespaces."""
    reference: Record | None = None
    """What the undisturbed run left."""
    run: Path | None = None
    """Its directory."""
    patience: float = 4.0
    """Seconds for `--hang-timeout`: more where this machine takes long to begin, for that is no hang."""

    @property
    def steps(self) -> int:
        return self.train.steps or self.job.steps

    @property
    def every(self) -> int:
        """Steps between checkpoints."""
        return self.train.save_every

    @property
    def copies(self) -> bool:
        """Ranks hold copies of everything: no completed step is to be lost with one of them."""
        return self.plan.along(self.plan.replica_axes) > 1 and self.plan.shards == 1


class Scene:
    """Of one fault."""

    def __init__(self, setting: Setting, name: str, folder: Path):
        self.setting, self.folder, self.runs = setting, folder, folder / "runs"
        self.draw = random.Random(f"{setting.seed} {name}")
        self.measured = Outcome()
        self.watched: list[Watched] = []
        self.helpers: list[int] = []
        self.undo: list[Callable[[], object]] = []
        self.world = setting.plan.world
        folder.mkdir(parents=True)

    # — what faults choose —

    def a_rank(self) -> int:
        return self.chosen("rank", range(self.world))

    def a_step(self) -> int:
        """The number of steps that are done when the fault comes: after a checkpoint, and before the next."""
        return self.chosen("step", range(self.setting.every + 1, 2 * self.setting.every))

    def chosen(self, what: str, among: range) -> int:
        """A number by chance, which the row tells."""
        number = self.draw.choice(among)
        self.measured.drawn.append(f"{what} {number}")
        return number

    def needs(self, missing: str, there: bool) -> None:
        """What the fault cannot be posed without; `missing` says why, if it is not there."""
        if not there:
            raise CannotPose(missing)

    @property
    def patient(self) -> tuple[str, ...]:
        """Of faults whose limits are minutes by default."""
        return ("--hang-timeout", f"{self.setting.patience:.0f}")

    def several(self) -> None:
        """A fault of one rank among others."""
        self.needs("the plan has one rank", self.world > 1)

    # — runs —

    def start(
        self,
        *more: str,
        strikes: tuple[Strike, ...] = (),
        before: Callable[[], None] = lambda: None,
        train: TrainOptions | None = None,
        job: Job | None = None,
    ) -> Watched:
        """`plait train` with these words besides; `train`: instead of what runs are asked for; `job`: an edited one."""
        strikes = strikes or (UNHURRIED,)
        words = ["train", *words_of(train or self.setting.train), "--runs", str(self.runs), *more]
        main, job = self.setting.main, job or self.setting.job

        def prepare() -> None:
            fix_threads(threads(self.world))
            before()

        around = struck(strikes, self.folder, self.draw.randrange(1 << 30), self.setting.plan.world)
        run = Watched(lambda words: main(words, job), words, self.runs, Beginning(around, prepare))
        self.watched.append(run)
        return run

    def helper(self, work: Callable[[], None]) -> int:
        """Do something in a process of its own, which is ended with the scene."""
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                work()
            os._exit(0)
        self.helpers.append(pid)
        return pid

    def mark(self) -> Mark:
        found = [mark for mark in marks(self.folder) if mark.act != "mark"]
        if not found:
            raise NotInTime("the step or phase of the fault did not come")
        return found[0]

    def close(self) -> None:
        """End what still runs; what is left behind is a shortfall."""
        for run in self.watched:
            run.look()
            run.end()
        for pid in self.helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        left = orphans() + self.kept()
        if left:
            self.fell(f"left behind: {', '.join(left)}")
        if self.measured.short:
            self.measured.output = "\n".join(run.output for run in self.watched)[-4000:]
        while self.undo:
            self.undo.pop()()

    def kept(self) -> list[str]:
        """What its runs have in shared memory."""
        return [p.name for run in self.watched for p in SHARED.glob(f"plait-*-{run.pid}-*")] if SHARED.is_dir() else []

    # — the judgement —

    def fell(self, why: str) -> None:
        self.measured.short.append(why)

    def expect(self, holds: bool, why: str) -> bool:
        """A shortfall unless it holds."""
        if not holds:
            self.fell(why)
        return holds

    def told(self, run: Watched, since: float, *says: str, within: float = SOON) -> None:
        """The run said each of these after the fault, and the first of them soon."""
        for number, words in enumerate(says):
            found = run.told(words, since)
            if found is None:
                last = next((line for _, line in reversed(run.lines) if "error[" in line), "")
                self.fell(f"it did not say `{words}`" + (f", but `{last[:90]}`" if last else ""))
            elif number == 0:
                self.measured.detected, self.measured.said = found[0] - since, found[1]
                late = within * max(1.0, self.world / cores())
                self.expect(found[0] - since <= late, f"said after {found[0] - since:.1f} s, not within {late:.0f}")

    def after(self, run: Watched, since: float | None = None) -> None:
        """Of a run that went on by itself: when the next new step came, and how many were lost. `since`: of a fault that was posed
        from outside."""
        struck_at, lost = [mark for mark in marks(self.folder) if mark.act != "mark"], 0
        if since is not None:
            struck_at = [Mark(since, max((n for t, n in run.steps if t <= since), default=0), 0, "outside")]
        for when, line in run.lines:
            if "going on from step" not in line:
                continue
            step = int(line.partition("going on from step ")[2].partition(",")[0])
            before = [mark for mark in struck_at if mark.time < when]
            if before:  # a loader process does not know at which step its rank is
                written = max((n for t, n in run.steps if t <= before[-1].time), default=0)
                lost += max(0, before[-1].step - step, written - step)
            made = next((t for t, n in run.steps if t > when and n == step + 1), None)
            if made is not None and before and self.measured.again is None:
                self.measured.again = made - before[-1].time
        self.measured.lost = lost

    def bounded(self, most: int) -> None:
        """No more steps were lost than this."""
        lost = self.measured.lost
        self.expect(lost is not None and lost <= most, f"{lost} steps were lost, not {most} at most")

    def equal(self) -> None:
        """The newest run ended as the undisturbed one."""
        assert self.setting.reference is not None
        try:
            wrong = Record.of(self.runs / "latest").differs(self.setting.reference)
        except Exception as error:  # whatever is wrong with what the run left
            wrong = [f"what it left cannot be read: {type(error).__name__}: {error}"]
        self.measured.equal = "no" if wrong else "yes"
        for why in wrong:
            self.fell(why)

    def near(self) -> None:
        """The newest run ended as the undisturbed one, but for the order of sums under another plan."""
        assert self.setting.reference is not None
        try:
            share, wrong = Record.of(self.runs / "latest").close(self.setting.reference)
        except Exception as error:  # whatever is wrong with what the run left
            share, wrong = 1.0, [f"what it left cannot be read: {type(error).__name__}: {error}"]
        self.measured.equal = "no" if wrong else f"to {share:.0e}"
        for why in wrong:
            self.fell(why)

    def resume(self, *more: str, strikes: tuple[Strike, ...] = (), lost: int | None = None) -> Watched:
        """Beginning again with --resume, to the end; it is to end as the undisturbed run."""
        before = max((run.step for run in self.watched), default=0)
        run = self.start("--resume", *more, strikes=strikes)
        code = run.wait()
        self.expect(code == 0, f"--resume ended with exit code {code}: {_error(run)}")
        found = run.told("resumed from")
        at, since = (int(found[1].rpartition("at step ")[2]), found[0]) if found is not None else (0, run.began)
        self.measured.lost = (self.measured.lost or 0) + max(0, before - at)
        self.measured.resumed = True
        self.measured.again = next((t - run.began for t, n in run.steps if t > since and n == at + 1), None)
        if lost is not None:
            self.bounded(lost)
        if code == 0:
            self.equal()
        return run

    # — the two ways in which most faults go —

    def survives(
        self,
        *strikes: Strike,
        says: tuple[str, ...],
        flags: tuple[str, ...] = (),
        lost: int | None = None,
        within: float = SOON,
    ) -> Outcome:
        """The run goes on by itself, and ends as the undisturbed one."""
        run = self.start(*flags, strikes=strikes)
        code = run.wait()
        self.told(run, self.mark().time, *says, within=within)
        if self.expect(code == 0, f"it ended with exit code {code}: {_error(run)}"):
            self.after(run)
            self.equal()
            self.bounded(self.allowed if lost is None else lost)
        return self.measured

    @property
    def allowed(self) -> int:
        """Steps that may be lost with one rank."""
        return 0 if self.setting.copies else self.since_checkpoint

    @property
    def since_checkpoint(self) -> int:
        """Steps that may be lost since the last checkpoint that was complete: the next may still be on its way."""
        return 2 * self.setting.every

    def ends(
        self, *strikes: Strike, says: tuple[str, ...], flags: tuple[str, ...] = (), code: int = 1, within: float = SOON
    ) -> Outcome:
        """The run ends and says of what; with --resume, and without the fault, it goes on to the same end."""
        run = self.start(*flags, strikes=strikes)
        got = run.wait()
        self.told(run, self.mark().time, *says, within=within)
        self.expect(got == code, f"exit code {got}, not {code}: {_error(run)}")
        self.resume(lost=self.since_checkpoint)
        return self.measured

    def stopped(self, run: Watched, since: float) -> None:
        """A request to stop: saved at once, exit code 75, and nothing is lost."""
        code = run.wait()
        self.told(run, since, "stopped at step", within=3 * SOON)
        self.expect(code == RESUMABLE, f"exit code {code}, not {RESUMABLE}: {_error(run)}")
        self.resume(lost=0)


def _error(run: Watched) -> str:
    """What a run said last, for a shortfall."""
    lines = [line for _, line in run.lines if line.strip()]
    found = next((line for line in lines if "error[" in line), lines[-1] if lines else "it said nothing")
    return found[:120]


KEPT, SHORT, NOT_RUN, NO_PROMISE = "as expected", "not as expected", "not run", "no guarantee"
"""Verdicts. `NO_PROMISE`: plait guarantees nothing; the outcome is measured all the same."""


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    done: str
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
    measured: Outcome
    took: float

    def to_dict(self) -> dict[str, Any]:
        told = {"name": self.fault.name, "done": self.fault.done, "promise": self.fault.promise}
        return told | {"verdict": self.verdict, "why": self.why, "seconds": self.took} | asdict(self.measured)
