"""Models that are larger than a rank's memory: the weights are those of one device bit for bit for any constructor, in bounded memory."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import jobs_real
import numpy as np
import pytest
import torch
from rarely import rarely
from torch import nn

from plait.config.plan import Plan
from plait.launch import fork
from plait.launch.place import Place
from plait.model import deferred_init
from plait.model.build_model import make_model
from plait.parallel.fsdp.strategy import make_shard_slicer
from plait.proof.verify import verify
from plait.tensors.collectives import digest_tensor


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "DEFER_BYTES", 0)
    monkeypatch.setattr(deferred_init, "LARGE_TENSOR_BYTES", 64)


def drawn(init: Callable[..., Any], *arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 12))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                init(parameter, *arguments)
        return model

    return make


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 12, padding_idx=3), nn.LayerNorm(12), nn.Linear(12, 20))
    model[2].weight = model[0].weight
    return model


def drawn_again() -> nn.Module:
    """The padding row is zeroed in values that are drawn again later, and again in the last ones."""
    model = nn.Embedding(20, 12, padding_idx=3)
    model.weight.data.normal_(0.0, 0.02)
    model.weight.data[3].zero_()
    return model


def copied() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False)


def from_numpy() -> nn.Module:
    model = nn.Linear(30, 30)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.random.randn(30, 30)).float() * random.random())
    return model


def scaled() -> nn.Module:
    model = nn.Linear(30, 30)
    with torch.no_grad():
        model.weight.mul_(random.random())
        model.weight.div_(model.weight.norm())
        model.bias.add_(1)
    return model


def in_parts() -> nn.Module:
    model = nn.Linear(30, 30)
    with torch.no_grad():
        model.weight[:10].zero_()
        model.weight[10:].normal_()
        for part in model.weight.chunk(3):
            nn.init.xavier_uniform_(part)
        model.weight.data = model.weight.data * 2
    return model


def from_state() -> nn.Module:
    model, other = nn.Linear(20, 60), nn.Linear(20, 60)
    model.load_state_dict(other.state_dict())
    return model


def own_generator() -> nn.Module:
    model = nn.Linear(20, 60)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(3))
    return model


def with_tables() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 20).requires_grad_(False), nn.Linear(20, 20))
    model.register_buffer("table", torch.arange(400.0).view(20, 20).cos(), persistent=False)
    model.register_buffer("noise", torch.rand(40, 40))
    model.add_module("teacher", copy.deepcopy(model[1]).requires_grad_(False))
    return model


MODELS = {f.__name__.rstrip("_"): drawn(f) for f in (
    nn.init.normal_, nn.init.uniform_, nn.init.ones_, nn.init.eye_, nn.init.xavier_uniform_, nn.init.xavier_normal_,
    nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_)} | {
    "constant": drawn(nn.init.constant_, 0.3), "sparse": drawn(nn.init.sparse_, 0.3), "tied": tied, "drawn_again": drawn_again,
    "copied": copied, "from_numpy": from_numpy, "scaled": scaled, "in_parts": in_parts, "from_state": from_state,
    "own_generator": own_generator, "with_tables": with_tables, "double": lambda: nn.Linear(20, 20).double(),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(20, 24)),
    "llama": lambda: jobs_real.llama().model(), "llama_tied": lambda: jobs_real.llama(tied=True).model(),
}  # fmt: skip


def hugging(name: str) -> nn.Module:
    import transformers as t

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 31,
    }
    if name == "bert":
        return t.BertForMaskedLM(t.BertConfig(**small))
    if name == "t5":
        return t.T5ForConditionalGeneration(
            t.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=31)
        )
    if name == "swin":
        return t.SwinForImageClassification(
            t.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2)
        )
    if name == "mamba":
        return t.MambaForCausalLM(t.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=31, state_size=4))
    return jobs_real.gpt2().model()


def by_values() -> nn.Module:
    model = nn.Linear(30, 30)
    if model.weight.sum() > 0:
        model.weight.data.neg_()
    return model


def one_of_another() -> nn.Module:
    model, both = nn.Module(), torch.randn(60, 20)
    model.a, model.b = nn.Parameter(both[:30]), nn.Parameter(both[30:])
    return model


WHOLE = {
    "by_values": by_values, "one_of_another": one_of_another, "truncated": drawn(nn.init.trunc_normal_),
    "not_contiguous": lambda: drawn(lambda p: setattr(p, "data", torch.randn(p.shape[::-1]).t()))(),
}  # fmt: skip


def same_bits(make: Callable[[], nn.Module], ranks: int = 3) -> None:
    job = jobs.make(make)
    whole = make_model(job)
    expected, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    for rank in range(ranks):
        mine = make_shard_slicer(Plan(fsdp=ranks), rank)
        found = deferred_init.build_deferred(lambda: make_model(job), mine, digest_tensor)
        assert found is not None
        assert [n for n, _ in found.model.named_parameters()] == list(expected)
        for name, parameter in found.model.named_parameters():
            assert parameter.requires_grad == expected[name].requires_grad
            if parameter.is_meta:
                assert torch.equal(found.shards[name], mine(expected[name])), name
                assert torch.equal(found.digests[name], digest_tensor(expected[name])), name
            else:
                assert torch.equal(parameter, expected[name]), name
        assert all(torch.equal(b, buffers[n]) for n, b in found.model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_one_device(name: str) -> None:
    same_bits(MODELS[name])


@pytest.mark.parametrize("name", ("bert", "t5", "swin", "mamba", "gpt2"))
def test_hugging_face(name: str) -> None:
    same_bits(lambda: hugging(name), 2)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_followed_is_built_whole(name: str) -> None:
    job = jobs.make(WHOLE[name])
    assert deferred_init.build_deferred(lambda: make_model(job), make_shard_slicer(Plan(fsdp=2), 0), digest_tensor) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, text",
    (
        pytest.param("gpt", "fsdp=3", marks=pytest.mark.prove),
        pytest.param("llama_tied", "dp=2 fsdp=2 activation_checkpointing=full", marks=pytest.mark.prove),
        ("digits", "fsdp=2 zero_stage=1"),
    ),
)
def test_verified(name: str, text: str) -> None:
    """`digits` never reveals its values; its running statistics must be right on all ranks."""
    assert verify(jobs_real.ALL[name](), Plan.parse(text)).equal


def deep(width: int = 1024, depth: int = 18) -> nn.Module:
    """304 MB in matrices of 16 MB, each drawn twice."""
    model = nn.Sequential(*(nn.Linear(width, 4 * width) for _ in range(depth)))
    model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    return model


@pytest.mark.parametrize("source", rarely("drawn", "copied"))
def test_memory_is_that_of_a_share(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "LARGE_TENSOR_BYTES", 1 << 16)

    def make() -> nn.Module:
        model = deep()
        if source == "copied":
            for layer in model:
                layer.weight.data.copy_(torch.randn(layer.weight.shape))
                layer.weight.data.normal_()
        return model

    def peak(build: Callable[[], Any]) -> Callable[[Place], dict[str, float]]:
        def run(place: Place) -> dict[str, float]:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            before = _status("VmRSS")
            made = build()
            return {"peak": _status("VmHWM") - before, "made": float(made is not None)}

        return run

    job = jobs.make(make)
    (whole,) = fork.run_ranks(peak(lambda: make_model(job)), 1)
    (part,) = fork.run_ranks(
        peak(
            lambda: deferred_init.build_deferred(
                lambda: make_model(job), make_shard_slicer(Plan(fsdp=8), 0), digest_tensor
            )
        ),
        1,
    )
    assert part["made"] and whole["peak"] > 290
    assert part["peak"] < 304 / 8 + 80, part  # the rank's share, and a few temporary tensors


def _status(key: str) -> float:
    """Return a value of /proc/self/status in MiB."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key))
    return int(line.split()[1]) / 1024
