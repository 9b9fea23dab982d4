"""A proof compares the messages of each rank with a dry run: for each strategy with a different order, and with wrong messages."""

from typing import Any

import jobs_pipeline
import pytest
import torch
from rarely import every, rarely, sampled
from torch.distributed import distributed_c10d as dist

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.proof.verify import verify
from plait.tensors import collectives as exchange

pytestmark = pytest.mark.messages

PLANS = (
    "pp=2 microbatches=3", "pp=3 microbatches=4 schedule=zb", "pp=2 microbatches=4 schedule=interleaved stages_per_rank=2",
    "pp=2 dp=2 microbatches=2", "pp=2 fsdp=2 microbatches=3",
    "pp=2 fsdp=2 microbatches=2 schedule=interleaved stages_per_rank=2",
)  # fmt: skip


@pytest.mark.parametrize(
    "name, text", sampled(3, every(2, [(n, PLANS[i % 6]) for i, n in enumerate(("root_gpt", "deep") * 3)]))
)
def test_what_is_sent_is_what_a_dry_run_sends(name: str, text: str) -> None:
    verdict = verify(jobs_pipeline.LISTED[name](), Plan.parse(text), steps=1)
    assert verdict.equal, (verdict.cause, verdict.to_dict()["first_wrong"])
    assert "not compared" not in verdict.to_dict()["probes"]["C"]["detail"]


@pytest.mark.parametrize("text", sampled(3, ("pp=2 microbatches=2", "pp=2 dp=2", "pp=2 fsdp=2")))
def test_a_message_that_no_dry_run_has_is_seen(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """On the last rank alone."""
    real = Engine.backward

    def backward(self: Any, batch: Any) -> Any:
        step_row = real(self, batch)
        if dist.get_backend() != "fake" and self.place.rank == self.plan.world - 1:
            dist.send(torch.zeros(2), 0)
        elif dist.get_backend() != "fake" and self.place.rank == 0:
            dist.recv(torch.zeros(2), self.plan.world - 1)
        return step_row

    monkeypatch.setattr(Engine, "backward", backward)
    verdict = verify(jobs_pipeline.LISTED["root_gpt"](), Plan.parse(text), steps=1)
    assert verdict.exit_code == DIFFERENT and verdict.code == "V012", verdict.to_dict()


@pytest.mark.parametrize(
    "plan", sampled(2, ("fsdp=2", *rarely("dp=2 fsdp=2 zero_stage=1 microbatches=2", "tp=2 sequence_parallel=true"), "cp=2"))
)
def test_the_collectives_of_devices(plan: str) -> None:
    """On a device, shards are exchanged by the library's own collectives; here over gloo."""
    token = exchange.DIRECT_DEVICES.set(())
    try:
        verdict = verify(jobs_pipeline.HARD["gpt"](), Plan.parse(plan))
    finally:
        exchange.DIRECT_DEVICES.reset(token)
    assert verdict.equal, verdict
    assert "not compared" not in verdict.to_dict()["probes"]["C"]["detail"]
