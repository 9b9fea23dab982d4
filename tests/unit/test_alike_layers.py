"""Layers with the same computation are analyzed once. Layers that only look alike are not treated as equal."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.job import Job
from plait.config.plan import Plan
from plait.model import equal_layers, trace
from plait.model import sketch as sketches
from plait.model.build_model import run_model
from plait.model.sketch import Sketch, sketch_model
from plait.model.slices import Slices
from plait.parallel.tensor import choose_slices
from plait.parallel.tensor.find.repeated_layers import find_in_shortened

LAYERS, WIDTH = 8, 12


class Layer(nn.Module):
    """A block. `kind` selects a difference, by the block's number."""

    def __init__(self, number: int, kind: str):
        super().__init__()
        self.layer_idx, self.kind, self.heads = number, kind, 4
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.1 if kind == "dropped" else 0.0)
        self.scale = 0.5 if kind == "value" and number == 5 else 1.0
        if kind == "wide" and number == 5:
            self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "window" and self.layer_idx % 3 == 2:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-3)
        if self.kind == "swapped" and self.layer_idx == 5:
            q, k = k, q
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        up = self.up(x)
        if self.kind == "nonlinear" and self.layer_idx == 5:
            up = up * up.mean(-1, keepdim=True)
        return x + self.scale * self.drop(self.down(F.gelu(up)))


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(Layer(i, kind) for i in range(LAYERS))
        if kind == "tied":
            self.layers[5].up = self.layers[4].up

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.embed(x)
        mask = torch.ones(len(x), 1, 6, 6, dtype=torch.bool).tril() if self.kind == "masked" else None
        states = []
        for i, layer in enumerate(self.layers):
            x = layer(x if self.kind != "skip" or i != 5 else x + kept, mask)
            kept = x if i == 2 else kept
            x = F.dropout(x, 0.1) if self.kind == "drawn" else x
            states.append(x)
        x = torch.stack(states).mean(0) if self.kind == "listed" else x
        if self.kind == "numbered":
            x = self.layers[LAYERS - 3].norm(x)
        if self.kind == "indexed":
            x = x + sum(self.layers[i].scale for i in range(LAYERS))
        return self.head(x)


def rows(samples: int) -> Tensor:
    return torch.arange(6).repeat(samples, 1)


def row_of(kind: str) -> tuple[tuple[str, ...], ...]:
    return sketch_model(Model(kind), rows, run_model).alike


EVERY = tuple(f"layers.{i}" for i in range(LAYERS))


def test_alike_layers_are_one_row() -> None:
    assert row_of("plain") == row_of("indexed") == (EVERY,)


@pytest.mark.parametrize("kind", ["window", "wide", "swapped", "nonlinear", "tied", "skip", "value", "numbered"])
def test_a_layer_that_computes_something_else_is_in_no_row_with_others(kind: str) -> None:
    assert EVERY not in row_of(kind)


KINDS = ["plain", "window", "wide", "swapped", "nonlinear", "tied", "skip", "value", "numbered", "indexed", "masked", "dropped", "drawn", "listed"]


@pytest.mark.parametrize("kind", KINDS)
def test_sketches_are_those_of_all_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares every field, including those that `==` ignores."""
    made, lengths = [], []
    run = trace.trace_run
    monkeypatch.setattr(sketches, "trace_run", lambda model, *args, **named: lengths.append(len(model.layers)) or run(model, *args, **named))
    for large in (0, 1 << 40):
        monkeypatch.setattr(equal_layers, "LARGE_MODEL", large)
        torch.manual_seed(0)
        made.append(sketch_model(Model(kind), rows, run_model))
    for field in dataclasses.fields(Sketch):
        assert repr(getattr(made[0], field.name)) == repr(getattr(made[1], field.name)), field.name
    left_out = sum(len(row) - 3 for row in made[1].alike)
    assert lengths[-2:] == [LAYERS, LAYERS] and any(n < LAYERS for n in lengths) == (left_out > 0)
    assert (lengths[-3] < LAYERS) == (left_out > 0 and kind not in ("drawn", "listed", "indexed")), "where a few cannot stand for all"


def found(kind: str, monkeypatch: pytest.MonkeyPatch, large: int) -> Slices:
    monkeypatch.setattr(equal_layers, "LARGE_MODEL", large)
    torch.manual_seed(0)
    model = Model(kind)
    job = Job(model=lambda: model, loss=F.mse_loss, data=list, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=8, steps=1)
    return choose_slices.find_plan_slices(sketch_model(model, rows, run_model), model, rows, run_model, job, Plan(tp=2, sequence_parallel=False))


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_those_of_all_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, full = found(kind, monkeypatch, 0), found(kind, monkeypatch, 1 << 40)
    assert short == full and len(full.groups) >= LAYERS


def test_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("plain")
    before = [name for name, _ in model.named_modules()]
    followed: list[list[str]] = []

    def find() -> Slices:
        followed.append([name for name, _ in model.layers.named_children()])
        raise ValueError("something else")

    monkeypatch.setattr(equal_layers, "LARGE_MODEL", 0)
    assert find_in_shortened(model, equal_layers.find_layer_rows(model, (EVERY,)), find) is None
    assert followed == [["0", "1", "7"]] and [name for name, _ in model.named_modules()] == before
    assert model(rows(2)).shape == (2, 6, 64)


def test_reasons_that_name_other_layers_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in OLMoE, which has no slices: the reason for layer 1 names layers 0 and 1, and would be wrong for layer 2."""
    monkeypatch.setattr(equal_layers, "LARGE_MODEL", 0)
    model = Model("plain")
    known = find_in_shortened(model, (EVERY,), lambda: Slices(unsliced=(("layers.1.up", 0.1, "its code cannot run on a slice"),)))
    guessed = find_in_shortened(model, (EVERY,), lambda: Slices(unsliced=(("layers.1.up", 0.1, "the output of layers.0.down reaches layers.1.up"),)))
    assert known is not None and guessed is None


@pytest.mark.parametrize("change", [
    lambda layer: setattr(layer, "heads", 2), lambda layer: setattr(layer, "forward", layer.forward), lambda layer: layer.eval(),
    lambda layer: layer.register_forward_hook(lambda *_: None), lambda layer: layer.norm.weight.requires_grad_(False),
    lambda layer: layer.register_buffer("table", torch.zeros(1)), lambda layer: setattr(layer, "sizes", [1]),
])  # fmt: skip
def test_layers_of_another_form_are_followed(change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_layers, "LARGE_MODEL", 0)
    model = Model("plain")
    assert equal_layers.find_layer_rows(model, (EVERY,)) == (EVERY,)
    change(model.layers[4])
    assert equal_layers.find_layer_rows(model, (EVERY,)) == ()
