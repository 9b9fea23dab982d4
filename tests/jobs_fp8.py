"""A GPT whose linear layers are suited to fp8, with one more linear layer before its blocks and one after them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.embed, self.first = nn.Embedding(64, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(64, (17,), generator=torch.Generator().manual_seed(i))
        return row[:-1], row[1:]


def gpt() -> plait.Job:
    return plait.Job(
        model=GPT, loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), data=Rows,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), batch=8, steps=6, clip=1.0,
    )  # fmt: skip
