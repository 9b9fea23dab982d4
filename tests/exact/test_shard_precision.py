"""Low and mixed precision of a sharded model: sums in fp32, one decision about an overflow, shards of several formats."""

from typing import Any

import jobs
import jobs_unlike
import pytest
import torch
from torch import Tensor, nn

from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp import groups
from plait.parallel.fsdp.runtime import ShardScatter


def trained(job: Any, plan: str, ranks: int) -> list[dict[str, Any]]:
    """The losses of each step, and the number formats of the gradient sums."""

    def run(place: Place) -> dict[str, Any]:
        summed: set[str] = set()
        real = ShardScatter.__call__

        def call(self: Any, **given: Any) -> None:
            summed.add(f"{given['input_tensor'].dtype} {given['output_tensor'].dtype}")
            real(self, **given)

        ShardScatter.__call__ = call
        engine = Engine(job, plan, place=place)
        rows = [engine.step(batch).loss for batch in engine.batches()]
        own = {str(p.dtype) for p in engine.rank_model.params.values()}
        finite = all(bool(p.isfinite().all()) for p in engine.rank_model.params.values())
        return {"rows": rows, "summed": sorted(summed), "own": sorted(own), "finite": finite}

    return fork.run_ranks(run, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, ranks",
    (
        ("fsdp=2 activation_checkpointing=full", 2),
        pytest.param("dp=2 fsdp=2 microbatches=2 zero_stage=2", 4, marks=pytest.mark.prove),
        pytest.param("fsdp=3 zero_stage=1 offload=optimizer", 3, marks=pytest.mark.prove),
    ),
)
def test_bf16_trains_and_sums_in_fp32(plan: str, ranks: int) -> None:
    job = jobs.make(jobs_unlike.Chain, steps=20)
    full = trained(job, "dp=1", 1)[0]["rows"]
    for found in trained(job, f"{plan} precision=bf16", ranks):
        assert (
            found["summed"] == ["torch.float32 torch.float32"] and found["own"] == ["torch.float32"] and found["finite"]
        )
        assert all(abs(a - b) < 0.05 * abs(a) + 0.02 for a, b in zip(full, found["rows"]))
        assert any(a != b for a, b in zip(full, found["rows"]))
        assert sum(found["rows"][-5:]) < sum(found["rows"][:5])


def overflowing(place: Place) -> dict[str, Any]:
    """Only rank 1 gets an infinity, in its third step."""
    engine = Engine(jobs.make(jobs_unlike.Chain), "dp=2 fsdp=2 precision=fp16", place=place)
    rows = []
    for batch in engine.batches():
        before = [p.detach().clone() for p in engine.rank_model.params.values()]
        if batch.position.step == 2 and place.rank == 1:
            engine.model.last.register_full_backward_hook(
                lambda m, a, b: tuple(None if t is None else t * torch.inf for t in a)
            )
        step = engine.step(batch)
        engine.model.last._backward_hooks.clear()
        moved = any(not torch.equal(a, b) for a, b in zip(before, engine.rank_model.params.values()))
        rows.append([step.skipped, moved, engine.rank_model.techniques.loss_scale.value, step.samples])
    return {"rows": rows}


@pytest.mark.slow
def test_overflow_on_one_rank_skips_on_all() -> None:
    first, *others = (r["rows"] for r in fork.run_ranks(overflowing, 4))
    assert all(rows == first for rows in others)
    assert [row[0] for row in first] == [False, False, True, False, False, False]
    assert [row[1] for row in first] == [True, True, False, True, True, True]
    assert [row[2] for row in first] == [65536.0] * 2 + [32768.0] * 4


class Formats(nn.Module):
    """A frozen part in bf16, a block in float64, the rest in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.first, self.wide = nn.Linear(6, 6), nn.Linear(6, 8), jobs_unlike.Block(8, 0.0)
        self.block, self.last = jobs_unlike.Block(8, 0.0), nn.Linear(8, 1)
        self.frozen.to(torch.bfloat16).requires_grad_(False)
        self.wide.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.frozen(x.bfloat16()).float())
        return self.last(self.block(self.wide(x.double()).float()))


@pytest.mark.slow
@pytest.mark.parametrize("size", (0, 700))  # a group for each unit; small adjacent units of one format together
@pytest.mark.parametrize(
    "plan, ranks",
    (("fsdp=2", 2), pytest.param("dp=2 fsdp=2 zero_stage=2 microbatches=2 activation_checkpointing=full", 4, marks=pytest.mark.prove)),
)
def test_parameters_of_several_formats(plan: str, ranks: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_BYTES", size)
    (whole,) = trained(jobs.make(Formats), "dp=1", 1)
    for found in trained(jobs.make(Formats), plan, ranks):
        assert all(abs(a - b) < 1e-4 for a, b in zip(whole["rows"], found["rows"]))
        assert found["own"] == whole["own"]
