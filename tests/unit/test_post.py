"""Messages between ranks: both ends derive the same order from the table, and the arrival of sent messages is known."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.parallel.pipeline.p2p import PREPOSTED_RECEIVES, PointToPoint, Routes, StageMessage, plan_routes
from plait.parallel.pipeline.schedule_search import build_table

SHAPES = (("sequential", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb", 1), ("zbv", 2))


class Done:
    """A message that has arrived, and the number of waits for it."""

    def __init__(self, log: list[Any], *what: Any):
        self.log, self.what = log, what

    def wait(self) -> None:
        self.log.append(("wait", *self.what))


class Wire:
    """The group of one rank without a network. `log` has its calls, in order."""

    def __init__(self, rank: int):
        self.own, self.log = rank, list[Any]()

    def rank(self) -> int:
        return self.own


@pytest.fixture(autouse=True)
def unwired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are recorded and not sent."""

    def note(what: str, group: Wire, peer: int, tag: int) -> Done:
        group.log.append((what, peer, tag))
        return Done(group.log, what, peer, tag)

    monkeypatch.setattr(dist, "isend", lambda t, group, group_dst, tag: note("send", group, group_dst, tag))
    monkeypatch.setattr(dist, "irecv", lambda t, group, group_src, tag: note("post", group, group_src, tag))


def play(rank: int, planned: Any, found: Routes) -> tuple[Wire, int]:
    """(calls to the wire in a rank's row, the maximum number of messages stored at once)."""
    wire, most = Wire(rank), 0
    post = PointToPoint(wire, found, lambda message: [torch.empty(1)])
    to = {message: b for (a, b), route in found.items() if a == rank for message in route.messages}
    for kind, stage, micro in ((a.kind, a.stage, a.micro) for a in planned.rows[rank] if a.kind != "W"):
        forward = kind == "F"
        if StageMessage(forward, stage, micro) in post.places:
            post.receive(StageMessage(forward, stage, micro))
        answer = StageMessage(forward, stage + 1 if forward else stage - 1, micro)
        if answer in to:
            post.send(answer, to[answer], [torch.empty(1)])
        most = max(most, sum(map(len, post.sent.values())))
        assert len(post.pending) <= len(post.senders) * (PREPOSTED_RECEIVES + planned.peak_live[rank])
    post.close()
    assert not post.pending and not any(post.sent.values())
    return wire, most


@pytest.mark.parametrize("schedule, per_rank", SHAPES)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_both_ends_of_every_pair_use_one_order(schedule: str, per_rank: int, ranks: int) -> None:
    planned = build_table(schedule, ranks, 7, per_rank)
    found = plan_routes(planned.rows, planned.owner, lambda message: True)
    wires = [play(r, planned, found)[0] for r in range(ranks)]
    for a, b in found:
        sent = [tag for what, peer, tag, *_ in wires[a].log if what == "send" and peer == b]
        posted = [tag for what, peer, tag, *_ in wires[b].log if what == "post" and peer == a]
        assert sent == posted and len(set(sent)) == len(sent)


def test_what_was_sent_is_let_go_however_many_micro_batches() -> None:
    kept = []
    for microbatches in (8, 64):
        planned = build_table("1f1b", 4, microbatches)
        found = plan_routes(planned.rows, planned.owner, lambda message: True)
        kept.append([play(r, planned, found)[1] for r in range(4)])
    assert kept[0] == kept[1] and max(kept[1]) <= 8


def test_what_came_back_says_what_was_taken() -> None:
    planned = build_table("1f1b", 2, 3)
    found = plan_routes(planned.rows, planned.owner, lambda message: True)
    assert found[0, 1].messages == tuple(StageMessage(True, 1, m) for m in range(3))
    assert found[1, 0].received_before == (1, 2, 3)  # a gradient is sent after the output that it belongs to
    assert found[0, 1].received_before == (0, 0, 1)


def test_messages_with_nothing_in_them_do_not_exist() -> None:
    planned = build_table("gpipe", 3, 2)
    found = plan_routes(planned.rows, planned.owner, lambda message: message.forward)
    assert sorted(found) == [(0, 1), (1, 2)]
