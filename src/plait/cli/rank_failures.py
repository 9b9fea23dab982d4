"""Counts the failures of a run, and decides if ranks restart and when a device is excluded."""

from collections import Counter
from dataclasses import dataclass

from plait.config.errors import PlaitError
from plait.launch.failures import JOB_CODES, LOST_CODES, SAMPLE_CODE

RESTARTABLE = (*LOST_CODES, "C009", SAMPLE_CODE)
"""Error codes after which a restart may help: a failed rank or node, or a sample that may be readable the next time."""
HARDWARE_CODES = ("C001", "C003")
"""Error codes that a device may cause."""
WARN_FAILURES = 3
"""Number of failures of one device at which the user is warned."""


@dataclass(frozen=True)
class HostDevice:
    """A device of a node: the node's name and the device's number there."""

    host: str
    number: int


class RankFailures:
    """Counts failures, and decides if the run continues. `limit`: restarts in a row at one step; `allow_shrink`: exclude failed ranks at
    once."""

    def __init__(self, limit: int, allow_shrink: bool = False):
        self.limit, self.allow_shrink = limit, allow_shrink
        self.tries, self.reached_step = 0, -1
        """Failures in a row at one step, and that step."""
        self.shrunk_at = -9
        """The step at which a device was last excluded."""
        self.devices = set[HostDevice | None]()
        """The devices of the ranks that failed at this step. None stands for a failure without a known device."""
        self.by_device = Counter[HostDevice]()
        self.last_exception: str | None = None
        """The last exception or exit of the job's own code, and where it happened."""

    def can_restart(
        self, error: BaseException, reached: int, device: HostDevice | None = None, can_exclude: bool = True
    ) -> bool:
        """Record a failure, and return True if the run continues.

        `reached`: number of completed steps; `device`: that of the failed rank; `can_exclude`: the run can continue without the device.
        """
        if not self.limit or not isinstance(error, PlaitError) or error.codes[0] not in RESTARTABLE:
            return False
        if (error.codes[0] in JOB_CODES and reached < 1) or self._is_repeated(error):
            return False  # the job's own code would raise it again after a restart
        if reached < 1:  # no step was completed since the last failure
            reached = self.reached_step
        if abs(reached - self.reached_step) > 1:
            self.tries = 0
            self.devices.clear()
        self.tries, self.reached_step = self.tries + 1, reached
        hardware = error.codes[0] in HARDWARE_CODES and device is not None
        self.devices.add(device if hardware and can_exclude else None)
        if hardware and device is not None:
            self.by_device[device] += 1
        return self.tries <= self.limit or self.should_exclude_device

    def _is_repeated(self, error: PlaitError) -> bool:
        """Return True if the job's own code already raised this for the same sample, or exited at the same place."""
        problem, before = error.problems[0], self.last_exception
        own = problem.code == SAMPLE_CODE or (problem.code == "C003" and "ended with exit code" in problem.what)
        self.last_exception = f"{problem.what} {problem.where}" if own else None
        return own and self.last_exception == before

    @property
    def should_exclude_device(self) -> bool:
        """Exclude the device that failed last: `allow_shrink` is set, or it is the only device that fails here."""
        if self.allow_shrink:
            return None not in self.devices
        alone = len(self.devices) == 1 and None not in self.devices
        return self.tries > self.limit and alone and abs(self.reached_step - self.shrunk_at) > 1

    def exclude_device(self) -> None:
        """Reset the count for a round without the device: its ranks have as many restarts again."""
        self.shrunk_at, self.tries = self.reached_step, 0
        self.devices.clear()

    def format_warning(self, device: HostDevice | None) -> str | None:
        """Format a warning about a device that fails repeatedly."""
        if device is None or self.by_device[device] < WARN_FAILURES:
            return None
        return f"note  {self.by_device[device]} ranks failed on {device.host}, device {device.number}. Check that device."
