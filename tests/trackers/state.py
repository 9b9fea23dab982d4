"""State that the forward pass writes: caches, codebooks, teachers, statistics, counters."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plait
from trackers.samples import Chain, Images, Ragged, Texts, first, made, next_token, sgd


class _Rotary(nn.Module):
    """Attention with rotary positions, whose tables grow if a longer text arrives."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("cos", torch.zeros(0, 2), persistent=False)
        self.register_buffer("sin", torch.zeros(0, 2), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        n = x.shape[2]
        if len(self.cos) < n:
            angles = torch.arange(n)[:, None] * torch.tensor([1.0, 0.1])
            self.cos, self.sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[:n].to(x.dtype), self.sin[:n].to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        h = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return x + self.out(h.transpose(1, 2).flatten(2))


class _Writer(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(16, 8), nn.ModuleList([kind(), kind(), kind()])
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def growing_tables() -> plait.Job:
    """Buffer sizes differ between ranks: a longer text makes the model extend its tables of rotary positions."""
    weight = lambda y: (y != -100).sum()  # noqa: E731
    return made(lambda: _Writer(_Rotary), next_token, Ragged, weight=weight)


class _Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        self.cache = (k, v)
        h = F.scaled_dot_product_attention(q, *self.cache, is_causal=True)
        return x + self.out(h.transpose(1, 2).flatten(2))


def cached_keys() -> plait.Job:
    """Memory grows under checkpointing: each attention layer stores keys and values in an attribute, with their graph."""
    return made(lambda: _Writer(_Caching), next_token, Texts)


class _Codebook(nn.Module):
    """Nearest codes with a straight-through gradient. The codes are moving means of the vectors that chose them."""

    codes: Tensor

    def __init__(self, everyone: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.everyone = Chain(outputs=4), Chain(inputs=4, outputs=6), everyone
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(-1)
        q = self.codes[chosen]
        if self.training:
            mean = plait.global_mean if self.everyone else lambda t: t.mean(0)
            with torch.no_grad():
                one = F.one_hot(chosen, 5).to(z)
                count, total = mean(one)[:, None], mean(one[:, :, None] * z[:, None])
                self.codes.copy_(torch.where(count > 0, 0.9 * self.codes + 0.1 * total / count.clamp(min=1e-6), self.codes))
        rebuilt = self.decoder(z + (q - z).detach())
        return (rebuilt - x).square().mean(-1) + 0.25 * (z - q.detach()).square().mean(-1)


def codebook() -> plait.Job:
    """Codebooks differ between ranks (VQ-VAE): codes are moving averages of a rank's own vectors."""
    return made(lambda: _Codebook(False), first)


def codebook_of_all() -> plait.Job:
    """The same model with the usual fix: codes are averages over the global batch."""
    return made(lambda: _Codebook(True), first)


class _Queue(nn.Module):
    """A queue of earlier samples' keys. New keys replace the oldest."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(outputs=4)
        self.register_buffer("keys", F.normalize(torch.randn(12, 4), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.encoder(x), dim=-1)
        near = (q * F.normalize(self.encoder(x.flip(-1)).detach(), dim=-1)).sum(-1)
        far = q @ self.keys.clone().T
        if self.training:
            with torch.no_grad():
                self.keys.copy_(torch.cat([plait.global_batch(q), self.keys])[:12])
        return far.logsumexp(-1) - near


def queue_of_keys() -> plait.Job:
    """Queues of negatives differ (MoCo): keys of all ranks are gathered before they enter the queue, which is a buffer."""
    return made(_Queue, first)


class _Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = Chain(outputs=4), nn.Embedding(5, 4), Chain(inputs=4, outputs=6)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        q = self.codes(torch.cdist(z.detach(), self.codes.weight.detach()).argmin(-1))
        rebuilt = self.decoder(z + (q - z).detach())
        return (rebuilt - x).square().mean(-1) + (q - z.detach()).square().mean(-1) + (z - q.detach()).square().mean(-1)


def learned_codebook() -> plait.Job:
    """Unused parameters differ between ranks: codes are learned, and only codes that a vector selects have a gradient."""
    return made(_Learned, first)


class _Teacher(nn.Module):
    """A student that predicts the outputs of its own moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predictor = Chain(outputs=5), nn.Linear(5, 5)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, its in zip(self.teacher.parameters(), self.student.parameters()):
                    mine.lerp_(its, 0.1)
        with torch.no_grad():
            target = self.teacher(x.flip(-1))
        return 2 - 2 * F.cosine_similarity(self.predictor(self.student(x)), target, dim=-1)


def bootstrap() -> plait.Job:
    """`lerp_` rejects sharded weights (BYOL): the forward pass updates a teacher inside the model."""
    return made(_Teacher, first)


class _ActNorm(nn.Module):
    ready: Tensor

    def __init__(self, everyone: bool) -> None:
        super().__init__()
        self.mean = plait.global_mean if everyone else lambda t: t.mean(0)
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("ready", torch.tensor(False))
        self.body = Chain()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                mean = self.mean(x)
                self.shift.copy_(-mean)
                self.scale.copy_(-((self.mean(x.square()) - mean.square()).clamp(min=0).sqrt() + 1e-3).log())
                self.ready.fill_(True)
        return self.body((x + self.shift) * self.scale.exp())


def first_batch_norm() -> plait.Job:
    """Replicas start from different weights: a flow's activation norm initializes its weights from a rank's first batch."""
    return made(lambda: _ActNorm(False))


def first_batch_norm_of_all() -> plait.Job:
    """The same model with the usual fix: the weights are initialized from the first global batch."""
    return made(lambda: _ActNorm(True))


class _MaxNorm(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(16, 6, **fields), Chain(outputs=16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.tokens(ids))


def embedding_max_norm() -> plait.Job:
    """An embedding with `max_norm` rescales rows of its weight in the forward pass, for the tokens of this rank."""
    return made(lambda: _MaxNorm(max_norm=1.0), next_token, Texts)


def embedding_by_frequency() -> plait.Job:
    """An embedding with `scale_grad_by_freq` divides a row's gradient by the token's count in this rank's batch."""
    return made(lambda: _MaxNorm(scale_grad_by_freq=True), next_token, Texts)


class _Metric(Chain):
    right: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.right += (out.argmax(-1) == x[:, :4].argmax(-1)).sum()
        self.seen += len(x)
        return out


def metric_in_model() -> plait.Job:
    """The model contains a metric: buffers count correct answers and samples, separately on each rank."""
    return made(_Metric)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)
        return self.last(h.mean((2, 3)))


def checkpointed_batch_norm() -> plait.Job:
    """Running statistics are updated twice: batch norms are inside the model's own activation checkpoints."""
    return made(_Checkpointed, data=Images, optimizer=sgd)


class _Clamped(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.69))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0, 0.7)
        return super().forward(x) * self.scale.exp()


def clamped_scale() -> plait.Job:
    """A two-tower model clamps its logit scale, a scalar parameter, in place through `.data` before use."""
    return made(_Clamped)
