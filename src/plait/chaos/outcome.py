"""What was measured of one fault."""

from dataclasses import dataclass, field


class CannotPose(Exception):
    """This machine, job or plan cannot be given the fault; the text says why."""


@dataclass
class Outcome:
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
    drawn: list[str] = field(default_factory=list)
    """What chance chose: ranks, steps, bytes of a file."""
    short: list[str] = field(default_factory=list)
    """Where plait fell short of its promise."""
    said: str = ""
    """The line that told of it."""
    output: str = ""
    """The end of what its runs said, where plait fell short."""
