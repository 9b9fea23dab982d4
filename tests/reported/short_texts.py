# texts of a few tokens under context parallelism: unpadded, padded in collate to a multiple of the ranks, or all of one length
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import plait


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.layers, self.head = nn.Embedding(30, 16), nn.Sequential(Block(16), Block(16)), nn.Linear(16, 30)

    def forward(self, ids):
        return self.head(self.layers(self.tok(ids)))


class Texts:
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 60

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = {"chat": 3 if i % 2 else 13, "pairs": 3, "answers": 2, "padded": 3 + i % 6, "even": 9}[self.kind]
        x = torch.randint(1, 30, (length,), generator=g)
        return x[:-1], x[1:]

    def collate(self, samples):
        x, y = zip(*samples)
        x, y = pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True, padding_value=-100)
        more = -x.shape[1] % 8 if self.kind == "padded" else 0
        return F.pad(x, (0, more)), F.pad(y, (0, more), value=-100)


def job(kind: str = "chat"):
    return plait.Job(
        model=LM,
        loss=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-100),
        weight=lambda y: (y != -100).sum(),
        data=lambda: Texts(kind),
        optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
        batch=8,
        steps=10,
        clip=1.0,
    )
