"""Knowledge distillation as a plait job: one model contains teacher and student, and the teacher is frozen. One loss, no phases."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import plait

TEMPERATURE, BATCH, STEPS = 2.0, 16, 20


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 12, generator=draw)
    return TensorDataset(x, (x[:, :4].sum(1) > 0).long() + (x[:, 4:].sum(1) > 0).long())


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


class Distilled(nn.Module):
    """The student's logits, and the teacher's logits for the same samples."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = network(64).eval().requires_grad_(False)
        self.student = network(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def loss(outputs: tuple[Tensor, Tensor], classes: Tensor) -> Tensor:
    logits, taught = outputs
    soft = F.kl_div(
        (logits / TEMPERATURE).log_softmax(-1),
        (taught / TEMPERATURE).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    return 0.5 * F.cross_entropy(logits, classes) + 0.5 * TEMPERATURE**2 * soft


def job() -> plait.Job:
    return plait.Job(
        model=Distilled,
        loss=loss,
        data=samples,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=BATCH,
        steps=STEPS,
    )
