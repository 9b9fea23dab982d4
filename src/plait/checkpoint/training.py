"""What a checkpoint is taken of, and given back to: a rank's training, of which `engine/engine.py` has the one implementation.

And how its ranks agree: each says something, and all hear it.
"""

import json
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from plait.checkpoint.carried_state import CarriedState
from plait.checkpoint.manifest import Base
from plait.config.errors import USAGE, PlaitError, problem_of
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Data, Position
from plait.launch.place import Place
from plait.parallel.rank_model import RankModel
from plait.tensors.collectives import exchange
from plait.tensors.norm import Rule


class CallbackState(Protocol):
    """What is kept beside a training as JSON values: the state of callbacks (`engine/callbacks.py`)."""

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, kept: dict[str, Any]) -> list[str]:
        """Take them up; what there is to say of them, a line each."""
        ...


class Training(Protocol):
    """One rank's part of a training."""

    job: Job
    plan: Plan
    place: Place
    rank_model: RankModel
    data: Data
    position: Position
    arguments: dict[str, str]
    base: Base | None
    """Where frozen parameters are that its checkpoints do not hold."""

    carried: CarriedState
    """What it carries from step to step outside of parameters and buffers."""

    @property
    def callbacks(self) -> CallbackState:
        """What has a state of its own."""

    @property
    def model(self) -> torch.nn.Module:
        """The rank's part of the model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of that part."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the training depends on (`checkpoint/fingerprint.py`)."""

    @property
    def rule(self) -> Rule:
        """Which of its tensors are to be finite."""


def exchange_json(training: Training, word: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, by rank; all ranks call it."""
    said = exchange(json.dumps(word).encode(), training.rank_model.mesh.everyone, training.rank_model.device)
    return [json.loads(text) for text in said]


def problems_in(error: PlaitError) -> dict[str, Any]:
    """An error as a word for `exchange_json`."""
    return {"problems": [vars(problem) for problem in error.problems]}


def raise_first(said: Iterable[dict[str, Any]], exit_code: int = USAGE) -> None:
    """The problems of the first rank that has any, on all ranks."""
    for word in said:
        if word.get("problems"):
            raise PlaitError(map(problem_of, word["problems"]), exit_code)
