# Fourier neural operator with complex parameters
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Spectral(nn.Module):
    def __init__(self, c, m):
        super().__init__()
        self.m = m
        self.w = nn.Parameter(torch.randn(c, c, m, dtype=torch.cfloat) / c)

    def forward(self, x):
        f = torch.fft.rfft(x)
        out = torch.zeros_like(f)
        out[..., : self.m] = torch.einsum("bim,iom->bom", f[..., : self.m], self.w)
        return torch.fft.irfft(out, n=x.shape[-1])


class Layer(nn.Module):
    def __init__(self, c, m):
        super().__init__()
        self.s, self.l = Spectral(c, m), nn.Conv1d(c, c, 1)

    def forward(self, x):
        return F.gelu(self.s(x) + self.l(x))


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(1, 8, 1)
        self.layers = nn.ModuleList(Layer(8, 5) for _ in range(3))
        self.proj = nn.Conv1d(8, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        for l in self.layers:
            x = l(x)
        return self.proj(x)


class Data:
    def __len__(self):
        return 80

    def __getitem__(self, i):
        x = torch.randn(1, 32, generator=torch.Generator().manual_seed(i))
        return x, x.cumsum(-1) / 8


def job():
    return plait.Job(
        model=FNO,
        loss=F.mse_loss,
        data=Data,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3),
        batch=16,
        steps=12,
        clip=1.0,
    )
