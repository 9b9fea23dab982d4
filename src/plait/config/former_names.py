"""Names of the previous version: accepted in this version, with a warning that gives the new name."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")


class FormerName(FutureWarning):
    """A plan key, option or value has the name of the previous version."""


def warn_renamed(kind: str, before: str, now: str) -> None:
    """Warn that a name was replaced. `kind` is its kind, such as "plan key"."""
    warnings.warn(f"{kind} {before} is now called {now}; the next version will not accept the former name", FormerName, stacklevel=3)


def replace_former_names(kind: str, values: dict[str, Value], former: dict[str, str]) -> dict[str, Value]:
    """Replace former names by their present names, which `former` maps."""
    for name in values:
        if name in former:
            warn_renamed(kind, name, former[name])
    return {former.get(name, name): value for name, value in values.items()}


@contextlib.contextmanager
def print_warnings_as_notes() -> Iterator[None]:
    """Print these warnings as notes of a command, once each."""
    with warnings.catch_warnings():
        show, shown = warnings.showwarning, set[str]()

        def print_note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, FormerName):
                show(message, category, *place, **more)
            elif str(message) not in shown:
                shown.add(str(message))
                print(f"note  {message}", file=sys.stderr)

        warnings.showwarning = print_note
        yield
