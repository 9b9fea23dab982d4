"""A dry run tells of the messages that a step sends: those of every rank, by calls and bytes of each operator.

The ledger of an unmetered step says what is sent. What the meter of a dry run looks at must not send anything itself.
"""

from functools import partial
from typing import Any

import jobs_moe
import jobs_real
import pytest
import torch

from plait import Job, Plan
from plait.engine.comm_log import BY_DATA, Ledger
from plait.engine.engine import Engine
from plait.launch import fork as here
from plait.launch.place import Place
from plait.planner.dryrun.dry_run import dry_run

PLANS = (
    "dp=2", "fsdp=2", "fsdp=2 zero=1 microbatches=2", "tp=2 sequence_parallel=false", "tp=2", "cp=4", "cp=2 context=ulysses",
    "pp=2 microbatches=2", "cp=2 tp=2",
)  # fmt: skip


def sent(place: Place, job: Job, plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """(calls, bytes) by operator, of the second step."""
    torch.set_num_threads(1)
    engine, ledger = Engine(job, plan, place=place, device="cpu"), Ledger()
    source = engine.batches()
    engine.step(next(source))
    with ledger.watch():
        engine.step(next(source))
    for (op, what), number in ledger.asked.items():
        (ledger.calls if what == "calls" else ledger.bytes)[op] += number
    return dict(ledger.calls), dict(ledger.bytes)


def compared(job: Job, plan: Plan) -> None:
    found = dry_run(job, plan)
    run = here.run(partial(sent, job=job, plan=plan), plan.world)
    for kind in found.kinds:
        calls, size = run[kind.rank]
        told: dict[str, Any] = kind.operators
        assert {op: n for op, (n, _) in told.items()} == calls
        assert {op: b for op, (_, b) in told.items() if op not in BY_DATA} == size


@pytest.mark.parametrize("line", PLANS)
def test_a_dry_run_tells_what_a_step_sends(line: str) -> None:
    compared(jobs_real.gpt(), Plan.parse(line))


@pytest.mark.parametrize("line", ("dp=2 ep=2", "fsdp=2 ep=2"))
def test_of_experts(line: str) -> None:
    compared(jobs_moe.mixtral(), Plan.parse(line))
