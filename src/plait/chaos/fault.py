"""A fault: how it is posed, what plait promises then, and what was measured when it was tried."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.chaos.scene import Scene

KEPT, SHORT, NOT_RUN = "kept", "fell short", "not run"


class CannotPose(Exception):
    """This machine, job or plan cannot be given the fault; the text says why."""


@dataclass
class Measured:
    """What was seen of one fault."""

    detected: float | None = None
    """Seconds from the fault to the first line that tells of it."""
    again: float | None = None
    """Seconds from the fault to the end of the next new step."""
    resumed: bool = False
    """A person had to start the run again: `again` counts from that start."""
    lost: int | None = None
    """Steps that were complete and had to be made again."""
    equal: str = ""
    """Whether losses, samples and weights are those of the undisturbed run."""
    short: list[str] = field(default_factory=list)
    """Where plait fell short of its promise."""
    said: str = ""
    """The line that told of it."""


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    done: str
    """What is done, in a few words."""
    promise: str
    pose: Callable[["Scene"], Measured]


@dataclass(frozen=True)
class Row:
    """A fault that was tried, or could not be."""

    fault: Fault
    verdict: str
    why: str
    measured: Measured
    took: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"name": self.fault.name, "done": self.fault.done, "promise": self.fault.promise}
        return told | {"verdict": self.verdict, "why": self.why, "seconds": self.took} | asdict(self.measured)
