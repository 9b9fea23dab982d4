"""Small, different jobs for the tests. Each is ordinary PyTorch, independent of how a plan splits it."""

import dataclasses
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plait


class Numbers:
    """`n` samples drawn once: x [features], and y from a fixed rule."""

    def __init__(self, n: int = 64, features: int = 6, classes: int = 0, augment: bool = False):
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, features, generator=g)
        self.y = (self.x @ torch.randn(features, 1, generator=g)).tanh()
        self.y = (self.y.squeeze(1) * 1000).long() % classes if classes else self.y
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(self.x.shape[1]) * 0.1 + random.random() if self.augment else 0.0
        return self.x[i] + noise, self.y[i]


class Tokens:
    """Sequences with different numbers of real tokens; padding targets are −100."""

    def __init__(self, n: int = 48, length: int = 9, vocabulary: int = 17):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randint(1, vocabulary, (n, length), generator=g)
        self.lengths = torch.randint(1, length + 1, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        targets = self.x[i].roll(-1).clone()
        targets[self.lengths[i] :] = -100
        return self.x[i], targets


class Stream:
    """An iterable data set with a state."""

    def __init__(self, n: int = 40):
        self.items, self.at = Numbers(n, augment=True), 0

    def __iter__(self):
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2)


def make(model, data=Numbers, loss=F.mse_loss, **fields) -> plait.Job:
    return plait.Job(
        **{"model": model, "loss": loss, "data": data, "optimizer": adam, "batch": 12, "steps": 6, **fields}
    )


def mlp(dropout: float = 0.2) -> plait.Job:
    def model():
        return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))

    return make(model, lambda: Numbers(augment=True))


def batch_norm() -> plait.Job:
    def model():
        return nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16, momentum=None, affine=False),
            nn.Linear(16, 1),
        )

    return make(model)


class LanguageModel(nn.Module):
    """An LSTM with dropout between its layers; embedding and head are tied."""

    def __init__(self, vocabulary: int = 17, width: int = 12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def ragged() -> plait.Job:
    return make(LanguageModel, Tokens, language_loss, weight=lambda t: (t != -100).sum())


class Attention(nn.Module):
    """An encoder with dropout in attention, the batch in dim 1, and a frozen embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8).requires_grad_(False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=False)
        self.head = nn.Linear(8, 17)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x).transpose(0, 1)).transpose(0, 1))


def attention() -> plait.Job:
    return make(Attention, Tokens, language_loss, weight=lambda t: (t != -100).sum())


class Branches(nn.Module):
    """One parameter is used for some inputs only, one is never used, and a layer is skipped at random."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.never = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.skipped, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if (x[:, 0] > 1.0).any():
            h = h + self.rare(h) * (x[:, :1] > 1.0)
        if random.random() < 0.5:
            h = h + self.skipped(h)
        return self.last(h)


def branches() -> plait.Job:
    return make(Branches, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))


class Vae(nn.Module):
    """Draws its latent with randn_like; takes a dict and returns a dict."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return {"x": self.decode(z), "mean": mean, "log_var": log_var}


class DictNumbers(Numbers):
    def __getitem__(self, i: int):
        x, _ = super().__getitem__(i)
        return {"x": x}, x


def vae_loss(out: dict[str, Tensor], x: Tensor) -> Tensor:
    kl = -0.5 * (1 + out["log_var"] - out["mean"] ** 2 - out["log_var"].exp()).sum(-1)
    return ((out["x"] - x) ** 2).sum(-1).mean() + kl.mean()


def vae() -> plait.Job:
    return make(
        Vae, DictNumbers, vae_loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)
    )


def stream() -> plait.Job:
    return make(lambda: nn.Linear(6, 1), Stream)


def groups() -> plait.Job:
    """Weight decay on matrices only, a learning-rate multiplier on the last layer, and RMSprop."""

    def optimizer(params):
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
        return torch.optim.RMSprop(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-3
        )

    return make(
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)),
        optimizer=optimizer,
        schedule=lambda s: 1.0 / (1 + s / 50),
    )


ALL = {f.__name__: f for f in (mlp, batch_norm, ragged, attention, branches, vae, stream, groups)}


@dataclasses.dataclass
class Out:
    logits: Tensor
    aux: Tensor | None = None


class Odd(nn.Module):
    """A counter buffer, a cache filled in the first forward, an explicit float32 norm, a frozen batch norm and a dataclass as output."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.cache: Tensor | None = None

    def train(self, mode: bool = True) -> "Odd":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor, scale: Tensor) -> Out:
        self.count += self.training
        if self.cache is None:
            self.cache = torch.arange(8, device=x.device, dtype=x.dtype)
        h = self.norm(self.inner(x)) + self.cache
        h = (h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return Out(self.out(h) * scale[:, None])


class Pairs(Numbers):
    def __getitem__(self, i: int):
        x, y = super().__getitem__(i)
        return (x, torch.tensor(1.0 + i % 3)), y


def odd() -> plait.Job:
    return make(
        Odd, Pairs, lambda out, y: F.huber_loss(out.logits, y), optimizer=lambda p: torch.optim.Adagrad(p, lr=1e-2)
    )


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.2, self.training) * torch.rand_like(x)


class Recomputed(nn.Module):
    """The model uses activation checkpointing itself, with dropout inside; one block draws in a direct call."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()), Noisy(), Noisy()])
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.1, self.training)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return self.last(h)


def recomputed() -> plait.Job:
    return make(Recomputed)


ALL |= {"odd": odd, "recomputed": recomputed}
