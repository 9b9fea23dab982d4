"""Jobs with several losses and optimizers: adversarial training, an autoencoder with a critic, an actor with a critic."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from plait import Job, Phase

NOISE, WIDE = 4, 6


def layers(*sizes: int, drop: float = 0.0) -> nn.Sequential:
    """Linear layers with tanh between them, so that the second derivative is not zero."""
    made: list[nn.Module] = []
    for before, after in pairwise(sizes):
        made += [nn.Linear(before, after), nn.Tanh(), *([nn.Dropout(drop)] if drop else [])]
    return nn.Sequential(*made[: -2 if drop else -1])


def samples(columns: int) -> TensorDataset:
    """Random vectors, each with a scalar."""
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(64, columns, generator=draw), torch.randn(64, generator=draw))


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, betas=(0.5, 0.9))


def penalised(model: nn.ModuleDict, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The critic's scores of real and generated samples, and its slope between them."""
    with torch.no_grad():
        made = model["generator"](torch.randn(len(real), NOISE, dtype=real.dtype))
    share = torch.rand(len(real), 1, dtype=real.dtype)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(model["critic"](between).sum(), between, create_graph=True)
    return model["critic"](real), model["critic"](made), slope.norm(dim=1)


def generated(model: nn.ModuleDict, real: Tensor) -> Tensor:
    """The critic's scores of generated samples."""
    return model["critic"](model["generator"](torch.randn(len(real), NOISE, dtype=real.dtype)))


def wgan_gp(drop: float = 0.0) -> Job:
    """Gulrajani et al. 2017: a critic with a gradient penalty, and a generator that is due in some steps."""
    return Job(
        model=lambda: nn.ModuleDict({"generator": layers(NOISE, 8, WIDE), "critic": layers(WIDE, 8, 8, 1, drop=drop)}),
        data=lambda: samples(WIDE),
        batch=8,
        steps=10,
        phases=(
            Phase(
                "critic",
                trains=("critic.*",),
                forward=penalised,
                loss=lambda out, _: (out[1] - out[0]).mean() + 10 * (out[2] - 1).square().mean(),
                optimizer=adam,
            ),
            Phase(
                "generator",
                trains=("generator.*",),
                forward=generated,
                loss=lambda out, _: -out.mean(),
                optimizer=adam,
                every=5,
            ),
        ),
    )


def resumed() -> Job:
    """A job with all states that a checkpoint must keep: float64, dropout, different optimizers, and a generator due in each third step."""
    job = wgan_gp(0.2)
    critic, generator = job.phases or ()
    slow = replace(generator, every=3, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3))
    return replace(
        job,
        model=lambda: wgan_gp(0.2).model().double(),
        data=lambda: [(x.double(), y) for x, y in samples(WIDE)],
        phases=(replace(critic, clip=1.0), slow),
        steps=15,
    )


def coded(model: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reconstructed samples, and the mean and log variance of their codes."""
    mean, log_variance = model["encoder"](x).chunk(2, -1)
    code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    return x, model["decoder"](code), mean, log_variance


def features(critic: nn.Sequential, x: Tensor) -> Tensor:
    return critic[1](critic[0](x))


def vae_gan() -> Job:
    """Larsen et al. 2016: an encoder, a decoder, and a critic in whose features samples are compared."""

    def encode(model: nn.ModuleDict, x: Tensor) -> tuple[Tensor, ...]:
        _, made, mean, log_variance = coded(model, x)
        return features(model["critic"], made), features(model["critic"], x), mean, log_variance

    def decode(model: nn.ModuleDict, x: Tensor) -> tuple[Tensor, ...]:
        _, made, *_ = coded(model, x)
        return features(model["critic"], made), features(model["critic"], x), model["critic"](made)

    def judge(model: nn.ModuleDict, x: Tensor) -> tuple[Tensor, ...]:
        return model["critic"](x), model["critic"](coded(model, x)[1].detach())

    def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
        return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()

    return Job(
        model=lambda: nn.ModuleDict(
            {"encoder": layers(WIDE, 8, 6), "decoder": layers(3, 8, WIDE), "critic": layers(WIDE, 8, 1)}
        ),
        data=lambda: samples(WIDE),
        batch=8,
        steps=10,
        clip=1.0,
        phases=(
            Phase(
                "encoder", trains=("encoder.*",), forward=encode, optimizer=adam,
                loss=lambda out, _: F.mse_loss(out[0], out[1]) + divergence(out[2], out[3]),
            ),
            Phase(
                "decoder", trains=("decoder.*",), forward=decode, optimizer=adam,
                loss=lambda out, _: F.mse_loss(out[0], out[1]) - out[2].mean(),
            ),
            Phase(
                "critic", trains=("critic.*",), forward=judge, clip=0.5,
                loss=lambda out, _: F.softplus(-out[0]).mean() + F.softplus(out[1]).mean(),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
            ),
        ),
    )  # fmt: skip


class ActorCritic(nn.Module):
    """A policy over four actions and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = layers(WIDE, 8, 8), nn.Linear(8, 4), layers(WIDE, 8, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(self.body(state)).log_softmax(-1), self.value(state).squeeze(-1)


class Recorded(torch.utils.data.Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """States with the action taken in each, and its return."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(6)
        self.states = torch.randn(64, WIDE, generator=draw)
        self.actions, self.returns = torch.randint(4, (64,), generator=draw), torch.randn(64, generator=draw)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.states[i], {"action": self.actions[i], "return": self.returns[i]}


def actor_critic() -> Job:
    """Two losses of the model's own forward pass, on recorded actions."""

    def policy_loss(out: tuple[Tensor, Tensor], done: dict[str, Tensor]) -> Tensor:
        chosen = out[0].gather(-1, done["action"][:, None]).squeeze(-1)
        return -(chosen * (done["return"] - out[1].detach())).mean()

    return Job(
        model=ActorCritic,
        data=Recorded,
        batch=8,
        steps=10,
        phases=(
            Phase("actor", trains=("body.*", "policy.*"), loss=policy_loss, optimizer=adam),
            Phase(
                "critic",
                trains=("value.*",),
                loss=lambda out, done: F.mse_loss(out[1], done["return"]),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            ),
        ),
    )


ALL = {"wgan_gp": wgan_gp, "vae_gan": vae_gan, "actor_critic": actor_critic, "dropped": lambda: wgan_gp(0.2)}
