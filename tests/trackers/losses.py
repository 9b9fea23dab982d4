"""Losses: the count that their mean divides by, and comparisons between samples."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from trackers.samples import Chain, Numbers, Ragged, Rows, first, generator, made

CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5, 2.0])


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(16, 6, padding_idx=0), Chain(outputs=16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.tokens(ids))


def _smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=0.1)


def smoothed_tokens() -> plait.Job:
    """Each rank averages over its own tokens: the loss smooths labels and ignores padding. `Job.weight` counts the tokens."""
    return made(_Tagger, _smoothed, Ragged, weight=lambda y: (y != -100).sum())


def smoothed_tokens_unweighted() -> plait.Job:
    """The same bug as reported: `Job.weight` is missing, so each rank's mean is weighted by its samples."""
    return made(_Tagger, _smoothed, Ragged)


def _by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=CLASS_WEIGHTS.to(outputs))


def class_weights() -> plait.Job:
    """Weighted cross-entropy divides by the class weights of the labels: `Job.weight` is their sum."""
    return made(Chain, _by_class, weight=lambda y: CLASS_WEIGHTS[y].sum())


def class_weights_by_samples() -> plait.Job:
    """The same bug as reported: the loss divides by class weights, but `Job.weight` is the number of samples."""
    return made(Chain, _by_class)


class _Views(Rows):
    def __getitem__(self, i: int) -> Any:
        x = torch.randn(6, generator=generator(i))
        return {"a": x, "b": x + 0.1 * torch.randn(6, generator=generator(-i))}, torch.tensor(i % 5)


class _TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Chain(), Chain(depth=2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return F.normalize(self.a(a), dim=-1), F.normalize(self.b(b), dim=-1), self.scale.exp()


def _contrast(outputs: Any, targets: Tensor) -> Tensor:
    a, b, scale = outputs
    logits, right = scale * a @ b.T, torch.arange(len(a))
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def _contrast_of_all(outputs: Any, targets: Tensor) -> Tensor:
    a, b, scale = outputs
    return _contrast((plait.global_batch(a), plait.global_batch(b), scale), targets)


def contrastive() -> plait.Job:
    """Gathered features have no gradient: InfoNCE over the global batch, with a learned temperature."""
    return made(_TwoTowers, _contrast_of_all, _Views)


def contrastive_by_rank() -> plait.Job:
    """The same bug as reported: the negatives are only those of the rank."""
    return made(_TwoTowers, _contrast, _Views)


def _hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    distances = (outputs[:, None] - outputs[None]).square().sum(-1)
    same = targets[:, None] == targets[None]
    far, near = (distances * same).amax(1), distances.masked_fill(same, 1e3).amin(1)
    return F.softplus(far - near).mean()


def triplets() -> plait.Job:
    """Triplet mining picks the hardest positive and negative of the batch that a rank has."""
    return made(Chain, _hardest, lambda: Rows(56))


class _Labels(Rows):
    """Three tasks. A sample has labels for some of them, and always for the first."""

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(6, generator=generator(i))
        y = torch.stack([x.sum(), x[0] * x[1], x.amax()])
        return x, y.masked_fill(torch.tensor([False, i % 3 == 0, i % 4 != 0]), float("nan"))


def _of_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    there = ~targets.isnan()
    return ((outputs - targets.nan_to_num()).square() * there).sum() / there.sum()


def _of_tasks(outputs: Tensor, targets: Tensor) -> Tensor:
    there = ~targets.isnan()
    squares = (outputs - targets.nan_to_num()).square() * there
    return (squares.sum(0) / there.sum(0).clamp(min=1)).sum()


def missing_labels() -> plait.Job:
    """Labels of several tasks are sparse: the loss is one mean over all present labels, which `Job.weight` counts."""
    return made(lambda: Chain(outputs=3), _of_labels, _Labels, weight=lambda y: (~y.isnan()).sum())


def missing_labels_by_task() -> plait.Job:
    """The same bug as reported: each task's loss is divided by the number of its labels on the rank."""
    return made(lambda: Chain(outputs=3), _of_tasks, _Labels)


class _Uncertain(Chain):
    def __init__(self) -> None:
        super().__init__(outputs=2)
        self.spread = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.spread


def _kendall(outputs: Any, targets: Tensor) -> Tensor:
    y, spread = outputs
    errors = torch.stack([F.l1_loss(y[:, :1], targets), F.mse_loss(y[:, 1:], targets.abs())])
    return (errors * (-spread).exp() + spread).sum()


def uncertainty_weights() -> plait.Job:
    """Two losses have learned weights: an output of the model is a parameter, and has no batch dim."""
    return made(_Uncertain, _kendall, Numbers)


def _correlation(outputs: Tensor, targets: Tensor) -> Tensor:
    a, b = outputs[:, 0] - outputs.mean(), targets[:, 0] - targets.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-6)


def correlation() -> plait.Job:
    """A metric is the loss: each rank computes the correlation of outputs and targets over its own batch."""
    return made(lambda: Chain(outputs=1), _correlation, Numbers)


def summed() -> plait.Job:
    """Ranks average gradients, but the loss is a sum (`reduction="sum"`)."""
    return made(lambda: Chain(outputs=1), lambda o, y: F.mse_loss(o, y, reduction="sum") / 10, Numbers)


def _switched(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    return loss if loss < 1.35 else 1.35 + (loss - 1.35).exp().log1p()


def branch_on_loss() -> plait.Job:
    """Outlier batches are damped by a branch on the value of the batch's loss."""
    return made(Chain, _switched)


class _Field(nn.Module):
    """Emissions, and the likelihood of tags by the forward algorithm. Tags of padding are -100."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.emit = nn.Embedding(16, 8), nn.Linear(8, 4)
        self.moves, self.starts = nn.Parameter(torch.randn(4, 4) / 4), nn.Parameter(torch.zeros(4))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        e, there, tags = self.emit(self.tokens(ids)), tags >= 0, tags.clamp(min=0)
        best = self.starts[tags[:, 0]] + e[:, 0].gather(1, tags[:, :1])[:, 0]
        every = self.starts + e[:, 0]
        for t in range(1, ids.shape[1]):
            step = self.moves[tags[:, t - 1], tags[:, t]] + e[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            best = best + step * there[:, t]
            grown = torch.logsumexp(every[:, :, None] + self.moves, 1) + e[:, t]
            every = torch.where(there[:, t, None], grown, every)
        return every.logsumexp(1) - best


class _Tagged(Ragged):
    def __getitem__(self, i: int) -> Any:
        ids, _ = super().__getitem__(i)
        return ids, ids % 4

    def collate(self, samples: list[Any]) -> Any:
        ids, tags = super().collate(samples)
        return {"ids": ids, "tags": tags}, torch.zeros(len(ids))


def random_field() -> plait.Job:
    """The loss needs the model's parameters (a CRF): the model takes the tags and returns likelihoods."""
    return made(_Field, first, _Tagged)
