"""A dry run lists the messages that a step sends: those of each rank, by calls and bytes of each operator.

They are compared with a step without any other measurement. The checks of a dry run's meter must send no messages themselves.
"""

from functools import partial

import jobs_moe
import jobs_real
import pytest
import torch
from rarely import rarely, sampled

from plait import Job, Plan
from plait.engine.engine import Engine
from plait.engine.traffic import Traffic
from plait.launch import fork
from plait.launch.place import Place
from plait.planner.dryrun.dry_run import dry_run

PLANS = (
    "dp=2", "fsdp=2", "tp=2", "cp=2", "pp=2 microbatches=2",
    *rarely("fsdp=2 zero_stage=1 microbatches=2", "tp=2 sequence_parallel=false", "cp=2 cp_method=ulysses", "cp=4", "cp=2 tp=2"),
)  # fmt: skip


def sent(place: Place, job: Job, plan: Plan) -> dict[str, tuple[int, int]]:
    """(calls, bytes) by operator, of the second step."""
    torch.set_num_threads(1)
    engine, traffic = Engine(job, plan, place=place, device="cpu"), Traffic(place.rank, plan)
    source = engine.batches()
    engine.step(next(source))
    with traffic.watch():
        engine.step(next(source))
    return traffic.total_by_op()


def compared(job: Job, plan: Plan) -> None:
    found = dry_run(job, plan)
    run = fork.run_ranks(partial(sent, job=job, plan=plan), plan.world)
    for kind in found.kinds:
        assert kind.operators == {op: tuple(told) for op, told in run[kind.rank].items()}


@pytest.mark.parametrize("line", sampled(5, PLANS))
def test_a_dry_run_tells_what_a_step_sends(line: str) -> None:
    compared(jobs_real.gpt(), Plan.parse(line))


@pytest.mark.slow
@pytest.mark.parametrize("line", (*rarely("dp=2 ep=2"), "fsdp=2 ep=2"))
def test_of_experts(line: str) -> None:
    compared(jobs_moe.mixtral(), Plan.parse(line))
