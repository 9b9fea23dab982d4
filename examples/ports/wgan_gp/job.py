"""A Wasserstein GAN with gradient penalty as a plait job: one model contains both networks, and each has a phase."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import plait

NOISE, PENALTY, CRITIC_STEPS, BATCH, STEPS = 4, 10.0, 5, 16, 30


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Points(Dataset[tuple[Tensor, int]]):
    """Points on a circle. The target is not used."""

    def __init__(self) -> None:
        angle = torch.rand(256, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
        self.points = torch.stack([angle.cos(), angle.sin()], 1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.points[i], 0


def criticised(model: nn.ModuleDict, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of real and generated points, and the norm of the critic's gradient between them."""
    with torch.no_grad():
        made = model["generator"](torch.randn(len(real), NOISE, dtype=real.dtype))
    share = torch.rand(len(real), 1, dtype=real.dtype)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(model["critic"](between).sum(), between, create_graph=True)
    return model["critic"](real), model["critic"](made), slope.norm(dim=1)


def critic_loss(outputs: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Tensor:
    real, made, slope = outputs
    return made.mean() - real.mean() + PENALTY * (slope - 1).square().mean()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.0, 0.9))


def job() -> plait.Job:
    critic = plait.Phase("critic", trains=("critic.*",), forward=criticised, loss=critic_loss, optimizer=adam)
    generator = plait.Phase(
        "generator",
        trains=("generator.*",),
        forward=lambda model, real: model["critic"](
            model["generator"](torch.randn(len(real), NOISE, dtype=real.dtype))
        ),
        loss=lambda scores, _: -scores.mean(),
        optimizer=adam,
        every=CRITIC_STEPS,
    )
    return plait.Job(
        model=lambda: nn.ModuleDict({"generator": network(NOISE, 32, 2), "critic": network(2, 32, 32, 1)}),
        phases=(critic, generator),
        data=Points,
        batch=BATCH,
        steps=STEPS,
    )
