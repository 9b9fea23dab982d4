"""The fused kernel that updates the weights on a GPU, unless the job sets `fused`."""

from typing import Any

import pytest
import torch
from torch import nn

from plait.checkpoint import optimizer_state
from plait.engine import train_step
from plait.model import optimizers
from plait.parallel.rank_model import Hooks
from plait.tensors.torch_private import FakeTensorMode


def fused(kind: Any, devices: tuple[str, ...], dtype: torch.dtype = torch.float32, **given: Any) -> list[Any]:
    with FakeTensorMode():
        held = [nn.Parameter(torch.empty(2, device=device, dtype=dtype)) for device in devices]
    optimizer = kind([{"params": [p]} for p in held], lr=0.1, **given)
    optimizers.fuse_update(optimizer, torch.device("cpu" if "cpu" in devices[:1] else "cuda"))
    return [group.get("fused") for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))
def test_it_is_fused_on_a_gpu(kind: Any) -> None:
    assert fused(kind, ("cuda", "cuda")) == [True, True]
    assert fused(kind, ("cuda", "meta")) == [True, True], "what other ranks hold is not updated here"
    assert fused(kind, ("meta",)) == [True], "a stage whose own parameters are all frozen goes as the others"


def test_what_the_job_says_is_kept() -> None:
    adam = torch.optim.AdamW
    assert fused(adam, ("cuda",), foreach=True) == fused(adam, ("cuda",), foreach=False) == [None]
    assert fused(adam, ("cuda",), fused=False) == [False]
    assert fused(adam, ("cuda",), differentiable=True) == [None]
    assert fused(adam, ("cpu",)) == [None] and fused(adam, ("cuda", "cpu")) == [None, None]
    assert fused(torch.optim.Adagrad, ("cuda",)) == [None] and fused(torch.optim.RMSprop, ("cuda",)) == [None]


def test_momentum_begins_as_without_fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For parameters that get their first gradient late, also in a skipped step."""
    monkeypatch.setattr(optimizers, "_can_fuse", lambda p: True)

    def trained(gradients: list[tuple[float | None, float | None]], left_out: int = -1, **given: Any) -> list[Any]:
        held = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD([{"params": [p]} for p in held], lr=0.1, momentum=0.9, nesterov=True, **given)
        optimizers.fuse_update(optimizer, torch.device("cuda" if not given else "cpu"))
        for step, numbers in enumerate(gradients):
            for p, number in zip(held, numbers):
                p.grad = None if number is None else torch.full((3,), number)
            finite = torch.tensor(step != left_out) if not given else None
            if given and step == left_out:
                continue
            train_step.step_optimizer(optimizer, Hooks(), finite)
        return [p.tolist() for p in held] + [bool(group.get("fused")) for group in optimizer.param_groups]

    for left_out in (-1, 1):
        course = [(1.0, None), (2.0, 3.0), (-1.0, 1.0), (0.5, 2.0)]
        (*mine, one, two), (*its, _, _) = trained(course, left_out), trained(course, left_out, foreach=False)
        assert one and two and mine == [pytest.approx(numbers) for numbers in its]
    damped = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9, dampening=0.5)
    optimizers.fuse_update(damped, torch.device("cuda"))
    assert not damped.param_groups[0]["fused"], "its first gradient counts otherwise than the next"


def test_it_is_no_hyperparameter() -> None:
    """A run that continues on other hardware uses the fastest update there."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    (group,) = optimizer_state.list_hyperparameters(optimizer)
    assert "lr" in group and not {"fused", "foreach"} & set(group)
