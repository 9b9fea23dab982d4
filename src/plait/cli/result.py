"""What a command prints for programs to read, with standard output for it alone."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import UnsupportedOperation
from typing import Any, Protocol, TextIO

STDOUT, STDERR = 1, 2


class Printed(Protocol):
    """The options of a command that prints a result."""

    @property
    def json(self) -> bool: ...
    @property
    def stdout(self) -> TextIO | None: ...


def print_result(options: Printed, facts: Any, text: str | None = None) -> None:
    """Print a result: `facts` as JSON with `--json`; without it `text`, unless a person has read that line by line already."""
    line = json.dumps(facts) if options.json else text
    if line is not None:
        print(line, file=options.stdout or sys.stdout, flush=True)


@contextmanager
def results_alone(asked: bool) -> Iterator[TextIO]:
    """Standard output, for results alone if `asked`: what a job, its libraries and its processes print meanwhile goes to standard error."""
    output = sys.stdout
    if not asked:
        yield output
        return
    with redirect_stdout(sys.stderr):
        if _number(output) != STDOUT:  # a notebook or a test has put something else there
            yield output
            return
        output.flush()
        kept = os.dup(STDOUT)
        os.dup2(STDERR, STDOUT)
        alone = open(kept, "w", encoding=output.encoding, errors=output.errors)  # noqa: SIM115  what could not be written is no error again
        try:
            yield alone
        finally:
            os.dup2(kept, STDOUT)
            with suppress(OSError):
                alone.close()


def _number(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (UnsupportedOperation, OSError, AttributeError):
        return None
