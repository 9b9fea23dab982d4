"""How plait says that something is wrong: what, why, where, fix, and one stable code.

Every error a user can cause is a `PlaitError` made of one or more `Problem`s. A problem found before any
process starts is collected with the others and all are shown together. ``errors.md`` beside this file explains
each code; ``plait help P012`` prints its section.
"""

import difflib
import errno
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USAGE, FAILED, DIFFERENT, RESUMABLE = 2, 1, 3, 75
"""Exit codes: bad plan or usage, the run failed, verify found a difference, stopped but resumable."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `what` is one sentence; `why` is the arithmetic with the user's own numbers."""

    code: str
    what: str
    why: str = ""
    where: str = ""
    fix: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.what}"]
        for label, text in (("why", self.why), ("where", self.where), ("fix", "\n".join(self.fix))):
            for i, line in enumerate(text.splitlines()):
                lines.append(f"  {label if i == 0 else '':<6} {line}")
        return "\n".join(lines)


class PlaitError(Exception):
    """One or more problems, shown together. `exit_code` is what the command line returns.

    `trace` is the traceback of the rank that failed, for `-v`. `said`: another process has shown it already.
    """

    def __init__(
        self, problems: Problem | Iterable[Problem], exit_code: int = USAGE, trace: str = "", *, said: bool = False
    ):
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.exit_code = exit_code
        self.trace = trace
        self.said = said
        super().__init__("\n\n".join(str(p) for p in self.problems))

    def __reduce__(self):
        return PlaitError, (self.problems, self.exit_code, self.trace)

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show instead of a traceback."""
        return str(self).splitlines()

    @property
    def codes(self) -> list[str]:
        return [p.code for p in self.problems]


def problem_of(told: Mapping[str, Any]) -> Problem:
    """A problem that travelled as JSON: `vars` of it."""
    return Problem(told["code"], told["what"], told["why"], told["where"], tuple(told["fix"]))


def in_a_line(error: BaseException) -> str:
    """`KeyError: 'x'`: the class of an exception and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the operating system's errors when something cannot be written for want of room."""


def too_small(option: str, value: int, least: int = 1) -> Problem:
    """U002: an option counts something, and its value is no such number."""
    return Problem("U002", f"{option} {value} is not a whole number ≥ {least}", fix=(f"{option} {max(least, 1)}",))


def disk_full(error: OSError) -> Problem:
    """R006: what could not be written, where that is known."""
    where = str(error.filename or "")
    fix = (
        "make room; what was written before is untouched, and --resume goes on from the newest checkpoint",
        "--runs FOLDER",
    )
    return Problem("R006", "the disk is full", why=f"the operating system says: {error.strerror}", where=where, fix=fix)


def proof_stopped(when: str) -> Problem:
    """C007."""
    why = f"asked to, by Ctrl-C or SIGTERM, {when}"
    return Problem("C007", "the proof was stopped", why=why, fix=("run it again",))


def trace_of(error: BaseException | None) -> str:
    """Its traceback, for `-v`."""
    return "".join(traceback.format_exception(error)) if error is not None else ""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The end of a sentence: `did you mean X ?`, or what is known when nothing is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean  {close[0]} ?" if close else f"known: {', '.join(known)}"


def codes() -> dict[str, str]:
    """All error codes, each with its page of ``errors.md``."""
    text = (Path(__file__).parents[1] / "errors.md").read_text(encoding="utf-8")
    return {section.split()[0]: section.strip() for section in text.split("\n## ")[1:]}


def explain(code: str) -> str | None:
    """The page of an error code from ``errors.md``, or None when there is no such code."""
    return codes().get(code)
