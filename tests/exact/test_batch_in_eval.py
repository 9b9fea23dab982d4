"""Modules that depend on the batch in eval mode: the evaluation is named as not exact, and no rank hangs in it."""

from collections.abc import Callable
from typing import Any

import jobs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.proof.verify import verify


class Direct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True) if len(x) > 1 else x * 0.0


class OwnNorm(nn.BatchNorm1d):
    """Normalizes by the batch in both modes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


class Softmax(nn.Module):
    """A softmax over the samples, in eval mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x.softmax(0) * len(x)


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x - plait.global_mean(x)


class Ranked(nn.Module):
    """The second output compares samples; the first does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, y - y.mean(0)


class Tokens(nn.Module):
    """Attention and norms within each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lstm = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.LSTM(6, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.flip(-1), x * 2.0], 1)
        x = self.lstm(self.layer(x).transpose(0, 1))[0].transpose(0, 1)
        return self.head(self.norm(x.mean(1)))


def layers(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), make(), nn.Linear(8, 1))


COUPLED = {
    "no running statistics": layers(lambda: nn.BatchNorm1d(8, track_running_stats=False)),
    "own norm": layers(lambda: OwnNorm(8)),
    "direct": layers(Direct),
    "softmax": layers(Softmax),
    "centered": layers(Centered),
}
CLEAN = {"tokens": Tokens, "running": layers(lambda: nn.BatchNorm1d(8)), "group": layers(lambda: nn.GroupNorm(2, 8))}


def job(model: Callable[[], nn.Module], **fields: Any) -> plait.Job:
    metrics = lambda outputs, targets: {"error": (outputs - targets).square().flatten()}  # noqa: E731
    return jobs.make(model, evaluate=plait.Evaluate(lambda: jobs.Numbers(45), metrics), **fields)


def named(made: plait.Job, text: str) -> list[str]:
    """The modules named as not exact, after an evaluation in which ranks have different numbers of batches."""

    def rank(place: Any) -> dict[str, Any]:
        engine = Engine(made, text, place=place, device="cpu")
        first = engine.evaluate()
        for batch, _ in zip(engine.batches(), range(1)):
            engine.step(batch)
        assert engine.evaluate().keys() == first.keys() == {"error"}
        return {"lines": [line for line in engine.inexact if "eval mode" in line]}

    return fork.run_ranks(rank, Plan.parse(text).world)[0]["lines"]


@pytest.mark.parametrize("kind", ["no running statistics", *(pytest.param(k, marks=pytest.mark.slow) for k in [*COUPLED][1:])])
def test_it_is_named_and_every_rank_ends(kind: str) -> None:
    lines = named(job(COUPLED[kind]), "dp=3")
    assert len(lines) == 1 and "how many samples a rank evaluates at once" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("text", ("fsdp=2", "dp=2 microbatches=2", "pp=2 microbatches=2", "tp=2 dp=2"))
def test_under_other_plans(text: str) -> None:
    assert named(job(COUPLED["own norm" if "pp" not in text else "softmax"]), text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLEAN)
def test_models_of_single_samples_are_not_accused(kind: str) -> None:
    assert named(job(CLEAN[kind]), "dp=2") == []


def test_what_metrics_do_not_read_is_not_accused() -> None:
    made = jobs.make(
        Ranked, loss=lambda o, t: F.mse_loss(o[0], t),
        evaluate=plait.Evaluate(lambda: jobs.Numbers(45), lambda o, t: {"error": (o[0] - t).square()}),
    )  # fmt: skip
    assert named(made, "dp=2") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("no running statistics", "softmax"))
def test_verify_names_it(kind: str) -> None:
    verdict = verify(job(COUPLED[kind]), Plan.parse("dp=2"))
    assert not verdict.equal and verdict.code == "V010" and "eval mode" in verdict.cause, verdict
