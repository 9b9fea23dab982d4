"""How plait says that something is wrong: what, why, where, fix, and one stable code.

Every error a user can cause is a `PlaitError` made of one or more `Problem`s. A problem found before any
process starts is collected with the others and all are shown together. ``errors.md`` beside this file explains
each code; ``plait help P012`` prints its section.
"""

import codecs
import difflib
import errno
import re
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
        return shown("\n".join(lines))


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


PLAIN = {"·": "-", "…": "...", "→": "->", "×": "x", "▸": ">", "✓": "y", "–": "-", "≥": ">=", "≤": "<=", "√": "sqrt "}
"""What stands for plait's own characters where a terminal's encoding has none of them (the POSIX locale)."""


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """The handler of errors of an encoding: plait's own characters as others, and any other spelled out."""
    if isinstance(error, UnicodeEncodeError) and (found := PLAIN.get(error.object[error.start])) is not None:
        return found, error.start + 1
    if isinstance(error, UnicodeEncodeError):
        error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


codecs.register_error("plait", _plain)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str) -> str:
    r"""The text with control characters spelled out, so that no terminal obeys them: a job's name, or what a rank prints, may be anybody's.

    >>> shown("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def text_of(error: BaseException) -> str:
    """`str(error)`, also where asking for it raises."""
    try:
        return str(error)
    except BaseException as another:
        return f"(its text cannot be read: {type(another).__name__} in its __str__)"


def in_a_line(error: BaseException) -> str:
    """`KeyError: 'x'`: the class of an exception and the first line of its text; `[R006] what: why` of a `PlaitError`."""
    if isinstance(error, PlaitError):
        first = error.problems[0]
        return f"[{first.code}] {first.what}" + f": {first.why.splitlines()[0]}" * bool(first.why)
    lines = text_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the operating system's errors when something cannot be written for want of room."""


def too_small(option: str, value: int, least: int = 1) -> Problem:
    """U002: an option counts something, and its value is no such number."""
    return Problem("U002", f"{option} {value} is not a whole number ≥ {least}", fix=(f"{option} {max(least, 1)}",))


def disk_full(error: OSError) -> Problem:
    """R006: what could not be written, where that is known."""
    where = str(error.filename or "")
    fix = (
        "free space, then --resume continues from the newest checkpoint",
        "--runs FOLDER",
    )
    what = "a file reached its size limit (ulimit -f)" if error.errno == errno.EFBIG else "the disk is full"
    return Problem("R006", what, why=f"operating system error: {error.strerror}", where=where, fix=fix)


def stopped(what: str, when: str) -> Problem:
    """C007."""
    why = f"it received Ctrl-C or SIGTERM {when}"
    return Problem("C007", f"the {what} was stopped", why=why, fix=("run it again",))


def trace_of(error: BaseException | None) -> str:
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


def problem_of_page(code: str, what: str, why: str = "", where: str = "") -> Problem:
    """A problem whose fixes are those that its page of ``errors.md`` lists."""
    lines = codes()[code].splitlines()
    return Problem(code, what, why, where, tuple(line.removeprefix("- ") for line in lines if line.startswith("- ")))
