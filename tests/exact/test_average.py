"""The moving average of the weights equals that of one device under each plan, and evaluation uses it; faults in it are detected."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jobs
import pytest
import torch
from rarely import every, rarely, sampled
from torch import Tensor, nn

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine import engine as engine_module
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.model.fake_model import sketch_fake_model
from plait.planner.dryrun.memory_table import make_memory_table
from plait.planner.plan_request import make_runtime_costs
from plait.proof.verify import verify
from plait.randomness.keyed import make_permutation
from plait.tensors.moving_average import MovingAverage

EMA = plait.EMA(0.9, every=1, warmup=True)


def squares(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": (outputs - targets).square().flatten()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1))


def frozen() -> nn.Module:
    made = model()
    made[2].requires_grad_(False)
    return made


def averaged(ema: plait.EMA = EMA, make: Callable[[], nn.Module] = model) -> plait.Job:
    return jobs.make(make, ema=ema, evaluate=plait.Evaluate(jobs.Numbers, squares))


PLANS = (
    "dp=2", "fsdp=2 zero_stage=2 microbatches=2", "tp=2", "pp=2 microbatches=2", *rarely(
        "fsdp=3", "fsdp=2 zero_stage=1", "dp=2 activation_checkpointing=full", "fsdp=2 offload=all", "dp=2 offload=optimizer", "dp=2 fsdp=2",
        "pp=2 fsdp=2",
        "tp=2 fsdp=2", "dp=2 processes=one", "dp=2 precision=bf16", "dp=2 batch_split=3:1",
    ),
)  # fmt: skip


@pytest.mark.parametrize("text", sampled(3, PLANS))
def test_equal(text: str) -> None:
    verdict = verify(averaged(), Plan.parse(text))
    assert verdict.equal, (verdict.cause, verdict.first_wrong)
    assert {"A", "E"} <= {probe.code for probe in verdict.probes}


@pytest.mark.slow
@pytest.mark.parametrize("text", every(2, ("fsdp=2", "dp=2")))
def test_frozen_weights_are_themselves(text: str) -> None:
    verdict = verify(averaged(plait.EMA(0.5, every=3), frozen), Plan.parse(text))
    assert verdict.equal, (verdict.cause, verdict.first_wrong)


@pytest.mark.slow
def test_whole_tensors_and_experts_are_averaged_in_parts() -> None:
    muon = lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 1e-2)  # noqa: E731
    made = dataclasses.replace(averaged(), optimizer=muon)
    verdict = verify(made, Plan.parse("fsdp=2"), seconds=0.0)
    assert verdict.equal, (verdict.cause, verdict.first_wrong)


RIGHT = MovingAverage.update


def _never(self: MovingAverage) -> None:
    self.steps += 1


def _late(self: MovingAverage) -> None:
    """Averages the weights from before the step."""
    before = getattr(self, "before", None) or {n: w.detach().clone() for n, w in self.weights.items()}
    now, self.before = {n: w.detach().clone() for n, w in self.weights.items()}, None
    kept, self.weights = self.weights, before
    RIGHT(self)
    self.weights, self.before = kept, now


@pytest.mark.parametrize("fault", (_never, _late))
def test_a_wrong_average_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(MovingAverage, "update", fault)
    verdict = verify(averaged(), Plan.parse("dp=2"), seconds=0.0)
    assert not verdict.equal and verdict.code == "V009" and "average" in verdict.cause, verdict


def test_an_evaluation_of_the_last_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "use_evaluated_weights", lambda rank_model: nullcontext())
    verdict = verify(averaged(), Plan.parse("dp=2"), seconds=0.0)
    assert verdict.code == "V020" and verdict.first_wrong is not None and verdict.first_wrong.code == "E"


def trained(job: plait.Job, text: str, steps: int) -> dict[str, Any]:
    """Rank 0's results after some steps, and after an evaluation that follows them."""

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(job, text, place=place, device="cpu", on_nan="skip")
        for batch, _ in zip(engine.batches(), range(steps)):
            engine.step(batch)
        assert engine.rank_model.techniques.average is not None
        state = lambda: {n: [p.tensor.tolist(), engine.rank_model.techniques.average.tensors[n].tolist()]  # noqa: E731
                         for n, p in engine.rank_model.get_parts().items() if engine.rank_model.techniques.average}  # fmt: skip
        before = state()
        told = engine.evaluate()
        same = before == state()
        return {"told": told, "same": same, **engine.rank_model.techniques.average.state_dict(), "state": before}

    return fork.run_ranks(rank, Plan.parse(text).world)[0]


@pytest.mark.parametrize("text", ("fsdp=2 zero_stage=1", *rarely("dp=2 offload=optimizer", "pp=2")))
def test_an_evaluation_changes_nothing(text: str) -> None:
    assert trained(averaged(), text, 3)["same"]


class Spoiled(jobs.Numbers):
    """A sample that is not finite is in the second step."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return (x * float("nan"), y) if i == BAD else (x, y)


BAD = int(make_permutation(0, 0, 64)[15])


def test_a_step_that_is_left_out_does_not_count() -> None:
    told = trained(dataclasses.replace(averaged(), data=Spoiled), "dp=2", 4)
    assert (told["steps"], told["moved"]) == (3, 3)


def test_weights_of_16_bits_are_averaged_in_32() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = MovingAverage(plait.EMA(0.999), {"w": weight}, {"w": weight})
    average.update()
    with torch.no_grad():
        weight.fill_(2.0)
    for _ in range(10):
        average.update()
    assert average.tensors["w"].dtype is torch.float32
    assert average.tensors["w"].tolist() == pytest.approx([2 - 0.999**10] * 3)
    with average.use_average():
        assert weight.tolist() == average.tensors["w"].bfloat16().tolist()
    assert weight.tolist() == [2.0] * 3 and average.tensors["w"].tolist() == pytest.approx([2 - 0.999**10] * 3)


@pytest.mark.slow
def test_memory_is_billed() -> None:
    with_one, without = averaged(), dataclasses.replace(averaged(), ema=None)
    tables = [make_memory_table(job, Plan.parse("fsdp=2")) for job in (with_one, without)]
    assert tables[0].categories["average"] > 0 and "average" not in tables[1].categories
    assert "of the weights (Job.ema)" in str(tables[0])
    bills = [make_runtime_costs(job, sketch_fake_model(job)[1]).state for job in (with_one, without)]
    assert bills[0] == bills[1] + 4


@pytest.mark.parametrize("text", ("replica_groups=2 outer_sync=local sync_every=2", "replica_groups=2 outer_sync=async"))
def test_where_there_is_no_one_average(text: str) -> None:
    with pytest.raises(PlaitError) as caught:
        check_plan(averaged(), Plan.parse(text))
    assert caught.value.codes[0] == "P066"


def test_a_number_of_steps_is_at_least_one() -> None:
    with pytest.raises(PlaitError) as caught:
        plait.EMA(0.9, every=0)
    assert list(caught.value.codes) == ["J004"]
