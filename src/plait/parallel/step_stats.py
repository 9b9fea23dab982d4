"""The numbers of a step that every rank must know: each rank packs its own, ranks sum them beside the gradients, and each unpacks the totals.

[Note: Row of a step]
The packed row is a float64 tensor on the rank's device, with the fields of `StepStats` in the order of their declaration. It travels with
the last gradients, since a message of its own would cost as much as a small model's gradients. A number that one rank alone knows, such as
the seconds that it computed, has a place for each rank, where the others add zero. So the totals hold all of them after one sum.
What computed the loss stays on the device: nothing here waits for it, and the host reads the totals later (`engine/stats_reader.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from plait.config.keys import SAME_LOSS
from plait.config.plan import Plan
from plait.tensors.transfers import upload

Number = Tensor | float


@dataclass(frozen=True)
class WeightedSum:
    """What a job logged under one name: values times their weights, and the weights."""

    total: Number
    weight: float


@dataclass(frozen=True)
class RunSignals:
    """What ranks tell each other of the run. Of one rank, or summed over ranks."""

    stop: float
    """Ranks whose process was asked to stop."""
    disk_save: float
    """How far ranks are with the checkpoint that they are writing (`Checkpoints.word`)."""
    memory_save: float
    """How far they are with the snapshot in memory."""
    end: float = 0.0
    """Ranks with a callback that wants to end the run. Messages in checkpoints of before there were callbacks lack it."""


@dataclass
class StepStats:
    """Numbers of one step: of one rank before the sum, of all ranks after it. See [Note: Row of a step]."""

    loss: Number = 0.0
    """Weighted mean over the global batch; before the sum, this rank's part of it."""
    stop: float = 0.0
    """As `RunSignals.stop`."""
    samples: list[float] = field(default_factory=list)
    """Of each share of the batch. Ranks with the same samples each add their fraction."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each rank computed."""
    waited: list[float] = field(default_factory=list)
    """Seconds that each rank waited for its samples."""
    room: list[float] = field(default_factory=list)
    """Samples that fit into each rank's memory; 0 if that is unknown. Empty without `batch_shares=auto`."""
    disk_save: float = 0.0
    memory_save: float = 0.0
    end: float = 0.0
    new_names: float = 0.0
    """Ranks that logged a name which not all ranks know."""
    logged: list[WeightedSum] = field(default_factory=list)
    """Of each name that all ranks know, in the order of `StepLog.names`."""

    @classmethod
    def zeros(cls, plan: Plan) -> Self:
        """Stats with a place for everything that ranks of this plan sum; nothing is logged."""
        by_rank = [0.0] * plan.world
        room = by_rank if plan.batch_shares == "auto" else []
        return cls(samples=[0.0] * plan.ranks, busy=[*by_rank], waited=[*by_rank], room=[*room])

    def add_losses(self, losses: Sequence[Tensor], plan: Plan, device: torch.device) -> None:
        """This rank's weighted losses of the step. Ranks that compute the same loss each add their fraction."""
        alike = plan.along(SAME_LOSS)
        if device.type == "cpu":
            self.loss = sum(float(loss) for loss in losses) / alike
        elif losses:
            self.loss = torch.stack(list(losses)).sum() / alike

    def add_rank(self, rank: int, plan: Plan, *, samples: int, busy: float, waited: float, room: int) -> None:
        self.samples[plan.share(rank)] = samples / (plan.pp * plan.along(SAME_LOSS))
        self.busy[rank], self.waited[rank] = busy, waited
        if self.room:
            self.room[rank] = float(room)

    @property
    def signals(self) -> RunSignals:
        return RunSignals(self.stop, self.disk_save, self.memory_save, self.end)

    @signals.setter
    def signals(self, signals: RunSignals) -> None:
        self.stop, self.end = signals.stop, signals.end
        self.disk_save, self.memory_save = signals.disk_save, signals.memory_save

    def pack(self, device: torch.device) -> Tensor:
        """The row: a float64 tensor on the device. Numbers that are there are copied on it, so the host does not wait."""
        numbers = list(self._numbers())
        if device.type == "cpu":
            return torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        row = upload([0.0 if isinstance(number, Tensor) else number for number in numbers], device)
        for i, number in enumerate(numbers):
            if isinstance(number, Tensor):
                row[i].copy_(number)
        return row

    @classmethod
    def unpack(cls, row: Iterable[float], plan: Plan) -> Self:
        """The stats in the numbers of a packed row, whose end is what was logged."""
        stats, numbers = cls.zeros(plan), iter(row)
        for one in fields(stats):
            empty = getattr(stats, one.name)
            if one.name == "logged":
                stats.logged = [WeightedSum(total, weight) for total, weight in zip(numbers, numbers)]
            else:
                setattr(stats, one.name, list(islice(numbers, len(empty))) if isinstance(empty, list) else next(numbers))
        return stats

    @staticmethod
    def loss_in(row: Tensor) -> Tensor:
        """The loss in a packed row, a scalar on its device."""
        return row[0]

    def _numbers(self) -> Iterator[Number]:
        for one in fields(self):
            value = getattr(self, one.name)
            for number in value if isinstance(value, list) else [value]:
                yield from (number.total, number.weight) if isinstance(number, WeightedSum) else (number,)
