"""A fault: how it is posed and what plait promises then; and a row of the table, which says what came of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from plait.chaos.scene import Outcome, Scene

KEPT, SHORT, NOT_RUN, NO_PROMISE = "kept", "fell short", "not run", "no promise"
"""Verdicts. `NO_PROMISE`: plait promises nothing; what was seen is told all the same."""


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    done: str
    """What is done, in a few words."""
    promise: str
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
