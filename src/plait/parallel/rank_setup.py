"""Inputs of a rank's build: the job, the plan, and the job's model before strategies split it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Data, make_sketch_batch
from plait.data.loading import DevicePrefetcher
from plait.launch.place import Place
from plait.tensors.module_state import find_device
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.transfers import move_tree


@dataclass(frozen=True)
class RankSetup:
    """Inputs of a rank's build. Strategies remove parts of `model` in place."""

    job: Job
    plan: Plan
    place: Place
    device: torch.device
    cast: torch.dtype | None
    """Dtype of all floating-point values in a proof; None keeps the job's own dtypes."""
    model: nn.Module
    data: Data
    example: tuple[Any, Any]
    """Inputs and targets of one sample of `data`."""
    call: Callable[[nn.Module, Any], Any]
    """(model, inputs) -> outputs in the number format of training, for analyses before the model is split."""
    device_copies: DevicePrefetcher
    """Copies samples to the device."""
    attributes: dict[str, ParameterAttributes]
    """Attributes that code has set on the job's parameters, by the model's names."""
    parameter_hooks: dict[str, ParameterHooks]
    """The job's hooks on gradients of parameters, after removal from the parameters."""
    structure: dict[str, list[str]]
    """Structure of the model's modules, for the checkpoint (`checkpoint/fingerprint.py`)."""
    fp8_layers: tuple[str, ...]
    """Linear layers that compute in fp8 under `precision=fp8`."""
    meta_shards: dict[str, Tensor]
    """This rank's parts of parameters that are on the meta device. A strategy that installs one removes it here."""

    @property
    def model_device(self) -> torch.device:
        """The device of the model: the CPU if the full model does not fit on the training device."""
        return find_device(self.model, self.device)

    def make_samples(self, count: int, at: torch.device | None = None) -> Any:
        """Return inputs and targets of `count` samples, on the model's device or on `at`."""
        return move_tree(make_sketch_batch(self.example, count), at or self.model_device, self.cast)

    def move_tree(self, tree: object) -> Any:
        """Move inputs or targets to the model's device and dtype."""
        return move_tree(tree, self.model_device, self.cast)
