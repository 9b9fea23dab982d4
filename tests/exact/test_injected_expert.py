"""Bugs of shared-out experts and of losses over the whole batch, each injected before the workers are forked."""

import dataclasses
from typing import Any

import jobs_moe
import pytest
import torch
from faulty import sees
from rarely import sampled
from torch import Tensor

from plait.engine.engine import Engine
from plait.losses import global_batch
from plait.losses.global_batch import BatchPeers
from plait.parallel.expert import layers
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.spec import ShardPlan
from plait.tensors.collectives import linear


def plain() -> Any:
    return jobs_moe.gpt(loss=jobs_moe.plain_loss, dropout=0.0)


def mixtral() -> Any:
    return dataclasses.replace(jobs_moe.mixtral(), loss=jobs_moe.next_token)


@pytest.mark.parametrize("factor", sampled(2, (2.0, 0.5)), ids=("twice", "averaged"))
def test_the_gradient_of_experts_scaled_by_the_ranks(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """9: Adam never shows it."""
    real = Engine.backward

    def backward(self: Engine, batch: Any) -> Any:
        step_row = real(self, batch)
        for name in self.rank_model.experts():
            self.rank_model.params[name].grad.mul_(factor)
        return step_row

    monkeypatch.setattr(Engine, "backward", backward)
    sees(mixtral(), "ep=2", "G", "mlp.experts", "V003")


@pytest.mark.slow
def test_the_same_experts_go_their_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """15: ranks that hold the same experts do not add their gradients up."""
    monkeypatch.setattr(GradientReducer, "_add_up", lambda self, names, group, means=(): None)
    sees(plain(), "dp=4 ep=2", "R", "moe.experts", "V004")


@pytest.mark.slow
def test_experts_counted_by_every_rank_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: as if every rank held them all."""
    real = ShardPlan.replicas
    twice = lambda self, name, at: real(self, name, at) * (2 if self.specs[name].expert else 1)  # noqa: E731
    monkeypatch.setattr(ShardPlan, "replicas", twice)
    sees(plain(), "ep=2", "U2", "", "V007")


@pytest.mark.slow
def test_a_row_lost_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """11: the last row of each message arrives empty."""
    real = layers.moved

    def moved(rows: Tensor, given: list[int], taken: list[int], group: Any) -> Tensor:
        received = real(rows, given, taken, group)
        return torch.cat([received[:-1], received[-1:] * 0.0])

    monkeypatch.setattr(layers, "moved", moved)
    sees(plain(), "ep=2", "G", "", "V015")


@pytest.mark.slow
def test_rows_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of tokens stay where their experts are: the experts' own are right, those before them are not."""
    monkeypatch.setattr(
        layers._Travel,
        "backward",
        staticmethod(lambda ctx, grad: (layers.moved(grad * 0.0, *_back(ctx)), *[None] * 4)),
    )
    sees(plain(), "ep=2", "G", "", "V018")


def _back(ctx: Any) -> tuple[Any, ...]:
    given, taken, group = ctx.way
    return taken, given, group


@pytest.mark.slow
def test_results_given_to_the_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = layers.through
    monkeypatch.setattr(layers, "through", lambda *args: real(*args).flip(0))
    sees(plain(), "ep=2", "G", "", "V015")


@pytest.mark.slow
def test_a_sample_that_does_not_count_is_in_the_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """43: a rank without samples runs one of another rank, which would be in the means of the batch twice."""
    real = BatchPeers.begin
    monkeypatch.setattr(BatchPeers, "begin", lambda self, idle: real(self, False))
    sees(jobs_moe.gpt(dropout=0.0), "dp=3", "U", "", "V018")


@pytest.mark.slow
def test_the_balance_of_each_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """10: the mean is of a rank's own tokens."""
    monkeypatch.setattr(global_batch, "summed", lambda x, group: x.clone())
    sees(jobs_moe.gpt(dropout=0.0), "ep=2", "G", "", "V013")


@pytest.mark.slow
def test_the_gradient_of_a_mean_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """10: the value is right, each rank's gradient has its own share of it only."""
    monkeypatch.setattr(
        global_batch, "linear", lambda x, sums, _, *where: linear(x, sums, lambda grad, *_: grad, *where)
    )
    sees(jobs_moe.gpt(dropout=0.0), "dp=2", "G", "", "V013")
