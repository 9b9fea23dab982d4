# other uses of complex numbers: a state-space layer with poles in two real columns, frequencies in a buffer, a product made by polar
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Poles(nn.Module):
    """A convolution with the powers of complex poles, computed by the Fourier transform (S4D)."""

    def __init__(self, c, n=4):
        super().__init__()
        self.logs = nn.Parameter(torch.stack([-torch.rand(c, n) - 0.1, torch.rand(c, n) * 3], -1))
        self.gains = nn.Parameter(torch.randn(c, n, 2) / n)

    def forward(self, x):  # [batch, time, c]
        poles, gains = torch.view_as_complex(self.logs), torch.view_as_complex(self.gains)
        powers = torch.exp(poles[..., None] * torch.arange(x.shape[1], device=x.device))
        kernel = torch.einsum("cn,cnt->ct", gains, powers).real
        n = 2 * x.shape[1]
        y = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), n=n) * torch.fft.rfft(kernel, n=n), n=n)
        return y[..., : x.shape[1]].transpose(1, 2)


class Filter(nn.Module):
    """Frequencies weighted by a complex buffer and a real parameter."""

    def __init__(self, c, t=16):
        super().__init__()
        self.register_buffer("shift", torch.exp(1j * torch.rand(t // 2 + 1, c)))
        self.gain = nn.Parameter(torch.ones(c))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.shift * self.gain, n=x.shape[1], dim=1)


class Phases(nn.Module):
    """Two real layers compute amplitude and phase. The next layer receives real and imaginary parts."""

    def __init__(self, c):
        super().__init__()
        self.size, self.phase, self.out = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(2 * c, c)

    def forward(self, x):
        z = torch.polar(F.softplus(self.size(x)), self.phase(x))
        z = z / (1 + z.abs())
        return self.out(torch.view_as_real(z).flatten(-2))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.lift = nn.Linear(3, 8)
        self.layers = nn.ModuleList({"poles": Poles, "filter": Filter, "phases": Phases}[kind](8) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.lift(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.gelu(layer(norm(x)))
        return self.head(x)


class Data:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(i))
        return x, x.sum(-1, keepdim=True).cumsum(0) / 8


def job(kind: str = "poles"):
    return plait.Job(
        model=lambda: Net(kind), loss=F.mse_loss, data=Data, optimizer=lambda p: torch.optim.AdamW(p, 1e-3), batch=12, steps=10, clip=1.0
    )
