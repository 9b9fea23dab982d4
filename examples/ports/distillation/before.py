"""Knowledge distillation in plain PyTorch: a small network learns the outputs of a large one, which is not trained."""

import torch
from torch import nn
from torch.nn import functional as F

TEMPERATURE, BATCH, STEPS = 2.0, 16, 20


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 12, generator=draw)
    return x, (x[:, :4].sum(1) > 0).long() + (x[:, 4:].sum(1) > 0).long()


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def main() -> None:
    torch.manual_seed(0)
    teacher, student = network(64).eval(), network(16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    x, y = samples()
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        with torch.no_grad():
            taught = teacher(x[rows])
        logits = student(x[rows])
        soft = F.kl_div(
            (logits / TEMPERATURE).log_softmax(-1),
            (taught / TEMPERATURE).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        loss = 0.5 * F.cross_entropy(logits, y[rows]) + 0.5 * TEMPERATURE**2 * soft
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
