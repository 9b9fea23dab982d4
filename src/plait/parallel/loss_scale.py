"""The factor on an fp16 loss that keeps small gradients from vanishing (see `parallel/precision.py`)."""

from dataclasses import dataclass

SMALLEST = 1.0
"""The loss scale below which there is no use in lowering it."""


@dataclass
class LossScale:
    """The factor on an fp16 loss. `update` is told whether the global norm was finite, so it is equal on all ranks."""

    value: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    @property
    def lowers(self) -> bool:
        """Whether an overflow can be answered by a smaller scale: at 1 the gradients themselves overflow."""
        return self.value > SMALLEST

    def update(self, finite: bool) -> None:
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
