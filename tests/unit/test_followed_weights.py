"""A teacher outside of the model that follows the model's weights. It is rejected if a rank lacks a full weight that the update reads."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.config.plan import Plan
from plait.model.build_model import run_model
from plait.model.sketch import sketch_model
from plait.parallel import mutations
from plait.parallel.fsdp import groups


class Student(nn.Module):
    """Two blocks and a list of their copies. The copies are updated in a hook, in the forward pass, or in a hook of the first block."""

    def __init__(self, where: str):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.teacher, self.where = [copy.deepcopy(self.blocks).requires_grad_(False)], where
        if where == "before":
            self.register_forward_pre_hook(lambda *_: self.move(self.blocks, self.teacher[0]))
        if where == "after":
            self.register_forward_hook(lambda *_: self.move(self.blocks, self.teacher[0]))
        if where == "block":
            self.blocks[0].register_forward_hook(lambda *_: self.move(self.blocks[0], self.teacher[0][0]))

    @torch.no_grad()
    def move(self, module: nn.Module, other: nn.Module) -> None:
        for p, t in zip(module.parameters(), other.parameters()):
            if self.where == "before":
                t.lerp_(p, 0.1)
            elif self.where == "after":
                t.copy_(0.9 * t + 0.1 * p)
            else:
                t.mul_(0.9).add_(p, alpha=0.1)

    def forward(self, x: Tensor) -> Any:
        y = x
        for block in self.blocks:
            y = y + block(y)
        if self.where == "forward":
            self.move(self.blocks, self.teacher[0])
        x = x + self.blocks[0][0].bias.detach().clone().mul_(self.blocks[0][0].bias)  # a separate tensor follows no weight
        return y, self.teacher[0][1](self.teacher[0][0](x))


@pytest.mark.parametrize("where", ["before", "after", "forward", "block", "never"])
def test_a_teacher_outside_of_the_model(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    student = Student(where)
    found = sketch_model(student, lambda n: torch.ones(n, 8), run_model)
    assert set(found.outside_writes) == {
        n for n, _ in student.named_parameters() if where != "never" and (where != "block" or n.startswith("blocks.0"))
    }
    cut = lambda plan: ("blocks.0.0.weight",) if plan.tp > 1 else ()  # noqa: E731
    refused = lambda line: mutations.find_lost_write(plan := Plan.parse(line), found, cut(plan)) is not None  # noqa: E731
    assert not refused("dp=2") and not refused("fsdp=2"), "all is gathered with the root"
    assert refused("tp=2") == (where != "never") and refused("pp=2") == (where in ("before", "after", "forward"))
    monkeypatch.setattr(groups, "TINY_BYTES", 0)
    assert not refused("fsdp=2"), "units whose weights other code uses are gathered with the root"
