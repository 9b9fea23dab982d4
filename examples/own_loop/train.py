"""Your own loop. `Engine` joins the processes torchrun started, or runs alone; the batches and the result are the same.

python examples/own_loop/train.py
torchrun --nproc-per-node 2 examples/own_loop/train.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from plait import Engine, Job, Plan


class Waves:
    """x in [-3, 3) and sin(x), 4,096 points."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([6.0 * i / len(self) - 3.0])
        return x, x.sin()


job = Job(
    model=lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)),
    loss=mse_loss,
    data=Waves,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch=64,
    steps=100,
)

if __name__ == "__main__":
    with Engine(job, Plan.parse("dp=*")) as engine:
        for batch in engine.batches():
            step = engine.step(batch)
            if engine.place.rank == 0 and step.step % 20 == 0:
                print(f"step {step.step}  loss {step.loss:.6f}  ranks {engine.place.world}")
