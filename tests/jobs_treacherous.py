"""Jobs whose training result changes under a split, as users really write them, and ordinary ones: `plait train jobs_treacherous.py:NAME`.

Each is correct on one device. `LOSSES`, `MODELS` and `DATA` are grouped by the part that makes them treacherous; `ORDINARY` jobs are not.
Training decides which of them differ under a plan; their names do not.
"""

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import get_worker_info

import plait

BATCH, CLASSES, WIDTH = 16, 5, 6
EXIT = 0.45


class Points:
    """56 vectors with a class, so that an epoch's last batch is short."""

    def __init__(self, length: int = 56):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, WIDTH, generator=generator)
        self.y = torch.randint(0, CLASSES, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Values(Points):
    """The same with a value to predict."""

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.x[i, :2].sin()


class Masks(Points):
    """The same with a mask to predict, whose density differs between samples."""

    def __getitem__(self, i: int) -> Any:
        return self.x[i], (torch.arange(8) < i % 7).float()


class Tokens(Points):
    """Rows of 8 tokens with the next one to predict; only some have a weight."""

    def __getitem__(self, i: int) -> Any:
        row = (torch.arange(9) * (i + 1) + i) % 11
        y = row[1:].clone()
        y[2 + i % 6 :] = -100
        return row[:-1], y


class Sentences(Points):
    """Rows of 2 to 8 tokens, padded to the longest of their batch."""

    def __getitem__(self, i: int) -> Any:
        return 1 + (torch.arange(2 + (5 * i) % 7) * (i + 1)) % 10, self.y[i]

    def collate(self, samples: list[Any]) -> Any:
        rows = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return rows, torch.stack([y for _, y in samples])


def mlp(out: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, out))


def embedded(out: int = 11) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, out))


def made(
    loss: Any = F.cross_entropy, model: Callable[[], Any] = mlp, data: Callable[[], Any] = Points, **more: Any
) -> plait.Job:
    fields: dict[str, Any] = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2), "batch": BATCH, "steps": 6}
    return plait.Job(model=model, loss=loss, data=data, **fields | more)


# Losses -------------------------------------------------------------------------------------------------------------


def summed() -> plait.Job:
    return made(lambda out, y: F.cross_entropy(out, y, reduction="sum"))


def root() -> plait.Job:
    return made(lambda out, y: F.mse_loss(out, y).sqrt(), lambda: mlp(2), Values)


def dice() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        p = out.sigmoid()
        return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)

    return made(loss, lambda: mlp(8), Masks)


def tokens_without_weight() -> plait.Job:
    return made(lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), embedded, Tokens)


def class_weights() -> plait.Job:
    return made(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 3.0, 1.0])))


def contrastive() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(out[:, :4], dim=1), F.normalize(out[:, 4:], dim=1)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a), device=a.device))

    return made(loss, lambda: mlp(8))


def hardest() -> plait.Job:
    return made(lambda out, y: F.cross_entropy(out, y, reduction="none").topk(4).values.mean())


def hardest_many() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(out, y, reduction="none")
        return each.topk(min(12, len(each))).values.mean()

    return made(loss)


def focal_by_positives() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        p = out.sigmoid()
        each = -((1 - p) ** 2) * y * p.log() - p**2 * (1 - y) * (1 - p).log()
        return each.sum() / y.sum().clamp(min=1)

    return made(loss, lambda: mlp(8), Masks)


def diversity() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean = out.softmax(-1).mean(0)
        return F.cross_entropy(out, y) + 0.5 * (mean * mean.log()).sum()

    return made(loss)


class Smoothed:
    def __init__(self) -> None:
        self.mean: Any = None

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def normalised_by_its_past() -> plait.Job:
    return made(Smoothed())


def spikes_damped() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean = F.cross_entropy(out, y)
        return mean * 0.1 if mean > 1.62 else mean

    return made(loss)


def flooding() -> plait.Job:
    return made(lambda out, y: (F.cross_entropy(out, y) - 1.62).abs() + 1.62)


def batch_hard_triplets() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        far = torch.cdist(out, out)
        same = y[:, None] == y[None]
        return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 1).mean()

    return made(loss)


def correlation() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        a, b = out - out.mean(0), y - y.mean(0)
        return 1 - ((a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0) + 1e-8)).mean()

    return made(loss, lambda: mlp(2), Values)


def standardised_targets() -> plait.Job:
    return made(lambda out, y: F.mse_loss(out, (y - y.mean(0)) / (y.std(0) + 1e-6)), lambda: mlp(2), Values)


def r_squared() -> plait.Job:
    return made(lambda out, y: ((out - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum(), lambda: mlp(2), Values)


def weighed_by_difficulty() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(out, y, reduction="none")
        return (each.detach().softmax(0) * each).sum()

    return made(loss)


def soft_f1() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        p, t = out.softmax(-1), F.one_hot(y, CLASSES)
        hit = (p * t).sum(0)
        return 1 - (2 * hit / (2 * hit + (p * (1 - t)).sum(0) + ((1 - p) * t).sum(0) + 1e-8)).mean()

    return made(loss)


def pairs_ranked() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        higher = (y[:, None, 0] > y[None, :, 0]).float()
        return (F.softplus(-(out[:, None, 0] - out[None, :, 0])) * higher).sum() / higher.sum().clamp(min=1)

    return made(loss, lambda: mlp(2), Values)


def worst_case() -> plait.Job:
    return made(lambda out, y: F.cross_entropy(out, y, reduction="none").max())


def median() -> plait.Job:
    return made(lambda out, y: (out - y).abs().sum(-1).median(), lambda: mlp(2), Values)


class Gaps(Values):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x, torch.where(torch.tensor([i % 3 == 0, i % 5 == 0]), torch.nan, y)


def missing_targets() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        there = ~y.isnan()
        return ((out - y)[there] ** 2).mean()

    return made(loss, lambda: mlp(2), Gaps)


def variance_and_covariance() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        z = out - out.mean(0)
        cov = z.T @ z / (len(z) - 1)
        return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + (cov - cov.diag().diag()).square().sum() / cov.shape[0]

    return made(loss)


def mixed_in_the_loss() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        other = y[torch.randperm(len(y))]
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, other)

    return made(loss)


def geometric_mean() -> plait.Job:
    return made(lambda out, y: F.cross_entropy(out, y, reduction="none").log().mean().exp())


def divided_by_a_fixed_batch() -> plait.Job:
    return made(lambda out, y: F.cross_entropy(out, y, reduction="sum") / BATCH)


LOSSES = (
    "summed", "root", "dice", "tokens_without_weight", "class_weights", "contrastive", "hardest", "hardest_many",
    "focal_by_positives", "diversity", "normalised_by_its_past", "spikes_damped", "flooding", "batch_hard_triplets",
    "correlation", "standardised_targets", "r_squared", "weighed_by_difficulty", "soft_f1", "pairs_ranked", "worst_case",
    "median", "missing_targets", "variance_and_covariance", "mixed_in_the_loss", "geometric_mean", "divided_by_a_fixed_batch",
)  # fmt: skip


# Models -------------------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """A model with a custom forward function between two layers."""

    def __init__(self, between: Callable[["Written", Tensor], Tensor]):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES), between
        self.calls, self.own, self.state = 0, torch.Generator().manual_seed(3), None
        self.gate = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x).tanh()))


def between(function: Callable[[Written, Tensor], Tensor]) -> plait.Job:
    return made(model=lambda: Written(function))


class Read(nn.Module):
    """Embeds tokens and reduces them to one vector."""

    def __init__(self, pool: Callable[["Read", Tensor, Tensor], Tensor], dropout: float = 0.0):
        super().__init__()
        self.embed, self.gru, self.last = nn.Embedding(11, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, CLASSES)
        self.pool, self.dropout = pool, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self, self.dropout(self.embed(x)), x))


def mean_of_padded() -> plait.Job:
    return made(model=lambda: Read(lambda m, h, x: h.mean(1)), data=Sentences)


def last_step_of_padded() -> plait.Job:
    return made(model=lambda: Read(lambda m, h, x: m.gru(h)[0][:, -1]), data=Sentences)


def dropout_on_padded() -> plait.Job:
    mean = lambda m, h, x: (h * (x > 0)[..., None]).sum(1) / (x > 0).sum(1, keepdim=True)  # noqa: E731
    return made(model=lambda: Read(mean, 0.2), data=Sentences)


def capacity() -> plait.Job:
    def route(m: Written, h: Tensor) -> Tensor:
        chosen = m.gate(h).argmax(-1)
        room = math.ceil(0.55 * len(h))
        place = F.one_hot(chosen, 2).cumsum(0).gather(1, chosen[:, None])
        return h * (place <= room) * m.gate(h).softmax(-1).amax(-1, keepdim=True)

    return between(route)


def early_exit() -> plait.Job:
    return between(lambda m, h: h if h.abs().mean() > EXIT else h + m.gate(h).sum(-1, keepdim=True))


def noise_of_numpy() -> plait.Job:
    return between(lambda m, h: h + 0.1 * torch.from_numpy(np.random.randn(*h.shape)).to(h))


def noise_of_python() -> plait.Job:
    return between(lambda m, h: h * torch.tensor([random.uniform(0.8, 1.2) for _ in range(len(h))])[:, None].to(h))


def noise_of_its_own() -> plait.Job:
    return between(lambda m, h: h + 0.1 * torch.randn(h.shape, generator=m.own, dtype=torch.float32).to(h))


def noise_of_a_fixed_seed() -> plait.Job:
    return between(lambda m, h: h + 0.1 * torch.from_numpy(np.random.default_rng(0).normal(size=h.shape)).to(h))


def noise_without_a_seed() -> plait.Job:
    return between(lambda m, h: h + 0.1 * torch.from_numpy(np.random.default_rng().normal(size=h.shape)).to(h))


def clock() -> plait.Job:
    return between(lambda m, h: h * (1 + 0.1 * math.sin(time.perf_counter() * 1e3)))


def counted_temperature() -> plait.Job:
    def warm(m: Written, h: Tensor) -> Tensor:
        m.calls += 1
        return h / (1 + 0.1 * m.calls)

    return between(warm)


def standardised() -> plait.Job:
    return between(lambda m, h: (h - h.mean(0)) / (h.std(0) + 1e-5))


def deviation_of_the_batch() -> plait.Job:
    return between(lambda m, h: h + h.std(0).mean())


def attention_over_samples() -> plait.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(11, 12), nn.Linear(12, 11)
            self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0)  # missing: batch_first

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(self.embed(x)))

    return made(
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        Model,
        Tokens,
        weight=lambda y: (y != -100).sum(),
    )


def softmax_over_samples() -> plait.Job:
    return between(lambda m, h: h * h.softmax(0))


def scaled_by_the_largest() -> plait.Job:
    return between(lambda m, h: h / h.abs().max().detach())


def stateful() -> plait.Job:
    def carry(m: Written, h: Tensor) -> Tensor:
        m.state = h.detach().mean(0) if m.state is None else m.state
        return h + m.state

    return between(carry)


def nearest_sample() -> plait.Job:
    return between(lambda m, h: h + 0.5 * h[(torch.cdist(h, h) + 1e3 * torch.eye(len(h)).to(h)).argmin(1)])


def rolled() -> plait.Job:
    return between(lambda m, h: 0.9 * h + 0.1 * h.roll(1, 0))


MODELS = (
    "mean_of_padded", "last_step_of_padded", "dropout_on_padded", "capacity", "early_exit", "noise_of_numpy",
    "noise_of_python", "noise_of_its_own", "noise_of_a_fixed_seed", "noise_without_a_seed", "clock", "counted_temperature",
    "standardised", "deviation_of_the_batch", "attention_over_samples", "softmax_over_samples", "scaled_by_the_largest",
    "stateful", "nearest_sample", "rolled",
)  # fmt: skip


# Data ---------------------------------------------------------------------------------------------------------------


class Noisy(Points):
    def __init__(self, noise: Callable[["Noisy", int], Tensor]):
        super().__init__()
        self.noise, self.own, self.reads = noise, torch.Generator().manual_seed(1), 0

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.x[i] + 0.1 * self.noise(self, i), self.y[i]


def noise(function: Callable[[Noisy, int], Tensor]) -> plait.Job:
    return made(data=lambda: Noisy(function))


def data_with_a_generator() -> plait.Job:
    return noise(lambda d, i: torch.randn(WIDTH, generator=d.own))


def data_without_a_seed() -> plait.Job:
    return noise(lambda d, i: torch.from_numpy(np.random.default_rng().normal(size=WIDTH)).float())


def data_that_counts() -> plait.Job:
    return noise(lambda d, i: torch.full((WIDTH,), math.sin(d.reads)))


def data_by_the_clock() -> plait.Job:
    return noise(lambda d, i: torch.full((WIDTH,), math.sin(time.perf_counter() * 1e3)))


def data_by_rank() -> plait.Job:
    return noise(lambda d, i: torch.full((WIDTH,), float(dist.get_rank() if dist.is_initialized() else 0)))


def data_by_loader() -> plait.Job:
    return noise(lambda d, i: torch.full((WIDTH,), float(get_worker_info() is not None)))


class Mixing(Points):
    def collate(self, samples: list[Any]) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        return 0.8 * x + 0.2 * x[torch.randperm(len(x))], y


def mixup() -> plait.Job:
    return made(data=Mixing)


class Pasting(Points):
    def collate(self, samples: list[Any]) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        return torch.cat([x[:, :3], x.flip(0)[:, 3:]], 1), y


def cutmix() -> plait.Job:
    return made(data=Pasting)


class Centred(Points):
    def collate(self, samples: list[Any]) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        return x - x.mean(0), y


def centred() -> plait.Job:
    return made(data=Centred)


DATA = (
    "data_with_a_generator", "data_without_a_seed", "data_that_counts", "data_by_the_clock", "data_by_rank", "mixup", "cutmix",
    "centred",
)  # fmt: skip


# Ordinary -----------------------------------------------------------------------------------------------------------


def plain() -> plait.Job:
    return made(clip=0.5)


def regression() -> plait.Job:
    return made(F.smooth_l1_loss, lambda: mlp(2), Values)


def tokens_with_weight() -> plait.Job:
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    return made(loss, embedded, Tokens, weight=lambda y: (y != -100).sum())


def classes_with_weight() -> plait.Job:
    table = torch.tensor([1.0, 5.0, 0.2, 3.0, 1.0])
    return made(nn.CrossEntropyLoss(weight=table), weight=lambda y: table[y].sum())


def transformer() -> plait.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(11, 12), nn.Linear(12, 11)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 24, 0.1, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for layer in self.layers:
                h = layer(h)
            return self.last(h)

    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    return made(loss, Model, Tokens, weight=lambda y: (y != -100).sum())


def images() -> plait.Job:
    class Images(Points):
        def __getitem__(self, i: int) -> Any:
            return self.x[i, None, :, None].expand(1, 6, 6) + 0.1 * torch.randn(1, 6, 6), self.y[i]

    def model() -> nn.Module:
        body = (
            nn.Conv2d(1, 8, 3),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Flatten(),
            nn.Linear(128, CLASSES),
        )
        return nn.Sequential(*body)

    return made(model=model, data=Images)


def batch_normed() -> plait.Job:
    return made(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    )


def recurrent() -> plait.Job:
    return made(model=lambda: Read(lambda m, h, x: m.gru(h)[0][:, -1]), data=Fixed)


class Fixed(Points):
    def __getitem__(self, i: int) -> Any:
        return (torch.arange(6) * (i + 1)) % 11, self.y[i]


def masked_padding() -> plait.Job:
    mean = lambda m, h, x: (h * (x > 0)[..., None]).sum(1) / (x > 0).sum(1, keepdim=True)  # noqa: E731
    return made(model=lambda: Read(mean), data=Sentences)


def noise_of_torch() -> plait.Job:
    return between(lambda m, h: h + 0.1 * torch.randn_like(h))


def stochastic_depth() -> plait.Job:
    return between(lambda m, h: h + m.gate(h).sum(-1, keepdim=True) * (torch.rand(len(h), 1) > 0.3).to(h))


def augmented() -> plait.Job:
    return noise(lambda d, i: torch.randn(WIDTH) + random.random() + np.random.rand())


def seeded_by_sample() -> plait.Job:
    return noise(lambda d, i: torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)))


class Stream:
    def __iter__(self) -> Any:
        data = Points()
        yield from (data[i] for i in random.sample(range(len(data)), len(data)))


def stream() -> plait.Job:
    return made(data=Stream)


def contrastive_of_all() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        z, t = plait.global_batch(F.normalize(out, dim=1)), plait.global_batch(y)
        far = torch.cdist(z, z)
        return (far * (t[:, None] == t[None])).mean() + F.relu(1 - far).mean()

    return made(loss)


def diversity_of_all() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean = plait.global_mean(out.softmax(-1))
        return F.cross_entropy(out, y) + 0.5 * (mean * mean.log()).sum()

    return made(loss)


def outputs_as_dict() -> plait.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return {"logits": out, "norm": out.square().mean(-1), "temperature": 0.5}

    return made(lambda out, y: F.cross_entropy(out["logits"], y) + 0.01 * out["norm"].mean(), Model)


def guarded() -> plait.Job:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        assert torch.isfinite(out).all()
        return F.cross_entropy(out, y, label_smoothing=0.1).clamp(max=1e6)

    return made(loss)


ORDINARY = (
    "plain", "regression", "tokens_with_weight", "classes_with_weight", "transformer", "images", "batch_normed", "recurrent",
    "masked_padding", "noise_of_torch", "stochastic_depth", "augmented", "seeded_by_sample", "stream", "contrastive_of_all",
    "diversity_of_all", "outputs_as_dict", "guarded",
)  # fmt: skip
TREACHEROUS = (*LOSSES, *MODELS, *DATA)
