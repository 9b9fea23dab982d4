"""The states of machines, round after round: launchers in threads of one process, with a store in memory."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from plait.config.errors import PlaitError, Problem
from plait.launch import node_rows, nodes
from plait.launch.failures import Failure
from plait.launch.node_rows import Held, NodeRows
from plait.launch.nodes import Node
from plait.launch.round import Round

KEY = b"of the job"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are exchanged often; how long a silent machine is waited for, each test says."""
    monkeypatch.setattr(node_rows, "PERIOD", 0.0)


def machines(store: HashStore, count: int, least: int | None = None) -> list[Node]:
    return [Node(NodeRows(store, KEY, k, count), count, 2, least) for k in range(count)]


def opened(all_of_them: list[Node], number: int = 0) -> Round:
    """All are ready, and number 0 opens a round with them."""
    for node in all_of_them:
        node.ready()
    leader = all_of_them[0]
    following = Round(number, "dp=4", {node.index: (0, 1) for node in all_of_them})
    leader.open(following, leader.gather() if not number else leader.newcomers())
    for node in all_of_them[1:]:
        assert node.next_round(lambda step: None) == following
    return following


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Another machine's launcher, in a thread; what it returns or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except PlaitError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def raised(rank: int) -> Failure:
    return Failure(rank, (2, rank), Problem("C005", f"rank {rank} raised ValueError", where="job.py:3"))


def test_one_machine_needs_no_other() -> None:
    node = Node.alone(2)
    node.ready()
    assert node.gather() == [] and node.open(Round(0, "dp=2", {0: (0, 1)}), []).world == 2
    assert node.look() is None and node.left() == [] and list(node.ranks) == [0, 1] and node.meeting is None
    node.failed(raised(1), here=True)
    assert node.open(Round(1, "dp=2", {0: (0, 1)}), []).number == node.number == 1
    began = time.monotonic()
    with node.taking_part():
        pass
    assert time.monotonic() - began < 5 and node.rows.mine.state == "over"


def test_what_fails_on_one_machine_is_read_on_all_with_its_name() -> None:
    zero, one, two = all_of_them = machines(HashStore(), 3)
    opened(all_of_them)
    assert [node.look() for node in all_of_them] == [None, None, None]
    one.failed(raised(3), here=True)
    assert two.look() is None, "machines read the row of number 0 alone"
    for node in (zero, two):
        found = node.look()
        assert found is not None and found.rank == 3 and not found.victim
        assert found.all_problems()[0].where.startswith("machine 1 (ranks 2-3) on ")
    zero.failed(found, here=False)  # number 0 ends its ranks for it, and is not where it happened
    assert two.look().all_problems()[0].where.count("machine ") == 1


def test_of_failures_on_several_machines_number_0_says_the_guilty_one() -> None:
    zero, one, two, three = all_of_them = machines(HashStore(), 4)
    opened(all_of_them)
    lost_peer = Failure(2, (4, 2), Problem("C004", "rank 2 lost its connection"), victim=True)
    one.failed(lost_peer, here=True)
    assert zero.look().victim and three.look() is None, "a victim says nothing of where it began"
    two.failed(raised(4), here=True)
    assert [node.look().rank for node in (zero, three)] == [4, 4]


def test_the_failure_of_a_round_is_not_read_in_the_next() -> None:
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.failed(raised(2), here=True)
    assert zero.look() is not None
    zero.failed(raised(2), here=False)
    opened(all_of_them, 1)
    assert zero.look() is None and one.look() is None


def test_a_silent_machine_is_lost_sooner_where_connections_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _one, two = all_of_them = machines(HashStore(), 3)
    opened(all_of_them)
    monkeypatch.setattr(nodes, "BROKEN", 0.1)
    zero.look()
    time.sleep(0.2)
    two.look()
    assert zero.look() is None, "it may be busy"
    two.look(broken=True)  # a rank of machine 2 lost its connection to one of machine 1
    found = zero.look()
    assert found is not None and found.all_problems()[0].what.startswith("machine 1 (ranks 2-3)")
    assert two.look().all_problems()[0].what == found.all_problems()[0].what


def test_number_0_waits_until_what_ranks_held_is_put_away_and_has_it_brought() -> None:
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.failed(raised(2), here=True)
    zero.look()
    zero.failed(raised(2), here=False)
    thread, left = beside(zero.left)
    time.sleep(0.3)
    assert thread.is_alive(), "machine 1 still collects"
    brought: list[int] = []
    one.ready(Held((7,), (8,)))

    def bring(step: int) -> dict[str, Any]:
        brought.append(step)
        return {"step": step}

    follower, found = beside(lambda: one.next_round(bring))
    thread.join(10)
    assert left == [[1]] and zero.rows[1].held == Held((7,), (8,))
    assert zero.bring(1, 8) == {"step": 8} and zero.bring(1, 7) == {"step": 7} and brought == [8, 7]
    following = Round(1, "dp=2", {0: (0,), 1: (1,)})
    zero.open(following, [])
    follower.join(10)
    assert found == [following] and list(one.ranks) == [1]


def test_a_machine_that_copies_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that dies meanwhile is soon known to be lost."""
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.failed(raised(2), here=True)
    zero.look()
    monkeypatch.setattr(nodes, "WORD", 1.0)
    monkeypatch.setattr(nodes, "PERIOD", 0.1)
    thread, left = beside(zero.left)
    with one.beating():
        time.sleep(2.0)
        assert thread.is_alive()
    thread.join(10)
    assert left == [[]]


def test_a_launcher_that_was_started_again_is_a_newcomer() -> None:
    store = HashStore()
    zero, one = all_of_them = machines(store, 2)
    opened(all_of_them)
    back = Node(NodeRows(store, KEY, 1, 2), 2, 2)
    assert zero.look().all_problems()[0].why == "its launcher was started again"
    assert zero.left() == [] and zero.newcomers() == []
    back.ready()
    zero.rows.exchange()
    assert zero.newcomers() == [1]
    zero.regroup()
    one.rows.exchange()
    assert one.regrouped and zero.regrouped
    zero.open(Round(1, "dp=4", {0: (0, 1), 1: (0, 1)}), [1])
    assert back.next_round(lambda step: None).number == 1 and zero.newcomers() == []


def test_the_run_begins_with_the_least_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _, two = machines(HashStore(), 3, least=2)
    two.ready()
    monkeypatch.setattr(nodes, "LAST_CALL", 0.3)
    assert zero.gather() == [2]
    monkeypatch.setattr(nodes, "ABSENT", 0.3)
    zero, _, two = machines(HashStore(), 3)
    two.ready()
    with pytest.raises(PlaitError, match="machine 1 did not come within"):
        zero.gather()


def test_what_ends_number_0_ends_a_machine_that_waits() -> None:
    zero, one = machines(HashStore(), 2)
    one.ready()
    follower, found = beside(lambda: one.next_round(lambda step: None))
    with pytest.raises(PlaitError), zero.taking_part():
        raise PlaitError(Problem("P001", "no such plan"), 2)
    follower.join(10)
    (error,) = found
    assert error.codes == ["P001"] and error.exit_code == 2 and error.problems[0].where.startswith("machine 0")


def test_a_run_that_is_over_has_no_next_round() -> None:
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.ended(asked=False)
    zero.ended(asked=False)
    assert not zero.regrouped and not one.regrouped
    follower, found = beside(lambda: one.next_round(lambda step: None))
    zero.rows.exchange(state="over")
    follower.join(10)
    assert found == [None]


def test_what_no_launcher_wrote_ends_the_run() -> None:
    store = HashStore()
    zero, _one = all_of_them = machines(store, 2)
    opened(all_of_them)
    store.set("launcher/1", '{"host": "h", "life": "1", "state": "over"}')
    found = zero.look()
    assert found is not None and found.all_problems()[0].code == "L009" and "launcher/1" in found.all_problems()[0].why
    assert not zero.cut_off
    with zero.taking_part():  # it waits for the machine, whose row it cannot read
        thread, read = beside(lambda: (time.sleep(0.5), _one.rows.exchange(), _one.rows[0].state))
    thread.join(10)
    assert read[0][-1] == "over"


def test_a_store_that_is_gone_cuts_a_machine_off(monkeypatch: pytest.MonkeyPatch) -> None:
    _zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)

    def gone(*words: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(one.rows, "exchange", gone)
    assert one.look().all_problems()[0].what.startswith("machine 0 (ranks 0-1)") and one.cut_off
    with pytest.raises(PlaitError, match=r"machine 0 .* is gone"):
        one.beat()


def test_what_all_need_once() -> None:
    zero, one = machines(HashStore(), 2)
    with pytest.raises(PlaitError, match="another machine did not come within 0 s"):
        one.take("run", patience=0.0)
    zero.give("run", {"path": "runs/1"})
    assert one.take("run") == {"path": "runs/1"}
