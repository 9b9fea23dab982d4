"""The loss scale of fp16 training, which keeps small gradients from vanishing (see `parallel/precision.py`)."""

import torch
from torch import Tensor

MIN_SCALE = 1.0
"""The least loss scale."""
INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000
"""Number of finite steps after which the scale is doubled."""


class LossScale:
    """The loss scale of fp16 training. It stays on the device: an overflow changes it there, and the host does not wait.

    `update` gets whether the global norm was finite, so the scale is equal on all ranks.
    """

    def __init__(self, device: torch.device):
        self.state = torch.tensor([INITIAL_SCALE, 0.0], dtype=torch.float64, device=device)
        """Shape [2]: the factor, and the number of finite steps since its last change."""

    @property
    def factor(self) -> Tensor:
        """The factor of the loss: a float64 scalar on the device."""
        return self.state[0]

    @property
    def value(self) -> float:
        """The factor as a float. Waits for the device."""
        return float(self.factor)

    def update(self, finite: bool | Tensor) -> None:
        """Update the scale after a step. `finite`: whether its gradients were finite, possibly a boolean scalar on the device."""
        factor, good = self.state[0], self.state[1] + 1
        grown = good == GROWTH_INTERVAL
        better = torch.stack([torch.where(grown, factor * 2, factor), torch.where(grown, torch.zeros_like(good), good)])
        worse = torch.stack([(factor / 2).clamp(min=MIN_SCALE), torch.zeros_like(good)])
        self.state = torch.where(finite, better, worse) if isinstance(finite, Tensor) else better if finite else worse

    def state_dict(self) -> dict[str, float]:
        """Return the state. Waits for the device."""
        value, good = self.state.tolist()
        return {"value": value, "good_steps": int(good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.state = torch.tensor([float(state["value"]), float(state["good_steps"])], dtype=torch.float64, device=self.state.device)


def scale_loss(loss: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply a loss by its factor, in the loss's format. For 16 bits, the product is computed in float32, as with a Python float."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1.0 else loss * factor
    wide = loss if loss.dtype.itemsize > 2 else loss.float()
    return (wide * factor.to(wide.dtype)).to(loss.dtype)
