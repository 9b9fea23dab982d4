"""Bugs of tensor parallelism, each injected before the workers are forked; verify detects each and names the right parameter."""

from typing import Any

import jobs
import pytest
import torch
from jobs import Tokens, language_loss, make
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.spec import ShardPlan
from plait.parallel.tensor import strategy as tensor
from plait.parallel.tensor import wiring
from plait.proof.verify import verify
from plait.tensors import collectives

WIDTH, HEAD = 8, 4


class Attention(nn.Module):
    """Four query heads with a norm on each, two key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 2
        self.norm, self.q_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(HEAD)
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * HEAD), nn.Linear(WIDTH, 2 * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (self.q(h), self.k(h), self.v(h)))
        k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """An embedding, two attentions, a pair of layers with dropout between, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, 17)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.up, self.drop, self.down = nn.Linear(WIDTH, 16), nn.Dropout(dropout), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + self.down(self.drop(self.up(h).relu())))


def job(dropout: float = 0.0) -> Any:
    return make(lambda: Model(dropout), Tokens, language_loss, weight=lambda t: (t != -100).sum())


def sees(given: Any, plan: str, probe: str, name: str) -> None:
    verdict = verify(given, Plan.parse(plan), quiet=True)
    wrong = {p.code: p.name for p in verdict.probes if not p.equal}
    assert verdict.exit_code == DIFFERENT
    assert probe in wrong, verdict.to_dict()
    assert name in (wrong[probe] if probe != "U2" else name), verdict.to_dict()


@pytest.mark.slow
def test_without_a_bug() -> None:
    """Without a bug the jobs are equal; otherwise the other tests would prove nothing."""
    assert verify(job(0.2), Plan.parse("tp=4")).equal


def with_gradient(monkeypatch: pytest.MonkeyPatch, collective: Any, adjoint: Any) -> None:
    """A collective whose backward is `adjoint`."""
    real = collectives.apply_linear
    monkeypatch.setattr(
        collectives, "apply_linear", lambda x, c, a, *where: real(x, c, adjoint if c is collective else a, *where)
    )


@pytest.mark.slow
def test_the_gradient_of_what_enters_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers before a pair get one rank's partial gradient. The last pair, the head, and all slices of them are right."""
    with_gradient(monkeypatch, collectives._identity, collectives._identity)
    sees(job(), "tp=2", "G", "embed.weight")


@pytest.mark.slow
def test_the_gradient_of_what_enters_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one sum for each column-parallel layer of the same input, plus one sum before all of them."""

    def twice(gradient: Tensor, group: Any) -> Tensor:
        return collectives.all_reduce_copy(collectives.all_reduce_copy(gradient, group), group)

    with_gradient(monkeypatch, collectives._identity, twice)
    sees(job(), "tp=2", "G", "embed.weight")


@pytest.mark.slow
def test_a_sum_whose_gradient_is_summed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adjoint of an all-reduce to all ranks is the identity: Megatron's g is no all-reduce in backward."""
    with_gradient(monkeypatch, collectives.all_reduce_copy, collectives.all_reduce_copy)
    sees(job(), "tp=2", "G", "")


@pytest.mark.slow
def test_a_rows_bias_added_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is right on each rank, but the forward pass adds the bias twice."""
    monkeypatch.setattr(wiring, "silence_bias", lambda row: None)
    sees(job(), "tp=2", "G", "")


def without(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Gradients of parameters with this word in their name are not summed."""
    real = GradientReducer._reduce_gradients

    def add_up(self: Any, names: list[str], group: Any, means: Any = ()) -> None:
        real(self, [n for n in names if word not in n], group, means)

    monkeypatch.setattr(GradientReducer, "_reduce_gradients", add_up)


@pytest.mark.slow
def test_gradients_of_norms_on_heads_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has full norms and its own heads."""
    without(monkeypatch, "q_norm")
    sees(job(), "tp=2", "G", "q_norm.weight")


@pytest.mark.slow
def test_gradients_of_shared_heads_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks have the same key head, and each its own query heads."""
    without(monkeypatch, ".k.")
    sees(job(), "tp=4", "G", ".k.")


@pytest.mark.slow
def test_masks_of_another_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank uses the other one's dropout mask."""
    monkeypatch.setattr(
        tensor, "SlicedDraws", lambda groups, rank, ranks: wiring.SlicedDraws(groups, (rank + 1) % ranks, ranks)
    )
    sees(job(0.3), "tp=2", "G", "")


@pytest.mark.slow
def test_the_same_mask_for_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank draws the first slice's mask."""
    monkeypatch.setattr(tensor, "SlicedDraws", lambda groups, rank, ranks: wiring.SlicedDraws(groups, 0, ranks))
    sees(job(0.3), "tp=2", "G", "")


@pytest.mark.slow
def test_rows_of_the_vocabulary_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lookup reads an adjacent row."""
    real = wiring._ShardedEmbedding.forward
    monkeypatch.setattr(wiring._ShardedEmbedding, "forward", lambda self, x: real(self, (x + 1) % 17))
    sees(job(), "tp=2", "G", "embed.weight")


@pytest.mark.slow
def test_whole_parameters_count_once_for_every_rank_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: norms and biases are on all ranks, and count once."""
    real = ShardPlan.count_replicas
    monkeypatch.setattr(ShardPlan, "count_replicas", lambda self, name, at: max(1, real(self, name, at) // 2))
    sees(job(), "tp=2", "U2", "")


def test_the_norm_of_a_ranks_own_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """21: each rank clips by the norm of its own slices."""
    monkeypatch.setattr(
        GradientReducer,
        "get_norm",
        lambda self: torch.nn.utils.get_total_norm(p.grad for p in self.own.values() if p.grad is not None),
    )
    sees(jobs.mlp(), "tp=2", "U2", "")
