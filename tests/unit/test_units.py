"""Units are found in models of many kinds, and the costs of their calls equal values computed by hand."""

import dataclasses
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plait
from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.model.build_model import run_model
from plait.model.operations import LinearCost, UnitCall
from plait.model.sketch import Sketch, sketch_model
from plait.model.sketch_table import format_count, outline_sketch
from plait.tensors.trees import EMPTY_TEMPLATE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "examples" / "llama" / "job.py"


def each(number: float) -> LinearCost:
    return LinearCost(0.0, number)


def of(model: nn.Module, *shape: int, units: tuple[str, ...] | None = None) -> Sketch:
    """The sketch of a model on floats of [n, *shape]. Checks every property that holds for any model."""
    return checked(model, lambda n: torch.ones(n, *shape), units)


def tokens(n: int) -> Tensor:
    return torch.ones(n, 7, dtype=torch.long)


def checked(model: nn.Module, inputs: Callable[[int], Any], units: tuple[str, ...] | None = None) -> Sketch:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sketch_model(model.train(), inputs, run_model, units)
    assert not found.unmeasured
    names = dict(model.named_parameters())
    inside = {name for unit in found.units for name in unit.parameters}
    assert inside | set(found.rest) == set(names) and not inside & set(found.rest)
    assert sum(names[n].nbytes for n in inside) + sum(names[n].nbytes for n in found.rest) == sum(
        p.nbytes for p in names.values()
    )
    if all(unit.closed for unit in found.units):
        assert sum(unit.weights for unit in found.units) == sum(names[n].nbytes for n in inside)
    for unit in found.units:
        assert not [other.name for other in found.units if other.name.startswith(f"{unit.name}.")]
    for i, one in enumerate(found.calls):
        assert all(need < i for need in one.needs)
    return found


def needs(found: Sketch) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.unit, one.needs) for one in found.calls]


def opened(found: Sketch) -> list[str]:
    return [unit.name for unit in found.units if not unit.closed]


# — by hand —


def test_an_mlp() -> None:
    found = of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)), 4)
    assert tuple(replace(c, template=EMPTY_TEMPLATE) for c in found.calls) == (
        UnitCall("0", (), each(2 * 4 * 8), each(4 * 4), each(4 * 8), each(4 * 4), fresh=each(4 * 4), given=1),
        UnitCall("3", (0,), each(2 * 8 * 2), each(4 * 8), each(4 * 2), each(4 * 8), fresh=each(4 * 8), given=1),
    )
    assert [(u.name, u.kind, u.weights, u.closed) for u in found.units] == [
        ("0", "Linear", 4 * (32 + 8), True),
        ("3", "Linear", 4 * (16 + 2), True),
    ]
    assert found.needs == (1,) and found.rest == ()
    assert (found.flops_between, found.saved_between) == (each(0), each(4 * 8 + 4 * 8)), "ReLU's result, dropout's mask"


def test_a_figure_has_a_fixed_and_a_linear_part() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Linear(6, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * self.table(torch.ones(10, 6)).sum(0)

    table, head = sorted(of(Model(), 5).calls, key=lambda one: one.unit != "table")
    assert table.flops == LinearCost(2 * 10 * 6 * 5, 0.0) and table.output == LinearCost(4 * 10 * 5, 0.0)
    assert head.flops == each(2 * 5 * 5) and head.flops.for_batch(7) == 350


def product(s: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True) + 0 * s.weight.sum()


class Fn(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor], *shape: int):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(*shape or (1,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


FLOPS: dict[str, tuple[nn.Module, tuple[int, ...], float]] = {
    "linear": (nn.Linear(5, 3), (7, 5), 2 * 7 * 5 * 3),
    "linear of a vector": (nn.Linear(5, 3, bias=False), (5,), 2 * 5 * 3),
    "convolution": (nn.Conv2d(2, 3, 3, padding=1), (2, 8, 8), 2 * 64 * 2 * 3 * 9),
    "bmm": (Fn(lambda s, x: x @ x.mT * s.weight), (4, 6), 2 * 4 * 6 * 4),
    "baddbmm": (Fn(lambda s, x: torch.baddbmm(s.weight, x, x.mT)), (4, 6), 2 * 4 * 6 * 4),
    "attention": (Fn(product), (2, 6, 8), 4 * 2 * 6 * 6 * 8),
    "matrix and vector": (Fn(lambda s, x: x.flatten(0, 1) @ s.weight, 6), (4, 6), 2 * 4 * 6),
    "LSTM": (nn.LSTM(4, 8, 2, batch_first=True), (5, 4), 2 * 5 * 4 * 8 * (4 + 8 + 8 + 8)),
    "GRU": (nn.GRU(4, 8, batch_first=True), (5, 4), 2 * 5 * 3 * 8 * (4 + 8)),
    "embedding": (nn.Embedding(9, 4), (), 0),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops(name: str) -> None:
    model, shape, expected = FLOPS[name]
    inputs = tokens if name == "embedding" else lambda n: torch.ones(n, *shape)
    (one,) = checked(nn.Sequential(model), inputs).calls
    assert one.flops == each(expected)


def test_what_is_saved_counts_once_and_with_everything_inside_a_unit() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    found = of(nn.Sequential(nn.Sequential(block), nn.Linear(8, 8)), 8, units=("0", "1"))
    first, second = found.calls
    assert first.saved == each(4 * 8 * 3), "the input, and both results of tanh"
    assert second.saved == each(0), "its input is the last tanh's result, which is kept already"


def test_a_checkpoint_keeps_only_its_input() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, torch.sin(x), use_reentrant=False)

    found = of(nn.Sequential(nn.ModuleList([Block()])[0], nn.Linear(8, 8)), 8, units=("0", "1"))
    assert found.calls[0].saved.per_sample <= 4 * 8 * 2 < 4 * 32


# — inputs of units —


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def conv(a: int, b: int) -> nn.Module:
            return nn.Conv2d(a, b, 3, padding=1)

        self.d1, self.d2, self.mid, self.u2, self.u1 = (
            conv(1, 8), conv(8, 16), conv(16, 32), conv(48, 16), conv(24, 8),
        )  # fmt: skip
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x).relu()
        b = self.d2(F.max_pool2d(a, 2)).relu()
        y = torch.cat([F.interpolate(self.mid(F.max_pool2d(b, 2)), scale_factor=2.0), b], 1)
        return self.out(self.u1(torch.cat([F.interpolate(self.u2(y), scale_factor=2.0), a], 1)))


def test_the_skips_of_a_unet() -> None:
    found = of(UNet(), 1, 16, 16)
    assert needs(found) == [("d1", ()), ("d2", (0,)), ("mid", (1,)), ("u2", (1, 2)), ("u1", (0, 3)), ("out", (4,))]
    assert found.needs == (5,) and found.calls[0].output == each(4 * 8 * 16 * 16)
    assert found.calls[3].flops == each(2 * 64 * 48 * 16 * 9)


class Three(nn.Module):
    """Three units a, b, c, and code between them."""

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Any]):
        super().__init__()
        self.a, self.b, self.c, self.between = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: Tensor) -> Any:
        return self.c(self.between(self, self.a(x), self.b(x)))


def written(s: Any, a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(a.shape)
    out[:, 1:] = b[:, 1:]
    return out


def through_a_view(s: Any, a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(a.shape)
    view = out[:, 1:]
    view.add_(b[:, 1:])
    return out


def plus_equals(s: Any, a: Tensor, b: Tensor) -> Tensor:
    a = a * 1
    a += b
    return a


BETWEEN: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], tuple[int, ...]]] = {
    "first": (lambda s, a, b: a, (0,)),
    "sum": (lambda s, a, b: a + b, (0, 1)),
    "setitem": (written, (1,)),
    "a write through a view": (through_a_view, (1,)),
    "+=": (plus_equals, (0, 1)),
    "out=": (lambda s, a, b: torch.add(a.detach(), 1, out=torch.empty(())) + 0 * b, (0, 1)),
    "zeros_like": (lambda s, a, b: torch.zeros_like(a) + b, (0, 1)),  # unknown inputs give unknown outputs
    "shape only": (lambda s, a, b: torch.ones(a.shape) * b, (1,)),
    "transposed": (lambda s, a, b: b.T.T, (1,)),
    "lists": (lambda s, a, b: torch.stack([a, b]).unbind()[0], (0, 1)),
    "neither": (lambda s, a, b: torch.ones(a.shape), ()),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_code_between_units_passes_on(name: str) -> None:
    between, expected = BETWEEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert needs(of(Three(between), 4))[2] == ("c", expected)


@dataclasses.dataclass
class State:
    x: Tensor
    step: int


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: State) -> State:
        return State(self.linear(state.x), state.step + 1)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.first = nn.ModuleList(Stepping() for _ in range(2)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.first(x), 0)
        for block in self.blocks:
            state = block(state)
        return state.x


def test_tensors_inside_objects_are_followed() -> None:
    found = of(Stateful(), 4)
    assert needs(found) == [("first", ()), ("blocks.0", (0,)), ("blocks.1", (1,))] and found.needs == (2,)
    assert found.calls[1].output == found.calls[1].inputs == each(16)


class Adding(nn.Module):
    """Writes into its input, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, into: Tensor, x: Tensor) -> None:
        into += self.linear(x)


class Scratch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        into = torch.zeros(x.shape)
        for block in self.blocks:
            block(into, x)
        return into


def test_a_unit_that_writes_into_its_input() -> None:
    found = of(Scratch(), 4)
    assert needs(found) == [("blocks.0", ()), ("blocks.1", (0,))] and found.needs == (0, 1)


# — which modules are units, and which are closed —


class GPT(nn.Module):
    def __init__(self, tied: bool, direct: bool = False):
        super().__init__()
        self.embed, self.position = nn.Embedding(20, 8), nn.Parameter(torch.zeros(7, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head, self.direct = nn.Linear(8, 20, bias=False), direct
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight) if self.direct else self.head(x)


def test_a_gpt_with_a_position_of_the_roots_own() -> None:
    found = checked(GPT(tied=False), tokens)
    assert [u.name for u in found.units] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [u.repeated for u in found.units] == [False, True, True, True, False]
    assert found.rest == ("position",) and opened(found) == []
    block = 2 * 7 * (4 * 64 + 2 * 128) + 4 * 7 * 7 * 8
    assert [c.flops.per_sample for c in found.calls] == [0, block, block, block, 2 * 7 * 8 * 20]


def test_tied_units_are_open_and_both_have_the_weight() -> None:
    found = checked(GPT(tied=True), tokens)
    assert opened(found) == ["embed", "head"]
    assert found.units[-1].parameters == found.units[0].parameters == ("embed.weight",)


def test_a_unit_whose_weight_the_root_uses_is_open() -> None:
    found = checked(GPT(tied=False, direct=True), tokens)
    assert opened(found) == ["embed"] and found.rest == ("position", "head.weight")
    assert found.flops_between == each(2 * 7 * 8 * 20) and found.needs == (3,)


USES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], list[str]]] = {
    "metadata": (lambda s, a, b: a.to(s.a.weight.dtype).to(s.a.weight.device) * s.a.weight.shape[0], []),
    "value": (lambda s, a, b: a * s.a.weight.sum(), ["a"]),
    "view": (lambda s, a, b: a @ s.a.weight.T, ["a"]),
    "data": (lambda s, a, b: a * s.b.weight.data.sum(), ["b"]),
    "bias": (lambda s, a, b: a + s.c.bias, ["c"]),
}


@pytest.mark.parametrize("name", USES)
def test_touching_a_units_parameters(name: str) -> None:
    between, expected = USES[name]
    assert opened(of(Three(between), 4)) == expected


class Reached(nn.Module):
    """Calls a part of its second block directly. Of its last block it calls only the parts."""

    def __init__(self, all_of_it: bool):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.all_of_it = all_of_it

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](self.blocks[1][0](x)) if self.all_of_it else self.blocks[2][0](x)


def test_a_part_called_from_outside_opens_the_unit() -> None:
    found = of(Reached(True), 4)
    assert [u.name for u in found.units] == ["blocks.0", "blocks.1", "blocks.2"] and opened(found) == ["blocks.1"]
    assert needs(found)[-1] == ("blocks.2", (1,)) and found.flops_between == each(32)


def test_a_module_that_is_never_called_is_opened() -> None:
    found = of(Reached(False), 4)
    assert needs(found) == [("blocks.0", ()), ("blocks.1", (0,)), ("blocks.2.0", (1,))] and opened(found) == []


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.block(x)
        return F.linear(self.norm(x), self.embed.weight)


def test_a_block_used_again_and_again_is_one_unit_with_several_calls() -> None:
    found = checked(Reused(), tokens)
    assert needs(found) == [("embed", ()), ("block", (0,)), ("block", (1,)), ("block", (2,)), ("norm", (3,))]
    assert opened(found) == ["embed"] and [u.repeated for u in found.units] == [False, True, False]


class Branching(nn.Module):
    """Python's generator decides which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        import random

        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x


def test_layers_left_out_at_random_are_units() -> None:
    found = of(Branching(), 4)
    assert {u.name for u in found.units} == {f"layers.{i}" for i in range(4)} and found.rest == ()


def looking(s: Any, x: Tensor) -> Tensor:
    return x * s.weight if x.sum().item() > -1 else x


def test_a_model_that_looks_at_values_is_measured_for_real() -> None:
    model = nn.Sequential(nn.Linear(4, 8), Fn(looking, 8), nn.Linear(8, 2))
    found = of(model, 4)
    assert found.needs_real_tensors and [c.flops for c in found.calls] == [each(64), each(0), each(32)]
    assert all(p.grad is None and p.grad_fn is None for p in model.parameters())


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean.mul_(0.9).add_(x.mean(0))
        return x - self.mean.detach()


def test_a_buffer_written_with_a_gradient_is_as_before() -> None:
    model = Averaging()
    assert of(model, 4).changed_buffers == ("mean",)
    assert model.mean.grad_fn is None and not model.mean.requires_grad and model.mean.is_leaf


def test_what_only_measuring_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no formula")

    monkeypatch.setattr("plait.model.operations.count_operator_flops", fails)
    found = sketch_model(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), lambda n: torch.ones(n, 4), run_model)
    assert found.unmeasured == "ValueError: no formula" and not found.needs_real_tensors and found.places == {"1#1#1": 0}
    assert (found.units, found.calls, found.rest) == ((), (), ("0.weight", "0.bias"))


# — models of the transformers package —

HF = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
CHAIN = [(), (0,), (1,), (2,), (3,), (4,)]


def text(n: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(n)}


def both(n: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(n), "decoder_input_ids": tokens(n)}


def made(name: str, **config: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(transformers, name)
        return kind(kind.config_class(**config))


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied: bool) -> None:
    model = made("LlamaForCausalLM", **HF, num_key_value_heads=2, tie_word_embeddings=tied)
    found = checked(model, text)
    layers = [f"model.layers.{i}" for i in range(3)]
    assert [c.unit for c in found.calls] == ["model.embed_tokens", *layers, "model.norm", "lm_head"]
    assert [c.needs for c in found.calls] == CHAIN
    assert opened(found) == (["model.embed_tokens", "lm_head"] if tied else [])
    layer = 2 * 7 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64) + 4 * 7 * 7 * 32
    assert [c.flops.per_sample for c in found.calls] == [0, layer, layer, layer, 0, 2 * 7 * 32 * 64]


def test_t5() -> None:
    model = made("T5ForConditionalGeneration", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    found = checked(model, both)
    assert needs(found) == [
        ("encoder.embed_tokens", ()), ("encoder.block.0", (0,)), ("encoder.block.1", (1,)),
        ("encoder.final_layer_norm", (2,)), ("decoder.embed_tokens", ()), ("decoder.block.0", (3, 4)),
        ("decoder.block.1", (3, 5)), ("decoder.final_layer_norm", (6,)), ("lm_head", (7,)),
    ]  # fmt: skip
    assert 8 in found.needs


def test_vit() -> None:
    model = made(
        "ViTForImageClassification", image_size=16, patch_size=4, **{k: v for k, v in HF.items() if k != "vocab_size"}
    )
    found = checked(model, lambda n: {"pixel_values": torch.ones(n, 3, 16, 16)})
    assert [c.needs for c in found.calls] == CHAIN and sum(u.repeated for u in found.units) == 3


def test_swin_stages_are_opened_into_blocks() -> None:
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2, 2], "num_heads": [2, 4, 8]}
    model = made("SwinForImageClassification", window_size=4, **sizes)
    found = checked(model, lambda n: {"pixel_values": torch.ones(n, 3, 32, 32)})
    names = [u.name for u in found.units]
    assert "swin.encoder.layers.2.blocks.0" in names and "swin.encoder.layers.2.blocks.1" in names
    assert [c.needs for c in found.calls] == [(), *((i,) for i in range(len(found.calls) - 1))]


def test_mamba() -> None:
    found = checked(
        made("MambaForCausalLM", hidden_size=32, num_hidden_layers=3, vocab_size=64, state_size=4, use_cache=False),
        text,
    )
    assert [c.needs for c in found.calls] == CHAIN and sum(u.repeated for u in found.units) == 3


def test_whisper() -> None:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = made(
        "WhisperForConditionalGeneration", vocab_size=64, d_model=32, max_source_positions=10, max_target_positions=16,
        **sizes, **words,
    )  # fmt: skip
    found = checked(model, lambda n: {"input_features": torch.ones(n, 80, 20), "decoder_input_ids": tokens(n)})
    order = {one.unit: i for i, one in enumerate(found.calls)}
    wanted = found.calls[order["model.decoder.layers.1"]].needs
    assert wanted == (order["model.encoder.layer_norm"], order["model.decoder.layers.0"])


# — Job.units —


def test_the_users_own_units() -> None:
    found = checked(GPT(tied=False), tokens, ("blocks.*", "embed"))
    assert [u.name for u in found.units] == ["embed", "blocks.0", "blocks.1", "blocks.2"]
    assert found.rest == ("position", "head.weight")
    found = checked(GPT(tied=False), tokens, ("blocks.0.linear1",))
    assert needs(found) == [("blocks.0.linear1", ())] and found.needs == (0,)


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (("block.*",), r'"block\.\*" names no called module        did you mean  blocks\.\* \?'),
        (("blocks",), '"blocks" names no called module'),
        (("blocks.*", "blocks.*.linear1"), "names blocks.0 and blocks.0.linear1, which lies inside it"),
        (("*.weight",), "names no called module"),
    ],
)
def test_units_that_are_not_there(units: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlaitError, match=said) as raised:
        checked(GPT(tied=False), tokens, units)
    assert raised.value.codes == ["J015"]


@pytest.mark.parametrize("wrong", [("",), "layers.*", (), (1,), ["a"]])
def test_units_are_a_tuple_of_names(wrong: Any) -> None:
    with pytest.raises(PlaitError, match="is not a tuple of names"):
        plait.Job(
            model=nn.Identity, loss=F.mse_loss, data=list, optimizer=torch.optim.SGD, batch=1, steps=1, units=wrong
        )


# — plait sketch —


def job_of(model: Callable[[], nn.Module], units: tuple[str, ...] | None = None) -> plait.Job:
    return plait.Job(
        model=model,
        loss=F.mse_loss,
        data=lambda: [(torch.ones(4), torch.ones(4))] * 8,
        optimizer=torch.optim.SGD,
        batch=4,
        steps=2,
        units=units,
    )


class Rates(nn.Module):
    """A constructor that reads values, as for stochastic depth, and creates large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.inner, self.outer = nn.Linear(4, 2**18), nn.Linear(2**18, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)) * self.rates[1]


class Picky(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        if self.weight.sum() > 1e9:
            raise ValueError

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > -1 else x


@pytest.mark.parametrize("model", [lambda: nn.Sequential(nn.Linear(4, 4)), Rates, lambda: nn.Sequential(Picky())])
def test_a_sketch_without_weights(model: Callable[[], nn.Module]) -> None:
    before = torch.get_rng_state()
    found = plait.sketch_of(job_of(model))
    assert torch.equal(before, torch.get_rng_state())
    assert found == dataclasses.replace(sketch_model(model(), lambda n: torch.ones(n, 4), run_model))


def test_a_job_that_fails_is_named() -> None:
    with pytest.raises(PlaitError, match="J003") as raised:
        plait.sketch_of(job_of(lambda: nn.Sequential(nn.Linear(3, 4))))
    assert raised.value.codes == ["J003"]
    with pytest.raises(PlaitError, match="J015"):
        plait.sketch_of(job_of(lambda: nn.Sequential(nn.Linear(4, 4)), ("1",)))


def test_a_large_model_that_looks_at_values_is_refused() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2**30, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x if self.layer(x).sum() > 0 else -x

    with pytest.raises(PlaitError, match="its weights are 16 GiB") as raised:
        plait.sketch_of(job_of(Large))
    assert raised.value.codes == ["J018"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", str(ROOT / "examples" / "stdlib_gpt" / "job.py"), "--batch", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("corpus")]
    blocks = next(line for line in lines if line[0] == "blocks.0-3")
    flops = 4 * 2 * (2 * 128 * 12 * 128**2 + 4 * 128 * 128 * 128)
    assert blocks[1:5] == ["Block", "4", "793k", format_count(flops)] and blocks[-1] == "embed"
    assert next(line for line in lines if line[0] == "embed")[:2] == ["embed", "*"]
    assert next(line for line in lines if line[:1] == ["between"])[-1] == "position"
    assert next(line for line in lines if line[:1] == ["together"])[-1] == "head"


@pytest.mark.slow
def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", str(LLAMA), "--json", "--job.length", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["unit"] for row in found["rows"]] == [
        "model.embed_tokens", "model.layers.0-3", "model.norm", "lm_head",
    ]  # fmt: skip
    assert found["rows"][1]["needs"] == ["model.embed_tokens"] and found["output_needs"] == ["lm_head"]
    assert found["flops"] == sum(row["flops"] for row in found["rows"]) > 0


def test_short_numbers() -> None:
    assert [format_count(n) for n in (0, 7, 999, 1000, 70_553_706_496, 3.45e15)] == ["0", "7", "999", "1k", "70.6G", "3.45P"]


def test_a_batch_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", str(LLAMA), "--batch", "0"]) == 2
    assert "U002" in capsys.readouterr().err


@pytest.mark.slow
def test_the_unet_example() -> None:
    found = outline_sketch(plait.sketch_of(load_job(str(ROOT / "examples" / "unet" / "job.py"))), 1)
    up = {row.unit: row.needs for row in found.rows}
    assert up["up.1"] == ("down.0", "up.0.4"), "the skip and what comes from below"


@pytest.mark.prove
def test_llama_70b_has_its_shape() -> None:
    """RankModel and run on fake tensors, all 80 layers. Memory is only that of Python and torch."""
    found = outline_sketch(plait.sketch_of(load_job(str(LLAMA), {"size": "70b"})), 1)
    assert found.parameters == 70_553_706_496
    assert [(row.unit, row.calls) for row in found.rows] == [
        ("model.embed_tokens", 1), ("model.layers.0-79", 80), ("model.norm", 1), ("lm_head", 1),
    ]  # fmt: skip
    kv = 8 * 128
    layer = 2 * 128 * (2 * 8192 * 8192 + 2 * 8192 * kv + 3 * 8192 * 28672) + 4 * 128 * 128 * 8192
    assert found.flops == 80 * layer + 2 * 128 * 8192 * 128256


@pytest.mark.prove
def test_llama_70b_takes_seconds_and_little_memory() -> None:
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    command = [sys.executable, "-m", "plait", "sketch", str(LLAMA), "--job.size", "70b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "model.layers.0-79" in done.stdout and "70.6G" in done.stdout
    assert time.perf_counter() - began <= 30
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert max(before, peak) <= 4 << 20, "KiB"


def test_measuring_is_cheap() -> None:
    """Two runs of a small model cost well under 20 ms more than those without measuring."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    seconds = []
    for _ in range(5):
        began = time.process_time()
        of(model, 4)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.1
