"""`plait plan` and tensor parallelism run no model at its full size: short rows, a memory limit, and no step for options that a pin excludes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.model.build_model import run_model
from plait.model.fake_model import sketch_fake_model
from plait.parallel.tensor import choose_slices
from plait.planner.workload import find_shardable

LENGTH, WORDS, WIDTH = 512, 1000, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Own(nn.Module):
    """Its loss is in its forward, which takes a view of its input."""

    def __init__(self, fixed: bool = False):
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, WORDS)
        self.fixed, self.longest = fixed, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        at = self.positions.weight if self.fixed else self.positions.weight[: x.shape[1]]
        h = self.embed(x) + at
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).view(-1, WORDS), y.view(-1))


class Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        row = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(i))
        return (row[:-1], row[1:]), torch.zeros(())


def job(fixed: bool = False) -> plait.Job:
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    return plait.Job(model=lambda: Own(fixed), loss=lambda out, y: out, data=Rows, batch=8, steps=4, optimizer=optimizer)


def inputs(n: int) -> Any:
    rows = [Rows()[i][0] for i in range(n)]
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def test_a_forward_that_takes_a_view_of_its_inputs_is_followed_on_short_rows() -> None:
    asked = job()
    _, sketch = sketch_fake_model(asked)
    model = Own()
    found = choose_slices.find_plan_slices(sketch, model, inputs, run_model, asked, Plan(tp=2), most=1e6)
    assert [group.row for group in found.groups] == ["layers.0.down", "layers.1.down"] and model.longest < 20


def test_a_model_for_whole_rows_alone_is_followed_within_a_bound_that_is_told() -> None:
    asked = job(fixed=True)
    _, sketch = sketch_fake_model(asked)
    model = Own(fixed=True)
    with pytest.raises(PlaitError, match="needs more than 977 KiB") as caught:
        choose_slices.find_plan_slices(sketch, model, inputs, run_model, asked, Plan(tp=2), most=1e6)
    assert caught.value.codes == ["P034"]
    found = choose_slices.find_plan_slices(sketch, model, inputs, run_model, asked, Plan(tp=2))
    assert [group.row for group in found.groups] == ["layers.0.down", "layers.1.down"]


@pytest.mark.parametrize("tp", (True, False))
def test_what_a_pin_rules_out_is_not_looked_for_and_lists_of_layers_run_on_few_words(tp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = job(), list[int]()
    forward = Own.forward
    monkeypatch.setattr(Own, "forward", lambda self, x, y: seen.append(x.shape[1]) or forward(self, x, y))
    model, sketch = sketch_fake_model(asked)
    seen.clear()
    cuts = find_shardable(sketch, model, inputs, asked, tp)
    assert bool(cuts.slices.groups) == tp and not cuts.mixtures and max(seen) <= 257, seen
