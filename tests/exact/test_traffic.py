"""The price's traffic is the counted traffic, on every rank of a pipeline, by calls and bytes; a wrong charge is seen."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jobs
import jobs_pipeline
import jobs_uncut
import jobs_unlike
import pytest
from rarely import every

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.model.fake_model import sketched
from plait.parallel.data import strategy as copies
from plait.parallel.fsdp import strategy as shard
from plait.parallel.order import charges
from plait.parallel.pipeline import strategy as pipeline
from plait.parallel.role import Layout, Role
from plait.tensors import exchange
from plait.verify.verify import verify

DEEP, ROOT = jobs_pipeline.LISTED["deep"], jobs_pipeline.LISTED["root_gpt"]
PLANS = (
    "pp=2 microbatches=3",
    "pp=3 microbatches=4 schedule=zb",
    "pp=2 microbatches=4 schedule=interleaved stages_per_rank=2",
    "pp=2 dp=2 microbatches=2",
    "pp=2 fsdp=2 microbatches=3",
    "pp=2 fsdp=2 microbatches=2 schedule=interleaved stages_per_rank=2",
)
JOBS = {
    "root_gpt": ROOT,  # tied, and parameters of the code between units
    "unet": jobs_unlike.ALL["unet"],  # skip connections
    "everywhere": jobs_pipeline.HARD["everywhere"],  # outputs without gradients
    "moe": jobs_pipeline.HARD["moe"],  # gradients that do not exist
    "detached": jobs_uncut.CUT["detached"],  # a backward pass that ends in the middle
    "scalars": jobs_unlike.ALL["scalars"],
    "ragged": jobs.ragged,  # weighted
}


@pytest.mark.parametrize(
    "name, text", every(2, [(n, PLANS[(k + i) % len(PLANS)]) for i in (0, 3) for k, n in enumerate(JOBS)])
)
def test_what_is_counted_is_what_is_priced(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(text), steps=1)
    assert verdict.equal, (verdict.cause, verdict.to_dict()["first_wrong"])


@pytest.mark.parametrize(
    "strategy, text, axis, op",
    (
        (pipeline, "pp=2 microbatches=2", "pp", "send"),
        (pipeline, "pp=2 microbatches=2", "pp", "allreduce_"),
        (copies, "pp=2 dp=2", "dp", "allreduce_"),
        (shard, "pp=2 fsdp=2", "fsdp", "recv_"),
    ),
)
def test_a_wrong_charge_is_seen(monkeypatch: pytest.MonkeyPatch, strategy: Any, text: str, axis: str, op: str) -> None:
    """On the last rank alone, and by its bytes alone."""
    real = strategy.price

    def price(plan: Plan, sketch: Any, role: Role) -> Iterable[Any]:
        for charge in real(plan, sketch, role):
            wrong = (charge.axis, charge.op) == (axis, op) and role.rank == plan.world - 1
            yield replace(charge, bytes=charge.bytes + 8) if wrong else charge

    monkeypatch.setattr(strategy, "price", price)
    verdict = verify(ROOT(), Plan.parse(text), steps=1)
    assert verdict.exit_code == DIFFERENT and verdict.code == "V012", verdict.to_dict()
    assert f"rank {Plan.parse(text).world - 1}" in verdict.cause


def test_a_plan_is_priced_without_processes() -> None:
    """Each boundary is charged to both of its ranks; a share with more samples sends more."""
    plan, job = Plan.parse("pp=2 dp=2 microbatches=2"), DEEP()
    sketch = sketched(job)[1]
    layout = Layout.of(plan, sketch)
    found = []
    for rank in range(plan.world):
        role = Role.of(plan, 9, rank, layout=layout)
        rows = [c for c in charges(plan, sketch, role) if c.kind == "traffic" and c.axis == "pp"]
        found.append({op: sum(c.bytes for c in rows if c.op == op) for op in ("send", "recv_")})
    assert found[0]["send"] == found[2]["recv_"] and found[2]["send"] == found[0]["recv_"]
    assert found[0]["send"] > found[1]["send"] > 0


@pytest.mark.parametrize("plan", ("fsdp=2", "dp=2 fsdp=2 zero=1 microbatches=2", "tp=2 sequence_parallel=true", "cp=2"))
def test_the_collectives_of_devices_are_priced(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device parts travel by the library's own collectives: here over gloo."""
    monkeypatch.setattr(exchange, "DIRECT", ())
    verdict = verify(jobs_pipeline.HARD["gpt"](), Plan.parse(plan))
    assert verdict.equal, verdict
