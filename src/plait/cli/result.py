"""Results of a command for other programs, with standard output reserved for them."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import UnsupportedOperation
from typing import Any, Protocol, TextIO

STDOUT, STDERR = 1, 2


class ResultOptions(Protocol):
    """The options that `print_result` reads."""

    @property
    def json(self) -> bool: ...
    @property
    def stdout(self) -> TextIO | None: ...


def print_result(options: ResultOptions, facts: Any, text: str | None = None) -> None:
    """Print `facts` as JSON with `--json`; otherwise print `text`, which is None if it was already printed."""
    line = json.dumps(facts) if options.json else text
    if line is not None:
        print(line, file=options.stdout or sys.stdout, flush=True)


@contextmanager
def reserve_stdout(enabled: bool) -> Iterator[TextIO]:
    """Yield standard output, reserved for results if `enabled`: other output of the job, libraries and processes is sent to standard error."""
    output = sys.stdout
    if not enabled:
        yield output
        return
    with redirect_stdout(sys.stderr):
        if _find_descriptor(output) != STDOUT:  # sys.stdout is replaced, by a notebook or a test
            yield output
            return
        output.flush()
        kept = os.dup(STDOUT)
        os.dup2(STDERR, STDOUT)
        alone = open(kept, "w", encoding=output.encoding, errors=output.errors)  # noqa: SIM115  a failed write is not reported twice
        try:
            yield alone
        finally:
            os.dup2(kept, STDOUT)
            with suppress(OSError):
                alone.close()


def _find_descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (UnsupportedOperation, OSError, AttributeError):
        return None
