"""NCCL runs messages of both directions in the order in which each end issues them. No table may deadlock.

The calls of `PointToPoint` to torch, in every rank's row, are recorded and then replayed under three rules. A message takes its
turn on a stream. There is one stream for each pair of ranks, or one for all messages of a rank (groups made with a
`device_id`). A message ends once both ends have reached it, and a call after a wait starts after that wait.
"""

from collections import Counter, deque
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.config.keys import SCHEDULES
from plait.parallel.pipeline.p2p import PointToPoint, Routes, StageMessage, plan_routes
from plait.parallel.pipeline.schedule_search import build_table
from plait.parallel.pipeline.schedules import ScheduleTable, find_schedule_errors

Message = tuple[int, int, int]
"""Sender, receiver, tag."""


class Noted:
    """An issued message. Its wait is recorded too."""

    def __init__(self, log: list[tuple[str, Message]], message: Message):
        self.log, self.message = log, message

    def wait(self) -> None:
        self.log.append(("wait", self.message))


class Wire:
    """The group of one rank, without a network. `log` has its messages and waits, in order."""

    def __init__(self, rank: int):
        self.own, self.log = rank, list[tuple[str, Message]]()

    def rank(self) -> int:
        return self.own

    def ask(self, message: Message) -> Noted:
        self.log.append(("ask", message))
        return Noted(self.log, message)


@pytest.fixture(autouse=True)
def unwired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", lambda t, group, group_dst, tag: group.ask((group.own, group_dst, tag)))
    monkeypatch.setattr(dist, "irecv", lambda t, group, group_src, tag: group.ask((group_src, group.own, tag)))


NOTHING = [torch.empty(0)]


def asked(planned: ScheduleTable, found: Routes, rank: int, ahead: int) -> list[tuple[str, Message]]:
    """The messages and waits of a rank's row, in the order of `PipelineRuntime.step`."""
    wire = Wire(rank)
    post = PointToPoint(wire, found, lambda message: NOTHING, ahead)
    to = {message: b for (a, b), route in found.items() if a == rank for message in route.messages}
    for action in planned.rows[rank]:
        if action.kind != "W":
            forward = action.kind == "F"
            need = StageMessage(forward, action.stage, action.micro)
            answer = StageMessage(forward, action.stage + (1 if forward else -1), action.micro)
            if need in post.places:
                post.receive(need)
            if answer in to:
                post.send(answer, to[answer], NOTHING)
    post.close()
    return wire.log


def stuck(logs: list[list[tuple[str, Message]]], one_stream: bool) -> list[Any]:
    """Replays under rendezvous. Returns the position of each rank that never ends, or nothing if all end."""
    at, over = [0] * len(logs), Counter[Message]()
    streams: list[dict[int, deque[Message]]] = [{} for _ in logs]
    going = True
    while going:
        going = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log):
                what, message = log[at[rank]]
                if what == "wait" and not over[message]:
                    break
                if what == "ask":
                    peer = sum(message[:2]) - rank
                    streams[rank].setdefault(-1 if one_stream else peer, deque()).append(message)
                at[rank], going = at[rank] + 1, True
        for a, own in enumerate(streams):
            for queue in own.values():
                while queue:
                    b = sum(queue[0][:2]) - a
                    other = streams[b].get(-1 if one_stream else a)
                    if not other or other[0] != queue[0]:
                        break
                    over[queue.popleft()] += 1
                    other.popleft()
                    going = True
    rest = [(r, log[at[r]]) for r, log in enumerate(logs) if at[r] < len(log)]
    return rest + [queue[0] for own in streams for queue in own.values() if queue]


def tables(schedule: str) -> list[ScheduleTable]:
    """Every table of a schedule for many sizes. Searched tables for fewer sizes."""
    few = schedule == "auto"
    sizes = product((2, 3, 4) if few else (2, 3, 4, 8), (1, 2, 3, 4) if few else (1, 2, 3, 4, 8, 16), (1, 2, 3))
    return [build_table(schedule, *size) for size in sizes if not find_schedule_errors(schedule, *size)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nobody_waits_forever_where_messages_run_in_order(schedule: str) -> None:
    for planned in tables(schedule):
        found = plan_routes(planned.rows, planned.owner, lambda message: True)
        logs = [asked(planned, found, rank, 0) for rank in range(planned.ranks)]
        for one_stream in (False, True):
            told = stuck(logs, one_stream)
            assert not told, (planned, one_stream, told)


def test_nobody_waits_forever_where_some_messages_are_empty() -> None:
    """A model whose stages pass on no gradients for some micro-batches: those messages do not exist."""
    for schedule, crosses in product(("1f1b", "gpipe"), (lambda x: x.forward, lambda x: x.micro % 2 or x.stage > 1)):
        planned = build_table(schedule, 4, 6)
        found = plan_routes(planned.rows, planned.owner, crosses)
        logs = [asked(planned, found, rank, 0) for rank in range(4)]
        assert not stuck(logs, False) and not stuck(logs, True)


def test_the_play_finds_ranks_that_wait_for_each_other() -> None:
    """Two adjacent ranks of 1f1b that both send before they receive."""
    there, back = (0, 1, 7), (1, 0, 8)
    crossed = [[("ask", there), ("ask", back), ("wait", back)], [("ask", back), ("ask", there), ("wait", there)]]
    assert len(stuck(crossed, False)) == len(stuck(crossed, True)) == 4


def test_few_receives_are_posted_before_they_are_needed() -> None:
    most = 0
    for schedule in ("1f1b", "interleaved", "zb", "zbv"):
        for planned in tables(schedule):
            found = plan_routes(planned.rows, planned.owner, lambda message: True)
            for rank in range(planned.ranks):
                open_ = set[Message]()
                for what, message in asked(planned, found, rank, 0):
                    if message[1] == rank:
                        (open_.add if what == "ask" else open_.discard)(message)
                        most = max(most, len(open_))
    assert most <= 4
