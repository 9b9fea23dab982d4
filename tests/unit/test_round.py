"""Rounds: which ranks lie where when machines have unequally many devices, or one is gone; and plans for fewer ranks."""

from pathlib import Path

import jobs
from msgspec import json

from plait.cli.other_plans import OtherPlans
from plait.cli.request import Request
from plait.config.plan import Plan
from plait.launch.round import Round

UNEVEN = Round(3, "dp=5", {0: (0, 1), 2: (1,), 5: (0, 3)})


def test_ranks_follow_the_machines() -> None:
    assert UNEVEN.world == 5
    assert [list(UNEVEN.ranks_of(k)) for k in (0, 1, 2, 5)] == [[0, 1], [], [2], [3, 4]]
    assert [UNEVEN.machine_of(rank) for rank in range(5)] == [0, 0, 2, 5, 5]
    assert [UNEVEN.device_of(rank) for rank in range(5)] == [0, 1, 1, 0, 3]
    assert UNEVEN.first(3) == {0: (0, 1), 2: (1,)}
    assert json.decode(json.encode(UNEVEN), type=Round) == UNEVEN


def test_every_rank_has_a_neighbour_on_the_next_machine() -> None:
    to, of = zip(*(UNEVEN.neighbours_of(rank) for rank in range(5)))
    assert to == (2, 2, 3, 0, 1) and of == ((3,), (4,), (0, 1), (2,), ())
    assert [UNEVEN.kept_by(k) for k in (0, 2, 5)] == [4, 3, 3]


def test_a_plan_is_found_for_fewer_ranks(tmp_path: Path) -> None:
    request = Request("job", jobs.mlp(), Plan.parse("dp=4 precision=bf16"), runs=tmp_path, check="none")
    plans = OtherPlans(request)
    try:
        assert plans.ready(4) and str(plans.of(4, lambda: None)) == "dp=4 precision=bf16"
        for world in (3, 1):
            plan = plans.of(world, lambda: None)
            assert 1 <= plan.world <= world and plan.precision == "bf16"
    finally:
        plans.close()
