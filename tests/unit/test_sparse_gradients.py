"""Layers whose gradients are sparse tensors are refused by name, wherever they are; one that is not trained has none."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.model.make import make_model


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
