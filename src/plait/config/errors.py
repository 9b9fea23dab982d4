"""Errors: what happened, why, where, the fix, and one stable code.

Every error that a user can cause is a `PlaitError` with one or more `Problem`s. Problems that are found before any process starts are
collected and printed together. `errors.md` in the parent folder explains each code, and ``plait help P012`` prints its section.
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
    """One problem. `what` is one sentence; `why` is the arithmetic with the user's values."""

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
        return escape_controls("\n".join(lines))


class PlaitError(Exception):
    """One or more problems, printed together. `exit_code` is the exit code of the command.

    `trace` is the traceback of the failed rank, for `-v`. `said`: another process has already printed the error.
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
        """Text that IPython and notebooks print instead of a traceback."""
        return str(self).splitlines()

    @property
    def codes(self) -> list[str]:
        return [p.code for p in self.problems]


def parse_problem(fields: Mapping[str, Any]) -> Problem:
    """Parse a problem that was sent as JSON (`vars` of it)."""
    return Problem(fields["code"], fields["what"], fields["why"], fields["where"], tuple(fields["fix"]))


ASCII_FALLBACKS = {"·": "-", "…": "...", "→": "->", "×": "x", "▸": ">", "✓": "y", "–": "-", "≥": ">=", "≤": "<=", "√": "sqrt "}
"""ASCII replacements of plait's own characters, for terminals whose encoding lacks them (the POSIX locale)."""


def _encode_fallback(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encoding error handler: replaces plait's own characters, and escapes all others."""
    if isinstance(error, UnicodeEncodeError) and (found := ASCII_FALLBACKS.get(error.object[error.start])) is not None:
        return found, error.start + 1
    if isinstance(error, UnicodeEncodeError):
        error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


codecs.register_error("plait", _encode_fallback)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    r"""Escape control characters, because job names and output of ranks are untrusted and could control the terminal.

    >>> escape_controls("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def safe_str(error: BaseException) -> str:
    """Return `str(error)`, even if it raises."""
    try:
        return str(error)
    except BaseException as another:
        return f"(its text cannot be read: {type(another).__name__} in its __str__)"


def summarize_error(error: BaseException) -> str:
    """Summarize an exception: its class and the first line of its text, such as `KeyError: 'x'`. For a `PlaitError`: `[R006] what: why`."""
    if isinstance(error, PlaitError):
        first = error.problems[0]
        return f"[{first.code}] {first.what}" + f": {first.why.splitlines()[0]}" * bool(first.why)
    lines = safe_str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a write that fails for lack of space."""


def too_small_problem(option: str, value: int, least: int = 1) -> Problem:
    """U002: the value of a count is below its minimum."""
    return Problem("U002", f"{option} {value} is not a whole number ≥ {least}", fix=(f"{option} {max(least, 1)}",))


def disk_full_problem(error: OSError) -> Problem:
    """R006: the disk is full. Names the file if it is known."""
    where = str(error.filename or "")
    fix = (
        "free space, then --resume continues from the newest checkpoint",
        "--runs FOLDER",
    )
    what = "a file reached its size limit (ulimit -f)" if error.errno == errno.EFBIG else "the disk is full"
    return Problem("R006", what, why=f"operating system error: {error.strerror}", where=where, fix=fix)


def stopped_problem(what: str, when: str) -> Problem:
    """C007: the command was stopped."""
    why = f"it received Ctrl-C or SIGTERM {when}"
    return Problem("C007", f"the {what} was stopped", why=why, fix=("run it again",))


def format_trace(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return `did you mean X ?`, or the known names if none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean  {close[0]} ?" if close else f"known: {', '.join(known)}"


def read_error_pages() -> dict[str, str]:
    """Return the section of ``errors.md`` of each error code."""
    text = (Path(__file__).parents[1] / "errors.md").read_text(encoding="utf-8")
    return {section.split()[0]: section.strip() for section in text.split("\n## ")[1:]}


def explain(code: str) -> str | None:
    """Return the section of an error code from ``errors.md``, or None for an unknown code."""
    return read_error_pages().get(code)


def problem_from_page(code: str, what: str, why: str = "", where: str = "") -> Problem:
    """Create a problem with the fixes that its section of ``errors.md`` lists."""
    lines = read_error_pages()[code].splitlines()
    return Problem(code, what, why, where, tuple(line.removeprefix("- ") for line in lines if line.startswith("- ")))
