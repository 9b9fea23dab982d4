"""The machines of a run, a launcher on each, from round to round.

A *round* is one start of the run's ranks (`launch/round.py`). Each machine is in a state, which its row in the job's store says
(`launch/node_rows.py`):

    came → ready → runs ─┬→ failed ─┬→ ready → runs (the next round) → …
                         └→ ended  ─┴→ over

    came     it has met the others
    ready    it waits for a round that it takes part in; what its ranks held after the round before is put away
    runs     its ranks train
    failed   a rank failed, here or elsewhere: its ranks are ended, what they held is being put away
    ended    its ranks have returned
    over     its launcher ends, with a failure if that is the reason

Number 0, which has the store, opens every round (`cli/restart_loop.py`), and says what failed, on whichever machine; the others wait for it. A
launcher that was started again is a newcomer, and joins with the next round. A launcher that says nothing for long has lost its machine.
One that cannot reach the store ends: two halves of a network never train the same run.

A rank that fails breaks the connections of ranks everywhere. So a machine that sees only such victims waits until number 0 says
where it began.

A run on one machine is the case of one node, whose store is in its own memory.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from msgspec import Struct

from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.launch import rendezvous
from plait.launch.failures import Failure
from plait.launch.hangs import ranks_in_words
from plait.launch.launchers import Membership
from plait.launch.node_rows import NOTHING, PERIOD, Bring, Brought, Held, NodeRows
from plait.launch.rendezvous import ABSENT, Meeting
from plait.launch.round import Round
from plait.launch.stopping import ending_waits

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
_START = ("start the same command on all machines", "--nnodes    the number of machines")


class _Opened(Struct, frozen=True):
    """A round as number 0 announces it, with the lives of the launchers that take part."""

    round: Round
    lives: dict[int, str]


class Node:
    """This machine among `count`, as its launcher sees it. `each`: ranks that a machine starts; `least`: machines without which no round
    begins; None if all must come."""

    def __init__(self, rows: NodeRows, count: int, each: int, least: int | None = None, meeting: Meeting | None = None):
        self.rows, self.index, self.count, self.each = rows, rows.index, count, each
        self.least, self._all_must_come = least or 1, least is None
        self.round: Round | None = None
        self.cut_off = False
        """The store cannot be reached, so this machine cannot go on."""
        self.regroups = False
        """Number 0: the ranks of the round are asked to stop, because there are newcomers."""
        self._meeting, self._lives = meeting, dict[int, str]()

    @staticmethod
    def alone(each: int) -> "Node":
        """The only machine of a run."""
        from torch.distributed import HashStore

        return Node(NodeRows(HashStore(), b"", 0, 1), 1, each)

    @staticmethod
    def join(member: Membership, world: int, say: Callable[[str], None]) -> "Node":
        """Meet the other machines. L006 when the machines would have unequal numbers of ranks; L002, L007, L008 as `rendezvous.meet`."""
        if world % member.count:
            what = f"{world} ranks do not go onto {member.count} machines in equal parts"
            least = world - world % member.count or member.count
            fix = (f"a plan of {least} or {least + member.count} ranks", "--nnodes    another number of machines")
            raise PlaitError(Problem("L006", what, fix=fix))
        meeting = rendezvous.meet(member, say)
        with ending_waits():
            store = meeting.store()
        store.set_timeout(timedelta(seconds=WORD))
        rows = NodeRows(store, meeting.key, member.index, member.count)
        return Node(rows, member.count, world // member.count, member.least, meeting)

    @property
    def ranks(self) -> range:
        """This machine's, in this round."""
        return self.round.ranks_of(self.index) if self.round is not None else range(0)

    @property
    def number(self) -> int:
        """Of the round; -1 before the first."""
        return -1 if self.round is None else self.round.number

    @property
    def meeting(self) -> Meeting | None:
        """Where the ranks of this round find each other, if they are on several machines."""
        return replace(self._meeting, prefix=f"round{self.number}/") if self._meeting is not None else None

    def machine(self, index: int) -> str:
        """The machine as messages name it: machine 1 (ranks 2-3) on gpu-b."""
        ranks = list(self.round.ranks_of(index)) if self.round is not None else []
        name = f"machine {index} ({ranks_in_words(ranks)})" if ranks else f"machine {index}"
        host = self.rows[index].host
        return f"{name} on {host}" if host else name

    # What every machine needs once

    def give(self, name: str, value: object) -> None:
        """Publish a value for all machines, also for those that come later."""
        self._reached(lambda: self.rows.put(f"word/{name}", value))

    def take(self, name: str, patience: float = ABSENT) -> Any:
        """The value that a machine gives; waits for it. C009 after `patience` seconds, or when the machine with the store is gone."""
        end = time.monotonic() + patience
        while (found := self._reached(lambda: self.rows.get(f"word/{name}", dict))) is None:
            if time.monotonic() > end:
                what = f"another machine did not come within {patience:.0f} s"
                raise PlaitError(Problem("C009", what, why=f"machine {self.index} waits for {name}", fix=_START), FAILED)
            self.beat()
        return found

    # While ranks run

    def look(self, broken: bool = False) -> Failure | None:
        """Exchange rows, if it is time, and return what failed on another machine of the round.

        `broken`: ranks here have lost connections. Then a machine that is silent for `BROKEN` seconds is gone.
        """
        if not self.rows.due:
            return None
        try:
            self.rows.exchange(broken=broken)
            others = [k for k in self._lives if k in self.rows.others]
            patience = BROKEN if broken or any(self.rows[k].broken for k in others) else LOST
            found = min(filter(None, (self._failure(k, patience) for k in others)), key=lambda f: f.order, default=None)
            if found is not None and self.index == 0 and not found.victim:
                self.rows.exchange(failure=found.to_json())  # the other machines hear of it before the ranks here have ended
        except Exception as error:  # torch has many for a store that is gone
            return self._unreachable(error, "its store does not answer: ")
        return found

    def failed(self, failure: Failure, here: bool) -> None:
        """Ranks here are ended because of this. `here`: it happened on this machine."""
        named = failure.on(self.machine(self.index)) if here else failure
        self._say(state="failed", failure=named.to_json())

    def ended(self, asked: bool) -> None:
        """All ranks here have returned. `asked`: a signal on this machine had asked them to stop."""
        self._say(state="ended", asked=asked)

    # Between rounds

    def beat(self) -> None:
        """Say that this machine is alive, while it waits. C009 when the store is gone; the error that ended number 0, if one did."""
        if self.count == 1:
            return
        time.sleep(0.05)
        if self.rows.due:
            self._say()
        self._raise_failure_of(0)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Inside, a thread says that this machine is alive, while the caller copies and does not use the node."""
        if self.count == 1:
            yield
            return
        done = threading.Event()

        def beat() -> None:
            while not done.wait(PERIOD):
                with contextlib.suppress(Exception):  # whoever waits for this machine next finds out
                    self.rows.exchange()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def ready(self, held: Held = NOTHING) -> None:
        """This machine can take part in the next round, and has so much of the state in its memory."""
        self._say(state="ready", held=held)

    def gather(self) -> list[int]:
        """Number 0: the other machines, once all have come; after `LAST_CALL` seconds the `least`. C009 when they do not come."""
        began = time.monotonic()
        while True:
            self.beat()
            for k in self.rows.others:
                self._raise_failure_of(k)
            there, waited = self.newcomers(), time.monotonic() - began
            enough = waited > LAST_CALL and not self._all_must_come and len(there) + 1 >= self.least
            if len(there) + 1 == self.count or enough:
                return there
            if waited > ABSENT:
                missing = ", ".join(str(k) for k in self.rows.others if k not in there)
                raise PlaitError(Problem("C009", f"machine {missing} did not come within {waited:.0f} s", fix=_START), FAILED)

    def newcomers(self) -> list[int]:
        """Machines that wait to take part and do not yet."""
        others = ((k, self.rows[k]) for k in self.rows.others)
        new = [k for k, row in others if row.state == "ready" and row.life != self._lives.get(k)]
        return [k for k in new if self.rows.silent(k) < BROKEN]

    def regroup(self) -> None:
        """Number 0: have the ranks of all machines stop after their step."""
        self._say(regroups=self.number)
        self.regroups = True

    @property
    def regrouped(self) -> bool:
        """Whether the ranks of this round were stopped so that more machines can join."""
        return self.rows[0].regroups == self.number

    def left(self) -> list[int]:
        """Number 0: the other machines that are ready after the round, once all are that are not lost."""
        while True:
            self.beat()
            others = [k for k in self._lives if k != self.index]
            gone = {k for k in others if self._silently_gone(k)}
            ready = [k for k in others if k not in gone and self.rows[k].round == self.number and self.rows[k].state == "ready"]
            if len(gone) + len(ready) == len(others):
                return ready

    def open(self, following: Round, newcomers: Iterable[int]) -> Round:
        """Number 0: begin a round."""
        known = {self.index, *newcomers, *self._lives}
        self._lives = {k: self.rows[k].life for k in following.devices if k in known}
        self._reached(lambda: self.rows.put(_ROUND, _Opened(following, self._lives)))
        return self._enter(following)

    def next_round(self, bring: Callable[[int], dict[str, Any] | None]) -> Round | None:
        """Wait for the next round that this machine takes part in; None when the run is over. `bring`: copies this machine's part of a
        step's state to the run directory when number 0 says so, and returns the metrics of that step."""
        while True:
            self.beat()
            leader = self.rows[0]
            if leader.state == "over":
                return None
            order, answer = leader.bring, self.rows.mine.brought
            if order is not None and order.machine == self.index and (answer is None or answer.number != order.number):
                with self.beating():
                    metrics = bring(order.step)
                self._say(brought=Brought(order.number, metrics))
            opened = self._reached(lambda: self.rows.get(_ROUND, _Opened))
            if opened is not None and opened.round.number > self.number and opened.lives.get(self.index) == self.rows.mine.life:
                self._lives = opened.lives
                return self._enter(opened.round)

    def bring(self, machine: int, step: int) -> dict[str, Any] | None:
        """Number 0: have a machine copy its part of a step's state, and return the metrics of that step, if it has them."""
        number = secrets.token_hex(4)
        self._say(bring=Bring(machine, step, number))
        while (answer := self.rows[machine].brought) is None or answer.number != number:
            self.beat()
            if self._silently_gone(machine):
                return None
        return answer.metrics

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Whatever this launcher raises inside ends the run on all machines. Number 0, with which the store goes, leaves last."""
        failure: Failure | None = None
        order = (1, self.index)
        try:
            yield
        except PlaitError as error:
            failure = Failure(self.ranks.start, order, problems=list(error.problems), exit_code=error.exit_code)
            raise
        except BaseException as error:
            problem = Problem("C009", f"{self.machine(self.index)} ended: {in_a_line(error)}", fix=("--resume",))
            failure = Failure(self.ranks.start, order, problem)
            raise
        finally:
            self._leave(failure.on(self.machine(self.index)).to_json() if failure is not None else None)

    def _enter(self, found: Round) -> Round:
        self.round, self.regroups = found, False
        self._say(state="runs", round=found.number, failure=None, broken=False, asked=False, bring=None)
        self.rows.forgive()
        return found

    def _leave(self, failure: dict[str, Any] | None) -> None:
        """Say that this launcher ends, and why; number 0 waits a little for the others to have read it."""
        end, facts = time.monotonic() + WORD, {"state": "over", "failure": failure}
        while True:
            try:
                self.rows.exchange(**facts)
                if self.index or not any(map(self._still_there, self.rows.others)):
                    return
            except PlaitError:  # L009: another program wrote a row, whose machine can still read
                if self.index:
                    return
            except Exception:  # torch has many for a store that is gone
                return
            if time.monotonic() > end:
                return
            time.sleep(0.05)

    def _still_there(self, k: int) -> bool:
        return bool(self.rows[k].life) and self.rows[k].state != "over" and self.rows.silent(k) < BROKEN

    def _failure(self, k: int, patience: float) -> Failure | None:
        """What has failed on a machine of this round, or what it says has failed on others."""
        row = self.rows[k]
        if row.failure is not None and (row.state == "over" or row.round == self.number):
            return Failure.of_json(row.failure)
        if row.life != self._lives[k]:
            return _lost(self.machine(k), k, "its launcher was started again")
        silent = self.rows.silent(k)
        if row.state not in ("ended", "over") and silent > patience:
            return _lost(self.machine(k), k, f"its launcher said nothing for {silent:.0f} s")
        return None

    def _raise_failure_of(self, k: int) -> None:
        """Raise what ended another launcher, if something did."""
        row = self.rows[k]
        if k != self.index and row.state == "over" and row.failure is not None:
            raise Failure.of_json(row.failure).error()

    def _silently_gone(self, k: int) -> bool:
        """Whether a machine is lost: it said nothing for long; longer if it ends its ranks and copies what they held."""
        row = self.rows[k]
        patience = WORD if row.round == self.number and row.state != "runs" else BROKEN
        return row.life != self._lives[k] or row.state == "over" or self.rows.silent(k) > patience

    def _say(self, **facts: Any) -> None:
        self._reached(lambda: self.rows.exchange(**facts))

    def _reached(self, work: Callable[[], Any]) -> Any:
        try:
            with ending_waits() if self.count > 1 else contextlib.nullcontext():
                return work()
        except Exception as error:  # torch has many for a store that is gone
            raise self._unreachable(error).error() from error

    def _unreachable(self, error: Exception, what: str = "") -> Failure:
        """What an error of the store means: it is out of reach, or another program wrote into it."""
        if isinstance(error, PlaitError):
            return Failure(-1, (0, self.index), error.problems[0])
        self.cut_off = True
        return _lost(self.machine(0), 0, f"{what}{type(error).__name__}")


def _lost(name: str, index: int, why: str) -> Failure:
    fix = ("--resume    on the machines that are left, or when it is back", "is it up? can it be reached?")
    return Failure(-1, (0, index), Problem("C009", f"{name} is gone", why=why, fix=fix))
