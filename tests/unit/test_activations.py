"""The planner's estimate of the activations that a model saves for backward, compared with real steps on the CPU. Masks, and detection
of causal attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs_real import example
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.parallel.activation_checkpointing import choose_units
from plait.planner.dryrun.measure import measure_step
from plait.planner.estimate import estimate_plan
from plait.planner.plan_request import PlanRequest

WIDTH, HEADS, LAYERS, WORDS = 64, 4, 3, 256


class Padded:
    """Tokens, and which of them are not padding."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.randint(WORDS, (self.length,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "there": torch.arange(self.length) < self.length - 7}, tokens


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "causal": lambda there: None,
    "rows": lambda there: there[:, None, None, :],
    "pairs": lambda there: there[:, None, None, :] & there[:, None, :, None],
    "bias": lambda there: torch.where(there[:, None, None, :] & there[:, None, :, None], 0.0, -1e9),
    "causal_mask": lambda there: there[:, None, None, :] & torch.ones(2 * there.shape[-1:], dtype=torch.bool).tril(),
}
"""Non-padding tokens [batch, length] as a mask [batch, 1, 1 or length, length] that all layers receive. Torch converts the truth values to
numbers in each layer."""


class Masked(nn.Module):
    def __init__(self, mask: str):
        super().__init__()
        self.mask = MASKS[mask]
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, there: Tensor) -> Tensor:
        x, mask = self.embed(input_ids), self.mask(there)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def masked(mask: str, length: int) -> Job:
    return plait.Job(
        model=lambda: Masked(mask), loss=lambda out, targets: F.cross_entropy(out.flatten(0, 1), targets.flatten()),
        data=lambda: Padded(length), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch=1, steps=2,
    )  # fmt: skip


JOBS: dict[str, Callable[[int], Job]] = {
    "llama": lambda length: example("llama", length=length, batch=1),
    "gpt": lambda length: example("stdlib_gpt", length=length, depth=LAYERS, width=WIDTH, heads=HEADS, dropout=0.0, batch=1),
    **{f"masked by {name}": partial(masked, name) for name in MASKS},
}


def asked(job: Job) -> PlanRequest:
    return PlanRequest.from_job(job, "", Machine.from_name("h100x8"), split=False)


def attention(request: PlanRequest) -> list[Any]:
    return [p for block in request.pace.work.blocks for p in block.products if p.fused]


@pytest.mark.parametrize("length", [1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (2048, 4096))])
@pytest.mark.parametrize("name", JOBS)
def test_what_a_step_keeps_is_what_the_planner_says(name: str, length: int) -> None:
    job = JOBS[name](length)
    said = estimate_plan(asked(job).pace, Plan(), job.batch).memory["activations"]
    with Engine(job, "dp=1", device="cpu") as engine:
        assert said == pytest.approx(measure_step(engine, 1).categories["activations"], rel=0.05)


@pytest.mark.parametrize("name", JOBS)
def test_which_attention_leaves_out_keys_after_a_query(name: str) -> None:
    found = attention(asked(JOBS[name](64)))
    assert {p.causal for p in found} == {name in ("llama", "gpt", "masked by causal")}


def test_a_causal_product_counts_with_its_full_square() -> None:
    flops = [sum(p.flops for p in attention(asked(masked(mask, 64)))) for mask in ("causal", "rows")]
    assert flops == [4 * 64 * 64 * WIDTH] * 2


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_layers_share_is_there_once(mask: str) -> None:
    """Layers are still recognized as equal, and each counts an equal part of the mask. `activation_checkpointing=full` saves the mask itself."""
    request = asked(masked(mask, 512))
    layers = next(block for block in request.pace.work.blocks if block.count == LAYERS)
    plain = next(block for block in asked(masked("causal", 512)).pace.work.blocks if block.count == LAYERS)
    own, square = 512 * WIDTH, 512 * 512
    inputs = {"causal": 0, "rows": 512 / 4, "pairs": square / 4, "bias": square, "causal_mask": square / 4}[mask]
    kept = {"causal": 0, "rows": 512 * LAYERS, "pairs": square * LAYERS, "bias": square, "causal_mask": square * LAYERS}[mask]
    assert layers.inputs == pytest.approx(own + inputs / LAYERS)
    assert layers.kept == pytest.approx(plain.kept + kept / LAYERS)
    assert [name for name in choose_units(request.sketch) if "layers" in name] == [f"layers.{i}" for i in range(LAYERS)]
