"""Models whose forward pass varies from step to step, by input sizes or by parts that are skipped at random."""

import dataclasses
import random
from typing import Any

import jobs_unlike
import numpy as np
import torch
from jobs import language_loss, make
from jobs_real import hugging
from jobs_unlike import Block, Chain
from torch import Tensor, nn
from torch.nn import functional as F

import plait

WORDS = 31


# — varying sizes —


class Ragged:
    """Sequences of different lengths, padded to the longest of the micro-batch."""

    def __init__(self, n: int = 48) -> None:
        g = torch.Generator().manual_seed(3)
        self.rows = [
            torch.randint(1, WORDS, (int(torch.randint(3, 12, (), generator=g)),), generator=g) for _ in range(n)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.rows[i], self.rows[i].roll(-1)

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor]:
        x, y = zip(*samples)
        return pad(x, 0), pad(y, -100)


def pad(rows: Any, value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


class Causal(nn.Module):
    """Causal attention: padding after a sequence does not affect its results."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Padded(nn.Module):
    """The first block's output is used again at the end; the position table is a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(16, 8) * 0.02)
        self.embed, self.blocks = nn.Embedding(WORDS, 8), nn.ModuleList(Causal() for _ in range(4))
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(h + first)


def padded() -> plait.Job:
    return make(Padded, Ragged, language_loss, weight=lambda t: (t != -100).sum())


class Pictures(Ragged):
    """Images of different sizes, padded to the largest, with a mask of the real pixels."""

    def __init__(self, n: int = 48) -> None:
        g = torch.Generator().manual_seed(5)
        sides = torch.randint(3, 8, (n, 2), generator=g).tolist()
        self.rows: list[Any] = [
            (torch.randn(2, h, w, generator=g), torch.randint(4, (), generator=g)) for h, w in sides
        ]

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.rows[i]

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor]:
        h, w = (max(x.shape[d] for x, _ in samples) for d in (1, 2))
        grow = lambda x: F.pad(x, (0, w - x.shape[2], 0, h - x.shape[1]))  # noqa: E731
        mask = torch.stack([grow(torch.ones_like(x[:1])) for x, _ in samples])
        return {"x": torch.stack([grow(x) for x, _ in samples]), "mask": mask}, torch.stack([y for _, y in samples])


class Conv(nn.Module):
    def __init__(self, inputs: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 6, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.gelu(self.conv(x)) * mask


class Sizes(nn.Module):
    """Convolutions with one skip connection over all of them, and a mean over the real pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.convs = Conv(2), nn.ModuleList(Conv() for _ in range(4))
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = skip = self.first(x, mask)
        for conv in self.convs:
            h = conv(h, mask)
        return self.last((h + skip).sum((2, 3)) / mask.sum((2, 3)))


class Graphs(Ragged):
    """Graphs of different sizes, packed into one: nodes, edges, and the graph of each node."""

    def __init__(self, n: int = 48) -> None:
        g = torch.Generator().manual_seed(6)
        self.rows: list[Any] = []
        for _ in range(n):
            size = int(torch.randint(2, 7, (), generator=g))
            edges = torch.randint(0, size, (2, 2 * size), generator=g)
            self.rows.append((torch.randn(size, 6, generator=g), edges, torch.randn(1, generator=g)))

    def __getitem__(self, i: int) -> Any:
        return self.rows[i][:2], self.rows[i][2]

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor]:
        starts = np.cumsum([0, *(len(x) for (x, _), _ in samples)]).tolist()
        nodes = torch.cat([x for (x, _), _ in samples])
        edges = torch.cat([e + s for ((_, e), _), s in zip(samples, starts)], 1)
        owner = torch.cat([torch.full((len(x),), i) for i, ((x, _), _) in enumerate(samples)])
        return (nodes, edges, owner, torch.zeros(len(samples), 8)), torch.stack([y for _, y in samples])


class Message(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(p=0.0)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + self.block(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = (
            nn.Linear(6, 8),
            nn.ModuleList(Message() for _ in range(4)),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, each: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h, edges)
        return self.last(each.to(h.dtype).index_add(0, owner, h))


class Masked(Ragged):
    """Data for models of the Hugging Face library: words, and a mask of the real ones."""

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor]:
        x, y = super().collate(samples)
        return {"input_ids": x, "attention_mask": (y != -100).long()}, y


def llama_padded() -> plait.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=WORDS, max_position_embeddings=16,
    )  # fmt: skip
    return hugging(lambda: LlamaForCausalLM(config), data=Masked, loss=words_loss, weight=lambda y: (y != -100).sum())


class Caching(Masked):
    """Inputs that enable the cache."""

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor]:
        x, y = super().collate(samples)
        return {**x, "use_cache": True}, y


def llama_caching() -> plait.Job:
    return dataclasses.replace(llama_padded(), data=Caching)


def words_loss(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), y.flatten())


def bert_padded() -> plait.Job:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=WORDS,
        max_position_embeddings=16, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return hugging(lambda: BertForMaskedLM(config), data=Masked, loss=words_loss, weight=lambda y: (y != -100).sum())


VARYING = {
    "padded": padded, "sizes": lambda: make(Sizes, Pictures, F.cross_entropy), "graph": lambda: make(Graph, Graphs),
    "llama_padded": llama_padded, "bert_padded": bert_padded,
}  # fmt: skip


# — parts skipped at random —


class NumpyDrop(Chain):
    """The root skips blocks by numpy's generator; a block draws from Python's and numpy's generators itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if np.random.rand() < 0.6:
                x = block(x) * random.uniform(0.9, 1.1)
        return self.last(x * np.random.uniform(0.9, 1.1))


class Moody(Block):
    """A block that draws a varying count of random numbers itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        while random.random() < 0.5:
            y = y * np.random.uniform(0.9, 1.1)
        return F.dropout(y, 0.2, self.training)


class MoodyDrop(NumpyDrop):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Moody() for _ in range(4))


class TorchDrop(Chain):
    """Skips by reading a value of torch's generator, as many libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        for block in self.blocks:
            if not (self.training and torch.rand([]) < 0.4):
                x = F.dropout(block(x), 0.1, self.training)
        return self.last(x)


def whisper_drop() -> plait.Job:
    import jobs_pipeline
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=6, max_target_positions=16,
        vocab_size=jobs_pipeline.WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        encoder_layerdrop=0.4, decoder_layerdrop=0.4,
    )  # fmt: skip
    return hugging(lambda: WhisperForConditionalGeneration(config), data=jobs_pipeline.Sounds)


RANDOM = {
    "layer_drop": jobs_unlike.ALL["layer_drop"], "drop_inside": jobs_unlike.ALL["drop_inside"],
    "numpy_drop": lambda: make(NumpyDrop), "moody": lambda: make(MoodyDrop),
    "torch_drop": lambda: make(TorchDrop), "whisper_drop": whisper_drop,
}  # fmt: skip


# — objects with tensors inside —


class Bag(dict):
    """A dict with attributes."""

    note = ""


class Note:
    """An object inside an object."""

    def __init__(self, seen: Tensor, depth: int) -> None:
        self.seen, self.depth = seen, depth


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, bag: Bag) -> Bag:
        made = Bag(h=self.block(bag["h"]), first=bag["first"])
        made.note = Note(bag["h"].mean(-1, keepdim=True), bag.note.depth + 1)
        return made


class Bags(nn.Module):
    """A subclass of dict, with an object in an attribute, goes from block to block; the first value skips to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Packs() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        bag = Bag(h=h, first=h)
        bag.note = Note(h[:, :1], 0)
        for block in self.blocks:
            bag = block(bag)
            bag["h"] = bag["h"] + bag.note.seen * bag.note.depth
        return self.last(bag["h"] + bag["first"])


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: Any) -> Any:
        state.h = self.block(state.h)
        return state


class Changed(nn.Module):
    """Blocks change the input state and return it; the root reads it through its old name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Changes() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        old = state = jobs_unlike.State(self.first(x))
        for block in self.blocks:
            state = block(state)
            state.h = state.h + 0.1 * old.h.tanh()
        return self.last(old.h)


class Aside(Changes):
    """Changes the state and returns a second value with it."""

    def forward(self, state: Any) -> Any:
        return super().forward(state), state.h.sum(-1)


class Asides(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state, total = jobs_unlike.State(self.first(x)), 0.0
        for block in self.blocks:
            state, more = block(state)
            total = total + more
        return self.last(state.h) + total[:, None]


class Silent(Changes):
    """Changes the state and returns None."""

    def forward(self, state: Any) -> None:
        super().forward(state)


class Silents(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Silent() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = jobs_unlike.State(self.first(x))
        for block in self.blocks:
            block(state)
        return self.last(state.h)


OBJECTS = {
    "objects": jobs_unlike.ALL["objects"], "bags": lambda: make(Bags), "changed": lambda: make(Changed),
}  # fmt: skip
UNFOLLOWED = {
    "asides": (lambda: make(Asides), "changes its input in place"), "silents": (lambda: make(Silents), "outside of its output"),
}  # fmt: skip
"""Name -> (job, words of the error)."""


class Leaving(nn.Module):
    """A block that also stores a value it computed, in a list passed to it or in an attribute."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.down, self.where = nn.Linear(8, 16), nn.Linear(16, 8), where

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        inner = torch.tanh(self.up(x))
        out = x + self.down(inner)
        if self.where == "list":
            kept.append(inner.mean(-1))
        elif self.where == "output":
            kept.append(out)
        else:
            self.last = inner.mean(-1)
        return out


class Leaves(nn.Module):
    """Returns the values that its blocks store, or a value computed from them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(6, 8),
            nn.ModuleList(Leaving(where) for _ in range(4)),
            nn.Linear(8, 1),
        )
        self.where = where

    def forward(self, x: Tensor) -> dict[str, Any]:
        x, kept = self.first(x), list[Tensor]()
        for block in self.blocks:
            x = block(x, kept)
        if self.where == "attribute":
            kept = [block.last for block in self.blocks]
        whole = torch.stack(kept).square().mean((0, 2)) if self.where == "output" else torch.stack(kept).sum(0)
        return {"y": self.last(x), "kept": kept, "whole": whole}


def left(where: str, read: Any = None) -> plait.Job:
    def loss(out: Any, y: Tensor) -> Tensor:
        return F.mse_loss(out["y"], y) + (0.0 if read is None else read(out).mean())

    return make(lambda: Leaves(where), loss=loss)


UNREAD = {
    "list": lambda: left("list"), "attribute": lambda: left("attribute"), "output": lambda: left("output"),
    "last_of_list": lambda: left("list", lambda out: out["kept"][3]),
}  # fmt: skip
"""Units store values in objects, and the loss depends on no value of another stage."""
READ = {
    "list": lambda: left("list", lambda out: out["kept"][0]), "whole": lambda: left("attribute", lambda out: out["whole"]),
    "output": lambda: left("output", lambda out: out["kept"][1]),
}  # fmt: skip
"""The same units; here the loss depends on a value of another stage."""
