"""Jobs over packed rows: models of Hugging Face, which separate documents by their positions, and a model with its own mask."""

from typing import Any

import torch
from jobs import make
from torch import Tensor, nn
from torch.nn import functional as F

import plait

WORDS, TOKENS = 32, 12


class Documents:
    """Documents of 2 to 9 tokens, like a tokenized data set of Hugging Face. The first two tokens of one are a prompt."""

    def __init__(self, n: int = 60):
        g = torch.Generator().manual_seed(11)
        lengths = torch.randint(2, 10, (n,), generator=g).tolist()
        self.rows = [torch.randint(0, WORDS, (length,), generator=g).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[i], "labels": [-100, -100, *self.rows[i][2:]][: len(self.rows[i])]}


class Own(nn.Module):
    """A decoder without rotary embeddings: a learned position table, and a mask from `plait.document_mask`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, 16), nn.Embedding(TOKENS, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x, mask = self.embed(input_ids) + self.places(position_ids), plait.document_mask(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


def llama(attention: str = "sdpa", cache: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=WORDS, max_position_embeddings=TOKENS, use_cache=cache, attn_implementation=attention,
        )
    )  # fmt: skip


def gpt2(attention: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=TOKENS, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=False, attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS = {"llama": llama, "llama with a cache": lambda: llama(cache=True), "gpt2": gpt2, "own": Own}


def loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def counted(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


def job(model: str = "llama", steps: int = 6) -> plait.Job:
    data = lambda: plait.packed(Documents(), TOKENS)  # noqa: E731
    return make(MODELS[model], data=data, loss=loss, weight=counted, batch=4, steps=steps)
