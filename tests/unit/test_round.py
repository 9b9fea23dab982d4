"""Attempts: the placement of ranks if nodes have unequal numbers of devices or one is missing, and plans for fewer ranks."""

from pathlib import Path

import jobs
from msgspec import json

from plait.cli.fallback_plans import FallbackPlans
from plait.cli.train_request import TrainRequest
from plait.config.plan import Plan
from plait.launch.round import Round

UNEVEN = Round(3, "dp=5", {0: (0, 1), 2: (1,), 5: (0, 3)})


def test_ranks_follow_the_machines() -> None:
    assert UNEVEN.world == 5
    assert [list(UNEVEN.ranks_of(k)) for k in (0, 1, 2, 5)] == [[0, 1], [], [2], [3, 4]]
    assert [UNEVEN.node_of(rank) for rank in range(5)] == [0, 0, 2, 5, 5]
    assert [UNEVEN.device_of(rank) for rank in range(5)] == [0, 1, 1, 0, 3]
    assert UNEVEN.limit_devices(3) == {0: (0, 1), 2: (1,)}
    assert json.decode(json.encode(UNEVEN), type=Round) == UNEVEN


def test_every_rank_has_a_neighbour_on_the_next_machine() -> None:
    to, of = zip(*(UNEVEN.neighbors_of(rank) for rank in range(5)))
    assert to == (2, 2, 3, 0, 1) and of == ((3,), (4,), (0, 1), (2,), ())
    assert [UNEVEN.count_kept_ranks(k) for k in (0, 2, 5)] == [4, 3, 3]


def test_a_plan_is_found_for_fewer_ranks(tmp_path: Path) -> None:
    request = TrainRequest("job", jobs.mlp(), Plan.parse("dp=4 precision=bf16"), runs=tmp_path, check="none")
    plans = FallbackPlans(request)
    try:
        assert plans.is_ready(4) and str(plans.wait_for(4, lambda: None)) == "dp=4 precision=bf16"
        for world in (3, 1):
            plan = plans.wait_for(world, lambda: None)
            assert 1 <= plan.world <= world and plan.precision == "bf16"
    finally:
        plans.close()
