"""The failures of a run, and whether it continues after them: how often ranks are restarted, and when a device is left out."""

from collections import Counter
from dataclasses import dataclass

from plait.config.errors import PlaitError
from plait.launch.failures import LOST, OWN, SAMPLE

RESTARTED = (*LOST, "C009", SAMPLE)
"""Errors after which a restart may help: a lost rank or machine, or a sample that may be readable the next time."""
HARDWARE = ("C001", "C003")
"""Errors that a device may have caused."""
OFTEN = 3
"""Failures of one device from which on it is named."""


@dataclass(frozen=True)
class HostDevice:
    """A device, by its machine's name and its number there."""

    host: str
    number: int


class RankFailures:
    """Counts failures, and judges whether the run continues. `limit`: restarts in a row at one step; `allow_shrink`: a lost rank is not replaced."""

    def __init__(self, limit: int, allow_shrink: bool = False):
        self.limit, self.allow_shrink = limit, allow_shrink
        self.tries, self.reached = 0, -1
        """Failures in a row at one step, and that step."""
        self.shrunk_at = -9
        """The step at which a device was left out last."""
        self.devices = set[HostDevice | None]()
        """The devices of the ranks that failed at this step; None stands for a failure that no device explains."""
        self.by_device = Counter[HostDevice]()
        self.raised: str | None = None
        """The last exception or exit of the job's own code, and where it happened."""

    def can_restart(
        self, error: BaseException, reached: int, device: HostDevice | None = None, spare: bool = True
    ) -> bool:
        """Record a failure, and return whether the run continues. `reached`: the number of completed steps; `device`: that of the failed
        rank; `spare`: the run can continue without it."""
        if not self.limit or not isinstance(error, PlaitError) or error.codes[0] not in RESTARTED:
            return False
        if (error.codes[0] in OWN and reached < 1) or self._is_repeated(error):
            return False  # the job's own code: a restart would raise it again
        if reached < 1:  # no step was completed since the failure before
            reached = self.reached
        if abs(reached - self.reached) > 1:
            self.tries = 0
            self.devices.clear()
        self.tries, self.reached = self.tries + 1, reached
        hardware = error.codes[0] in HARDWARE and device is not None
        self.devices.add(device if hardware and spare else None)
        if hardware and device is not None:
            self.by_device[device] += 1
        return self.tries <= self.limit or self.leaves_device_out

    def _is_repeated(self, error: PlaitError) -> bool:
        """Whether the job's own code has raised this for the same sample, or exited at the same place, before."""
        problem, before = error.problems[0], self.raised
        own = problem.code == SAMPLE or (problem.code == "C003" and "ended with exit code" in problem.what)
        self.raised = f"{problem.what} {problem.where}" if own else None
        return own and self.raised == before

    @property
    def leaves_device_out(self) -> bool:
        """Whether the next round has no rank on the device that failed last: `allow_shrink` says so, or it is the only one that fails here."""
        if self.allow_shrink:
            return None not in self.devices
        alone = len(self.devices) == 1 and None not in self.devices
        return self.tries > self.limit and alone and abs(self.reached - self.shrunk_at) > 1

    def leave_device_out(self) -> None:
        """The next round has no rank there; the remaining ones have as many restarts."""
        self.shrunk_at, self.tries = self.reached, 0
        self.devices.clear()

    def warning(self, device: HostDevice | None) -> str | None:
        """A line about a device that fails again and again."""
        if device is None or self.by_device[device] < OFTEN:
            return None
        return f"note  {self.by_device[device]} ranks failed on {device.host}, device {device.number}. Check that device."
