"""Models whose positions interact in written-out code: attention as products and a softmax, recurrences, convolutions."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from jobs import Tokens, language_loss, make
from jobs_context import WIDTH, Attention, ByHand, Scaled, Turned, Weights, tokens
from jobs_pipeline import WORDS, hugging
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Einsum(Attention):
    """Products by einsum, a causal triangle of the input's length, dropout on the scores."""

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(self.norm(h)).chunk(3, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril(), -torch.inf)
        weights = F.dropout(F.softmax(scores, dim=-1), 0.2, self.training)
        return torch.einsum("bhij,bjhd->bhid", weights, v)


class Buffered(nn.Module):
    """The attention of a small GPT as it is often written: a separate module, with a triangle in a buffer."""

    def __init__(self, heads: int = 2, keys: int = 2):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, WIDTH // heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * keys * self.size)
        self.proj, self.drop, self.out_drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        k, v = self.kv(x).split(self.keys * self.size, dim=2)
        q = self.q(x).view(B, T, self.heads, self.size).transpose(1, 2)
        k, v = (t.view(B, T, self.keys, self.size).transpose(1, 2) for t in (k, v))
        if self.keys != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.keys, dim=1) for t in (k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(self.size))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.drop(F.softmax(att, dim=-1))
        return self.out_drop(self.proj((att @ v).transpose(1, 2).contiguous().view(B, T, C)))


class Block(nn.Module):
    def __init__(self, mixer: Callable[[], nn.Module]):
        super().__init__()
        self.ln1, self.ln2, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mixer()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Relative(nn.Module):
    """A learned bias for each distance (T5), computed in the block; one head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.bias = nn.Embedding(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[1], device=x.device)
        bias = self.bias((n[None, :] - n[:, None]).clamp(-15, 15) + 15)[..., 0]
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) + bias
        return torch.bmm(torch.softmax(scores.float(), -1).type_as(x), self.v(x))


class Sloped(nn.Module):
    """A bias that falls with the distance (ALiBi), added by the product itself; heads in the batch dim; no flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            z.reshape(b, t, 2, -1).transpose(1, 2).reshape(b * 2, t, -1) for z in self.qkv(x).tensor_split(3, -1)
        )
        slope = torch.tensor([0.5, 0.25], dtype=x.dtype).repeat(b)[:, None, None]
        alibi = slope * torch.arange(t, dtype=x.dtype)[None, None]
        scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.5)
        causal = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        out = torch.bmm((scores + causal).softmax(-1), v)
        return self.out(out.view(b, 2, t, -1).permute(0, 2, 1, 3).reshape(b, t, -1))


class Fourier(nn.Module):
    """Mixes positions and features by Fourier transforms (FNet)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class Recurrent(nn.Module):
    """An LSTM over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Scan(nn.Module):
    """A state-space layer in plain Python: a short convolution, then a state that is passed from position to position."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.decay = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.into(x).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        state, found = torch.zeros_like(h[:, 0]), []
        for i in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + h[:, i]
            found.append(state)
        return self.out(torch.stack(found, 1) * F.silu(gate))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return y * (grads[0] - (grads[0] * y).sum(-1, keepdim=True))


class Own(nn.Module):
    """A torch.autograd.Function of its own in which positions interact."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Softmax.apply(self.q(x) @ x.mT) @ self.v(x)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1), v)


class Scripted(nn.Module):
    """Attention in a function that torch.jit has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.attention = torch.jit.script(_attention)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.q(x), x, self.v(x))


class Both(nn.Module):
    """torch's attention, and a convolution over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.conv = nn.Linear(WIDTH, 3 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 * self.training)
        return out.transpose(1, 2).flatten(2) + self.conv(x.mT).mT


def block(mixer: Callable[[], nn.Module]) -> Callable[[], plait.Job]:
    return tokens(lambda: Block(mixer))


def conv_net() -> plait.Job:
    """Only convolutions over positions: context parallelism saves no memory."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(17, WIDTH)
            self.blocks = nn.ModuleList([Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) for _ in range(3)])
            self.head = Turned(nn.Conv1d(WIDTH, 17, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for inner in self.blocks:
                h = inner(h)
            return self.head(h)

    return make(Model, Tokens, language_loss, weight=lambda t: (t != -100).sum())


OWN: dict[str, Callable[[], plait.Job]] = {
    "by_hand": tokens(ByHand),
    "scaled": tokens(lambda: Attention(Scaled())),
    "weights": tokens(Weights),
    "einsum": tokens(Einsum),
    "buffered": block(Buffered),
    "one_key_head": block(lambda: Buffered(keys=1)),
    "relative": block(Relative),
    "sloped": block(Sloped),
    "fourier": block(Fourier),
    "recurrent": block(Recurrent),
    "scan": block(Scan),
    "own_function": block(Own),
    "scripted": block(Scripted),
    "both": block(Both),
    "mixed": tokens(lambda: Attention(Turned(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(WIDTH, WIDTH, 3)))),
    "batch_norm": tokens(lambda: Attention(Turned(nn.BatchNorm1d(WIDTH)))),
}


def library(kind: str, head: str = "ForCausalLM", **fields: Any) -> Callable[[], plait.Job]:
    """A model of the Hugging Face library with written-out attention and an output for each token."""

    def job() -> plait.Job:
        import transformers

        def model() -> nn.Module:
            config = getattr(transformers, f"{kind}Config")(**{"vocab_size": WORDS, "pad_token_id": 0, **fields})
            config.use_cache, config._attn_implementation = False, "eager"
            return getattr(transformers, kind + head)(config)

        return hugging(model)

    return job


LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
HUGGING: dict[str, Callable[[], plait.Job]] = {
    "llama": library("Llama", num_key_value_heads=2, attention_dropout=0.1, **LLAMA),
    "gpt2": library("GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16),
    "gptj": library("GPTJ", n_embd=16, n_layer=2, n_head=2, n_positions=16, rotary_dim=4),
    "gpt_neo": library("GPTNeo", hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=16,
                       attention_types=[[["global", "local"], 1]], window_size=4),
    "neox": library("GPTNeoX", **LLAMA),
    "bloom": library("Bloom", hidden_size=16, n_layer=2, n_head=2),
    "falcon": library("Falcon", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True),
    "codegen": library("CodeGen", n_embd=16, n_layer=2, n_head=4, n_positions=16, rotary_dim=4),
    "opt": library("OPT", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, word_embed_proj_dim=16,
                   max_position_embeddings=16),
    "mpt": library("Mpt", d_model=16, n_layers=2, n_heads=2, max_seq_len=16),
    "mamba": library("Mamba", hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=2),
    "rwkv": library("Rwkv", hidden_size=16, num_hidden_layers=2, attention_hidden_size=16),
    "bert": library("Bert", "ForMaskedLM", **BERT),
    "electra": library("Electra", "ForMaskedLM", embedding_size=16, **BERT),
    "deberta": library("Deberta", "ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8, **BERT),
    "deberta2": library("DebertaV2", "ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4,
                        conv_kernel_size=3, conv_act="gelu", **BERT),
    "roformer": library("RoFormer", "ForMaskedLM", embedding_size=16, **BERT),
    "fnet": library("FNet", "ForMaskedLM", **{k: v for k, v in BERT.items() if k != "num_attention_heads"}),
    "xlnet": library("XLNet", "LMHeadModel", d_model=16, n_layer=2, n_head=2, d_inner=24),
    "convbert": library("ConvBert", "ForMaskedLM", embedding_size=16, conv_kernel_size=3, **BERT),
    "mobilebert": library("MobileBert", "ForMaskedLM", embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16, **BERT),
    "squeezebert": library("SqueezeBert", "ForMaskedLM", embedding_size=16, q_groups=1, k_groups=1, v_groups=1, **BERT),
    "perceiver": library("Perceiver", "ForMaskedLM", num_latents=6, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2,
                         num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=8, qk_channels=16, v_channels=16),
    "mamba2": library("Mamba2", hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    "xlm": library("XLM", "WithLMHeadModel", emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=16, n_words=WORDS),
    "openai": library("OpenAIGPT", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16),
    "ctrl": library("CTRL", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16, dff=24),
    "biogpt": library("BioGpt", **BERT),
    "albert": library("Albert", "ForMaskedLM", embedding_size=16, **BERT),
    "recurrent_gemma": library("RecurrentGemma", hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
                               lru_width=16, attention_window_size=8),
}  # fmt: skip
ALL = {f"own_{name}": job for name, job in OWN.items()} | HUGGING
