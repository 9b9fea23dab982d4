"""Differences that small batches never show: verify also compares batches of the job's own size, with chosen samples, and evaluates."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import pytest
import torch
from jobs import Numbers, make
from rarely import sampled
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Evaluate
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine import engine, evaluate
from plait.proof import full_batch
from plait.proof.verdict import Verdict, format_verdict
from plait.proof.verify import verify

pytestmark = pytest.mark.whole


class Layers(nn.Module):
    """Two layers; `how` names a way in which the samples of a batch depend on each other."""

    def __init__(self, how: str = ""):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "size" and len(x) > 15:
            x = x - x.mean(0)
        if self.how == "rare" and float(x.abs().max()) > 8.0:
            x = x / x.abs().max()
        if self.how == "capacity":
            x = torch.where(torch.arange(len(x))[:, None] < 10, x, torch.zeros_like(x))
        return self.down(self.up(x).tanh())


class Outlier(Numbers):
    """One sample of 200 is far from the others."""

    def __init__(self) -> None:
        super().__init__(200)
        self.x[137] *= 10.0


def hardest(out: Tensor, target: Tensor) -> Tensor:
    each = (out - target).square().flatten(1).mean(1)
    return each.topk(min(8, len(each))).values.mean()


def rooted(out: Tensor, target: Tensor) -> Tensor:
    """The root of the loss if the loss is large."""
    loss = F.mse_loss(out, target)
    return loss.sqrt() if loss > 1.7 else loss


JOBS: dict[str, Callable[[], Job]] = {
    "size": lambda: make(lambda: Layers("size"), lambda: Numbers(96), batch=24),
    "capacity": lambda: make(lambda: Layers("capacity"), lambda: Numbers(96), batch=24),
    "hardest": lambda: make(Layers, lambda: Numbers(96), hardest, batch=24),
    "rare": lambda: make(lambda: Layers("rare"), Outlier, batch=24),
    "rooted": lambda: make(Layers, lambda: Numbers(96), rooted, batch=24),
    "stream": lambda: make(lambda: Layers("size"), lambda: jobs.Stream(96), batch=24),
}


@pytest.mark.parametrize("name", sampled(9, JOBS))
def test_what_small_batches_do_not_meet(name: str) -> None:
    job = JOBS[name]()
    assert verify(job, Plan.parse("dp=2"), seconds=0.0).equal, "the small batches alone must not see it"
    verdict = verify(job, Plan.parse("dp=2"))
    assert not verdict.equal and verdict.code == "V021", verdict.to_dict()


@pytest.mark.slow
def test_the_verdict_says_what_was_proved() -> None:
    verdict = verify(make(Layers, lambda: Numbers(96), batch=24), Plan.parse("dp=2"))
    assert verdict.equal and verdict.forced["own"]["batch"] == 24 and verdict.forced["own"]["steps"] == 2
    assert "then 2 of 24, clipped as the job does; then one of 5 with weights × 4" in format_verdict(verdict, "job.py")


def test_a_batch_that_is_too_long_is_said() -> None:
    verdict = verify(make(Layers, lambda: Numbers(96), batch=24), Plan.parse("dp=2"), seconds=1e-9)
    assert verdict.equal and verdict.forced["own"]["steps"] == 0
    assert "the job's own batch of 24 was not tried: a step takes" in format_verdict(verdict, "job.py")


def _late(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """From a step on, one rank's gradient is different."""
    real = engine.Engine.backward

    def backward(self: Any, batch: Any) -> Any:
        step_row = real(self, batch)
        if batch.position.step >= first:
            for parameter in self.rank_model.params.values():
                parameter.grad.mul_(1.0 + 1e-6)
        return step_row

    monkeypatch.setattr(engine.Engine, "backward", backward)


def test_a_fault_from_step_5_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _late(monkeypatch, 4)
    assert not verify(jobs.groups(), Plan.parse("dp=2")).equal


@pytest.mark.slow
def test_a_fault_from_step_10_on_needs_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _late(monkeypatch, 9)
    assert verify(jobs.groups(), Plan.parse("dp=2")).equal
    assert not verify(jobs.groups(), Plan.parse("dp=2"), steps=10).equal


class Shy(torch.optim.SGD):
    """Clips inside, by the gradient norm of its own parameters, if that is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        if norm > 50.0:
            for gradient in gradients:
                gradient.mul_(50.0 / norm)
        return super().step()


@pytest.mark.parametrize("text", sampled(3, ("fsdp=2", "pp=2 microbatches=2", "dp=2")))
def test_an_optimizer_that_rarely_clips(text: str) -> None:
    """Rejected or detected if parameters are sharded; exact if they are not."""
    job = replace(jobs.groups(), optimizer=lambda ps: Shy(ps, lr=0.01))
    try:
        verdict = verify(job, Plan.parse(text))
    except PlaitError as error:
        assert error.codes == ["P022"] and text != "dp=2"
        return
    assert verdict.equal is (text == "dp=2"), verdict.to_dict()


def evaluated(n: int = 31) -> Job:
    def metrics(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"error": (out - y).abs(), "right": (out > y).float()}

    return replace(jobs.mlp(), evaluate=Evaluate(lambda: Numbers(n), metrics))


@pytest.mark.parametrize("text", sampled(2, ("dp=2", "dp=3 microbatches=2", "pp=2 microbatches=2")))
def test_evaluation_is_compared(text: str) -> None:
    verdict = verify(evaluated(), Plan.parse(text))
    assert verdict.equal and any(p.code == "E" and p.name for p in verdict.probes)


def wrong(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Evaluation loops as they are often written."""
    real = {"iterate_in_order": evaluate.EvalData.iterate_in_order, "_reduce_means": evaluate._reduce_means}

    def padded(held_out: evaluate.EvalData, *rest: Any) -> Any:
        """A distributed sampler pads the shorter share with a sample that then counts twice."""
        for pair, count in real["iterate_in_order"](held_out, *rest):
            yield pair, max(count, 1)

    def mean_of_means(rank_model: Any, sums: dict[str, Tensor]) -> dict[str, float]:
        return real["_reduce_means"](
            rank_model, {name: torch.stack([row[0] / row[1], row[1] / row[1]]) for name, row in sums.items()}
        )

    def twice(held_out: evaluate.EvalData, *rest: Any) -> Any:
        """Rank 0 reads all of the data, not its share."""
        if held_out.share.rank == 0:
            held_out = replace(held_out, share=replace(held_out.share, ranks=1))
        yield from real["iterate_in_order"](held_out, *rest)

    patches = {
        "padded": (evaluate.EvalData, "iterate_in_order", padded),
        "mean of means": (evaluate, "_reduce_means", mean_of_means),
        "twice": (evaluate.EvalData, "iterate_in_order", twice),
    }
    monkeypatch.setattr(*patches[name])


def told(verdict: Verdict) -> str:
    return "" if verdict.equal else verdict.code


@pytest.mark.parametrize("name", ("mean of means", "twice"))
def test_a_wrong_evaluation_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, name)
    assert told(verify(evaluated(), Plan.parse("dp=2"))) == "V020"


@pytest.mark.slow
def test_a_sample_counted_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without samples runs one of another rank, because a forward pass gathers parameters."""
    wrong(monkeypatch, "padded")
    assert told(verify(evaluated(), Plan.parse("fsdp=2"))) == "V020"


def test_eps_of_an_optimizer_is_raised_where_it_is_compared_with_gradients() -> None:
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    for optimizer, eps in ((torch.optim.AdamW(weight), 0.5), (torch.optim.Adafactor(weight), (0.5, 1e-3))):
        full_batch.raise_eps(optimizer, 0.5)
        assert optimizer.param_groups[0]["eps"] == eps
