"""What a checkpoint is taken of, and given back to: a rank's training, of which `engine/engine.py` has the one implementation."""

from typing import Any, Protocol

import torch

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Position
from plait.launch.place import Place
from plait.parallel.built import Built
from plait.tensors.finite import Rule


class Training(Protocol):
    """One rank's part of a training."""

    job: Job
    plan: Plan
    place: Place
    built: Built
    position: Position
    arguments: dict[str, str]

    @property
    def model(self) -> torch.nn.Module:
        """The rank's part of the model."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of that part."""
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the training depends on (`checkpoint/fingerprint.py`)."""
        ...

    @property
    def rule(self) -> Rule:
        """Which of its tensors are to be finite."""
        ...
