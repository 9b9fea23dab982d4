"""The states of nodes, attempt after attempt: launchers in threads of one process, with a store in memory."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from plait.config.errors import PlaitError, Problem
from plait.launch import node_rows, nodes
from plait.launch.failures import Failure
from plait.launch.node_rows import NodeRows, StoredSteps
from plait.launch.nodes import Node
from plait.launch.round import Round

KEY = b"of the job"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are exchanged often. Each test sets how long a silent node is awaited."""
    monkeypatch.setattr(node_rows, "PERIOD", 0.0)


def machines(store: HashStore, count: int, least: int | None = None) -> list[Node]:
    return [Node(NodeRows(store, KEY, k, count), count, 2, least) for k in range(count)]


def opened(all_of_them: list[Node], number: int = 0) -> Round:
    """All are ready, and node 0 opens an attempt with them."""
    for node in all_of_them:
        node.announce_ready()
    leader = all_of_them[0]
    following = Round(number, "dp=4", {node.index: (0, 1) for node in all_of_them})
    leader.open_round(following, leader.gather_nodes() if not number else leader.list_newcomers())
    for node in all_of_them[1:]:
        assert node.await_round(lambda step: None) == following
    return following


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Another node's launcher, in a thread. Returns its result or its exception."""
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
    node = Node.make_single(2)
    node.announce_ready()
    assert node.gather_nodes() == [] and node.open_round(Round(0, "dp=2", {0: (0, 1)}), []).world == 2
    assert node.check_nodes() is None and node.list_remaining() == [] and list(node.ranks) == [0, 1] and node.meeting is None
    node.announce_failure(raised(1), here=True)
    assert node.open_round(Round(1, "dp=2", {0: (0, 1)}), []).number == node.round_number == 1
    began = time.monotonic()
    with node.report_exit():
        pass
    assert time.monotonic() - began < 5 and node.rows.own.state == "over"


def test_what_fails_on_one_machine_is_read_on_all_with_its_name() -> None:
    zero, one, two = all_of_them = machines(HashStore(), 3)
    opened(all_of_them)
    assert [node.check_nodes() for node in all_of_them] == [None, None, None]
    one.announce_failure(raised(3), here=True)
    assert two.check_nodes() is None, "machines read the row of number 0 alone"
    for node in (zero, two):
        found = node.check_nodes()
        assert found is not None and found.rank == 3 and not found.victim
        assert found.all_problems()[0].where.startswith("machine 1 (ranks 2-3) on ")
    zero.announce_failure(found, here=False)  # node 0 ends its ranks because of it, and is not the place of the failure
    assert two.check_nodes().all_problems()[0].where.count("machine ") == 1


def test_of_failures_on_several_machines_number_0_says_the_guilty_one() -> None:
    zero, one, two, three = all_of_them = machines(HashStore(), 4)
    opened(all_of_them)
    lost_peer = Failure(2, (4, 2), Problem("C004", "rank 2 lost its connection"), victim=True)
    one.announce_failure(lost_peer, here=True)
    assert zero.check_nodes().victim and three.check_nodes() is None, "a victim says nothing of where it began"
    two.announce_failure(raised(4), here=True)
    assert [node.check_nodes().rank for node in (zero, three)] == [4, 4]


def test_the_failure_of_a_round_is_not_read_in_the_next() -> None:
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.announce_failure(raised(2), here=True)
    assert zero.check_nodes() is not None
    zero.announce_failure(raised(2), here=False)
    opened(all_of_them, 1)
    assert zero.check_nodes() is None and one.check_nodes() is None


def test_a_silent_machine_is_lost_sooner_where_connections_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _one, two = all_of_them = machines(HashStore(), 3)
    opened(all_of_them)
    monkeypatch.setattr(nodes, "BROKEN_LOST_AFTER", 0.1)
    zero.check_nodes()
    time.sleep(0.2)
    two.check_nodes()
    assert zero.check_nodes() is None, "it may be busy"
    two.check_nodes(broken=True)  # a rank of node 2 lost its connection to one of node 1
    found = zero.check_nodes()
    assert found is not None and found.all_problems()[0].what.startswith("machine 1 (ranks 2-3)")
    assert two.check_nodes().all_problems()[0].what == found.all_problems()[0].what


def test_number_0_waits_until_what_ranks_held_is_put_away_and_has_it_brought() -> None:
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.announce_failure(raised(2), here=True)
    zero.check_nodes()
    zero.announce_failure(raised(2), here=False)
    thread, left = beside(zero.list_remaining)
    time.sleep(0.3)
    assert thread.is_alive(), "machine 1 still collects"
    brought: list[int] = []
    one.announce_ready(StoredSteps((7,), (8,)))

    def bring(step: int) -> dict[str, Any]:
        brought.append(step)
        return {"step": step}

    follower, found = beside(lambda: one.await_round(bring))
    thread.join(10)
    assert left == [[1]] and zero.rows[1].held == StoredSteps((7,), (8,))
    assert zero.request_copy(1, 8) == {"step": 8} and zero.request_copy(1, 7) == {"step": 7} and brought == [8, 7]
    following = Round(1, "dp=2", {0: (0,), 1: (1,)})
    zero.open_round(following, [])
    follower.join(10)
    assert found == [following] and list(one.ranks) == [1]


def test_a_machine_that_copies_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that dies meanwhile is detected as lost soon."""
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.announce_failure(raised(2), here=True)
    zero.check_nodes()
    monkeypatch.setattr(nodes, "REPLY_WAIT", 1.0)
    monkeypatch.setattr(nodes, "PERIOD", 0.1)
    thread, left = beside(zero.list_remaining)
    with one.keep_alive():
        time.sleep(2.0)
        assert thread.is_alive()
    thread.join(10)
    assert left == [[]]


def test_a_launcher_that_was_started_again_is_a_newcomer() -> None:
    store = HashStore()
    zero, one = all_of_them = machines(store, 2)
    opened(all_of_them)
    back = Node(NodeRows(store, KEY, 1, 2), 2, 2)
    assert zero.check_nodes().all_problems()[0].why == "its launcher was started again"
    assert zero.list_remaining() == [] and zero.list_newcomers() == []
    back.announce_ready()
    zero.rows.exchange()
    assert zero.list_newcomers() == [1]
    zero.regroup()
    one.rows.exchange()
    assert one.is_regrouped and zero.is_regrouped
    zero.open_round(Round(1, "dp=4", {0: (0, 1), 1: (0, 1)}), [1])
    assert back.await_round(lambda step: None).number == 1 and zero.list_newcomers() == []


def test_the_run_begins_with_the_least_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _, two = machines(HashStore(), 3, least=2)
    two.announce_ready()
    monkeypatch.setattr(nodes, "LAST_CALL", 0.3)
    assert zero.gather_nodes() == [2]
    monkeypatch.setattr(nodes, "START_TIMEOUT", 0.3)
    zero, _, two = machines(HashStore(), 3)
    two.announce_ready()
    with pytest.raises(PlaitError, match="machine 1 did not arrive within"):
        zero.gather_nodes()


def test_what_ends_number_0_ends_a_machine_that_waits() -> None:
    zero, one = machines(HashStore(), 2)
    one.announce_ready()
    follower, found = beside(lambda: one.await_round(lambda step: None))
    with pytest.raises(PlaitError), zero.report_exit():
        raise PlaitError(Problem("P001", "no such plan"), 2)
    follower.join(10)
    (error,) = found
    assert error.codes == ["P001"] and error.exit_code == 2 and error.problems[0].where.startswith("machine 0")


def test_a_run_that_is_over_has_no_next_round() -> None:
    zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    one.announce_end(asked=False)
    zero.announce_end(asked=False)
    assert not zero.is_regrouped and not one.is_regrouped
    follower, found = beside(lambda: one.await_round(lambda step: None))
    zero.rows.exchange(state="over")
    follower.join(10)
    assert found == [None]


def test_what_no_launcher_wrote_ends_the_run() -> None:
    store = HashStore()
    zero, _one = all_of_them = machines(store, 2)
    opened(all_of_them)
    store.set("launcher/1", '{"host": "h", "life": "1", "state": "over"}')
    found = zero.check_nodes()
    assert found is not None and found.all_problems()[0].code == "L009" and "launcher/1" in found.all_problems()[0].why
    assert not zero.is_cut_off
    with zero.report_exit():  # it waits for the node, whose row it cannot read
        thread, read = beside(lambda: (time.sleep(0.5), _one.rows.exchange(), _one.rows[0].state))
    thread.join(10)
    assert read[0][-1] == "over"


def test_a_store_that_is_gone_cuts_a_machine_off(monkeypatch: pytest.MonkeyPatch) -> None:
    _zero, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)

    def gone(*words: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(one.rows, "exchange", gone)
    assert one.check_nodes().all_problems()[0].what.startswith("machine 0 (ranks 0-1)") and one.is_cut_off
    with pytest.raises(PlaitError, match=r"machine 0 .* is gone"):
        one.send_heartbeat()


def test_what_all_need_once() -> None:
    zero, one = machines(HashStore(), 2)
    with pytest.raises(PlaitError, match="another machine did not arrive within 0 s"):
        one.await_value("run", patience=0.0)
    zero.publish("run", {"path": "runs/1"})
    assert one.await_value("run") == {"path": "runs/1"}


def test_the_last_node_of_a_run_has_no_remote_ranks() -> None:
    """Its ranks waited for each other, and were left alone because another node could have been the cause."""
    zero, one = all_of_them = machines(HashStore(), 2)
    assert not zero.has_remote_ranks
    opened(all_of_them)
    assert zero.has_remote_ranks and one.has_remote_ranks
    zero.open_round(Round(1, "dp=2", {0: (0, 1)}), [])
    assert not zero.has_remote_ranks and not Node.make_single(2).has_remote_ranks


def test_a_store_that_was_lost_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prints a dozen lines for each request on a broken connection, and the launcher made four of them in a second."""
    _, one = all_of_them = machines(HashStore(), 2)
    opened(all_of_them)
    requests = list[object]()

    def fail(**facts: object) -> None:
        requests.append(facts)
        raise ConnectionError("Broken pipe")

    monkeypatch.setattr(one.rows, "exchange", fail)
    assert one.check_nodes().all_problems()[0].code == "C009" and one.is_cut_off
    assert one.check_nodes() is None and len(requests) == 1
