"""Several machines, a launcher on each: each watches over its own ranks, and they tell each other what they see.

Each launcher keeps a row in the job's store: that it is alive, and what has failed on its machine. Whoever reads of a failure
elsewhere ends its own ranks, and raises the same error. A launcher that says nothing for long, or whose connection is gone, has
lost its machine.

A rank that fails breaks the connections of ranks everywhere. So a machine that sees only such victims waits for the word of
the machine where it began.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.launch import rendezvous
from plait.launch.failures import Failure
from plait.launch.hangs import ranks_in_words
from plait.launch.launchers.membership import Membership
from plait.launch.rendezvous import ABSENT, Meeting

OFTEN = 0.25
"""Seconds between two looks at the other machines."""
LOST = 30.0
"""Seconds without a word after which a machine is lost. One that is very busy is silent for some."""
WORD = 10.0
"""Seconds that a machine which sees victims alone waits for the word of another; and for others to read its own."""
COMING = 5.0
"""Seconds that number 0, when it fails, waits for machines that have not come yet: they would wait for it in vain."""
BROKEN = 4.0
"""Seconds without a word after which a machine is lost whose ranks have dropped their connections."""


class Node:
    """This machine among `count`: its launcher's part."""

    def __init__(self, member: Membership, meeting: Meeting, world: int):
        self.index, self.count, self.world, self.meeting = member.index, member.count, world, meeting
        self.ranks = self.ranks_of(member.index)
        self.store = meeting.store()
        self.store.set_timeout(timedelta(seconds=WORD))
        self.row: dict[str, Any] = {"host": socket.gethostname(), "state": "runs", "beat": 0}
        self.others = {k: _Other(k, self.machine(k)) for k in range(member.count) if k != member.index}
        self.looked = 0.0
        self._write()

    @staticmethod
    def join(member: Membership, world: int, say: Callable[[str], None]) -> "Node":
        """Meet the other machines. L006 when the ranks cannot be shared equally; L002, L007, L008 as `rendezvous.meet`."""
        if world % member.count:
            what = f"{world} ranks do not go onto {member.count} machines in equal parts"
            least = world - world % member.count or member.count
            fix = (f"a plan of {least} or {least + member.count} ranks", "--nnodes    another number of machines")
            raise PlaitError(Problem("L006", what, fix=fix))
        return Node(member, rendezvous.meet(member, say), world)

    def machine(self, index: int) -> str:
        """The machine as messages name it."""
        return f"machine {index} ({ranks_in_words(list(self.ranks_of(index)))})"

    def ranks_of(self, index: int) -> range:
        """A machine's ranks."""
        each = self.world // self.count
        return range(index * each, (index + 1) * each)

    def give(self, name: str, value: object) -> None:
        """Tell all machines something, once."""
        self.store.set(f"word/{name}", json.dumps(value))

    def take(self, name: str, patience: float = ABSENT) -> Any:
        """What a machine gives; waits for it. C009 when it does not come, or when the machine that has the store is gone."""
        end = time.monotonic() + patience
        while not self._reached(lambda: self.store.check([f"word/{name}"])):
            if time.monotonic() > end:
                what = f"another machine did not come within {patience:.0f} s"
                raise PlaitError(
                    Problem("C009", what, why=f"machine {self.index} waits for {name}", fix=_START), FAILED
                )
            failure = self.look()
            if failure is not None:
                raise failure.error()
            time.sleep(0.05)
        return json.loads(self._reached(lambda: self.store.get(f"word/{name}")))

    def look(self, broken: bool = False) -> Failure | None:
        """Say that this machine is alive, and return what failed on another. Does so every `OFTEN` seconds.

        `broken`: connections of ranks are, so that who is silent is gone.
        """
        now = time.monotonic()
        if now - self.looked < OFTEN:
            return None
        suspended = self.looked and now - self.looked > LOST / 3
        self.looked = now
        try:
            self._write()
            there = [k for k in self.others if self.others[k].row or self.store.check([_key(k)])]
            rows = self.store.multi_get([_key(k) for k in there]) if there else []
        except Exception as error:  # torch has many for a store that is gone
            return self._gone(f"its store does not answer: {type(error).__name__}")
        for k, row in zip(there, rows, strict=True):
            self.others[k].read(json.loads(row), now)
        if suspended:  # this launcher did not run: its clock says nothing of others
            for other in self.others.values():
                other.heard = now
        patience = BROKEN if broken else LOST
        return next((found for o in self.others.values() if (found := o.failure(now, patience)) is not None), None)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What this launcher raises inside ends the run on all machines."""
        try:
            yield
        except PlaitError as error:
            if self.row["state"] == "runs":
                problems = list(error.problems)
                self.tell(Failure(self.ranks.start, (1, self.index), problems=problems, exit_code=error.exit_code))
            raise
        except BaseException as error:
            if self.row["state"] == "runs":
                problem = Problem("C009", f"{self.machine(self.index)} ended: {in_a_line(error)}", fix=("--resume",))
                self.tell(Failure(self.ranks.start, (1, self.index), problem))
            raise

    def tell(self, failure: Failure) -> None:
        """Let the others know what failed here, and wait until they do."""
        self.row |= {"state": "failed", "failure": failure.to_json()}
        self._end()

    def done(self) -> None:
        """Say that all ranks here are done. Number 0, which has the store, stays until all are."""
        self.row["state"] = "ended"
        self._end()

    def _end(self) -> None:
        """Write the last row; number 0, with which the store goes, waits a little for the others to have read it."""
        began = time.monotonic()
        try:
            self._write()
            self.store.check([_key(self.index)])  # answered when the row is there; else it goes with this process
        except Exception:  # nobody is there to read it
            return
        while self.index == 0:
            self.looked = 0.0
            self.look()
            patience = {None: COMING, "runs": WORD}
            states = [other.row.get("state") for other in self.others.values()]
            if not any(time.monotonic() - began < patience.get(state, 0.0) for state in states):
                break
            time.sleep(0.05)

    def _write(self) -> None:
        self.row["beat"] += 1
        self.store.set(_key(self.index), json.dumps(self.row))

    def _reached(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # torch has many for a store that is gone
            raise self._gone(f"{type(error).__name__}").error() from error

    def _gone(self, why: str) -> Failure:
        return _lost(self.machine(0), 0, why)


_START = ("start the same command on all machines", "--nnodes    the number of machines")


class _Other:
    """What is known of another machine."""

    def __init__(self, index: int, name: str):
        self.index, self.name = index, name
        self.row: dict[str, Any] = {}
        self.heard = time.monotonic()

    def read(self, row: dict[str, Any], now: float) -> None:
        if row["beat"] != self.row.get("beat"):
            self.row, self.heard = row, now

    def failure(self, now: float, patience: float) -> Failure | None:
        """What has failed there. A machine that has not come yet is waited for elsewhere."""
        if self.row.get("state") == "failed":
            return Failure.of_json(self.row["failure"], f"{self.name} on {self.row['host']}")
        if self.row.get("state") == "runs" and now - self.heard > patience:
            why = f"its launcher said nothing for {now - self.heard:.0f} s"
            self.row["state"] = "lost"
            return _lost(f"{self.name} on {self.row['host']}", self.index, why)
        return None


def _lost(name: str, index: int, why: str) -> Failure:
    fix = ("--resume    on the machines that are left, or when it is back", "is it up? can it be reached?")
    return Failure(-1, (0, index), Problem("C009", f"{name} is gone", why=why, fix=fix))


def _key(index: int) -> str:
    return f"launcher/{index}"
