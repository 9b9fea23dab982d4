"""The moving average of tensors: `torch.optim.swa_utils.AveragedModel` for a rank's parts, which may lie on the host.

Numbers of 16 bits are averaged in 32: a decay of 0.999 moves an average by less than bfloat16 can hold.
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

FINE = torch.float32
"""What weights of fewer bits are averaged in."""
PREFIX = "ema/"
"""How its tensors are named in a checkpoint."""


class MovingAverage:
    """A rank's parts of the average, by the model's names, and how often it has moved."""

    def __init__(self, ema: EMA, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]):
        """`own`: what the model computes with; `weights`: the same, or copies elsewhere that the optimizer updates."""
        self.ema, self.own, self.weights = ema, dict(own), dict(weights)
        self.tensors = {name: _fine(weight).clone() for name, weight in self.weights.items()}
        self.steps = 0
        """Optimizer steps that changed the weights."""
        self.moved = 0
        """How often it took something of the weights; the first time it became a copy of them."""
        self._held: dict[str, Tensor] = {}

    def stepped(self) -> None:
        """The weights have changed: take something of them, if it is time."""
        self.steps += 1
        if self.steps % self.ema.every:
            return
        self.moved += 1
        decay = min(self.ema.decay, self.moved / (9 + self.moved)) if self.ema.warmup else self.ema.decay
        alike: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, average in self.tensors.items():
            averages, weights = alike.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            weights.append(_fine(self.weights[name]))
        with torch.no_grad():
            for averages, weights in alike.values():
                if self.moved == 1:
                    copy_(averages, weights)
                else:
                    get_ema_multi_avg_fn(decay)(averages, weights, None)

    def parts(self, model: Mapping[str, Part], reading: bool = False) -> dict[str, Part]:
        """This rank's parts for a checkpoint, by their names there. `model`: those of the weights.

        Before the first time the average is the weights. `reading`: where one is read to.
        """
        source = self.tensors if reading or self.moved else self.weights
        return {f"{PREFIX}{name}": replace(model[name], tensor=source[name].detach()) for name in self.tensors}

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint holds beside the tensors."""
        return {"steps": self.steps, "moved": self.moved}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; the tensors were read in place."""
        self.steps, self.moved = state["steps"], state["moved"]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the average. Nothing else is the model's state meanwhile."""
        self._put()
        try:
            yield
        finally:
            self._put_back()

    def _put(self) -> None:
        with torch.no_grad():
            for name, average in self.tensors.items():
                weight = self.own[name]
                held = weight.clone()
                weight.copy_(average)
                if average.dtype == weight.dtype:
                    average.copy_(held)
                else:  # it would lose what the weights cannot hold
                    self._held[name] = held

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, average in self.tensors.items():
                weight = self.own[name]
                held = self._held.pop(name, None)
                if held is not None:
                    weight.copy_(held)
                    continue
                held = weight.clone()
                weight.copy_(average)
                average.copy_(held)


def _fine(weight: Tensor) -> Tensor:
    """The numbers of a weight in the format that they are averaged in."""
    return weight.detach().to(averaged_in(weight.dtype))


def averaged_in(dtype: torch.dtype) -> torch.dtype:
    """The format in which weights of this one are averaged."""
    return torch.promote_types(dtype, FINE)
