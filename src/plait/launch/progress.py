"""A row of progress for each rank in memory that the launcher and all ranks share: step, phase, and when it last moved.

Writing a row costs a microsecond and needs no one to listen. Rows tell the launcher who is holding everyone up; a flag
beside them is how it asks all ranks to stop. Loader processes share the memory too: what they read counts as their rank's.
"""

import mmap
import struct
import time
from dataclasses import dataclass

PHASES = (
    "start", "build", "data", "forward", "backward", "reduce", "optimizer", "evaluate", "evaluation data", "checkpoint",
    "end",
)  # fmt: skip
READING = ("data", "evaluation data")
"""Phases in which a rank reads samples."""
EVALUATING = ("evaluate", "evaluation data")
BETWEEN = (*EVALUATING, "checkpoint")
"""Phases between two steps."""
_ROW = struct.Struct("qqd")
_READ = struct.Struct("d")
_WIDTH = _ROW.size + _READ.size


@dataclass(frozen=True)
class Progress:
    """What a rank is doing. `since`: when it, or a loader of its own while it reads, last said so (`time.monotonic`)."""

    step: int
    """Steps that are done; -1 before the first batch is asked for."""
    phase: str
    since: float


class ProgressBoard:
    """Row 0 holds the stop flag, the others belong to `ranks` in turn. Anonymous shared memory: inherited by fork, no name."""

    def __init__(self, ranks: range):
        self.ranks = ranks
        self.memory = mmap.mmap(-1, _WIDTH * (len(ranks) + 1))
        for rank in ranks:
            self.write(rank, -1, "start")

    def _at(self, rank: int) -> int:
        return _WIDTH * (rank - self.ranks.start + 1)

    def write(self, rank: int, step: int, phase: str) -> None:
        """Rank `rank` begins `phase`, or is alive in it."""
        at = self._at(rank)  # one copy of a finished row: packing in place would zero it first, and be read so
        self.memory[at : at + _ROW.size] = _ROW.pack(step, PHASES.index(phase), time.monotonic())

    def within(self, rank: int, phase: str) -> None:
        """Rank `rank` begins `phase`, or is alive in it, at the same step."""
        self.write(rank, self._row(rank).step, phase)

    def reads(self, rank: int) -> None:
        """A sample is being read for `rank`, by itself or by one of its loader processes."""
        at = self._at(rank) + _ROW.size
        self.memory[at : at + _READ.size] = _READ.pack(time.monotonic())

    def read(self, rank: int) -> Progress:
        row = self._row(rank)
        if row.phase not in READING:
            return row
        (last,) = _READ.unpack_from(self.memory, self._at(rank) + _ROW.size)
        return Progress(row.step, row.phase, max(row.since, last))

    def _row(self, rank: int) -> Progress:
        step, phase, when = _ROW.unpack_from(self.memory, self._at(rank))
        return Progress(step, PHASES[phase], when)

    def begun(self) -> bool:
        """Whether there may be a step to save: a rank has made one, or goes on from some (replica groups do not wait for each other)."""
        return max(self._row(rank).step for rank in self.ranks) > 0

    def stop(self, asked: bool = True) -> None:
        """Ask all ranks to stop after their step. `asked`: somebody wants the run to end; else to go on with others."""
        self.memory[0] = 1 if asked else self.memory[0] or 2

    def stopping(self) -> bool:
        """Whether all ranks are to stop."""
        return self.memory[0] != 0

    def asked(self) -> bool:
        """Whether somebody wants the run to end."""
        return self.memory[0] == 1

    def leave(self) -> None:
        """Ask ranks that wait for samples to give them up, and with them the step."""
        self.memory[1] = 1

    def leaves(self) -> bool:
        return self.memory[1] != 0

    def delays(self, rank: int, seconds: float) -> bool:
        """Whether a rank has waited so long for the samples of a step, or evaluates: what can be left between two steps."""
        row = self._row(rank)
        return row.phase in EVALUATING or (row.phase == "data" and time.monotonic() - row.since > seconds)
