"""The factor on an fp16 loss that keeps small gradients from vanishing (see `parallel/precision.py`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1.0
"""The loss scale below which there is no use in lowering it."""


@dataclass
class LossScale:
    """The factor on an fp16 loss. `update` is told whether the global norm was finite, so it is equal on all ranks."""

    value: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    @property
    def factor(self) -> float | Tensor:
        """What losses are multiplied by."""
        return self.value

    def update(self, finite: bool | Tensor) -> None:
        """After a step, whose gradients were finite or not."""
        if not finite:
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


class DeviceLossScale(LossScale):
    """A loss scale whose value stays on the device: whether a step overflowed changes it there, and the host does not wait for that."""

    def __init__(self, scale: LossScale, device: torch.device):
        super().__init__(scale.value, scale.good_steps, scale.growth_interval)
        self.there = torch.tensor([self.value, float(self.good_steps)], dtype=torch.float64, device=device)
        """Shape [2]: the factor, and the steps that have gone well since it was last changed."""

    @property
    def factor(self) -> Tensor:
        return self.there[0]

    def update(self, finite: bool | Tensor) -> None:
        """As that of the host; `finite` may be a boolean scalar on the device."""
        factor, good = self.there[0], self.there[1] + 1
        grown = good == self.growth_interval
        better = torch.stack([torch.where(grown, factor * 2, factor), torch.where(grown, torch.zeros_like(good), good)])
        worse = torch.stack([(factor / 2).clamp(min=SMALLEST), torch.zeros_like(good)])
        self.there = torch.where(finite, better, worse) if isinstance(finite, Tensor) else better if finite else worse

    def state_dict(self) -> dict[str, float]:
        """Waits for the device."""
        self.value, good = self.there.tolist()
        self.good_steps = int(good)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        super().load_state_dict(state)
        self.there = torch.tensor([self.value, float(self.good_steps)], dtype=torch.float64, device=self.there.device)


def scaled(loss: Tensor, factor: float | Tensor) -> Tensor:
    """A loss times its factor, in the loss's format. The product is made as with a number of the host: in float32 for 16 bits."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1.0 else loss * factor
    wide = loss if loss.dtype.itemsize > 2 else loss.float()
    return (wide * factor.to(wide.dtype)).to(loss.dtype)
