"""The kernel that updates the weights on a GPU, where the job leaves it open."""

from typing import Any

import pytest
import torch
from torch import nn

from plait.checkpoint import optimizer_state
from plait.model import fused_optimizer
from plait.tensors.torch_private import FakeTensorMode


def fused(kind: Any, devices: tuple[str, ...], dtype: torch.dtype = torch.float32, **given: Any) -> list[Any]:
    with FakeTensorMode():
        held = [nn.Parameter(torch.empty(2, device=device, dtype=dtype)) for device in devices]
    optimizer = kind([{"params": [p]} for p in held], lr=0.1, **given)
    fused_optimizer.choose(optimizer)
    return [group.get("fused") for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))
def test_it_is_fused_on_a_gpu(kind: Any) -> None:
    assert fused(kind, ("cuda", "cuda")) == [True, True]
    assert fused(kind, ("cuda", "meta")) == [True, True], "what other ranks hold is not updated here"


def test_what_the_job_says_is_kept() -> None:
    adam = torch.optim.AdamW
    assert fused(adam, ("cuda",), foreach=True) == fused(adam, ("cuda",), foreach=False) == [None]
    assert fused(adam, ("cuda",), fused=False) == [False]
    assert fused(adam, ("cuda",), differentiable=True) == [None]
    assert fused(adam, ("cpu",)) == fused(adam, ("meta",)) == [None] and fused(adam, ("cuda", "cpu")) == [None, None]
    assert fused(torch.optim.Adagrad, ("cuda",)) == [None] and fused(torch.optim.RMSprop, ("cuda",)) == [None]


def test_it_is_no_hyperparameter() -> None:
    """A run that goes on elsewhere updates as it is best there."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    (group,) = optimizer_state.hyperparameters(optimizer)
    assert "lr" in group and not {"fused", "foreach"} & set(group)
