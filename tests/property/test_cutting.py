"""Random sequences of calls are split into stages: balanced within the slack, in order, and every required value is sent on."""

from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.config.errors import PlaitError
from plait.model.operations import LinearCost, Unit, UnitCall
from plait.model.sketch import Sketch
from plait.parallel.pipeline.partition import (
    SLACK,
    StagePartition,
    check_partition,
    compute_boundary_bytes,
    estimate_call_costs,
    partition_stages,
)


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    """Up to nine calls of up to nine units. Each call needs some of the earlier ones."""
    calls = []
    for i in range(draw(st.integers(1, 9))):
        needs = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        flops, size = draw(st.integers(0, 1000)), draw(st.integers(1, 100))
        figures = {"inputs": LinearCost(0, 1), "output": LinearCost(0, size), "saved": LinearCost(0, draw(st.integers(0, 50)))}
        name = f"u{draw(st.integers(0, i))}"
        calls.append(UnitCall(name, tuple(sorted(needs)), flops=LinearCost(0, flops), **figures))
    names = dict.fromkeys(c.unit for c in calls)
    units = tuple(Unit(n, "Linear", (), 0, True, True) for n in names)
    output = draw(st.sets(st.integers(0, len(calls) - 1), min_size=1, max_size=3))
    return Sketch((), units=units, calls=tuple(calls), needs=tuple(sorted(output)))


def longest(cost: list[float], bounds: tuple[int, ...]) -> float:
    return max(sum(cost[a:b]) for a, b in pairwise(bounds))


@settings(max_examples=200, deadline=None)
@given(sketches(), st.integers(1, 5))
def test_balanced_in_order_and_complete(sketch: Sketch, stages: int) -> None:
    n = len(sketch.calls)
    assume(n >= stages)
    made = partition_stages(sketch, stages)
    assert list(made.owner) == sorted(made.owner) and set(made.owner) == set(range(stages))
    bounds = (*(made.owner.index(s) for s in range(stages)), n)
    every = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    cost, moved = estimate_call_costs(sketch), compute_boundary_bytes(sketch)
    limit = min(longest(cost, b) for b in every) * SLACK
    assert longest(cost, bounds) <= limit * (1 + 1e-12)
    best = min(sum(moved[i] for i in b[1:-1]) for b in every if longest(cost, b) <= limit)
    assert sum(moved[i] for i in bounds[1:-1]) <= best * (1 + 1e-12)
    _crosses(sketch, made)


def _crosses(sketch: Sketch, made: StagePartition) -> None:
    """A value of an earlier stage enters the stage that needs it, and every stage between them. No other value does."""
    assert made.crossing[0] == ()
    for stage in range(1, made.stages):
        wanted = {i for j, c in enumerate(sketch.calls) if made.owner[j] >= stage for i in c.needs} | set(sketch.needs)
        assert set(made.crossing[stage]) == {i for i in wanted if made.owner[i] < stage}


@settings(max_examples=60, deadline=None)
@given(sketches(), st.data())
def test_the_users_own_cuts(sketch: Sketch, data: st.DataObject) -> None:
    names = [c.unit for c in sketch.calls]
    firsts = sorted(names.index(n) for n in set(names))[1:]
    assume(firsts)
    starts = sorted(data.draw(st.sets(st.sampled_from(firsts), min_size=1)))
    made = partition_stages(sketch, len(starts) + 1, tuple(names[i] for i in starts))
    assert [made.owner.index(s) for s in range(1, made.stages)] == starts
    _crosses(sketch, made)


@settings(max_examples=30, deadline=None)
@given(sketches(), st.integers(1, 4))
def test_too_many_stages(sketch: Sketch, more: int) -> None:
    with pytest.raises(PlaitError, match="P023"):
        partition_stages(sketch, len(sketch.calls) + more)


@pytest.mark.parametrize("leaks, refused", (((), False), ((1,), False), ((2,), True), ((-1,), True)))
def test_leaks_matter_between_stages(leaks: tuple[int, ...], refused: bool) -> None:
    """A unit may pass on a value outside of its output if the next user of that value is in the same stage."""
    figures = dict.fromkeys(("flops", "inputs", "output", "saved"), LinearCost(0, 1))
    calls = [UnitCall(f"u{i}", (i - 1,) if i else (), **figures, leaks=leaks if i == 0 else ()) for i in range(4)]
    units = tuple(Unit(c.unit, "Linear", (), 0, True, True) for c in calls)
    sketch = Sketch((), units=units, calls=tuple(calls), needs=(3,))
    made = partition_stages(sketch, 2, ("u2",))
    if refused:
        with pytest.raises(PlaitError, match="u0 passes a value outside of its output"):
            check_partition(sketch, made, False)
    else:
        check_partition(sketch, made, False)
