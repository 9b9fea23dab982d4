"""What the launchers of several machines say to each other: one row for each machine, in the job's store.

Every `PERIOD` seconds each launcher writes its own row. Number 0 reads all of them, the others read that of number 0, so what is sent grows
with the number of machines and not with its square. A row, like every value here, comes with a proof that a launcher of the run
wrote it: other programs of the same user can reach the store too.
"""

import hmac
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct, json
from msgspec.structs import replace

from plait.config.errors import FAILED, PlaitError, Problem, shown
from plait.launch.gate import PROOF, proof_of

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
PERIOD = 0.25
"""Seconds between two exchanges of rows."""
SUSPENDED = 10.0
"""Seconds without an exchange after which this launcher itself did not run, so that its clock says nothing about the others."""


class Held(Struct, frozen=True):
    """The training states in a machine's memory, by step: those that are complete, and those of which it has pieces."""

    complete: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()


NOTHING = Held()


class Bring(Struct, frozen=True):
    """Number 0 has a machine copy its part of a step's state to the run directory."""

    machine: int
    step: int
    number: str


class Brought(Struct, frozen=True):
    """The answer to a `Bring` of that number, with the metrics of its step if the machine has them."""

    number: str
    metrics: dict[str, Any] | None = None


class NodeRow(Struct, frozen=True):
    """The state of one machine (`launch/nodes.py` explains the states)."""

    host: str = ""
    life: str = ""
    """Drawn at random when the launcher starts; empty before it has come."""
    beat: int = 0
    state: Literal["came", "ready", "runs", "failed", "ended", "over"] = "came"
    round: int = -1
    failure: dict[str, Any] | None = None
    """What failed in this round (of number 0: on any machine), or what ended the launcher."""
    broken: bool = False
    """Ranks here have lost their connections to others, so a machine that is silent is gone."""
    asked: bool = False
    """A signal on this machine asked the ranks to stop."""
    held: Held = NOTHING
    regroups: int = -1
    """Number 0: the round in which the ranks stop so that more machines can join."""
    bring: Bring | None = None
    """Number 0: what a machine is to do before the next round."""
    brought: Brought | None = None


class NodeRows:
    """This machine's row, and the others' as far as this machine reads them."""

    def __init__(self, store: "Store", key: bytes, index: int, count: int):
        self._store, self._key, self.index = store, key, index
        self.others = [0] if index else [*range(1, count)]
        """The machines whose rows this one reads."""
        self._rows = dict.fromkeys(self.others, NodeRow()) | {index: NodeRow(socket.gethostname(), secrets.token_hex(8))}
        self._heard = dict.fromkeys(self.others, time.monotonic())
        self._exchanged = 0.0
        self.put(_key(index), self.mine)

    @property
    def mine(self) -> NodeRow:
        return self._rows[self.index]

    def __getitem__(self, machine: int) -> NodeRow:
        return self._rows[machine]

    def silent(self, machine: int) -> float:
        """Seconds since something new was read from a machine."""
        return time.monotonic() - self._heard[machine]

    def forgive(self) -> None:
        """Count the silence of the others from now on."""
        self._heard = dict.fromkeys(self.others, time.monotonic())

    @property
    def due(self) -> bool:
        return time.monotonic() - self._exchanged >= PERIOD

    def exchange(self, **facts: Any) -> None:
        """Write this machine's row, with these fields changed, and read the others'. When it returns, the others can read the row."""
        now = time.monotonic()
        if self._exchanged and now - self._exchanged > SUSPENDED:
            self.forgive()
        self._exchanged = now
        self._rows[self.index] = replace(self.mine, beat=self.mine.beat + 1, **facts)
        self.put(_key(self.index), self.mine)
        there = [k for k in self.others if self._rows[k].life or self._store.check([_key(k)])]
        values = self._store.multi_get(list(map(_key, there))) if there else []
        for k, value in zip(there, values, strict=True):
            row = self._proven(_key(k), value, NodeRow)
            if (row.life, row.beat) != (self._rows[k].life, self._rows[k].beat):
                self._rows[k], self._heard[k] = row, now

    def put(self, key: str, value: object) -> None:
        """Write a value, with the proof that a launcher of the run wrote it."""
        text = json.encode(value)
        self._store.set(key, self._proof(key, text) + text.decode())

    def get(self, key: str, kind: type[T]) -> T | None:
        """A value that a launcher wrote, or None before it did. L009 when another program wrote it."""
        return self._proven(key, self._store.get(key), kind) if self._store.check([key]) else None

    def _proof(self, key: str, text: bytes) -> str:
        return proof_of(self._key, key.encode(), text).hex()

    def _proven(self, key: str, value: bytes, kind: type[T]) -> T:
        proof, text = value[: 2 * PROOF], value[2 * PROOF :]
        if hmac.compare_digest(proof, self._proof(key, text).encode()):
            return json.decode(text, type=kind)
        what = "another program has written into this run's store: it holds what no launcher of the run wrote"
        fix = ("end that program", "--resume    on all machines, with another --master port")
        why = f"{key} is {shown(value.decode(errors='replace')[:80])}"
        raise PlaitError(Problem("L009", what, why=why, fix=fix), FAILED)


def _key(machine: int) -> str:
    return f"launcher/{machine}"
