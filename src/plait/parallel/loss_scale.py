"""The factor on an fp16 loss that keeps small gradients from vanishing (see `parallel/precision.py`)."""

import torch
from torch import Tensor

SMALLEST = 1.0
"""The loss scale below which there is no use in lowering it."""
FIRST = 65536.0
GROWTH_INTERVAL = 2000
"""Good steps after which it is doubled."""


class LossScale:
    """The factor on an fp16 loss. It stays on the device: whether a step overflowed changes it there, and the host does not wait for that.

    `update` is told whether the global norm was finite, so it is equal on all ranks.
    """

    def __init__(self, device: torch.device):
        self.there = torch.tensor([FIRST, 0.0], dtype=torch.float64, device=device)
        """Shape [2]: the factor, and the steps that have gone well since it was last changed."""

    @property
    def factor(self) -> Tensor:
        """What losses are multiplied by: a float64 scalar on the device."""
        return self.there[0]

    @property
    def value(self) -> float:
        """The factor. Waits for the device."""
        return float(self.factor)

    def update(self, finite: bool | Tensor) -> None:
        """After a step, whose gradients were finite or not; `finite` may be a boolean scalar on the device."""
        factor, good = self.there[0], self.there[1] + 1
        grown = good == GROWTH_INTERVAL
        better = torch.stack([torch.where(grown, factor * 2, factor), torch.where(grown, torch.zeros_like(good), good)])
        worse = torch.stack([(factor / 2).clamp(min=SMALLEST), torch.zeros_like(good)])
        self.there = torch.where(finite, better, worse) if isinstance(finite, Tensor) else better if finite else worse

    def state_dict(self) -> dict[str, float]:
        """Waits for the device."""
        value, good = self.there.tolist()
        return {"value": value, "good_steps": int(good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.there = torch.tensor([float(state["value"]), float(state["good_steps"])], dtype=torch.float64, device=self.there.device)


def scaled(loss: Tensor, factor: float | Tensor) -> Tensor:
    """A loss times its factor, in the loss's format. The product is made as with a number of the host: in float32 for 16 bits."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1.0 else loss * factor
    wide = loss if loss.dtype.itemsize > 2 else loss.float()
    return (wide * factor.to(wide.dtype)).to(loss.dtype)
