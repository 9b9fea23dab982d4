"""Rows are sent to their experts: values and gradients are those of the full layer, for uneven loads too."""

import copy

import jobs_moe
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from plait.launch.fork import run_ranks
from plait.losses.global_batch import BatchPeers
from plait.model.experts import MoELayer, shard_stacked
from plait.parallel.expert.layers import ExpertPlacement, ListedExperts, StackedExperts, make_dispatch
from plait.parallel.expert.mixture_finder import find_mixtures

LOADS = {2: ([5, 3], [4, 0], [0, 1]), 3: ([2, 0, 5], [1, 1, 1])}


class Bank(nn.Module):
    """Stacked experts in three tensors."""

    def __init__(self, experts: int = 5, width: int = 6):
        super().__init__()
        self.number = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width))
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for e in range(self.number):
            token, slot = torch.where(chosen == e)
            if len(token):
                y = F.linear(F.gelu(F.linear(hidden[token], self.up[e])), self.down[e])
                out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bank = nn.Linear(6, 5), Bank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return x + self.bank(x, chosen, weights)


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Layer().double() if kind == "stacked" else jobs_moe.Mixture(6, 5, always=kind == "always").double()


def split(kind: str, layer: nn.Module, ranks: int, rank: int, group: object) -> None:
    """Leave only a rank's experts in the module."""
    way, sharers = ExpertPlacement(group, 5), BatchPeers()
    if kind == "stacked":
        mixture = MoELayer("bank", 5, (), count_attributes=(("number", 0),))
        bank = shard_stacked(layer.bank, mixture, mixture.get_rank_experts(ranks, rank))
        bank.forward = StackedExperts(bank, 5, make_dispatch(way), sharers)
        return
    layer.forward = ListedExperts(layer, list(layer.experts), way.mine, make_dispatch(way), sharers)
    layer.forward.width = 6
    for number, expert in enumerate(layer.experts):
        if number not in way.mine:
            for p in expert.parameters():
                p.data = p.data[:0]


def out_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = layer(x)
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.slow
@pytest.mark.parametrize("again", (False, True), ids=("", "recomputed"))
@pytest.mark.parametrize("kind", ("stacked", "listed", "always"))
@pytest.mark.parametrize("ranks", LOADS)
def test_a_layer_whose_experts_are_elsewhere(ranks: int, kind: str, again: bool) -> None:
    def target(place):
        group = place.connect(torch.device("cpu"))
        for loads in LOADS[ranks]:
            whole = made(kind)
            part = copy.deepcopy(whole)
            split(kind, part, ranks, place.rank, group)
            rows = torch.randn(sum(loads), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
            given = rows.clone().requires_grad_()
            expected = out_of(whole, given)
            (expected**2).sum().backward()
            first = sum(loads[: place.rank])
            mine = rows[first : first + loads[place.rank]].clone().requires_grad_()
            out = checkpoint(lambda x, p=part: out_of(p, x), mine, use_reentrant=False) if again else out_of(part, mine)
            (out**2).sum().backward()
            torch.testing.assert_close(out, expected[first : first + len(mine)], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(mine.grad, given.grad[first : first + len(mine)], rtol=1e-12, atol=1e-12)
            same_gradients(kind, whole, part, ExpertPlacement(group, 5).mine)
        dist.barrier(group)
        return {}

    run_ranks(target, ranks)


def same_gradients(kind: str, whole: nn.Module, part: nn.Module, mine: range) -> None:
    """The gradients of a rank's experts are complete, not partial sums, and None if one device has none."""
    if kind == "stacked":
        for a, b in zip(whole.bank.parameters(), part.bank.parameters()):
            torch.testing.assert_close(a.grad[mine.start : mine.stop], b.grad, rtol=1e-12, atol=1e-12)
        return
    for number in mine:
        for a, b in zip(whole.experts[number].parameters(), part.experts[number].parameters()):
            assert (a.grad is None) == (b.grad is None), number
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def given(rows: int) -> torch.Tensor:
    return torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(rows, 6)


def call(model: nn.Module, x: torch.Tensor) -> object:
    return model(x)


class Chain(nn.Module):
    """A list of equal modules, each on the output of the one before; the last two get only some of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[2](self.layers[1](x[:1]))


class Together(nn.Module):
    """Experts that normalize over their rows: a token's result depends on the other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Softmax(0)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.experts[0](x[:1]), self.experts[0](x[1:2]), self.experts[1](x[2:])])


def test_what_is_a_mixture_is_found_by_its_structure() -> None:
    (bank,), _ = find_mixtures(Layer(), given, call)
    assert (bank.name, bank.experts, bank.count_attributes, bank.rows, bank.width) == ("bank", 5, (("number", 0),), 2.0, (6, 6))
    (listed,), _ = find_mixtures(jobs_moe.Mixture(6, 5), given, call)
    assert (listed.experts, len(listed.modules), listed.rows, listed.coupled) == (5, 5, 2.0, False)


def test_a_layer_that_drops_tokens_is_named() -> None:
    (listed,), _ = find_mixtures(jobs_moe.Mixture(6, 5, capacity=1.25), given, call)
    assert listed.coupled


@pytest.mark.parametrize("kind", (Chain, Together))
def test_what_only_looks_like_a_mixture_stays_whole(kind: type[nn.Module]) -> None:
    found, why = find_mixtures(kind(), given, call)
    assert not found and len(why) == 1
