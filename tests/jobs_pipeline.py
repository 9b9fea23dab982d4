"""Models that a pipeline must split unchanged: small ones of the Hugging Face library, and models that are hard to split."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jobs
import jobs_real
import jobs_unlike
import torch
from jobs import Tokens, language_loss, make
from jobs_real import hugging
from jobs_unlike import Block, blocks
from torch import Tensor, nn
from torch.nn import functional as F

import plait

LENGTH, WORDS = 8, 31


class Samples:
    """A few samples, drawn once. A generator seeded with the sample's number makes `inputs` and `target`."""

    def __init__(self, inputs: Callable[[torch.Generator], dict[str, Tensor]], classes: int = 4, n: int = 24):
        g = torch.Generator().manual_seed(11)
        self.rows = [(inputs(g), torch.randint(classes, (), generator=g)) for _ in range(n)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        return self.rows[i]


def pixels(side: int, channels: int = 3) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda g: {"pixel_values": torch.randn(channels, side, side, generator=g)}


def words(g: torch.Generator, n: int = LENGTH) -> Tensor:
    return torch.randint(1, WORDS, (n,), generator=g)


def label(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


def gemma() -> plait.Job:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=WORDS, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return hugging(lambda: GemmaForCausalLM(config))


def llama() -> plait.Job:
    return jobs_real.llama(tied=False)


def gpt2() -> plait.Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=WORDS, n_positions=16)
    return hugging(lambda: GPT2LMHeadModel(config))


def mixtral() -> plait.Job:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=WORDS, max_position_embeddings=16, num_local_experts=4, experts_implementation="eager",
    )  # fmt: skip
    return hugging(lambda: MixtralForCausalLM(config))


class Masked(Samples):
    """Words, a mask of the real ones, and the same words to restore."""

    def __init__(self) -> None:
        super().__init__(lambda g: {"input_ids": words(g), "length": torch.randint(3, LENGTH + 1, (), generator=g)})

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        row, _ = self.rows[i]
        mask = torch.arange(LENGTH) < row["length"]
        return {"input_ids": row["input_ids"], "attention_mask": mask.long()}, torch.where(mask, row["input_ids"], -100)


def bert(layers: int = 3, attention: str = "eager") -> plait.Job:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=24, vocab_size=WORDS,
        max_position_embeddings=16, attn_implementation=attention,
    )  # fmt: skip
    return hugging(
        lambda: BertForMaskedLM(config),
        data=Masked,
        loss=lambda out, y: F.cross_entropy(out.logits.flatten(0, 1), y.flatten()),
        weight=lambda y: (y != -100).sum(),
    )


class Pairs(Samples):
    """Pairs of an input and an output sequence."""

    def __init__(self) -> None:
        super().__init__(lambda g: {"input_ids": words(g), "decoder_input_ids": words(g, 5)})

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        row, _ = self.rows[i]
        return row, row["decoder_input_ids"].roll(-1)


def t5() -> plait.Job:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2, vocab_size=WORDS,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hugging(lambda: T5ForConditionalGeneration(config), data=Pairs)


def vit() -> plait.Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=4, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return hugging(lambda: ViTForImageClassification(config), data=lambda: Samples(pixels(8)), loss=label)


def swin() -> plait.Job:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, num_labels=4,
        drop_path_rate=0.0,
    )  # fmt: skip
    return hugging(lambda: SwinForImageClassification(config), data=lambda: Samples(pixels(16)), loss=label)


def mamba() -> plait.Job:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=16, num_hidden_layers=3, state_size=4, vocab_size=WORDS)
    return hugging(lambda: MambaForCausalLM(config))


def convnext() -> plait.Job:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2, image_size=16, num_labels=4
    )
    return hugging(lambda: ConvNextForImageClassification(config), data=lambda: Samples(pixels(16)), loss=label)


class Sounds(Samples):
    def __init__(self) -> None:
        super().__init__(
            lambda g: {"input_features": torch.randn(8, 12, generator=g), "decoder_input_ids": words(g, 5)}
        )

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        row, _ = self.rows[i]
        return row, row["decoder_input_ids"].roll(-1)


def whisper() -> plait.Job:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=6, max_target_positions=16,
        vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return hugging(lambda: WhisperForConditionalGeneration(config), data=Sounds)


class Towers(Samples):
    def __init__(self) -> None:
        super().__init__(lambda g: {"input_ids": words(g), **pixels(8)(g)})


def _clip_model() -> Any:
    from transformers import CLIPConfig, CLIPModel

    side = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**side, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    image = {**side, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=12))


def clip() -> plait.Job:
    """The contrastive loss depends on the full batch, so no split into micro-batches is exact."""

    def loss(out: Any, _: Tensor) -> Tensor:
        mine = torch.arange(len(out.logits_per_text), device=out.logits_per_text.device)
        return (F.cross_entropy(out.logits_per_text, mine) + F.cross_entropy(out.logits_per_image, mine)) / 2

    return hugging(_clip_model, data=Towers, loss=loss)


def clip_pairs() -> plait.Job:
    """The two towers under a loss of each sample alone."""
    return hugging(
        _clip_model, data=Towers, loss=lambda out, _: (out.text_embeds - out.image_embeds).square().sum(-1).mean()
    )


# — written by hand —


class RootGPT(nn.Module):
    """A position parameter of the root itself; embedding and head are tied; dropout between units."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(9, 8) * 0.02)
        self.embed, self.blocks, self.norm = nn.Embedding(17, 8), blocks(4), nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.embed(x) + self.position[: x.shape[1]], 0.1, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Deep(nn.Module):
    """A long chain, for many stages."""

    def __init__(self, n: int = 7) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 8), blocks(n), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class Recurrent(nn.Module):
    """LSTMs that pass states to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.embed(x), None
        for layer in self.layers:
            h, state = layer(h, state)
        return self.head(F.dropout(h, 0.1, self.training))


class Router(nn.Module):
    """Returns an expert's index (integers), a mask of the rows that it changes (booleans), the probabilities, and the balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p = self.score(x).softmax(-1)
        return p.argmax(-1), p.max(-1).values > 0.34, p, p.square().sum(-1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, to: Tensor, kept: Tensor, p: Tensor) -> Tensor:
        out = torch.stack([e(x) for e in self.experts], -2)
        out = (out * F.one_hot(to, 3).unsqueeze(-1) * p.unsqueeze(-1)).sum(-2)
        return torch.where(kept.unsqueeze(-1), out, x)


class Moe(nn.Module):
    """This block's experts and the next block's use a router's choices; its balance loss is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.routers, self.experts = (
            nn.ModuleList(Router() for _ in range(2)),
            nn.ModuleList(Experts() for _ in range(3)),
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        h, balance = self.first(x), []
        for i, experts in enumerate(self.experts):
            if i < 2:
                to, kept, p, aux = self.routers[i](h)
                balance.append(aux)
            h = h + experts(h, to, kept, p)
        return {"out": self.last(h), "balance": sum(balance)}


def moe() -> plait.Job:
    return make(Moe, loss=lambda out, y: F.mse_loss(out["out"], y) + 0.1 * out["balance"].mean())


@dataclass
class State:
    h: Tensor
    x: Tensor
    steps: int


class Stage(nn.Module):
    """Takes a state by keyword, with the batch's own input and a mask; returns a state."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.take = Block(), nn.Linear(6, 8)

    def forward(self, *, state: State, mask: Tensor) -> State:
        return State(self.block(state.h) + self.take(state.x) * mask, state.x, state.steps + 1)


class Everywhere(nn.Module):
    """The batch's input, a mask made of it, and a buffer are used in all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.stages = nn.ModuleList(Stage() for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor, scale: Tensor) -> State:
        mask = (x[:, :1] > 0) * scale[:, None] * self.scale
        state = State(self.first(x), x, 0)
        for stage in self.stages:
            state = stage(state=state, mask=mask)
        return State(self.last(state.h), x, state.steps)


def everywhere() -> plait.Job:
    return make(Everywhere, jobs.Pairs, lambda out, y: F.huber_loss(out.h, y))


class SharedNorm(nn.Module):
    """One norm called after each block: each stage has its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.norm, self.last = nn.Linear(6, 8), blocks(4), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = self.norm(block(h))
        return self.last(h)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(17, 8), blocks(4), nn.Linear(8, 17, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class HeadedTied(Headed):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def chunked(model: Any) -> Callable[[], plait.Job]:
    """The head's product and the loss in one, chunk by chunk."""
    loss = plait.LinearCrossEntropy("head", chunk=5)
    return lambda: make(model, Tokens, loss, weight=loss.weight)


def tokens(model: Any) -> Callable[[], plait.Job]:
    return lambda: make(model, Tokens, language_loss, weight=lambda t: (t != -100).sum())


HUGGING = {
    "llama": llama, "gemma": gemma, "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "swin": swin, "mamba": mamba,
    "convnext": convnext, "whisper": whisper, "clip_pairs": clip_pairs, "mixtral": mixtral,
}  # fmt: skip
LISTED = {
    "deep": lambda: make(Deep), "unet": jobs_unlike.ALL["unet"], "unet_example": jobs_real.unet, "root_gpt": tokens(RootGPT),
    "recurrent": tokens(Recurrent), **HUGGING,
}  # fmt: skip
"""Models that a pipeline must support."""
HARD = {
    "moe": moe, "everywhere": everywhere, "shared_norm": lambda: make(SharedNorm),
    "llama_tied": lambda: jobs_real.llama(tied=True), "gpt": jobs_real.gpt,
    "chunked": chunked(Headed), "chunked_tied": chunked(HeadedTied),
    "frozen_chain": lambda: make(jobs_unlike.FrozenMiddle), "clipped": lambda: replace(make(Deep), clip=0.01),
}  # fmt: skip
"""Other models that are hard to split."""
