"""Several machines, a launcher on each: each watches over its own ranks, and they tell each other what they see.

Each launcher keeps a row in the job's store: that it is alive, in which round its ranks are (see `round.py`), and what has failed on
its machine. Whoever reads of a failure elsewhere ends its own ranks, and raises the same error. A launcher that says nothing for
long, or whose connection is gone, has lost its machine.

    comes → ready → runs ─┬→ failed ─┬→ runs (the next round)
                          └→ ended  ─┴→ over

Number 0, which has the store, decides whether there is another round, and with which machines; the others wait for its word. A launcher
that was started again is a newcomer: number 0 takes it into the next round. A machine that cannot reach the store ends, so two
halves of a network never train the same run.

A rank that fails breaks the connections of ranks everywhere. So a machine that sees only such victims waits for the word of
the machine where it began.
"""

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from msgspec import convert

from plait.config.errors import FAILED, PlaitError, Problem, in_a_line, shown
from plait.launch import rendezvous
from plait.launch.failures import Failure
from plait.launch.gate import PROOF, proof_of
from plait.launch.hangs import ranks_in_words
from plait.launch.launchers import Membership
from plait.launch.rendezvous import ABSENT, Meeting, Round
from plait.launch.stopping import ending_waits

OFTEN = 0.25
"""Seconds between two looks at the other machines."""
LOST = 30.0
"""Seconds without a word after which a machine is lost. One that is very busy is silent for some."""
WORD = 10.0
"""Seconds that a machine which sees victims alone waits for the word of another; and for others to read its own."""
BROKEN = 4.0
"""Seconds without a word after which a machine is lost whose ranks have dropped their connections."""
LAST_CALL = 30.0
"""Seconds that number 0 waits for all machines, where fewer would do (the name is torch elastic's)."""
_ROUND = "round"
"""The key of the newest round in the store."""


class Node:
    """This machine among `count`: its launcher's part. `each`: ranks that it starts."""

    def __init__(self, member: Membership, meeting: Meeting, each: int):
        self.index, self.count, self.each = member.index, member.count, each
        self.least, self._patient = member.least or 1, member.least is None
        with ending_waits():
            self.store = meeting.store()
        self.store.set_timeout(timedelta(seconds=WORD))
        self.round: Round | None = None
        self.cut_off = False
        """The store is out of reach, and with it the run."""
        self.regroups = False
        """Number 0 has asked the ranks of the round to stop, for there are newcomers."""
        self._meeting, self._lives, self._looked = meeting, dict[int, str](), 0.0
        self._others = {k: _Other() for k in range(member.count) if k != member.index}
        self._row: dict[str, Any] = {
            "host": socket.gethostname(), "life": secrets.token_hex(8), "state": "comes", "round": -1, "beat": 0
        }  # fmt: skip
        self._write()

    @staticmethod
    def join(member: Membership, world: int, say: Callable[[str], None]) -> "Node":
        """Meet the other machines. L006 when the ranks cannot be shared equally; L002, L007, L008 as `rendezvous.meet`."""
        if world % member.count:
            what = f"{world} ranks do not go onto {member.count} machines in equal parts"
            least = world - world % member.count or member.count
            fix = (f"a plan of {least} or {least + member.count} ranks", "--nnodes    another number of machines")
            raise PlaitError(Problem("L006", what, fix=fix))
        return Node(member, rendezvous.meet(member, say), world // member.count)

    @property
    def ranks(self) -> range:
        """This machine's, in this round."""
        return self.round.ranks_of(self.index) if self.round is not None else range(0)

    @property
    def meeting(self) -> Meeting:
        """Where the ranks of this round find each other."""
        return replace(self._meeting, prefix=f"round{self.round.number}/" if self.round is not None else "")

    def machine(self, index: int) -> str:
        """The machine as messages name it: machine 1 (ranks 2-3) on gpu-b."""
        ranks = list(self.round.ranks_of(index)) if self.round is not None else []
        told = f"machine {index} ({ranks_in_words(ranks)})" if ranks else f"machine {index}"
        host = self.host(index)
        return f"{told} on {host}" if host else told

    def host(self, index: int) -> str:
        """The name of a machine; empty while it is unknown."""
        return self._row["host"] if index == self.index else self._others[index].row.get("host", "")

    def row(self, index: int) -> dict[str, Any]:
        """What a machine says of itself."""
        return self._row if index == self.index else self._others[index].row

    # What is said once

    def give(self, name: str, value: object) -> None:
        """Tell all machines something, those that come later too."""
        self._set(f"word/{name}", value)

    def take(self, name: str, patience: float = ABSENT) -> Any:
        """What a machine gives; waits for it. C009 when it does not come, or when the machine that has the store is gone."""
        end = time.monotonic() + patience
        key = f"word/{name}"
        while not self._reached(lambda: self.store.check([key])):
            if time.monotonic() > end:
                what = f"another machine did not come within {patience:.0f} s"
                raise PlaitError(
                    Problem("C009", what, why=f"machine {self.index} waits for {name}", fix=_START), FAILED
                )
            self.beat()
        return self._get(key)

    # While ranks run

    def look(self, broken: bool = False) -> Failure | None:
        """Say that this machine is alive, and return what failed on another one of the round. Does so every `OFTEN` seconds.

        `broken`: connections of ranks are, so that who is silent is gone.
        """
        now = time.monotonic()
        if now - self._looked < OFTEN:
            return None
        try:
            self._exchange(now)
        except Exception as error:  # torch has many for a store that is gone
            return self._gone(error, "its store does not answer: ")
        others = (k for k in self._lives if k != self.index)
        return next((f for k in others if (f := self._failure(k, BROKEN if broken else LOST)) is not None), None)

    def tell(self, failure: Failure) -> None:
        """Let the others know what failed here."""
        self._say(state="failed", failure=failure.to_json())

    def ended(self, asked: bool) -> None:
        """All ranks here have ended well. `asked`: somebody on this machine had asked them to stop."""
        self._say(state="ended", asked=asked)

    # Between rounds

    def beat(self) -> None:
        """Say that this machine is alive, while it waits. C009 when the store is gone; what ended number 0, if something did."""
        time.sleep(0.05)
        if time.monotonic() - self._looked >= OFTEN:
            self._reached(lambda: self._exchange(time.monotonic()))
        over = self.row(0).get("over") if self.index else None
        if over:
            raise Failure.of_json(over, self.machine(0)).error()

    def ready(self) -> None:
        """This machine can take part in the next round."""
        self._say(state="ready")

    def gather(self) -> list[int]:
        """Number 0: the other machines, once all have come; after `LAST_CALL` as many as there must be at least. C009 when they do not."""
        began = time.monotonic()
        while True:
            self.beat()
            for k, other in self._others.items():
                if other.row.get("over"):
                    raise Failure.of_json(other.row["over"], self.machine(k)).error()
            there, waited = self.newcomers(), time.monotonic() - began
            if len(there) + 1 == self.count or (waited > LAST_CALL and not self._patient and len(there) + 1 >= self.least):
                return there
            if waited > ABSENT:
                missing = ", ".join(str(k) for k in self._others if k not in there)
                raise PlaitError(Problem("C009", f"machine {missing} did not come within {waited:.0f} s", fix=_START), FAILED)

    def newcomers(self) -> list[int]:
        """Machines that wait to take part and do not yet."""
        now = time.monotonic()
        return [
            k for k, other in self._others.items()
            if other.row.get("state") == "ready" and other.row["life"] != self._lives.get(k) and now - other.heard < BROKEN
        ]  # fmt: skip

    def regroup(self) -> None:
        """Number 0: have the ranks of all machines stop after their step."""
        self.regroups = True
        self._say(regroups=self._number)

    def left(self) -> list[int]:
        """Number 0: the other machines that have ended the round, once all have that are not lost."""
        while True:
            self.beat()
            now, others = time.monotonic(), [k for k in self._lives if k != self.index]
            gone = {k for k in others if self._gone_silently(k, now)}
            done = [k for k in others if k not in gone and self._has_left(k)]
            if len(gone) + len(done) == len(others):
                return done

    def open(self, following: Round, newcomers: list[int]) -> Round:
        """Number 0: begin a round."""
        self._lives = {
            k: self._row["life"] if k == self.index else self._others[k].row["life"]
            for k in following.devices
            if k == self.index or k in newcomers or k in self._lives
        }
        self._reached(
            lambda: self._set(_ROUND, {**vars(following), "lives": self._lives})
        )
        return self._enter(following)

    def next_round(self, serve: Callable[[dict[str, Any]], dict[str, Any]] = lambda order: {}) -> Round | None:
        """Wait for the next round with this machine in it; None when the run is over. `serve` does what number 0 asks of this machine
        meanwhile, and returns what to tell it."""
        while True:
            self.beat()
            if self.row(0).get("state") == "over":
                return None
            order = self.row(0).get("order")
            if order and order["to"] == self.index and self._row.get("served") != order["number"]:
                self._say(served=order["number"], answer=serve(order))
            if self._reached(lambda: self.store.check([_ROUND])):
                word = self._get(_ROUND)
                found = convert(word, Round, str_keys=True)
                if found.number > self._number and word["lives"].get(str(self.index)) == self._row["life"]:
                    self._lives = {int(k): life for k, life in word["lives"].items()}
                    return self._enter(found)

    def ask(self, machine: int, **order: Any) -> dict[str, Any]:
        """Number 0: have a machine that waits do something, and return its answer; empty when it is gone before."""
        number = secrets.token_hex(4)
        self._say(order={**order, "to": machine, "number": number})
        while self.row(machine).get("served") != number:
            self.beat()
            if self._gone_silently(machine, time.monotonic()):
                return {}
        return self.row(machine)["answer"]

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Whatever this launcher raises inside ends the run on all machines. Number 0, with which the store goes, leaves last."""
        over: dict[str, Any] | None = None
        try:
            yield
        except PlaitError as error:
            failure = Failure(self.ranks.start, (1, self.index), problems=list(error.problems), exit_code=error.exit_code)
            over = failure.to_json()
            raise
        except BaseException as error:
            problem = Problem("C009", f"{self.machine(self.index)} ended: {in_a_line(error)}", fix=("--resume",))
            over = Failure(self.ranks.start, (1, self.index), problem).to_json()
            raise
        finally:
            self._leave(over)

    @property
    def _number(self) -> int:
        return -1 if self.round is None else self.round.number

    def _enter(self, found: Round) -> Round:
        self.round, self.regroups = found, False
        for name in ("failure", "asked", "order"):
            self._row.pop(name, None)
        self._say(state="runs", round=found.number)
        now = time.monotonic()
        for k in self._lives:
            if k != self.index:
                self._others[k].heard = now
        return found

    def _leave(self, over: dict[str, Any] | None) -> None:
        """Say that this launcher ends, and why; number 0 waits a little for the others to have read it."""
        began = time.monotonic()
        with contextlib.suppress(Exception):  # nobody is there to read it
            self._say(state="over", over=over)
            while self.index == 0 and time.monotonic() - began < WORD:
                time.sleep(0.05)
                try:
                    self._exchange(time.monotonic())
                except PlaitError:  # L009: nobody is heard, and they can still read
                    continue
                now = time.monotonic()
                if not any(o.row and o.row["state"] != "over" and now - o.heard < BROKEN for o in self._others.values()):
                    break

    def _failure(self, k: int, patience: float) -> Failure | None:
        """What has failed on a machine of this round."""
        other = self._others[k]
        if other.row.get("over"):
            return Failure.of_json(other.row["over"], self.machine(k))
        if other.row.get("state") == "failed" and other.row["round"] == self._number:
            return Failure.of_json(other.row["failure"], self.machine(k))
        if other.row.get("life") != self._lives[k]:
            return _lost(self.machine(k), k, "its launcher was started again")
        silent = time.monotonic() - other.heard
        if other.row["state"] not in ("ended", "over") and silent > patience:
            return _lost(self.machine(k), k, f"its launcher said nothing for {silent:.0f} s")
        return None

    def _has_left(self, k: int) -> bool:
        row = self._others[k].row
        return row["round"] == self._number and row["state"] in ("failed", "ended")

    def _gone_silently(self, k: int, now: float) -> bool:
        """Whether a machine is lost: it said nothing for long, and was not at work on what it puts away."""
        other = self._others[k]
        patience = 4 * LOST if other.row.get("round") == self._number and self._has_left(k) else BROKEN
        return other.row.get("life") != self._lives[k] or other.row["state"] == "over" or now - other.heard > patience

    def _exchange(self, now: float) -> None:
        """Write this machine's row, and read the others'."""
        suspended = self._looked and now - self._looked > LOST / 3
        self._looked = now
        self._write()
        there = [k for k, other in self._others.items() if other.row or self.store.check([_key(k)])]
        rows = self.store.multi_get([_key(k) for k in there]) if there else []
        for k, row in zip(there, rows, strict=True):
            self._others[k].read(self._read(_key(k), row), now)
        if suspended:  # this launcher did not run: its clock says nothing of others
            for other in self._others.values():
                other.heard = now

    def _say(self, **facts: Any) -> None:
        """Change this machine's row; when this returns the others can read it."""
        self._row |= facts
        self._reached(lambda: (self._write(), self.store.check([_key(self.index)])))

    def _write(self) -> None:
        self._row["beat"] += 1
        self._set(_key(self.index), self._row)

    def _set(self, key: str, value: object) -> None:
        """Write a value, with what proves that a launcher of the run wrote it."""
        text = json.dumps(value)
        self.store.set(key, self._proof(key, text) + text)

    def _proof(self, key: str, text: str) -> str:
        return proof_of(self._meeting.key, key.encode(), text.encode()).hex()

    def _get(self, key: str) -> Any:
        return self._read(key, self._reached(lambda: self.store.get(key)))

    def _read(self, key: str, value: bytes) -> Any:
        """What a launcher wrote. L009 when it was somebody else."""
        said = value.decode(errors="replace")
        proof, text = said[: 2 * PROOF], said[2 * PROOF :]
        if proof.isascii() and hmac.compare_digest(proof, self._proof(key, text)):
            return json.loads(text)
        what = "another program has written into this run's store: it holds what no launcher of the run wrote"
        fix = ("end that program", "--resume    on all machines, with another --master port")
        why = f"{key} is {shown(said[:80])}"
        raise PlaitError(Problem("L009", what, why=why, fix=fix), FAILED)

    def _reached(self, ask: Callable[[], Any]) -> Any:
        try:
            with ending_waits():
                return ask()
        except Exception as error:  # torch has many for a store that is gone
            raise self._gone(error).error() from error

    def _gone(self, error: Exception, what: str = "") -> Failure:
        """What an error of the store means: the store is out of reach, or says what no launcher wrote."""
        if isinstance(error, PlaitError):
            return Failure(-1, (0, self.index), error.problems[0])
        self.cut_off = True
        return _lost(self.machine(0), 0, f"{what}{type(error).__name__}")


_START = ("start the same command on all machines", "--nnodes    the number of machines")


class _Other:
    """What is known of another machine."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.heard = time.monotonic()

    def read(self, row: dict[str, Any], now: float) -> None:
        if (row["life"], row["beat"]) != (self.row.get("life"), self.row.get("beat")):
            self.row, self.heard = row, now


def _lost(name: str, index: int, why: str) -> Failure:
    fix = ("--resume    on the machines that are left, or when it is back", "is it up? can it be reached?")
    return Failure(-1, (0, index), Problem("C009", f"{name} is gone", why=why, fix=fix))


def _key(index: int) -> str:
    return f"launcher/{index}"
