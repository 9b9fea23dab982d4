"""Moving average of tensors: `torch.optim.swa_utils.AveragedModel` for a rank's parts, which may be on the host.

16-bit weights are averaged in 32 bits: a decay of 0.999 changes an average by less than the resolution of bfloat16.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from plait.config.job import EMA
from plait.tensors.rows import Part
from plait.tensors.torch_private import copy_

AVERAGE_DTYPE = torch.float32
"""Dtype of the average for narrower weights."""
EMA_PREFIX = "ema/"
"""Prefix of its tensors in a checkpoint."""


class MovingAverage:
    """A rank's parts of the average, by the model's names, and the number of updates."""

    def __init__(self, ema: EMA, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]):
        """`own`: tensors that the model computes with; `weights`: the same, or master copies that the optimizer updates."""
        self.ema, self.own, self.weights = ema, dict(own), dict(weights)
        self.tensors = {name: _to_average_dtype(weight).clone() for name, weight in self.weights.items()}
        self.steps = 0
        """Optimizer steps that changed the weights."""
        self.moved = 0
        """Number of updates; the first one copied the weights."""
        self._kept_weights: dict[str, Tensor] = {}

    def update(self) -> None:
        """Count an optimizer step and update the average if it is due."""
        self.steps += 1
        if self.steps % self.ema.every:
            return
        self.moved += 1
        decay = min(self.ema.decay, self.moved / (9 + self.moved)) if self.ema.warmup else self.ema.decay
        alike: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, average in self.tensors.items():
            averages, weights = alike.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            weights.append(_to_average_dtype(self.weights[name]))
        with torch.no_grad():
            for averages, weights in alike.values():
                if self.moved == 1:
                    copy_(averages, weights)
                else:
                    get_ema_multi_avg_fn(decay)(averages, weights, None)

    def checkpoint_parts(self, model: Mapping[str, Part], reading: bool = False) -> dict[str, Part]:
        """Return this rank's parts by their names in a checkpoint. `model`: the parts of the weights.

        Before the first update the average equals the weights. `reading`: return the parts to read into.

        """
        source = self.tensors if reading or self.moved else self.weights
        return {f"{EMA_PREFIX}{name}": replace(model[name], tensor=source[name].detach()) for name in self.tensors}

    def state_dict(self) -> dict[str, int]:
        """Return the checkpoint values other than tensors."""
        return {"steps": self.steps, "moved": self.moved}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load the values; the tensors were read in place."""
        self.steps, self.moved = state["steps"], state["moved"]

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Context in which the model computes with the average. Other state of the model is unchanged."""
        self._swap_in()
        try:
            yield
        finally:
            self._swap_out()

    def _swap_in(self) -> None:
        with torch.no_grad():
            for name, average in self.tensors.items():
                weight = self.own[name]
                held = weight.clone()
                weight.copy_(average)
                if average.dtype == weight.dtype:
                    average.copy_(held)
                else:  # the weights' dtype would round it
                    self._kept_weights[name] = held

    def _swap_out(self) -> None:
        with torch.no_grad():
            for name, average in self.tensors.items():
                weight = self.own[name]
                held = self._kept_weights.pop(name, None)
                if held is not None:
                    weight.copy_(held)
                    continue
                held = weight.clone()
                weight.copy_(average)
                average.copy_(held)


def _to_average_dtype(weight: Tensor) -> Tensor:
    return weight.detach().to(choose_average_dtype(weight.dtype))


def choose_average_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of `dtype` are averaged."""
    return torch.promote_types(dtype, AVERAGE_DTYPE)
