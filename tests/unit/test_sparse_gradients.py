"""Layers and functions with sparse gradients are rejected by name, anywhere in a model. Frozen ones are accepted."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.model.build_model import make_model, run_model
from plait.model.sketch import sketch_model
from plait.proof.verify import verify


def job(model: Callable[[], nn.Module]) -> plait.Job:
    return plait.Job(
        model=model, loss=F.mse_loss, data=list, optimizer=lambda p: torch.optim.SGD(p, 0.1), batch=4, steps=2
    )


def pretrained(frozen: bool) -> nn.Module:
    return nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=frozen, sparse=True)


@pytest.mark.parametrize("model", (
    lambda: nn.ModuleDict({"first": nn.ModuleList([nn.EmbeddingBag(5, 2, sparse=True)])}),
    lambda: nn.Sequential(pretrained(frozen=True), pretrained(frozen=False)),
    lambda: nn.Sequential(nn.Embedding(5, 2, sparse=True, padding_idx=0), nn.Linear(2, 1)),
))  # fmt: skip
def test_a_trained_table_is_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(PlaitError) as raised:
        make_model(job(model))
    assert raised.value.codes == ["J012"]


def test_a_frozen_table_is_not() -> None:
    make_model(job(lambda: nn.Sequential(pretrained(frozen=True), nn.Linear(2, 1))))


class Looked(nn.Module):
    """Looks rows up by a function, so no layer shows the sparse gradient."""

    def __init__(self, look: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], trained: bool = True):
        super().__init__()
        self.look, self.table = look, nn.Parameter(torch.ones(5, 2), requires_grad=trained)
        self.last = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.look(x, self.table))


def looks(n: int) -> torch.Tensor:
    return torch.zeros(n, 3, dtype=torch.int64)


@pytest.mark.parametrize("look", (
    lambda x, table: F.embedding(x, table, sparse=True).mean(1),
    lambda x, table: F.embedding_bag(x, table, sparse=True),
))  # fmt: skip
def test_a_function_that_looks_rows_up_is_refused(look: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(PlaitError) as raised:
        sketch_model(Looked(look), looks, run_model)
    assert raised.value.codes == ["J012"]
    assert sketch_model(Looked(look, trained=False), looks, run_model).calls


def test_a_proof_names_sparse_gradients() -> None:
    samples = [(torch.zeros(3, dtype=torch.int64), torch.zeros(1)) for _ in range(12)]
    model = lambda: Looked(lambda x, table: F.embedding(x, table, sparse=True).mean(1))  # noqa: E731
    with pytest.raises(PlaitError) as raised:
        verify(dataclasses.replace(job(model), data=lambda: samples), Plan.parse("dp=2"))
    assert raised.value.codes == ["J012"]
