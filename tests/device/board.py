"""The operations that a test's ranks have queued on their communicators. Each rank writes them to memory that all ranks can read.

A rank that finds a fault reports with it the operations of the other ranks. Forks share the memory, so a board is made before them.
"""

import mmap
import threading
from collections import deque
from collections.abc import Iterable

SLOT = 1 << 14
SHOWN = 6
"""The number of operations per stream in a report."""


class Board:
    """A text for each rank."""

    def __init__(self, ranks: int = 32):
        self.memory = mmap.mmap(-1, ranks * SLOT)

    def write(self, rank: int, text: str) -> None:
        data = text.encode()[: SLOT - 4]
        self.memory[rank * SLOT + 4 : rank * SLOT + 4 + len(data)] = data
        self.memory[rank * SLOT : rank * SLOT + 4] = len(data).to_bytes(4, "little")

    def read(self, rank: int) -> str:
        size = int.from_bytes(self.memory[rank * SLOT : rank * SLOT + 4], "little")
        return self.memory[rank * SLOT + 4 : rank * SLOT + 4 + size].decode(errors="replace")

    def told(self, ranks: Iterable[int]) -> str:
        """Report the queued operations of these ranks."""
        return "\n".join(f"rank {rank}: {self.read(rank) or 'has asked for nothing yet'}" for rank in ranks)


class Asked:
    """This rank's queued operations, by stream and in order, and the current activity of its host."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank, self.host = board, rank, "computes"
        self.streams: dict[str, deque[str]] = {}
        self.last: dict[str, str] = {}
        self.lock = threading.Lock()

    def put(self, stream: str, what: str) -> None:
        with self.lock:
            self.streams.setdefault(stream, deque()).append(what)
            self._write()

    def over(self, stream: str) -> None:
        """The first operation of a stream has ended."""
        with self.lock:
            self.last[stream] = self.streams[stream].popleft()
            self._write()

    def does(self, host: str) -> None:
        with self.lock:
            self.host = host
            self._write()

    def _write(self) -> None:
        lines = [f"its host {self.host}"]
        for stream, queue in self.streams.items():
            if queue:
                more = [f"… and {len(queue) - SHOWN} more"] if len(queue) > SHOWN else []
                lines.append(f"{stream}: " + ", then ".join([*list(queue)[:SHOWN], *more]))
            else:
                lines.append(f"{stream}: nothing more; the last was {self.last[stream]}")
        self.board.write(self.rank, "\n    ".join(lines))
