"""Jobs whose model or `collate` rejects a batch without samples, which a rank may get of a short batch. Each trains on one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import plait


class Texts:
    """Sequences of different lengths, the longest first in a batch, and their lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        g = torch.Generator().manual_seed(i)
        return torch.randn(2 + i % 5, 4, generator=g), torch.randint(0, 3, (), generator=g)

    def collate(self, samples: list[Any]) -> Any:
        rows, labels = zip(*samples)
        lengths = torch.tensor([len(row) for row in rows])
        return (pad_sequence(list(rows), batch_first=True), lengths), torch.stack(labels)


class Packed(nn.Module):
    """`pack_padded_sequence` rejects an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm, self.out = nn.LSTM(4, 6, batch_first=True), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.norm(self.rnn(packed)[1][0][-1]))


class Clouds(Texts):
    """The points of all samples in one row, and the end of each sample: dim 0 is not the batch's."""

    def collate(self, samples: list[Any]) -> Any:
        rows, labels = zip(*samples)
        ends = torch.tensor([len(row) for row in rows]).cumsum(0)
        return {"points": torch.cat(rows), "ends": ends}, torch.stack(labels)


class Pooled(nn.Module):
    """The maximum over each sample's points, with a batch norm over points."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.norm, self.out = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, points: Tensor, ends: Tensor) -> Tensor:
        h = F.relu(self.norm(self.each(points)))
        starts = [0, *ends.tolist()[:-1]]
        return self.out(torch.stack([h[a:b].max(0).values for a, b in zip(starts, ends.tolist())]))


class Images(Texts):
    """A list of tensors of different shapes, as detectors take it, and a list of targets."""

    def collate(self, samples: list[Any]) -> Any:
        rows, labels = zip(*samples)
        return {"images": list(rows)}, list(labels)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.norm, self.out = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.out(self.norm(torch.stack([self.each(image).amax(0) for image in images])))


class Instance(nn.Module):
    """Instance norms reject an empty batch. Because of a counter of forward passes, each rank must run."""

    passes: Tensor

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.conv, self.out, self.direct = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(6, 3), direct
        self.norm = nn.Identity() if direct else nn.InstanceNorm1d(6, affine=True)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.passes += 1
        h = self.conv(F.pad(x, (0, 0, 0, 3)).transpose(1, 2))
        h = F.instance_norm(h) if self.direct else self.norm(h)
        return self.out(h.amax(2) * lengths.to(h.dtype)[:, None])


class Called(nn.Module):
    """A batch norm that is called as a function: named as not exact, and not proved further."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.norm(self.conv(x.transpose(1, 2)))
        return self.out(F.batch_norm(h, None, None, training=True)[:, :, : int(lengths.max())].mean(2))


class Cooled(nn.Module):
    """A temperature that falls with each call; a plain attribute counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.out, self.calls = nn.Linear(4, 6), nn.Linear(6, 3), 0

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.calls += self.training
        return self.out(F.softmax(self.each(x).mean(1) * 1.1**self.calls, 1))


def _job(model: Callable[[], nn.Module], data: Callable[[], Any]) -> plait.Job:
    def loss(outputs: Tensor, targets: Any) -> Tensor:
        return F.cross_entropy(outputs, torch.stack(targets) if isinstance(targets, list) else targets)

    return plait.Job(
        model=model, loss=loss, weight=len, data=data, optimizer=lambda p: torch.optim.AdamW(p, 1e-2), batch=8, steps=12,
        evaluate=plait.Evaluate(data, lambda o, y: {"largest": o.amax(-1)}),
    )  # fmt: skip


JOBS = {
    "packed": lambda: _job(Packed, Texts),
    "pooled": lambda: _job(Pooled, Clouds),
    "detector": lambda: _job(Detector, Images),
    "instance": lambda: _job(lambda: Instance(False), Texts),
    "instance function": lambda: _job(lambda: Instance(True), Texts),
    "cooled": lambda: _job(Cooled, Texts),
    "called": lambda: _job(Called, Texts),
}
