"""Models with several sequences: encoders and decoders, and models whose sequence length is no size of the input."""

from typing import Any

import jobs_pipeline
import torch
from jobs import make
from jobs_pipeline import LENGTH, WORDS, Pairs, Samples, words
from jobs_real import hugging
from torch import Tensor, nn
from torch.nn import functional as F

import plait

WIDTH = 8


def bart(length: int = 5) -> plait.Job:
    """A padded encoder, a causal decoder, and cross-attention."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=WORDS, max_position_embeddings=16,
        dropout=0.1, attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return hugging(lambda: BartForConditionalGeneration(config), data=lambda: Padded(length))


class Padded(Samples):
    """An input sequence with some masked positions, and an output sequence."""

    def __init__(self, length: int):
        super().__init__(
            lambda g: {
                "input_ids": words(g),
                "attention_mask": (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (), generator=g)).long(),
                "decoder_input_ids": words(g, length),
            }
        )

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        row, _ = self.rows[i]
        return row, row["decoder_input_ids"].roll(-1)


class Attention(nn.Module):
    """Attention of `h` over `to`, which may be longer or shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, to: Tensor | None = None, causal: bool = False) -> Tensor:
        x = self.norm(h)
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2)
            for t in (self.q(x), *self.kv(x if to is None else to).chunk(2, -1))
        )
        p = 0.1 if self.training else 0.0
        return h + self.out(
            F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal).transpose(1, 2).flatten(2)
        )


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = Attention(), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        h = self.own(h)
        return h + self.inner(h)


class Decoder(Encoder):
    """`aligned`: position i sees the positions up to i of the other sequence."""

    def __init__(self, aligned: bool):
        super().__init__()
        self.aligned, self.cross = aligned, Attention()

    def forward(self, h: Tensor, read: Tensor) -> Tensor:
        h = self.cross(self.own(h, causal=True), read, self.aligned)
        return h + self.inner(h)


class Translator(nn.Module):
    """Written by hand: one embedding for both sequences, tied to the head."""

    def __init__(self, aligned: bool = False, drop: float = 0.1):
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.encoder = nn.ModuleList([Encoder() for _ in range(2)])
        self.decoder = nn.ModuleList([Decoder(aligned) for _ in range(2)])
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        x, y = (self.drop(self.embed(t) + self.position[: t.shape[1]]) for t in (input_ids, decoder_input_ids))
        for block in self.encoder:
            x = block(x)
        x = self.norm(x)
        for block in self.decoder:
            y = block(y, x)
        return y @ self.embed.weight.T


class Transformer(nn.Module):
    """torch's own transformer, with its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 2, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1])
        padding = input_ids == 3
        h = self.body(
            self.embed(input_ids), self.embed(decoder_input_ids), tgt_mask=mask, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(h)


class Added(nn.Module):
    """The sum of two sequences of one length, each with its own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.one, self.other = (nn.ModuleList([Encoder() for _ in range(2)]) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        x, y = self.embed(input_ids), self.embed(decoder_input_ids)
        for a, b in zip(self.one, self.other):
            x, y = a(x), b(y)
        return self.head(x + 0.5 * y)


class Latents(nn.Module):
    """A few learned queries, equal on all ranks. They attend to the sequence, and the sequence to them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.latents = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(3, WIDTH) * 0.1)
        self.look, self.ask = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        h = self.embed(input_ids)
        few = self.latents.expand(len(h), -1, -1)
        few = few + self.look(few, h, h, need_weights=False)[0]
        few = few + self.inner(few)
        return self.head(h + self.ask(h, few, few, need_weights=False)[0])


class Same(Pairs):
    """Pairs of sequences of one length."""

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        row, _ = self.rows[i]
        other = row["input_ids"].flip(0)
        return {"input_ids": row["input_ids"], "decoder_input_ids": other}, other.roll(-1)


def translate(model: Any, data: Any = Pairs) -> Any:
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    return lambda: make(model, data, loss)


ALL = {
    "bart": bart,
    "bart_same": lambda: bart(LENGTH),
    "translator": translate(Translator),
    "aligned": translate(lambda: Translator(aligned=True)),
    "transformer": translate(Transformer),
    "added": translate(Added, Same),
    "latents": translate(Latents, Same),
    "t5": jobs_pipeline.t5,
    "whisper": jobs_pipeline.whisper,
    "vit": jobs_pipeline.vit,
    "clip": jobs_pipeline.clip_pairs,
}
