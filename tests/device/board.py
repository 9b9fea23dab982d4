"""What the ranks of a test have asked of their communicators: each writes it into memory that all of them see.

A rank that finds a fault tells with it what the others were doing. Memory is shared by forks, so a board is made before them.
"""

import mmap
import threading
from collections import deque
from collections.abc import Iterable

SLOT = 1 << 14
SHOWN = 6
"""Operations of a stream that are told."""


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
        """What each of these ranks has asked for."""
        return "\n".join(f"rank {rank}: {self.read(rank) or 'has asked for nothing yet'}" for rank in ranks)


class Asked:
    """What this rank has asked for: by stream, in order; and what its host is doing."""

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
        """The first of a stream has come to its end."""
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
