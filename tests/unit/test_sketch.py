"""The sketch detects operators that draw random numbers or couple samples. It does not change the model or the generators."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.model.build_model import run_model, set_training
from plait.model.sketch import Sketch, sketch_model
from plait.randomness.keyed import get_host_state


def of(model: nn.Module, *shape: int) -> Sketch:
    """The sketch of a model on inputs of [n, *shape]."""
    return sketch_model(model, lambda n: torch.ones(n, *shape), run_model)


class Fn(nn.Module):
    """A model of one function (self, x), with buffers for counts and averages."""

    def __init__(self, function: Callable[[Any, Tensor], Any]):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def test_parameters_are_those_that_train() -> None:
    model = nn.Linear(3, 2).double()
    model.bias.requires_grad_(False)
    assert of(model.float(), 3).parameters == (("weight", (2, 3), torch.float32),)


@pytest.mark.parametrize(
    ("function", "shape", "places"),
    [
        (lambda s, x: F.dropout(x), (3, 5), {"#1#1": 0}),
        (lambda s, x: F.dropout(x.transpose(0, 1)), (3, 5), {"#1#1": 1}),
        (lambda s, x: F.dropout(x.permute(1, 2, 0)), (3, 5), {"#1#1": 2}),
        (lambda s, x: F.dropout(x.flatten(0, 1)), (3, 5), {"#1#1": 0}),
        (lambda s, x: x * F.dropout(s.weight), (4,), {"#1#1": None}),
        (lambda s, x: x * torch.rand(1) + torch.rand_like(x), (4,), {"#1#1": None, "#1#2": 0}),
        (lambda s, x: F.dropout(F.dropout(x), 0.1), (3,), {"#1#1": 0, "#1#2": 0}),
        (lambda s, x: F.dropout(x, 0.0), (3,), {}),
        (lambda s, x: F.dropout(x, 0.5, False), (3,), {}),
        (lambda s, x: F.dropout2d(x), (3, 5, 5), {"#1#1": 0}),
        (lambda s, x: F.scaled_dot_product_attention(x, x, x), (3, 5), {}),
        (lambda s, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), (3, 5), {"#1#1": 0}),
        (lambda s, x: x + torch.ones(1).expand(3, 5, 1).sum(), (1,), {}),
    ],
)
def test_places_and_batch_dims(function: Any, shape: tuple[int, ...], places: dict[str, int | None]) -> None:
    assert of(Fn(function), *shape).places == places


def test_places_have_the_names_of_modules() -> None:
    shared = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(nn.Dropout(0.1), nn.ReLU()), shared)
    assert of(model, 4).places == {"1#1#1": 0, "2.0#1#1": 0, "1#2#1": 0}
    assert of(nn.LSTM(4, 4, 3, dropout=0.5), 2, 4).places == {"#1#1": 0, "#1#2": 0}


@pytest.mark.parametrize(
    "draw", [lambda s, x: x[:, torch.randperm(4)], lambda s, x: torch.multinomial(x, 2), lambda s, x: torch.poisson(x)]
)
def test_draws_without_a_rule_are_named(draw: Any) -> None:
    assert of(Fn(draw), 4).unkeyed == ("Fn",)
    assert of(nn.Sequential(Fn(draw)), 4).unkeyed == ("0",)


class Frozen(nn.BatchNorm1d):
    """Batch norm that stays in eval mode, the usual way."""

    def train(self, mode: bool = True):
        return super().train(False)


COUPLED = {
    "BatchNorm1d": (lambda: nn.Sequential(nn.BatchNorm1d(4)), (4,), ("0",), ()),
    "BatchNorm1d of sequences": (lambda: nn.Sequential(nn.BatchNorm1d(4)), (4, 5), ("0",), ()),
    "BatchNorm2d": (lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)), (1, 5, 5), ("1",), ()),
    "no statistics": (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), (4,), ("0",), ()),
    "frozen": (lambda: nn.Sequential(nn.BatchNorm1d(4), Frozen(4)), (4,), ("0",), ()),
    "F.batch_norm": (lambda: Fn(lambda s, x: F.batch_norm(x, s.mean, s.var, training=True)), (4,), (), ("Fn",)),
    "of nothing": (lambda: Fn(lambda s, x: F.batch_norm(x, None, None, training=True)), (4,), (), ("Fn",)),
    "F.batch_norm in eval": (lambda: Fn(lambda s, x: F.batch_norm(x, s.mean, s.var)), (4,), (), ()),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 5), (), ()),
    "InstanceNorm, tracking": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (4, 5), (), ()),
    "LayerNorm, GroupNorm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(5)), (4, 5), (), ()),
    "F.instance_norm": (lambda: Fn(lambda s, x: F.instance_norm(x)), (4, 5), (), ()),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples(name: str) -> None:
    make, shape, norms, coupled = COUPLED[name]
    found = of(set_training(make()), *shape)
    assert (found.batch_norms, found.batch_coupled) == (norms, coupled)


def test_a_layer_in_eval_mode_stays_in_eval_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].eval()
    assert of(model, 4).batch_norms == ()
    assert not model[0].training


def count_and_look(s: Any, x: Tensor) -> Tensor:
    """Reads a value, draws from all generators, and writes to a buffer."""
    s.mean += 1
    x = F.dropout(x * random.random() + np.random.rand() + torch.rand(()).item())
    return x * s.weight if x.sum().item() > -1 else x


LOOKING = {
    "item": (count_and_look, {"#1#1": None, "#1#2": 0}),
    "branch": (lambda s, x: F.dropout(x * s.weight) if x.sum() > 0 else x, {"#1#1": 0}),
    "mask": (lambda s, x: F.dropout(x)[x > 0].sum() * s.weight, {"#1#1": 0}),
    "numpy": (lambda s, x: F.dropout(x) * float(x.numpy().sum()), {"#1#1": 0}),
}


@pytest.mark.parametrize("name", LOOKING)
def test_a_model_that_looks_at_values_runs_for_real_on_a_copy(name: str) -> None:
    function, places = LOOKING[name]
    model = nn.Sequential(Fn(function)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    generators = get_host_state()
    found = of(model, 4)
    assert found.needs_real_tensors
    assert found.places == {f"0{place}": dim for place, dim in places.items()}
    assert found.host_random == (name == "item")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    now = get_host_state()
    assert now[0] == generators[0]
    assert np.array_equal(now[1][1], generators[1][1])
    assert now[1][2:] == generators[1][2:]
    assert torch.equal(now[2], generators[2])
    assert model.training


def read(x: Tensor) -> Tensor:
    """A constant that is written into another tensor."""
    made = torch.arange(4.0)
    (2 * x.detach()).add_(made)
    return made


def filled(x: Tensor) -> Tensor:
    """A constant until values of samples are written into it."""
    made = torch.zeros(len(x))
    made[:] = x.detach().sum(1)
    return made


CONSTANTS = {
    "positions": (lambda s, x: x * s.weight if torch.arange(x.shape[1]).max() == 3 else x, False),
    "of Python's values": (lambda s, x: x * s.weight * sum(torch.tensor([1, 2]).tolist()), False),
    "of numpy's": (lambda s, x: x * s.weight if torch.as_tensor(np.ones(2)).sum() == 2 else x, False),
    "of another's kind": (lambda s, x: x * s.weight if x.new_tensor([1.0]).item() else x, False),
    "found": (lambda s, x: x[:, torch.ones(4, 4).triu(3).nonzero()[:, 1]] * s.weight[:1] if torch.eye(3).numpy().any() else x, False),
    "as many as samples": (lambda s, x: x * s.weight if torch.ones(len(x), 4).all() else x, False),
    "written with a constant": (lambda s, x: x * s.weight if torch.zeros(4).add_(torch.ones(4)).sum() == 4 else x, False),
    "written into something else": (lambda s, x: x * s.weight if read(x).max() == 3 else x, False),
    "item": (lambda s, x: x * s.weight if filled(x)[0].item() > -1 else x, True),
    "tolist": (lambda s, x: x * s.weight if filled(x).tolist()[0] > -1 else x, True),
    "numpy": (lambda s, x: x * s.weight if filled(x).numpy()[0] > -1 else x, True),
    "branch": (lambda s, x: x * s.weight if filled(x).any() else x, True),
    "by an operator": (lambda s, x: x * s.weight if torch.zeros(4).add_(x.sum()).tolist() else x, True),
    "of weights": (lambda s, x: x * s.weight if (torch.ones(4) * s.weight).sum() > 0 else x, True),
    "at random": (lambda s, x: x * s.weight if torch.rand(()) < 2 else x, True),
    "at random in place": (lambda s, x: x * s.weight if torch.zeros(2).uniform_().tolist() else x, True),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_code_may_look_at_what_is_the_same_in_every_step(name: str) -> None:
    function, by_values = CONSTANTS[name]
    found = of(Fn(function), 4)
    assert found.needs_real_tensors == by_values and not found.outside_writes and not found.rewritten


def test_a_constant_that_is_too_large_takes_no_memory() -> None:
    def mask(s: Any, x: Tensor) -> Tensor:
        at = torch.arange(1 << 20)
        assert (at[:, None] >= at).shape == (1 << 20, 1 << 20)
        return x * s.weight

    assert not of(Fn(mask), 4).needs_real_tensors


def test_what_weights_write_into_a_constant_is_the_models_own() -> None:
    assert of(Fn(lambda s, x: x + torch.zeros(4).copy_(s.weight)), 4).outside_writes == {}


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        Fn(lambda s, x: (s.mean.add_(x.mean(0).detach()), x * s.weight)[1]),
        Fn(lambda s, x: x * s.weight + random.random() * np.random.rand()),
    ],
)
def test_a_sketch_leaves_the_model_and_the_generators(model: nn.Module) -> None:
    model.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    generators = get_host_state()
    found = of(model, 4)
    assert not found.needs_real_tensors
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[2])


def average(s: Any, x: Tensor) -> Tensor:
    s.mean = 0.9 * s.mean + 0.1 * x.mean(0).detach()
    return x * s.weight - s.mean


def lazily(s: Any, x: Tensor) -> Tensor:
    if s.cache is None:
        s.cache = torch.arange(4.0).cos()  # as rotary embeddings and causal masks do
    return x * s.weight * s.cache


@pytest.mark.parametrize("function", [average, lazily])
def test_no_fake_tensor_stays_in_the_model(function: Any) -> None:
    model = Fn(function)
    of(model, 4)
    assert float(model(torch.ones(2, 4)).detach().sum()) != 0
    assert type(model.mean) is Tensor


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: Tensor | None = None


@pytest.mark.parametrize("wrap", [lambda y: {"logits": y}, lambda y: Output(y), lambda y: (y, [y]), lambda y: None])
def test_any_kind_of_output(wrap: Any) -> None:
    assert of(Fn(lambda s, x: wrap(F.dropout(x * s.weight))), 4).places == {"#1#1": 0}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(9, 4), nn.Dropout(0.5)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.drop(self.embed(tokens)) * mask[..., None]}


@pytest.mark.parametrize("kind", [dict, tuple])
def test_inputs_by_name_and_by_position(kind: type) -> None:
    def inputs(n: int) -> Any:
        pair = {"tokens": torch.zeros(n, 3, dtype=torch.long), "mask": torch.ones(n, 3, dtype=torch.bool)}
        return pair if kind is dict else tuple(pair.values())

    assert sketch_model(Named(), inputs, run_model).places == {"drop#1#1": 0}


class Pair(nn.Module):
    """Two units, and a function between them of the first one's output."""

    def __init__(self, between: Callable[[Tensor], Tensor], aside: bool = False):
        super().__init__()
        self.between, self.aside = between, aside
        self.first, self.second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        y = self.second(self.between(x))
        return (y, x) if self.aside else y


@pytest.mark.parametrize(
    ("between", "aside", "comes"),
    [
        (lambda x: x, False, True),
        (lambda x: x.detach(), False, False),
        (lambda x: torch.clone(x).data * 2, False, False),
        (lambda x: torch.ones_like(x), False, False),
        (lambda x: torch.where(x > 0, 1.0, -1.0), False, False),
        (lambda x: x.detach() + x.mean(), False, True),
        (lambda x: x.add_(x.detach()), False, True),
        (lambda x: x.detach(), True, True),
    ],
    ids=["given", "detached", "data", "its form", "a comparison", "partly", "in place", "also returned"],
)
def test_a_gradient_comes_back_only_to_what_is_not_detached(between: Callable[[Tensor], Tensor], aside: bool, comes: bool) -> None:
    """A stage waited for gradients that never arrive, and a dry run assumed that they had: V012 for a correct run under pp and fsdp."""
    first, second = of(Pair(between, aside), 4).calls
    assert (first.backward, [slot.grad for slot in first.template.slots]) == (comes, [comes])
    assert second.backward and [slot.grad for slot in second.template.slots] == [True]
