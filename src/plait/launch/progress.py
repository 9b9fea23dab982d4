"""Progress of each rank, in memory shared by the launcher and all ranks: step, phase and time of the last change.

Writing a row takes about a microsecond and needs no reader. From the rows the launcher finds the rank that blocks the others. A flag in the
same memory requests all ranks to stop. Loader processes share the memory too, so their reads count as their rank's.
"""

import mmap
import struct
import time
from dataclasses import dataclass

PHASES = (
    "start", "build", "data", "forward", "backward", "reduce", "optimizer", "evaluate", "evaluation data", "checkpoint",
    "end",
)  # fmt: skip
READ_PHASES = ("data", "evaluation data")
"""Phases in which a rank reads samples."""
EVAL_PHASES = ("evaluate", "evaluation data")
BETWEEN_PHASES = (*EVAL_PHASES, "checkpoint")
"""Phases between two steps."""
_ROW = struct.Struct("qqd")
_READ = struct.Struct("d")
_WIDTH = _ROW.size + _READ.size


@dataclass(frozen=True)
class Progress:
    """State of a rank. `since`: time of its last report, or of a report of its loader processes while it reads (`time.monotonic`)."""

    step: int
    """Completed steps; -1 before the first batch is requested."""
    phase: str
    since: float


class ProgressBoard:
    """Row 0 has the stop flag, the other rows belong to `ranks` in order. Anonymous shared memory, inherited by fork."""

    def __init__(self, ranks: range):
        self.ranks = ranks
        self.memory = mmap.mmap(-1, _WIDTH * (len(ranks) + 1))
        for rank in ranks:
            self.write(rank, -1, "start")

    def _row_offset(self, rank: int) -> int:
        return _WIDTH * (rank - self.ranks.start + 1)

    def write(self, rank: int, step: int, phase: str) -> None:
        """Record that rank `rank` begins or continues `phase`."""
        at = self._row_offset(rank)  # one copy of a finished row: pack_into zeroes the row first, and a reader may see that
        self.memory[at : at + _ROW.size] = _ROW.pack(step, PHASES.index(phase), time.monotonic())

    def write_phase(self, rank: int, phase: str) -> None:
        """Record that rank `rank` begins or continues `phase`, at the same step."""
        self.write(rank, self._row(rank).step, phase)

    def mark_read(self, rank: int) -> None:
        """Record that a sample is being read for `rank`, by itself or by one of its loader processes."""
        at = self._row_offset(rank) + _ROW.size
        self.memory[at : at + _READ.size] = _READ.pack(time.monotonic())

    def read(self, rank: int) -> Progress:
        row = self._row(rank)
        if row.phase not in READ_PHASES:
            return row
        (last,) = _READ.unpack_from(self.memory, self._row_offset(rank) + _ROW.size)
        return Progress(row.step, row.phase, max(row.since, last))

    def _row(self, rank: int) -> Progress:
        step, phase, when = _ROW.unpack_from(self.memory, self._row_offset(rank))
        return Progress(step, PHASES[phase], when)

    def has_begun(self) -> bool:
        """Whether there may be a step to save: a rank has completed or resumed one (replica groups do not wait for each other)."""
        return max(self._row(rank).step for rank in self.ranks) > 0

    def stop(self, ends_run: bool = True) -> None:
        """Request all ranks to stop after their step. `ends_run`: the run ends; otherwise it restarts with more ranks."""
        self.memory[0] = 1 if ends_run else self.memory[0] or 2

    def is_stopping(self) -> bool:
        """Whether all ranks must stop."""
        return self.memory[0] != 0

    def is_end_requested(self) -> bool:
        """Whether the run must end."""
        return self.memory[0] == 1

    def request_leave(self) -> None:
        """Request ranks that wait for samples to abandon them, and the step with them."""
        self.memory[1] = 1

    def is_leave_requested(self) -> bool:
        return self.memory[1] != 0

    def is_delayed(self, rank: int, seconds: float) -> bool:
        """Whether a rank has waited for a step's samples for more than `seconds`, or evaluates; both can be abandoned between two steps."""
        row = self._row(rank)
        return row.phase in EVAL_PHASES or (row.phase == "data" and time.monotonic() - row.since > seconds)
