"""A byte-level GPT on the Python standard library's own source: real text, no download.

    plait train  examples/stdlib_gpt/job.py --nproc 2
    plait verify examples/stdlib_gpt/job.py --plan "dp=2"

Everything here is ordinary PyTorch for one device. plait reads the last function and splits the rest.
"""

import hashlib
import os
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import plait


class Block(nn.Module):
    """Pre-norm attention and MLP. x: [batch, length, width]."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        attention = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attention.transpose(1, 2).reshape(b, t, w)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the embedding. Bytes in, logits over bytes out."""

    def __init__(self, depth: int, width: int, heads: int, length: int, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def corpus() -> Tensor:
    """The source of the standard library as one row of bytes, in the order of the file names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
    files = list[Path]()
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in skip]  # other folders are skipped
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    text = bytearray(b"\n".join(p.read_bytes() for p in files))
    digest = hashlib.sha256(text).hexdigest()[:12]
    print(f"corpus  Python standard library, {len(text) / 1e6:.1f} MB, sha256 {digest}", flush=True)
    return torch.frombuffer(text, dtype=torch.uint8)


class StdlibText:
    """Windows of `length` bytes and, as targets, the same windows one byte later."""

    def __init__(self, length: int):
        self.text, self.length = corpus(), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.text[i * self.length : (i + 1) * self.length + 1].long()
        return window[:-1], window[1:]


def job(
    depth: int = 4, width: int = 128, heads: int = 4, length: int = 128, dropout: float = 0.0, lr: float = 2e-3,
    batch: int = 32, steps: int = 300,
) -> plait.Job:  # fmt: skip
    """The arguments become ``--job.depth 8``."""
    warm = 20 * batch
    return plait.Job(
        model=lambda: GPT(depth, width, heads, length, dropout),
        loss=lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
        data=lambda: StdlibText(length),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, fused=True),
        batch=batch,
        steps=steps,
        schedule=lambda samples: min(1.0, (samples + batch) / warm),
        clip=1.0,
    )
