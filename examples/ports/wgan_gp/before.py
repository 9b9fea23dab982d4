"""A Wasserstein GAN with gradient penalty (Gulrajani et al. 2017) in plain PyTorch: five critic steps to one of the generator."""

import torch
from torch import Tensor, nn

NOISE, PENALTY, CRITIC_STEPS, BATCH, STEPS = 4, 10.0, 5, 16, 30


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def points() -> Tensor:
    """Points on a circle."""
    angle = torch.rand(256, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1)


def main() -> None:
    torch.manual_seed(0)
    generator, critic = network(NOISE, 32, 2), network(2, 32, 32, 1)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    data = points()
    for step in range(1, STEPS + 1):
        real = data[torch.arange((step - 1) * BATCH, step * BATCH) % len(data)]
        with torch.no_grad():
            made = generator(torch.randn(len(real), NOISE))
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(made).mean() - critic(real).mean() + PENALTY * (slope.norm(dim=1) - 1).square().mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        print(f"step {step} critic {loss.item():.6f}")
        if step % CRITIC_STEPS == 0:
            critic.requires_grad_(False)
            loss = -critic(generator(torch.randn(len(real), NOISE))).mean()
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()
            critic.requires_grad_(True)
            print(f"step {step} generator {loss.item():.6f}")


if __name__ == "__main__":
    main()
