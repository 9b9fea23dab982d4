"""Mixtures of experts: the Hugging Face library's, and plain ones as users write them."""

import random
from typing import Any

import torch
from jobs_real import Rows, hugging, next_token
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

import plait

WORDS = 31


def mixtral(**given: Any) -> plait.Job:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=WORDS, max_position_embeddings=16, num_local_experts=4, attention_dropout=0.1,
        experts_implementation="eager", output_router_logits=True, **given,
    )  # fmt: skip
    return hugging(lambda: MixtralForCausalLM(config))


def qwen3(**given: Any) -> plait.Job:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=WORDS, num_experts=8, num_experts_per_tok=2,
        attention_dropout=0.1, experts_implementation="eager", output_router_logits=True, **given,
    )  # fmt: skip
    return hugging(lambda: Qwen3MoeForCausalLM(config))


def gpt_oss() -> plait.Job:
    """The library's model: one kernel for all experts, which has no float64, behind a forward that is passed under a different name."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=WORDS, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, pad_token_id=0,
    )  # fmt: skip
    return hugging(lambda: GptOssForCausalLM(config))


def balanced(outputs: Any, targets: Tensor) -> Tensor:
    """A model with the library's balance loss, added to its own loss."""
    return next_token(outputs, targets) + 0.05 * outputs.aux_loss


class Expert(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _gumbel(scores: Tensor) -> Tensor:
    return scores - torch.log(-torch.log(torch.rand(scores.shape).clamp(1e-6, 1 - 1e-6)))


def _normal(scores: Tensor) -> Tensor:
    noise = torch.empty_like(scores)
    nn.init.normal_(noise, 0.0, 0.5)
    return scores + noise


NOISES: dict[str, Any] = {
    "jitter": lambda gate, x: gate(x * torch.empty_like(x).uniform_(0.8, 1.2)),
    "gumbel": lambda gate, x: _gumbel(gate(x)),
    "normal": lambda gate, x: _normal(gate(x)),
    "scaled": lambda gate, x: gate(x) + torch.randn_like(gate(x)) * F.softplus(gate(x)),
    "dropout": lambda gate, x: F.dropout(gate(x), 0.3),
    "hidden": lambda gate, x: gate(x).masked_fill(torch.bernoulli(torch.full((len(x), 1), 0.2)).bool(), 0.0),
    "python": lambda gate, x: gate(x) * random.uniform(0.5, 2.0),
    "gumbel_softmax": lambda gate, x: F.gumbel_softmax(gate(x), tau=0.5).log(),
}
"""Noise that a router may draw before it chooses experts: (gate, tokens) -> scores."""


class Mixture(nn.Module):
    """A router, a list of experts, one shared expert, and the residual. Experts without tokens are not called. `noise`: of `NOISES`."""

    def __init__(
        self, width: int, experts: int, capacity: float | None = None, always: bool = False, noise: str | None = None
    ):
        super().__init__()
        self.noise = NOISES[noise] if noise and noise != "module" else None
        self.drop = nn.Dropout(0.3 if noise == "module" else 0.0)
        self.gate, self.shared = nn.Linear(width, experts), Expert(width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.capacity, self.always = capacity, always

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.drop(self.gate(flat)) if self.noise is None or not self.training else self.noise(self.gate, flat)
        p = scores.softmax(-1)
        weights, chosen = p.topk(2, -1)
        out = self.shared(flat)
        most = None if self.capacity is None else int(self.capacity * chosen.numel() / len(self.experts))
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            token, slot = token[:most], slot[:most]
            if len(token) or self.always:
                out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return x + out.reshape(x.shape), p, F.one_hot(chosen, len(self.experts)).sum(1).to(p)


class Bank(nn.Module):
    """Stacked experts. No shape depends on the choice: each expert computes all rows, and the weights of unchosen rows are zero."""

    def __init__(self, experts: int, width: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.einsum("tw,ewf->etf", hidden, self.up)
        found = torch.einsum("etf,efw->etw", F.gelu(found), self.down)
        given = weights.new_zeros(len(hidden), len(self.up)).scatter_add(1, chosen, weights)
        return torch.einsum("te,etw->tw", given.to(found), found)


class Banked(nn.Module):
    """A router before stacked experts, and the residual."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, experts), Bank(experts, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        p = self.gate(flat).softmax(-1)
        weights, chosen = p.topk(2, -1)
        out = self.experts(flat, chosen, weights)
        return x + out.reshape(x.shape), p, F.one_hot(chosen, p.shape[1]).sum(1).to(p)


class Block(nn.Module):
    def __init__(self, width: int, experts: int, dropout: float, stacked: bool = False, **given: Any):
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)
        self.moe = Banked(width, experts) if stacked else Mixture(width, experts, **given)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.moe(x + self.drop(self.mix(self.norm(past))))


class Gpt(nn.Module):
    def __init__(
        self, experts: int = 4, depth: int = 2, width: int = 12, dropout: float = 0.1, times: int = 1, **given: Any
    ):
        super().__init__()
        self.times = times
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, experts, dropout, **given) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, list[Any]]:
        x, routed = self.words(input_ids), []
        for block in [*self.blocks] * self.times:
            x, *told = block(x)
            routed.append(told)
        return self.head(x), routed


def plain_loss(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs[0].flatten(0, 1), targets.flatten())


def balance_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The balance loss of each layer, exact over the global batch."""
    found = [len(p[0]) * (plait.global_mean(p) * plait.global_mean(c)).sum() for p, c in outputs[1]]
    return plain_loss(outputs, targets) + 0.05 * torch.stack(found).sum()


def local_balance(outputs: Any, targets: Tensor) -> Tensor:
    """The same loss as one writes it for one device: over a rank's local batch."""
    found = [len(p[0]) * (p.mean(0) * c.mean(0)).sum() for p, c in outputs[1]]
    return plain_loss(outputs, targets) + 0.05 * torch.stack(found).sum()


def gpt(loss: Any = balance_loss, length: int = 4, **given: Any) -> plait.Job:
    return plait.Job(
        model=lambda: Gpt(**given),
        loss=loss,
        data=lambda: Rows(length=length),
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
        batch=12,
        steps=6,
    )
