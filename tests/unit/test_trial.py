"""Metrics are tried before training: errors in them are reported with the user's line, and correct ones are accepted."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plait
from plait.config.errors import PlaitError
from plait.engine.engine import Engine

Metrics = Callable[[Any, Any], Any]
RIGHT: dict[str, Metrics] = {
    "one_per_sample": lambda out, y: {"error": (out - y).abs()},
    "masked_by_outputs": lambda out, y: {"large": out[out > 0.5]},
    "none_for_this_sample": lambda out, y: {"none": out[y > 9.0]},
    "lists": lambda out, y: {"list": out.flatten().tolist()},
    "only_probabilities": lambda out, y: {"log": torch.distributions.Normal(out, 1 + y.abs()).log_prob(out)},
}
WRONG: dict[str, tuple[Metrics, str]] = {
    "tensor": (lambda out, y: (out - y).abs(), "J024"),
    "text": (lambda out, y: {"error": "small"}, "J024"),
    "name": (lambda out, y: {"error": out.argmx(-1)}, "J024"),
    "shape": (lambda out, y: {"error": out.view(-1, 7)}, "J024"),
    "mean": (lambda out, y: {"error": (out - y).abs().mean()}, "J025"),
    "item": (lambda out, y: {"error": (out - y).abs().mean().item()}, "J025"),
    "per_class": (lambda out, y: {"error": out.new_zeros(3) + out.sum()}, "J025"),
}


def job(metrics: Metrics, model: Callable[[], nn.Module] | None = None, data: Any = jobs.Numbers) -> plait.Job:
    made = replace(jobs.batch_norm(), evaluate=plait.Evaluate(data, metrics))
    return replace(made, model=model or made.model)


def problem(job: plait.Job, plan: str = "dp=1") -> Any:
    with pytest.raises(PlaitError) as caught:
        Engine(job, plan)
    return caught.value.problems[0]


@pytest.mark.parametrize("name", RIGHT)
def test_what_works_is_let_through(name: str) -> None:
    Engine(job(RIGHT[name]), "dp=1")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_before_a_step(name: str) -> None:
    metrics, code = WRONG[name]
    found = problem(job(metrics))
    assert found.code == code
    assert f"{__file__}:{metrics.__code__.co_firstlineno}" in found.where


def test_metrics_that_need_sound_numbers() -> None:
    """A metric that raises on artificial outputs, and not on the model's, is not an error."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1), nn.Softplus(), nn.Threshold(3.0, 3.0))

    def metrics(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        if float(out.min()) < 3.0:
            raise ValueError("not an output of this model")
        return {"error": (out - y).abs()}

    Engine(job(metrics, model), "dp=1")


def test_a_model_that_looks_at_values_only_in_evaluation() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.training or float(out.detach().sum()) > 1e9 else out.abs()

    Engine(job(RIGHT["one_per_sample"], lambda: Looks(6, 1)), "dp=1")
    assert problem(job(WRONG["mean"][0], lambda: Looks(6, 1))).code == "J025"
    assert problem(job(WRONG["name"][0], lambda: Looks(6, 1))).code == "J024"


def test_outputs_that_are_large_stay_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.engine.evaluate.MAX_FAKE_BYTES", 0)
    Engine(job(RIGHT["masked_by_outputs"]), "dp=1")
    for name in ("name", "mean", "tensor"):
        assert problem(job(WRONG[name][0])).code == WRONG[name][1]


def test_the_trial_leaves_everything_as_it_was() -> None:
    held = jobs.Stream()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    plain = Engine(replace(job(RIGHT["one_per_sample"]), evaluate=None), "dp=1")
    before = random.random(), np.random.rand(), torch.rand(1)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    tried = Engine(job(RIGHT["one_per_sample"], data=lambda: held), "dp=1")
    assert (random.random(), np.random.rand(), torch.rand(1)) == before
    assert all(m.training for m in tried.model.modules())
    for (name, a), (_, b) in zip(plain.model.named_buffers(), tried.model.named_buffers()):
        assert torch.equal(a, b), name


def test_evaluation_data_that_cannot_be_read() -> None:
    for data in (list, lambda: [1, 2, 3], lambda: iter(())):
        found = problem(job(RIGHT["one_per_sample"], data=data))
        assert (found.code, found.where) == ("J007", "Evaluate(data=…)")
