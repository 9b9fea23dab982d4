"""A loss without logits, under plans: the split run equals one device, with a tied and an untied head."""

from typing import Any

import jobs
import pytest
import torch
from rarely import rarely
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify

VOCABULARY, WIDTH = 17, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Gpt(nn.Module):
    """A tiny GPT. It returns its logits in a dict; `capped` logits are a function of the head's output."""

    def __init__(self, tied: bool, capped: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(), Block()])
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.capped = capped

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = self.lm_head(self.norm(h))
        return {"logits": torch.tanh(logits) if self.capped else logits}


def gpt(tied: bool, capped: bool = False, head: str = "lm_head") -> plait.Job:
    loss = plait.LinearCrossEntropy(head=head, chunk=7)
    return jobs.make(lambda: Gpt(tied, capped), jobs.Tokens, loss, weight=loss.weight)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2 microbatches=3", *rarely("dp=3"), "dp=2 processes=one"])
@pytest.mark.parametrize("tied", [True, *rarely(False)], ids=["tied", "untied"])
def test_equal(tied: bool, text: str) -> None:
    verdict = verify(gpt(tied), Plan.parse(text))
    assert verdict.equal, verdict.cause
    assert not verdict.inexact


def test_low_precision_proves_its_logic() -> None:
    assert verify(gpt(True), Plan.parse("dp=2 precision=bf16")).equal


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
def test_compiled_equal() -> None:
    assert verify(gpt(True), Plan.parse("dp=2 compile=true")).equal


@pytest.mark.parametrize(("job", "code"), [(gpt(True, capped=True), "J017"), (gpt(True, head="head"), "J016")])
def test_what_cannot_work_is_named(job: plait.Job, code: str) -> None:
    with pytest.raises(PlaitError, match=code):
        verify(job, Plan.parse("dp=2"))


class OwnLoss(nn.Module):
    """A model that computes its loss in its own forward, with plait's function."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.gpt.norm(self.gpt.blocks[0](self.gpt.embed(x)))
        head = self.gpt.lm_head
        rows = [plait.linear_cross_entropy(row, head.weight, t.roll(-1), head.bias, chunk=4) for row, t in zip(h, x)]
        return torch.stack(rows)


@pytest.mark.slow
def test_a_model_that_calls_it_itself() -> None:
    job = jobs.make(OwnLoss, jobs.Tokens, lambda losses, targets: losses.mean())
    assert verify(job, Plan.parse("dp=2 microbatches=3")).equal
