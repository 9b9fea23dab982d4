"""Models whose sequence ranks can shard, and models with units that prevent it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs_pipeline
import torch
from jobs import Tokens, language_loss, make
from jobs_moe import Mixture, mixtral
from jobs_moe import balanced as balance
from jobs_pipeline import LENGTH
from jobs_real import Rows, gpt, gpt2, hugging, llama, next_token
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plait

WIDTH = 8


def bert() -> plait.Job:
    """Bidirectional attention with a padding mask, learned positions and dropout."""
    return jobs_pipeline.bert(layers=2, attention="sdpa")


class Packed(Rows):
    """Several documents in a row: positions restart at each, and a mask separates them."""

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        ids, targets = self.rows[i, :-1], self.rows[i, 1:].clone()
        cut = 2 + i % 4
        document = (torch.arange(len(ids)) >= cut).long()
        position = torch.arange(len(ids)) - cut * document
        mask = (document[:, None] == document) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        targets[cut - 1] = -100
        return {"input_ids": ids["input_ids"] if isinstance(ids, dict) else ids, "position_ids": position,
                "attention_mask": mask[None]}, targets  # fmt: skip


def packed() -> plait.Job:
    return hugging(llama().model, data=lambda: Packed(length=10), weight=lambda y: (y != -100).sum())


def padded() -> plait.Job:
    """A decoder with a padding mask. The model combines it with the causal mask."""

    class Padded(Rows):
        def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
            inputs, targets = super().__getitem__(i)
            mask = torch.arange(len(targets)) < 4 + i % 5
            return {**inputs, "attention_mask": mask.long()}, torch.where(mask, targets, -100)

    return hugging(llama().model, data=lambda: Padded(length=9), weight=lambda y: (y != -100).sum())


class Encoder(nn.Module):
    """torch's own encoder layers, batch-first or not, with both kinds of mask or none."""

    def __init__(self, batch_first: bool, causal: bool, padding: bool):
        super().__init__()
        self.batch_first, self.causal, self.padding = batch_first, causal, padding
        self.embed = nn.Embedding(17, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.2, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) if self.batch_first else self.embed(x).transpose(0, 1)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        h = self.layers(h, mask=mask, src_key_padding_mask=(x == 3) if self.padding else None)
        return self.head(h if self.batch_first else h.transpose(0, 1))


def encoder(*how: bool) -> Callable[[], plait.Job]:
    return lambda: make(lambda: Encoder(*how), Tokens, language_loss, weight=lambda t: (t != -100).sum())


class Attention(nn.Module):
    """A residual block: causal attention, then `inner`."""

    def __init__(self, inner: nn.Module | None = None, heads: int = 2, norm: bool = True):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) if inner is None else inner

    def split(self, h: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1)]

    def attend(self, h: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.split(h), is_causal=True)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.out(self.attend(h).transpose(1, 2).flatten(2))
        return h + self.inner(h)


class Model(nn.Module):
    """Blocks between an embedding and a head; `between` is applied to the hidden states after the blocks."""

    def __init__(self, block: Callable[[], nn.Module], between: str = "", blocks: int = 2):
        super().__init__()
        self.embed, self.position = nn.Embedding(17, WIDTH), nn.Parameter(torch.randn(12, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([block() for _ in range(blocks)])
        self.between, self.head = between, nn.Linear(WIDTH, 17)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True) if between == "lstm" else None

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.between == "checkpoint" else block(h)
        if self.lstm is not None:
            h = h + self.lstm(h)[0]
        if self.between == "skip":
            h = h + 0.5 * first
            h *= 2.0
        if self.between == "ignored":
            self.head(h[:, 1])  # gathered, and not used by the loss
        if self.between in ("first", "ignored"):
            return self.head(h[:, 0])
        if self.between == "mean":
            return self.head(h.mean(1))
        return self.head(h)


def tokens(block: Callable[[], nn.Module], between: str = "") -> Callable[[], plait.Job]:
    if between in ("first", "mean", "ignored"):
        loss = lambda logits, y: F.cross_entropy(logits, y.clamp(min=0)[:, 0])  # noqa: E731
        return lambda: make(lambda: Model(block, between), Tokens, loss)
    return lambda: make(lambda: Model(block, between), Tokens, language_loss, weight=lambda t: (t != -100).sum())


class ByHand(Attention):
    """Attention written as matrix products and a softmax."""

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = self.split(h)
        scores = (q @ k.mT).masked_fill(torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v


class Turned(nn.Module):
    """Runs a module on channels-first hidden states."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h.mT).mT


class Routed(nn.Module):
    """A list of experts; each gets some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture(WIDTH, 4)

    def forward(self, h: Tensor) -> Tensor:
        return self.mixture(h)[0]


class Counts(Attention):
    """Computes its own positions."""

    def split(self, h: Tensor) -> list[Tensor]:
        q, k, v = super().split(h)
        turn = torch.arange(h.shape[1], dtype=h.dtype)[:, None].cos()
        return [q * turn, k * turn, v]


class Scaled(nn.Module):
    """A norm over the sequence."""

    def forward(self, h: Tensor) -> Tensor:
        return h / (1 + h.square().mean((1, 2), keepdim=True))


class Again(Attention):
    """Recomputes only its attention in backward."""

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.out(checkpoint(self.attend, h, use_reentrant=False).transpose(1, 2).flatten(2))
        return h + self.inner(h)


class Weights(nn.Module):
    """torch's attention, with `need_weights=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.out(self.attention(h, h, h, need_weights=True)[0])


class Biased(nn.Module):
    """A mask of learned values, which the model computes once for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(17, WIDTH), nn.Parameter(torch.randn(2, 12) * 0.1)
        self.blocks = nn.ModuleList([GivenMask() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, x: Tensor) -> Tensor:
        h, n = self.embed(x), torch.arange(x.shape[1], device=x.device)
        distance = (n[:, None] - n).clamp(min=0)
        mask = self.bias[:, distance].masked_fill(n[:, None] < n, -torch.inf)[None]
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)


class GivenMask(Attention):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        h = h + self.out(F.scaled_dot_product_attention(*self.split(h), attn_mask=mask).transpose(1, 2).flatten(2))
        return h + self.inner(h)


def unbalanced() -> plait.Job:
    """A mixture of stacked experts, without the balance loss that its library collects with hooks."""

    def model() -> nn.Module:
        made = mixtral().model()
        made.config.output_router_logits = False
        return made

    return hugging(model)


def balanced(**given: Any) -> plait.Job:
    """The same model with the balance loss: a mean over all tokens of the router logits that hooks collect."""
    return replace(mixtral(**given), loss=balance)


class Noted(Attention):
    """Stores a value computed from its rows."""

    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        self.note = h.square().mean()
        return h


class Noting(Model):
    def __init__(self) -> None:
        super().__init__(Noted)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(block.note for block in self.blocks)


def biased() -> plait.Job:
    return make(Biased, Tokens, language_loss, weight=lambda t: (t != -100).sum())


HUGGING = {"llama": llama, "gpt2": gpt2, "bert": bert, "packed": packed, "padded": padded}
OWN: dict[str, Any] = {
    "gpt": gpt,
    "first_encoder": encoder(True, True, True),
    "second_encoder": encoder(False, False, True),
    "causal_encoder": encoder(True, True, False),
    "plain": tokens(Attention),
    "skip": tokens(Attention, "skip"),
    "first": tokens(Attention, "first"),
    "mean": tokens(Attention, "mean"),
    "ignored": tokens(Attention, "ignored"),
    "lstm": tokens(Attention, "lstm"),
    "checkpoint": tokens(lambda: Attention(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))), "checkpoint"),
    "biased": biased,
    "routed": tokens(lambda: Attention(Routed())),
    "counts": tokens(Counts),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "again": (tokens(Again), "checkpoint in its own code"),
    "noting": (lambda: make(Noting, Tokens, lambda out, y: language_loss(out[0], y) + out[1]), "another way"),
}
EXPERTS = {"unbalanced": unbalanced, "balanced": balanced, "routed": OWN["routed"]}
ALL = HUGGING | OWN | {name: job for name, (job, _) in REFUSED.items()}

__all__ = ["ALL", "HUGGING", "LENGTH", "OWN", "REFUSED", "next_token"]
