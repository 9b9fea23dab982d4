"""Every schedule table of every size runs to its end, executes every action once, and stays within its stated memory."""

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rarely import rarely

from plait.config.keys import SCHEDULES
from plait.parallel.pipeline.schedule_search import (
    StageCosts,
    build_table,
    find_best_table,
    iter_greedy_tables,
    simulate,
)
from plait.parallel.pipeline.schedules import ScheduleTable, assign_folded, assign_looped, find_schedule_errors

RANKS, MICROBATCHES, STAGES = range(1, 9), range(1, 33), range(1, 5)
TEXTBOOK = [name for name in SCHEDULES if name != "auto"]


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    for v in STAGES:
        for p in RANKS:
            for m in MICROBATCHES:
                if not find_schedule_errors(name, p, m, v):
                    yield p, m, v


def check(found: ScheduleTable, p: int, m: int, v: int) -> None:
    """Checks the structure: every action once, on its owner, in ascending order of micro-batches, within the stated memory."""
    assert (found.ranks, found.stages, found.microbatches) == (p, p * v, m) == (len(found.rows), len(found.owner), m)
    assert all(found.owner.count(rank) == v for rank in range(p))
    for rank, row in enumerate(found.rows):
        kinds: dict[tuple[str, int], list[int]] = {}
        now = most = 0
        for a in row:
            assert found.owner[a.stage] == rank
            for kind in "IW" if a.kind == "B" else a.kind:
                kinds.setdefault((kind, a.stage), []).append(a.micro)
            now += {"F": 1, "I": 0}.get(a.kind, -1)
            most = max(most, now)
        assert kinds == {(k, s): list(range(m)) for k in "FIW" for s in range(p * v) if found.owner[s] == rank}
        assert now == 0 and most <= found.peak_live[rank]


def stated(name: str, p: int, m: int, v: int, rank: int) -> int:
    """The maximum per rank, as the docstrings state it."""
    return {
        "sequential": v,
        "gpipe": v * m,
        "1f1b": min(m, p - rank),
        "interleaved": min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1),
        "zb": min(m, p),
        "zbv": min(2 * m, 2 * p),
    }[name]


def makespan(name: str, p: int, m: int, v: int) -> int | None:
    """The makespan from the literature with F = I = W = 1, or None if no formula exists."""
    if name == "sequential":
        return 3 * p * v * m
    if name == "zbv":
        return 6 * m + p - 1 if m >= 2 * p - 1 else None
    if name == "zb":
        return 3 * m + p - 1 if m >= p else None
    if name in ("gpipe", "interleaved") and v > 1 and m % p:
        return None
    return 3 * (v * m + p - 1)


@pytest.mark.parametrize("step", (5, *rarely(1)))
def test_every_table_of_every_size(step: int) -> None:
    """Every fifth size. The long list runs all sizes."""
    for name in TEXTBOOK:
        for p, m, v in islice(sizes(name), 0, None, step):
            found = build_table(name, p, m, v)
            check(found, p, m, v)
            one = [1.0] * (p * v)
            played = simulate(found, one, one, one)
            assert found.peak_live == tuple(stated(name, p, m, v, rank) for rank in range(p)) or name in (
                "interleaved",
                "zbv",
            )
            assert all(n <= stated(name, p, m, v, rank) for rank, n in enumerate(found.peak_live)), (name, p, m, v)
            assert played.makespan == (makespan(name, p, m, v) or played.makespan), (name, p, m, v)
            assert played.makespan >= 3 * v * m


@pytest.mark.slow
def test_the_search_is_never_worse_and_fits() -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 5, 8, 13):
            for v in STAGES:
                found, one = build_table("auto", p, m, v), [1.0] * (p * v)
                check(found, p, m, v)
                assert max(found.peak_live) <= p * v
                took = simulate(found, one, one, one).makespan
                for name in TEXTBOOK:
                    if not find_schedule_errors(name, p, m, v) and max((other := build_table(name, p, m, v)).peak_live) <= p * v:
                        assert took <= simulate(other, one, one, one).makespan, (name, p, m, v)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, int, StageCosts]:
    p, m, v = draw(st.integers(1, 5)), draw(st.integers(1, 10)), draw(st.integers(1, 3))
    times = st.lists(st.floats(0.01, 10), min_size=p * v, max_size=p * v).map(tuple)
    link = draw(
        st.one_of(st.floats(0, 3), st.lists(st.floats(0, 3), min_size=p * v - 1, max_size=p * v - 1).map(tuple))
    )
    return p, m, v, StageCosts(draw(times), draw(times), draw(times), link, draw(st.floats(0, 1)), draw(times))


@given(jobs())
def test_uneven_times(job: tuple[int, int, int, StageCosts]) -> None:
    """For any durations: no deadlock, dependencies are kept, no rank runs two actions at once, and nothing is computed twice."""
    p, m, v, costs = job
    hops = [costs.link] * (p * v) if isinstance(costs.link, (int, float)) else costs.link
    for name in TEXTBOOK:
        if find_schedule_errors(name, p, m, v):
            continue
        found = build_table(name, p, m, v)
        played = costs.simulate_table(found)
        ends = {(a.kind.replace("B", "I"), a.stage, a.micro): end for _, a, _, end in played.events}
        for (rank, _, _, end), (other, _, start, _) in zip(played.events, played.events[1:]):
            assert rank != other or end <= start

        def wait(s: int, own: tuple[int, ...] = found.owner) -> float:
            return hops[s] if own[s] != own[s + 1] else 0.0

        for _, a, start, _ in played.events:
            s, micro = a.stage, a.micro
            if a.kind == "F":
                assert s == 0 or start >= ends["F", s - 1, micro] + wait(s - 1)
            elif a.kind == "W":
                assert start >= ends["I", s, micro]
            else:
                assert start >= ends["F", s, micro]
                assert s == p * v - 1 or start >= ends["I", s + 1, micro] + wait(s)
        assert played.makespan >= max(played.busy) and sum(played.busy) > 0


@pytest.mark.slow
@given(jobs(), st.floats(1, 6), st.booleans())
def test_the_search_under_any_limit(job: tuple[int, int, int, StageCosts], room: float, split: bool) -> None:
    p, m, v, costs = job
    limits = [
        max(sum(costs.saved[s] for s in range(p * v) if own[s] == r) for own in (assign_looped(p, v), assign_folded(p, v))) * room
        for r in range(p)
    ]
    for found in iter_greedy_tables(p, m, v, costs, limits, split):
        check(found, p, m, v)
        assert all(held <= most * (1 + 1e-6) for held, most in zip(costs.simulate_table(found).peak_bytes, limits))
    found = find_best_table(p, m, v, costs, limits, split=split)
    played = costs.simulate_table(found)
    assert found == find_best_table(p, m, v, costs, limits, split=split)
    assert all(held <= most * (1 + 1e-6) for held, most in zip(played.peak_bytes, limits))
    assert split or not any(a.kind in "IW" for row in found.rows for a in row)
    for name in TEXTBOOK:
        if not find_schedule_errors(name, p, m, v) and (split or name not in ("zb", "zbv")):
            other = costs.simulate_table(build_table(name, p, m, v))
            if all(held <= most for held, most in zip(other.peak_bytes, limits)):
                assert played.makespan <= other.makespan * (1 + 1e-6)


def test_what_the_search_gains() -> None:
    """Cases for which the published tables were not designed: few micro-batches, uneven stages, links, no split backward."""

    def gain(p: int, m: int, v: int, costs: StageCosts, **more: bool) -> float:
        names = [
            n for n in TEXTBOOK if not find_schedule_errors(n, p, m, v) and (more.get("split", True) or n not in ("zb", "zbv"))
        ]
        others = [costs.simulate_table(t).makespan for n in names if max((t := build_table(n, p, m, v)).peak_live) <= p * v]
        return 1 - costs.simulate_table(find_best_table(p, m, v, costs, **more)).makespan / min(others)

    assert gain(4, 6, 4, StageCosts.uniform(16)) > 0.5, "gpipe and interleaved do not fit: only sequential is left"
    assert gain(4, 3, 2, StageCosts.uniform(8)) > 0.1, "fewer micro-batches than zbv was drawn for"
    uneven = (1.0, 1.21, 1.13, 1.04)
    costs = StageCosts(uneven, uneven, tuple(0.8 * t for t in uneven), link=0.1)
    assert gain(4, 4, 1, costs) > 0.02
    assert gain(4, 4, 1, costs, split=False) > 0.02


def test_a_limit_below_one_micro_batch_is_said() -> None:
    with pytest.raises(ValueError, match=r"memory limit of 1\.5"):
        find_best_table(2, 4, 2, limit=1.5)
    tight, one = find_best_table(4, 8, limit=1), [1.0] * 4
    assert tight.peak_live == (1, 1, 1, 1)
    assert simulate(tight, one, one, one).makespan < simulate(build_table("sequential", 4, 8), one, one, one).makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_table_every_time(name: str) -> None:
    for p, m, v in ((1, 1, 1), (2, 4, 1), (3, 5, 2), (4, 6, 2), (2, 3, 4)):
        if not find_schedule_errors(name, p, m, v):
            assert build_table(name, p, m, v) == build_table(name, p, m, v)


def test_problems_are_sentences_with_numbers() -> None:
    assert find_schedule_errors("interleaved", 4, 8, 1) == ["interleaved needs stages_per_rank ≥ 2; with 1 it equals 1f1b"]
    assert find_schedule_errors("1f1b", 4, 8, 3) == ["1f1b needs 1 stage per rank, not 3"]
    assert find_schedule_errors("zbv", 4, 8, 1) == ["zbv needs 2 stages per rank, one on each arm of the V, not 1"]
    assert len(find_schedule_errors("gpipe", 0, 0, 0)) == 3
    with pytest.raises(ValueError, match="1 stage per rank, not 2"):
        build_table("zb", 2, 2, 2)
    with pytest.raises(ValueError, match="schedule 'pipe' is unknown"):
        build_table("pipe", 2, 2)


GOLDEN = {
    ("1f1b", 3, 5, 1): """
        owner 0 1 2
        rank 0 live 3: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 B0.3 B0.4
        rank 1 live 2: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 F1.4 B1.3 B1.4
        rank 2 live 1: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 F2.4 B2.4""",
    ("gpipe", 2, 3, 1): """
        owner 0 1
        rank 0 live 3: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
        rank 1 live 3: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2""",
    ("sequential", 2, 2, 2): """
        owner 0 1 0 1
        rank 0 live 2: F0.0 F2.0 B2.0 B0.0 F0.1 F2.1 B2.1 B0.1
        rank 1 live 2: F1.0 F3.0 B3.0 B1.0 F1.1 F3.1 B3.1 B1.1""",
    ("zb", 2, 4, 1): """
        owner 0 1
        rank 0 live 2: F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3
        rank 1 live 2: F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 F1.3 I1.3 W1.2 W1.3""",
    ("zbv", 2, 4, 2): """
        owner 0 1 1 0
        rank 0 live 4: F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 B0.0 F3.2 I3.2 W3.2 B0.1 F3.3 I3.3 W3.3 B0.2 B0.3
        rank 1 live 4: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 F1.3 I1.1 W1.1 F2.3 I2.2 W2.2 I1.2 I2.3 I1.3 W1.2 W2.3 W1.3""",
    ("interleaved", 2, 4, 2): """
        owner 0 1 0 1
        rank 0 live 5: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        rank 1 live 3: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3""",
}  # fmt: skip


@pytest.mark.parametrize("size", GOLDEN, ids=lambda size: "-".join(map(str, size)))
def test_golden(size: tuple[str, int, int, int]) -> None:
    found = build_table(*size)
    lines = [f"owner {' '.join(map(str, found.owner))}"]
    for rank, row in enumerate(found.rows):
        lines.append(f"rank {rank} live {found.peak_live[rank]}: {' '.join(map(str, row))}")
    assert lines == [line.strip() for line in GOLDEN[size].strip().splitlines()]
