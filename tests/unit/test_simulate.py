"""The virtual clock on cases that can be computed by hand."""

import pytest

from plait.parallel.pipeline.schedule_search import Deadlock, SimulatedRun, build_table, simulate
from plait.parallel.pipeline.schedules import Action, ScheduleTable


def play(name: str, p: int, m: int, v: int = 1, link: float = 0.0, send: float = 0.0) -> SimulatedRun:
    one = [1.0] * (p * v)
    return simulate(build_table(name, p, m, v), one, one, one, link, send, saved=[10.0 * (s + 1) for s in range(p * v)])


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [8, 16, 32])
def test_bubbles_of_the_textbook(p: int, m: int) -> None:
    assert play("sequential", p, m).bubble == pytest.approx((p - 1) / p)
    for name in ("gpipe", "1f1b"):
        assert play(name, p, m).bubble == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3, 4):
        assert play("interleaved", p, m, v).bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert play("zb", p, m).bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    if m >= 2 * p - 1:
        assert play("zbv", p, m, 2).bubble == pytest.approx((p - 1) / (6 * m + p - 1))


def test_zero_bubble_with_other_times() -> None:
    """ZB-H1 waits (p - 1)(F + I - W), and 1f1b waits (p - 1)(F + I + W): Qi et al. 2024, table 2."""
    for f, i, w in ((1.0, 1.0, 1.0), (2.0, 2.5, 1.5), (3.0, 3.0, 2.0)):
        times = [f] * 4, [i] * 4, [w] * 4
        assert simulate(build_table("1f1b", 4, 16), *times).makespan == pytest.approx(16 * (f + i + w) + 3 * (f + i + w))
        assert simulate(build_table("zb", 4, 16), *times).makespan == pytest.approx(16 * (f + i + w) + 3 * (f + i - w))


def test_events_of_a_small_table() -> None:
    played = play("1f1b", 2, 2)
    assert [(e.rank, str(e.action), e.start, e.end) for e in played.events] == [
        (0, "F0.0", 0, 1), (0, "F0.1", 1, 2), (0, "B0.0", 4, 6), (0, "B0.1", 7, 9),
        (1, "F1.0", 1, 2), (1, "B1.0", 2, 4), (1, "F1.1", 4, 5), (1, "B1.1", 5, 7),
    ]  # fmt: skip
    assert (played.makespan, played.busy, played.idle) == (9, (6, 6), (3, 3))
    assert played.peak_bytes == (20, 20)


def test_links_and_sends() -> None:
    assert play("sequential", 3, 1, link=0.5).makespan == 9 + 4 * 0.5
    assert play("sequential", 3, 1, send=0.5).makespan == 9 + 4 * 0.5
    assert play("sequential", 3, 1, send=0.5).busy == (3.5, 4.0, 3.5)
    one = [1.0] * 4
    v = simulate(build_table("zbv", 2, 1, 2), one, one, one, [1.0, 100.0, 2.0])
    whole = 4 + 4 + 2 + 2 * (1 + 2)  # F, I, the W of stages 2 and 0, and two messages each way
    assert v.makespan == whole, "stages 1 and 2 are on one rank: no message between them"
    assert play("gpipe", 2, 4, link=0.5).makespan == 15 + 2 * 0.5, "messages travel beside the work"


def test_a_deadlock_names_who_waits_for_what() -> None:
    rows = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)),
    )
    one = [1.0] * 2
    with pytest.raises(Deadlock, match=r"rank 0 waits forever at B0.0; rank 1 waits forever at F1.1"):
        simulate(ScheduleTable("mine", 2, (0, 1), rows), one, one, one)
    early = ((Action("W", 0, 0), Action("F", 0, 0), Action("I", 0, 0)),)
    with pytest.raises(Deadlock) as caught:
        simulate(ScheduleTable("mine", 1, (0,), early), [1.0], [1.0], [1.0])
    assert caught.value.blocked == {0: Action("W", 0, 0)}


def test_what_does_not_fit_the_table_is_said() -> None:
    found, one = build_table("gpipe", 2, 2), [1.0] * 2
    with pytest.raises(ValueError, match="forward has 3 times for 2 stages"):
        simulate(found, [1.0] * 3, one, one)
    with pytest.raises(ValueError, match="link has 2 times for 1 boundaries"):
        simulate(found, one, one, one, [1.0, 1.0])
    with pytest.raises(ValueError, match="saved has 1 values for 2 stages"):
        simulate(found, one, one, one, saved=[1.0])
