"""Which optimizers can update parts of tensors: the right ones are exact, the others are refused by name."""

from collections.abc import Callable
from typing import Any

import jobs
import pytest
import torch
from torch import nn

from plait.engine import Engine
from plait.errors import PlaitError
from plait.launch import here
from plait.plan import Plan
from plait.verify import verify

PARTS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adam_foreach_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True),
    "nesterov": lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_fused": lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9, dampening=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, 1e-1, lr_decay=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, decoupled_weight_decay=True, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


class Lamb(torch.optim.Optimizer):
    """You et al. 2020: Adam's direction, scaled by the norm of the tensor over the norm of its update."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].lerp_(p.grad, 0.1)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        return state["m"] / (state["v"].sqrt() + 1e-6)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self.direction(p)
                    trust = p.norm() / update.norm() if p.dim() > 1 else 1.0
                    p.sub_(group["lr"] * trust * update)


class Lars(Lamb):
    """You et al. 2017: the gradient itself, scaled likewise."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad


WHOLE = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 1e-2),
    "Lamb": Lamb,
    "Lars": Lars,
}


@pytest.mark.parametrize("name", PARTS)
def test_element_wise_optimizers_are_exact(name: str) -> None:
    plan = "dp=2 fsdp=2 offload=optimizer" if "foreach" in name else "fsdp=3 zero=2"
    verdict = verify(jobs.make(lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)), optimizer=PARTS[name]),
                     Plan.parse(plan))  # fmt: skip
    assert verdict.equal, verdict.cause


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_tensors_are_refused(name: str) -> None:
    """By trying them. LARS takes the norm of two matrices among vectors, which it leaves alone."""
    job = jobs.make(lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)), optimizer=WHOLE[name])
    with pytest.raises(PlaitError, match="P022") as error:
        _build(job)
    assert name in str(error.value) and "fsdp=2" in str(error.value)


def _build(job: Any) -> list[dict[str, bool]]:
    def run(place: Any) -> dict[str, bool]:
        Engine(job, "fsdp=2", place=place)
        return {}

    made: Callable[[Any], dict[str, bool]] = run
    return here.run(made, 2)
