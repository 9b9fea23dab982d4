"""Bugs of expert parallelism and of losses over the full batch, each injected before the workers are forked."""

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
from plait.tensors.collectives import apply_linear


def plain() -> Any:
    return jobs_moe.gpt(loss=jobs_moe.plain_loss, dropout=0.0)


def mixtral() -> Any:
    return dataclasses.replace(jobs_moe.mixtral(), loss=jobs_moe.next_token)


@pytest.mark.parametrize("factor", sampled(2, (2.0, 0.5)), ids=("twice", "averaged"))
def test_the_gradient_of_experts_scaled_by_the_ranks(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """9: invisible with Adam."""
    real = Engine.backward

    def backward(self: Engine, batch: Any) -> Any:
        step_row = real(self, batch)
        for name in self.rank_model.list_expert_params():
            self.rank_model.params[name].grad.mul_(factor)
        return step_row

    monkeypatch.setattr(Engine, "backward", backward)
    sees(mixtral(), "ep=2", "G", "mlp.experts", "V003")


@pytest.mark.slow
def test_the_same_experts_go_their_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """15: ranks with the same experts do not add their gradients up."""
    monkeypatch.setattr(GradientReducer, "_reduce_gradients", lambda self, names, group, means=(): None)
    sees(plain(), "dp=4 ep=2", "R", "moe.experts", "V004")


@pytest.mark.slow
def test_experts_counted_by_every_rank_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: as if each rank had all of them."""
    real = ShardPlan.count_replicas
    twice = lambda self, name, at: real(self, name, at) * (2 if self.specs[name].expert else 1)  # noqa: E731
    monkeypatch.setattr(ShardPlan, "count_replicas", twice)
    sees(plain(), "ep=2", "U2", "", "V007")


@pytest.mark.slow
def test_a_row_lost_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """11: the last row of each message is zero on arrival."""
    real = layers.send_rows

    def moved(rows: Tensor, given: list[int], taken: list[int], group: Any) -> Tensor:
        received = real(rows, given, taken, group)
        return torch.cat([received[:-1], received[-1:] * 0.0])

    monkeypatch.setattr(layers, "send_rows", moved)
    sees(plain(), "ep=2", "G", "", "V015")


@pytest.mark.slow
def test_rows_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of tokens are not sent back. The experts' own gradients are right, and those of earlier layers are wrong."""
    monkeypatch.setattr(
        layers._RowExchange,
        "backward",
        staticmethod(lambda ctx, grad: (layers.send_rows(grad * 0.0, *_back(ctx)), *[None] * 4)),
    )
    sees(plain(), "ep=2", "G", "", "V018")


def _back(ctx: Any) -> tuple[Any, ...]:
    given, taken, group = ctx.way
    return taken, given, group


@pytest.mark.slow
def test_results_given_to_the_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = layers.dispatch_rows
    monkeypatch.setattr(layers, "dispatch_rows", lambda *args: real(*args).flip(0))
    sees(plain(), "ep=2", "G", "", "V015")


@pytest.mark.slow
def test_a_sample_that_does_not_count_is_in_the_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """43: a rank without samples runs a sample of another rank, which would count twice in the batch's means."""
    real = BatchPeers.begin
    monkeypatch.setattr(BatchPeers, "begin", lambda self, idle: real(self, False))
    sees(jobs_moe.gpt(dropout=0.0), "dp=3", "U", "", "V018")


@pytest.mark.slow
def test_the_balance_of_each_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """10: the mean is over a rank's own tokens."""
    monkeypatch.setattr(global_batch, "all_reduce_copy", lambda x, group: x.clone())
    sees(jobs_moe.gpt(dropout=0.0), "ep=2", "G", "", "V013")


@pytest.mark.slow
def test_the_gradient_of_a_mean_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """10: the value is right, but each rank's gradient has only its own term."""
    monkeypatch.setattr(
        global_batch, "apply_linear", lambda x, sums, _, *where: apply_linear(x, sums, lambda grad, *_: grad, *where)
    )
    sees(jobs_moe.gpt(dropout=0.0), "dp=2", "G", "", "V013")
