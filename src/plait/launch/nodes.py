"""The nodes of a run, with one launcher each, from round to round.

A *round* is one start of the run's ranks (`launch/round.py`). Each node has a state, in its row in the job's store
(`launch/node_rows.py`):

    came → ready → runs ─┬→ failed ─┬→ ready → runs (the next round) → …
                         └→ ended  ─┴→ over

    came     it has connected to the others
    ready    it waits for a round that it takes part in; snapshots of the round before are saved
    runs     its ranks train
    failed   a rank failed, on this node or another: its ranks are ended, their snapshots are being saved
    ended    its ranks have returned
    over     its launcher ends, with a failure if that is the reason

Node 0, which has the store, opens every round (`cli/restart_loop.py`), and announces failures on any node; the other nodes wait for it.
A restarted launcher is a newcomer, and joins in the next round. A launcher that is silent for long has lost its node. A launcher that cannot
reach the store ends, so two halves of a split network never train the same run.

A rank that fails breaks the connections of ranks on all nodes. So a node whose failed ranks are all victims waits until node 0
announces the cause.

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

from plait.config.errors import FAILED, PlaitError, Problem, summarize_error
from plait.launch import rendezvous
from plait.launch.failures import Failure
from plait.launch.hangs import format_ranks
from plait.launch.launchers import Membership
from plait.launch.node_rows import NO_STEPS, PERIOD, CopyReply, CopyRequest, NodeRows, StoredSteps
from plait.launch.rendezvous import START_TIMEOUT, Rendezvous
from plait.launch.round import Round
from plait.launch.stopping import end_waits_on_stop

LOST_AFTER = 30.0
"""Seconds of silence after which a node is lost. A very busy node is silent for some seconds."""
REPLY_WAIT = 10.0
"""Seconds that a node with victims only waits for another node's failure, and that others have to read its own."""
BROKEN_LOST_AFTER = 4.0
"""Seconds of silence after which a node is lost if its ranks have dropped their connections."""
LAST_CALL = 30.0
"""Seconds that node 0 waits for all nodes if fewer are enough (torch elastic's name)."""
_ROUND = "round"
"""Key of the newest round in the store."""
_START_FIX = ("start the same command on all machines", "check --nnodes, the number of machines")


class _OpenedRound(Struct, frozen=True):
    """A round that node 0 announces, with the tokens of the launchers that take part."""

    round: Round
    lives: dict[int, str]


class Node:
    """This node among `count`, for its launcher. `ranks_per_node`: ranks that a node starts.

    `min_nodes`: minimum number of nodes for a round; None if all must arrive.
    """

    def __init__(self, rows: NodeRows, count: int, ranks_per_node: int, min_nodes: int | None = None, meeting: Rendezvous | None = None):
        self.rows, self.index, self.count, self.ranks_per_node = rows, rows.index, count, ranks_per_node
        self.min_nodes, self._all_must_come = min_nodes or 1, min_nodes is None
        self.round: Round | None = None
        self.is_cut_off = False
        """The store cannot be reached, so this node cannot continue."""
        self.regroups = False
        """Node 0: the ranks of the round must stop, because there are newcomers."""
        self._meeting, self._lives = meeting, dict[int, str]()

    @staticmethod
    def make_single(ranks_per_node: int) -> "Node":
        """Make the only node of a run."""
        from torch.distributed import HashStore

        return Node(NodeRows(HashStore(), b"", 0, 1), 1, ranks_per_node)

    @staticmethod
    def join(member: Membership, world: int, say: Callable[[str], None]) -> "Node":
        """Connect to the other nodes. Raises L006 if nodes would have unequal numbers of ranks; L002, L007, L008 as `join_rendezvous`."""
        if world % member.count:
            what = f"{world} ranks cannot be divided equally among {member.count} machines"
            least = world - world % member.count or member.count
            fix = (f"a plan of {least} or {least + member.count} ranks", "change --nnodes")
            raise PlaitError(Problem("L006", what, fix=fix))
        meeting = rendezvous.join_rendezvous(member, say)
        with end_waits_on_stop():
            store = meeting.connect_store()
        store.set_timeout(timedelta(seconds=REPLY_WAIT))
        rows = NodeRows(store, meeting.key, member.index, member.count)
        return Node(rows, member.count, world // member.count, member.min_count, meeting)

    @property
    def ranks(self) -> range:
        """This node's ranks in this round."""
        return self.round.ranks_of(self.index) if self.round is not None else range(0)

    @property
    def has_remote_ranks(self) -> bool:
        """Whether other nodes have ranks in this round."""
        return self.round is not None and self.round.world > len(self.ranks)

    @property
    def round_number(self) -> int:
        """Number of the round; -1 before the first."""
        return -1 if self.round is None else self.round.number

    @property
    def meeting(self) -> Rendezvous | None:
        """Rendezvous of this round's ranks, if they are on several nodes."""
        return replace(self._meeting, prefix=f"round{self.round_number}/") if self._meeting is not None else None

    def describe_node(self, index: int) -> str:
        """Format the node for messages: machine 1 (ranks 2-3) on gpu-b."""
        ranks = list(self.round.ranks_of(index)) if self.round is not None else []
        name = f"machine {index} ({format_ranks(ranks)})" if ranks else f"machine {index}"
        host = self.rows[index].host
        return f"{name} on {host}" if host else name

    # Values for all nodes

    def publish(self, name: str, value: object) -> None:
        """Publish a value for all nodes, including later ones."""
        self._guard_store(lambda: self.rows.put(f"word/{name}", value))

    def await_value(self, name: str, patience: float = START_TIMEOUT) -> Any:
        """Wait for a value that a node publishes. Raises C009 after `patience` seconds, or if the node with the store is lost."""
        end = time.monotonic() + patience
        while (found := self._guard_store(lambda: self.rows.get(f"word/{name}", dict))) is None:
            if time.monotonic() > end:
                what = f"another machine did not arrive within {patience:.0f} s"
                raise PlaitError(Problem("C009", what, why=f"machine {self.index} waits for {name}", fix=_START_FIX), FAILED)
            self.send_heartbeat()
        return found

    # While ranks run

    def check_nodes(self, broken: bool = False) -> Failure | None:
        """Exchange rows, if due, and return the failure of another node of the round.

        `broken`: ranks on this node have lost connections. A node that is silent for `BROKEN_LOST_AFTER` seconds then counts as lost.
        """
        if self.is_cut_off or not self.rows.is_due:
            return None
        try:
            self.rows.exchange(broken=broken)
            others = [k for k in self._lives if k in self.rows.others]
            patience = BROKEN_LOST_AFTER if broken or any(self.rows[k].broken for k in others) else LOST_AFTER
            found = min(filter(None, (self._find_failure(k, patience) for k in others)), key=lambda f: f.order, default=None)
            if found is not None and self.index == 0 and not found.victim:
                self.rows.exchange(failure=found.to_json())  # announced before the ranks here have ended
        except Exception as error:  # torch raises various errors for a lost store
            return self._explain_store_error(error, "its store does not answer: ")
        return found

    def announce_failure(self, failure: Failure, here: bool) -> None:
        """Announce a failure that ends the ranks on this node. `here`: it happened on this node."""
        named = failure.with_node(self.describe_node(self.index)) if here else failure
        self._send_row(state="failed", failure=named.to_json())

    def announce_end(self, asked: bool) -> None:
        """Announce that all ranks on this node have returned. `asked`: a signal on this node had requested a stop."""
        self._send_row(state="ended", asked=asked)

    # Between rounds

    def send_heartbeat(self) -> None:
        """Send a heartbeat while waiting. Raises C009 if the store is lost, or the error that ended node 0."""
        if self.count == 1:
            return
        time.sleep(0.05)
        if self.rows.is_due:
            self._send_row()
        self._raise_failure_of(0)

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Inside, a thread sends heartbeats, while the caller copies data and does not use the node."""
        if self.count == 1:
            yield
            return
        done = threading.Event()

        def beat() -> None:
            while not done.wait(PERIOD):
                with contextlib.suppress(Exception):  # the next wait for this node reports it
                    self.rows.exchange()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def announce_ready(self, held: StoredSteps = NO_STEPS) -> None:
        """Announce that this node can take part in the next round, with the steps whose state it has in memory."""
        self._send_row(state="ready", held=held)

    def gather_nodes(self) -> list[int]:
        """Node 0: wait for all other nodes, or after `LAST_CALL` seconds for `min_nodes`, and return them. Raises C009 if they do not arrive."""
        began = time.monotonic()
        while True:
            self.send_heartbeat()
            for k in self.rows.others:
                self._raise_failure_of(k)
            there, waited = self.list_newcomers(), time.monotonic() - began
            enough = waited > LAST_CALL and not self._all_must_come and len(there) + 1 >= self.min_nodes
            if len(there) + 1 == self.count or enough:
                return there
            if waited > START_TIMEOUT:
                missing = ", ".join(str(k) for k in self.rows.others if k not in there)
                raise PlaitError(Problem("C009", f"machine {missing} did not arrive within {waited:.0f} s", fix=_START_FIX), FAILED)

    def list_newcomers(self) -> list[int]:
        """List the nodes that wait to take part."""
        others = ((k, self.rows[k]) for k in self.rows.others)
        new = [k for k, row in others if row.state == "ready" and row.life != self._lives.get(k)]
        return [k for k in new if self.rows.silent_seconds(k) < BROKEN_LOST_AFTER]

    def regroup(self) -> None:
        """Node 0: have the ranks of all nodes stop after their step."""
        self._send_row(regroups=self.round_number)
        self.regroups = True

    @property
    def is_regrouped(self) -> bool:
        """Whether the ranks of this round were stopped so that more nodes can join."""
        return self.rows[0].regroups == self.round_number

    def list_remaining(self) -> list[int]:
        """Node 0: wait until every node of the round is ready or lost, and return the ready ones."""
        while True:
            self.send_heartbeat()
            others = [k for k in self._lives if k != self.index]
            gone = {k for k in others if self._is_gone(k)}
            ready = [k for k in others if k not in gone and self.rows[k].round == self.round_number and self.rows[k].state == "ready"]
            if len(gone) + len(ready) == len(others):
                return ready

    def open_round(self, following: Round, newcomers: Iterable[int]) -> Round:
        """Node 0: open a round."""
        known = {self.index, *newcomers, *self._lives}
        self._lives = {k: self.rows[k].life for k in following.devices if k in known}
        self._guard_store(lambda: self.rows.put(_ROUND, _OpenedRound(following, self._lives)))
        return self._enter_round(following)

    def await_round(self, bring: Callable[[int], dict[str, Any] | None]) -> Round | None:
        """Wait for the next round of this node; None if the run is over.

        `bring`: copies this node's part of a step's state to the run directory on node 0's request, and returns the metrics of that step.
        """
        while True:
            self.send_heartbeat()
            leader = self.rows[0]
            if leader.state == "over":
                return None
            order, answer = leader.bring, self.rows.own.brought
            if order is not None and order.machine == self.index and (answer is None or answer.number != order.number):
                with self.keep_alive():
                    metrics = bring(order.step)
                self._send_row(brought=CopyReply(order.number, metrics))
            opened = self._guard_store(lambda: self.rows.get(_ROUND, _OpenedRound))
            if opened is not None and opened.round.number > self.round_number and opened.lives.get(self.index) == self.rows.own.life:
                self._lives = opened.lives
                return self._enter_round(opened.round)

    def request_copy(self, machine: int, step: int) -> dict[str, Any] | None:
        """Node 0: have a node copy its part of a step's state; return the metrics of that step, if the node has them."""
        number = secrets.token_hex(4)
        self._send_row(bring=CopyRequest(machine, step, number))
        while (answer := self.rows[machine].brought) is None or answer.number != number:
            self.send_heartbeat()
            if self._is_gone(machine):
                return None
        return answer.metrics

    @contextlib.contextmanager
    def report_exit(self) -> Iterator[None]:
        """Announce any error inside to all nodes, which ends the run. Node 0, which has the store, leaves last."""
        failure: Failure | None = None
        order = (1, self.index)
        try:
            yield
        except PlaitError as error:
            failure = Failure(self.ranks.start, order, problems=list(error.problems), exit_code=error.exit_code)
            raise
        except BaseException as error:
            problem = Problem("C009", f"{self.describe_node(self.index)} ended: {summarize_error(error)}", fix=("--resume",))
            failure = Failure(self.ranks.start, order, problem)
            raise
        finally:
            self._announce_exit(failure.with_node(self.describe_node(self.index)).to_json() if failure is not None else None)

    def _enter_round(self, found: Round) -> Round:
        self.round, self.regroups = found, False
        self._send_row(state="runs", round=found.number, failure=None, broken=False, asked=False, bring=None)
        self.rows.reset_silence()
        return found

    def _announce_exit(self, failure: dict[str, Any] | None) -> None:
        """Announce that this launcher ends, and its failure. Node 0 waits briefly until the others have read it."""
        end, facts = time.monotonic() + REPLY_WAIT, {"state": "over", "failure": failure}
        while True:
            try:
                self.rows.exchange(**facts)
                if self.index or not any(map(self._is_present, self.rows.others)):
                    return
            except PlaitError:  # L009: another program wrote a row, and that row's node can still read
                if self.index:
                    return
            except Exception:  # torch raises various errors for a lost store
                return
            if time.monotonic() > end:
                return
            time.sleep(0.05)

    def _is_present(self, k: int) -> bool:
        return bool(self.rows[k].life) and self.rows[k].state != "over" and self.rows.silent_seconds(k) < BROKEN_LOST_AFTER

    def _find_failure(self, k: int, patience: float) -> Failure | None:
        """Return the failure of a node of this round, or the failure of another node that it announced."""
        row = self.rows[k]
        if row.failure is not None and (row.state == "over" or row.round == self.round_number):
            return Failure.from_json(row.failure)
        if row.life != self._lives[k]:
            return _make_lost_failure(self.describe_node(k), k, "its launcher was started again")
        silent = self.rows.silent_seconds(k)
        if row.state not in ("ended", "over") and silent > patience:
            return _make_lost_failure(self.describe_node(k), k, f"its launcher was silent for {silent:.0f} s")
        return None

    def _raise_failure_of(self, k: int) -> None:
        """Raise the error that ended another launcher, if there is one."""
        row = self.rows[k]
        if k != self.index and row.state == "over" and row.failure is not None:
            raise Failure.from_json(row.failure).error()

    def _is_gone(self, k: int) -> bool:
        """Whether a node is lost: silent for too long. The limit is higher while it ends its ranks and saves their snapshots."""
        row = self.rows[k]
        patience = REPLY_WAIT if row.round == self.round_number and row.state != "runs" else BROKEN_LOST_AFTER
        return row.life != self._lives[k] or row.state == "over" or self.rows.silent_seconds(k) > patience

    def _send_row(self, **facts: Any) -> None:
        self._guard_store(lambda: self.rows.exchange(**facts))

    def _guard_store(self, work: Callable[[], Any]) -> Any:
        try:
            with end_waits_on_stop() if self.count > 1 else contextlib.nullcontext():
                return work()
        except Exception as error:  # torch raises various errors for a lost store
            raise self._explain_store_error(error).error() from error

    def _explain_store_error(self, error: Exception, what: str = "") -> Failure:
        """Convert an error of the store: it is unreachable, or another program wrote into it."""
        if isinstance(error, PlaitError):
            return Failure(-1, (0, self.index), error.problems[0])
        self.is_cut_off = True
        return _make_lost_failure(self.describe_node(0), 0, f"{what}{type(error).__name__}")


def _make_lost_failure(name: str, index: int, why: str) -> Failure:
    fix = ("--resume    on the remaining machines, or when it is back", "check that it is up and reachable")
    return Failure(-1, (0, index), Problem("C009", f"{name} is gone", why=why, fix=fix))
