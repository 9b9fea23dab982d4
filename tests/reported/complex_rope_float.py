# Llama as many write it: complex rope buffer, x.float() in rope and norm
import torch
import torch.nn.functional as F
from torch import nn

import plait

V = 64


class RMS(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.type_as(x) * self.weight


def rotate(x, f):
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * f[None, :, None]
    return torch.view_as_real(z).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = (
            nn.Linear(d, 48, bias=False),
            nn.Linear(d, 48, bias=False),
            nn.Linear(48, d, bias=False),
        )
        self.an, self.fn = RMS(d), RMS(d)

    def forward(self, x, f):
        b, t, d = x.shape
        y = self.an(x)
        q, k, v = (w(y).view(b, t, self.h, -1) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, f), rotate(k, f)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.wo(a.transpose(1, 2).reshape(b, t, d))
        y = self.fn(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, d=32, h=4):
        super().__init__()
        self.tok = nn.Embedding(V, d)
        self.layers = nn.ModuleList(Block(d, h) for _ in range(2))
        self.norm, self.out = RMS(d), nn.Linear(d, V, bias=False)
        f = torch.outer(torch.arange(64).float(), 1e4 ** (-torch.arange(0, d // h, 2).float() / (d // h)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(f), f), persistent=False)

    def forward(self, ids):
        x, f = self.tok(ids), self.freqs_cis[: ids.shape[1]]
        for l in self.layers:
            x = l(x, f)
        return self.out(self.norm(x))


class Text:
    def __len__(self):
        return 200

    def __getitem__(self, i):
        s = torch.randint(0, V, (17,), generator=torch.Generator().manual_seed(i))
        return s[:-1], s[1:]


def job():
    return plait.Job(
        model=Llama,
        loss=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
        data=Text,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
        batch=16,
        steps=20,
        clip=1.0,
    )
