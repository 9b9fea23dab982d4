"""One line of progress per rank in memory that the launcher and all ranks share: (step, phase, time).

Writing it costs a microsecond and needs no one to listen. It gives the launcher who is holding everyone up, and a
way to ask all ranks to stop.
"""

import mmap
import struct
import time

PHASES = (
    "start", "build", "data", "forward", "backward", "reduce", "optimizer", "evaluate", "checkpoint", "end",
)  # fmt: skip
_ROW = struct.Struct("qqd")


class Words:
    """Row 0 holds the stop flag; row r + 1 belongs to rank r. Anonymous shared memory: inherited by fork, no name."""

    def __init__(self, world: int):
        self.world = world
        self.memory = mmap.mmap(-1, _ROW.size * (world + 1))
        for rank in range(world):
            self.write(rank, -1, "start")

    def write(self, rank: int, step: int, phase: str) -> None:
        at = _ROW.size * (rank + 1)  # one copy of a finished row: packing in place would zero it first, and be read so
        self.memory[at : at + _ROW.size] = _ROW.pack(step, PHASES.index(phase), time.monotonic())

    def read(self, rank: int) -> tuple[int, str, float]:
        """(step, phase, monotonic time of the last change) of a rank."""
        step, phase, when = _ROW.unpack_from(self.memory, _ROW.size * (rank + 1))
        return step, PHASES[phase], when

    def stop(self) -> None:
        self.memory[0] = 1

    def stopping(self) -> bool:
        return self.memory[0] == 1
