"""State that the launchers of several nodes exchange: one row per node, in the job's store.

Every `PERIOD` seconds each launcher writes its own row. Node 0 reads all rows; the others read node 0's row. So traffic grows linearly with
the number of nodes. Each value carries a proof that a launcher of the run wrote it, because other programs of the same user can reach the
store too.
"""

import hmac
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct, json
from msgspec.structs import replace

from plait.config.errors import FAILED, PlaitError, Problem, escape_controls
from plait.launch.gate import PROOF, compute_proof

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
PERIOD = 0.25
"""Seconds between two exchanges of rows."""
SUSPENDED_AFTER = 10.0
"""Seconds without an exchange after which this launcher itself was suspended. Its clock then proves nothing about other nodes."""


class StoredSteps(Struct, frozen=True):
    """Steps whose training state is in a node's memory: complete states, and states of which it has shards."""

    complete: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()


NO_STEPS = StoredSteps()


class CopyRequest(Struct, frozen=True):
    """Request from node 0 to copy a node's part of a step's state to the run directory."""

    machine: int
    step: int
    number: str


class CopyReply(Struct, frozen=True):
    """Reply to the `CopyRequest` with this number, with the metrics of its step if the node has them."""

    number: str
    metrics: dict[str, Any] | None = None


class NodeRow(Struct, frozen=True):
    """State of one node (`launch/nodes.py` explains the states)."""

    host: str = ""
    life: str = ""
    """Random token of the launcher process; empty before it has arrived."""
    beat: int = 0
    state: Literal["came", "ready", "runs", "failed", "ended", "over"] = "came"
    round: int = -1
    failure: dict[str, Any] | None = None
    """The failure in this round (in node 0's row: on any node), or the error that ended the launcher."""
    broken: bool = False
    """Ranks on this node have lost connections to others, so a silent node is lost."""
    asked: bool = False
    """A signal on this node requested the ranks to stop."""
    held: StoredSteps = NO_STEPS
    regroups: int = -1
    """Node 0: round in which the ranks stop so that more nodes can join."""
    bring: CopyRequest | None = None
    """Node 0: a node's task before the next round."""
    brought: CopyReply | None = None


class NodeRows:
    """This node's row, and the rows of the nodes that it reads."""

    def __init__(self, store: "Store", key: bytes, index: int, count: int):
        self._store, self._key, self.index = store, key, index
        self.others = [0] if index else [*range(1, count)]
        """The nodes whose rows this node reads."""
        self._rows = dict.fromkeys(self.others, NodeRow()) | {index: NodeRow(socket.gethostname(), secrets.token_hex(8))}
        self._last_heard = dict.fromkeys(self.others, time.monotonic())
        self._exchanged = 0.0
        self.put(_row_key(index), self.own)

    @property
    def own(self) -> NodeRow:
        return self._rows[self.index]

    def __getitem__(self, machine: int) -> NodeRow:
        return self._rows[machine]

    def silent_seconds(self, machine: int) -> float:
        """Seconds since a row of a node last changed."""
        return time.monotonic() - self._last_heard[machine]

    def reset_silence(self) -> None:
        """Reset the silent times of the other nodes to zero."""
        self._last_heard = dict.fromkeys(self.others, time.monotonic())

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._exchanged >= PERIOD

    def exchange(self, **facts: Any) -> None:
        """Write this node's row with these fields changed, and read the others'. After the return the other nodes can read the row."""
        now = time.monotonic()
        if self._exchanged and now - self._exchanged > SUSPENDED_AFTER:
            self.reset_silence()
        self._exchanged = now
        self._rows[self.index] = replace(self.own, beat=self.own.beat + 1, **facts)
        self.put(_row_key(self.index), self.own)
        there = [k for k in self.others if self._rows[k].life or self._store.check([_row_key(k)])]
        values = self._store.multi_get(list(map(_row_key, there))) if there else []
        for k, value in zip(there, values, strict=True):
            row = self._decode_proven(_row_key(k), value, NodeRow)
            if (row.life, row.beat) != (self._rows[k].life, self._rows[k].beat):
                self._rows[k], self._last_heard[k] = row, now

    def put(self, key: str, value: object) -> None:
        """Write a value, with the proof that a launcher of the run wrote it."""
        text = json.encode(value)
        self._store.set(key, self._compute_proof(key, text) + text.decode())

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return a value that a launcher wrote, or None if it is missing. Raises L009 if another program wrote it."""
        return self._decode_proven(key, self._store.get(key), kind) if self._store.check([key]) else None

    def _compute_proof(self, key: str, text: bytes) -> str:
        return compute_proof(self._key, key.encode(), text).hex()

    def _decode_proven(self, key: str, value: bytes, kind: type[T]) -> T:
        proof, text = value[: 2 * PROOF], value[2 * PROOF :]
        if hmac.compare_digest(proof, self._compute_proof(key, text).encode()):
            return json.decode(text, type=kind)
        what = "another program has written into this run's store: a value has no valid proof of the run's key"
        fix = ("end that program", "--resume    on all machines, with another --master port")
        why = f"{key} is {escape_controls(value.decode(errors='replace')[:80])}"
        raise PlaitError(Problem("L009", what, why=why, fix=fix), FAILED)


def _row_key(machine: int) -> str:
    return f"launcher/{machine}"
