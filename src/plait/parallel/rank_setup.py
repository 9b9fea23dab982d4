"""What a rank is asked to train, and the job's model as it was made: before anything of it is cut, or found out about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Data, first_samples
from plait.data.loading import DeviceCopies
from plait.launch.place import Place
from plait.tensors.modules import device_of
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.transfers import move


@dataclass(frozen=True)
class RankSetup:
    """`model` is the job's, of which strategies take parts away."""

    job: Job
    plan: Plan
    place: Place
    device: torch.device
    cast: torch.dtype | None
    """The format of all numbers in a proof; None: the job's own formats."""
    model: nn.Module
    data: Data
    example: tuple[Any, Any]
    """Inputs and targets of a sample of it."""
    call: Callable[[nn.Module, Any], Any]
    """(model, inputs) -> outputs, in training's format: for those who look at the model before it is split."""
    inputs: DeviceCopies
    """Samples on their way to the device."""
    attributes: dict[str, ParameterAttributes]
    """What code has put on the job's parameters, by the model's names."""
    parameter_hooks: dict[str, ParameterHooks]
    """The job's hooks on gradients of parameters, taken off them."""
    structure: dict[str, list[str]]
    """What the model's modules were made with (`checkpoint/fingerprint.py`)."""
    fp8_layers: tuple[str, ...]
    """Linear layers that compute in fp8 under `precision=fp8`."""
    shares: dict[str, Tensor]
    """This rank's parts of parameters that are on the meta device. Whoever puts one in place takes it out."""

    @property
    def at(self) -> torch.device:
        """Where the model is: in the host's memory, if the device has no room for it before it is cut."""
        return device_of(self.model, self.device)

    def samples(self, count: int, at: torch.device | None = None) -> Any:
        """Inputs and targets of so many samples, on the device of the model, or `at` another."""
        return move(first_samples(self.example, count), at or self.at, self.cast)

    def moved(self, tree: object) -> Any:
        """Inputs or targets as the model takes them: where it is, in its format."""
        return move(tree, self.at, self.cast)
