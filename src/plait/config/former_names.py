"""Names of the version before: accepted in this version, with a warning that gives the new name."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")


class FormerName(FutureWarning):
    """A plan key, option or value is given by the name that it had in the version before."""


def warn(kind: str, before: str, now: str) -> None:
    """Warn that something was renamed. `kind`: what it is, such as "plan key"."""
    warnings.warn(f"{kind} {before} is now called {now}; the next version will not accept the former name", FormerName, stacklevel=3)


def replaced(kind: str, values: dict[str, Value], former: dict[str, str]) -> dict[str, Value]:
    """The values by their present names, which `former` has by the former ones."""
    for name in values:
        if name in former:
            warn(kind, name, former[name])
    return {former.get(name, name): value for name, value in values.items()}


@contextlib.contextmanager
def as_notes() -> Iterator[None]:
    """Print these warnings as notes of a command, each once."""
    with warnings.catch_warnings():
        show, shown = warnings.showwarning, set[str]()

        def note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, FormerName):
                show(message, category, *place, **more)
            elif str(message) not in shown:
                shown.add(str(message))
                print(f"note  {message}", file=sys.stderr)

        warnings.showwarning = note
        yield
