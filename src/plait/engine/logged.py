"""Numbers that a job's own code records while a step runs: `plait.log("aux", value)` in the model's forward or in the loss.

What is recorded of a step is the mean over the global batch, with the weight of the loss: each call counts with the weight of the
samples it was made for (`Job.weight`; without one, their number). Ranks learn through the row of numbers that they sum in every step
that one of them met a new name, and then tell each other once. From then on each name has two numbers in that row, a weighted sum
and a weight: a step takes no message more. Where several ranks have the same samples (`tp`), each counts, in both numbers.

The second forward pass of a recomputation runs within backward, where nothing is recorded.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.config.errors import FAILED, PlaitError, Problem
from plait.parallel.gradient_reducer import Number, WeightedSum
from plait.tensors.collectives import exchange
from plait.tensors.torch_private import FakeTensor

RECORDS: ContextVar[Callable[[str, Number], None] | None] = ContextVar("records", default=None)
"""What takes the numbers of the forward pass that runs; None: nothing does."""
AGREEING: ContextVar[bool] = ContextVar("agreeing", default=False)
"""Ranks tell each other of new names: a message that comes once, and belongs to no step."""


def log(name: str, value: Number) -> None:
    """Record a number of the step that runs: in metrics.jsonl and `Step.logged`, the mean over the global batch.

    `value`: a number, or a tensor of one element: the mean over the samples that the model or the loss was called with. Called
    several times with one name, it is the mean of all. Outside a training step it does nothing. U014 for another value.
    """
    record = RECORDS.get()
    if record is None:
        return
    scalar = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    if not isinstance(name, str) or not scalar:
        what = f"plait.log({name!r}, …) was given {_described(value)}"
        why = "it takes a name and one number: the mean over the samples that are there"
        raise PlaitError(Problem("U014", what, why=why, fix=("plait.log(name, values.mean())",)), FAILED)
    if not isinstance(value, FakeTensor):  # a number that only another stage has
        record(name, value.detach() if isinstance(value, Tensor) else float(value))


def _described(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def recording(record: Callable[[str, Number], None] | None) -> Iterator[None]:
    """A context in which `record` takes what is logged; with None nothing does."""
    token = RECORDS.set(record)
    try:
        yield
    finally:
        RECORDS.reset(token)


NOTHING = WeightedSum(0.0, 0.0)


def means(sums: dict[str, WeightedSum]) -> dict[str, float]:
    """The weighted mean of each name that anybody logged."""
    return {name: float(each.total) / each.weight for name, each in sums.items() if each.weight}


@dataclass(frozen=True)
class Logged:
    """What one rank's code logged in one step, for when the sums over all ranks are read."""

    names: tuple[str, ...]
    """That all ranks knew, in the order of the row."""
    sums: dict[str, WeightedSum]
    """Of this rank."""

    def known(self, totals: list[WeightedSum]) -> dict[str, float]:
        """The means of the step of those names, from the sums over all ranks."""
        return means(dict(zip(self.names, totals)))

    def new(self) -> dict[str, tuple[float, float]]:
        """This rank's sums of other names, as JSON values."""
        return {name: (float(each.total), each.weight) for name, each in self.sums.items() if name not in self.names}


class StepLog:
    """What one rank's code logged in a step, and the names that all ranks know."""

    def __init__(self, device: torch.device):
        self.device = device
        self.names: list[str] = []
        """In the order of the row."""
        self.sums: dict[str, WeightedSum] = {}
        """Of this step."""
        self.sent = Logged((), {})
        """What was logged in the step whose row was made last. Ranks may come to know names between its row and its end."""
        self.silent = False
        """Nothing is recorded: the step is tried without numbers."""

    def begin(self) -> None:
        self.sums = {}

    @contextmanager
    def at(self, weight: float) -> Iterator[None]:
        """Around a forward pass, or a loss, of samples with this weight over that of the global batch."""

        def record(name: str, value: Number) -> None:
            before = self.sums.get(name, NOTHING)
            value = value.double().reshape(()).to(self.device) if isinstance(value, Tensor) else value
            self.sums[name] = WeightedSum(before.total + value * weight, before.weight + weight)

        with recording(None if self.silent or not weight else record):
            yield

    @property
    def has_new_names(self) -> bool:
        """Whether a name was logged that not all ranks know."""
        return not self.sums.keys() <= set(self.names)

    def send(self) -> list[WeightedSum]:
        """This rank's sums of the names that all ranks know: what goes into the row of the step."""
        self.sent = Logged(tuple(self.names), self.sums)
        return [self.sums.get(name, NOTHING) for name in self.names]

    def agreed(self, step: Logged, group: ProcessGroup | None) -> dict[str, float]:
        """The means of a step in which some rank met new names. All ranks exchange them, and know them from here on."""
        pairs = self._agreed(step, group)
        self.names += [name for name in pairs if name not in self.names]
        return means(pairs)

    def _agreed(self, step: Logged, group: ProcessGroup | None) -> dict[str, WeightedSum]:
        """The sums over all ranks of the names that are new, in an order that is the same on all."""
        token = AGREEING.set(True)
        try:
            said = exchange(json.dumps(step.new()).encode(), group, self.device)
        finally:
            AGREEING.reset(token)
        found: dict[str, WeightedSum] = {}
        for name, (total, weight) in (pair for text in said for pair in json.loads(text).items()):
            before = found.get(name, NOTHING)
            found[name] = WeightedSum(before.total + total, before.weight + weight)
        return found


def refused_in_threads() -> Callable[[str, Number], None]:
    """What takes the numbers of a forward pass of a part of the samples, in a thread: it refuses them."""

    def record(name: str, value: Number) -> None:
        what = f'plait.log("{name}", …) was called in the model under processes=one'
        why = "threads run parts of the samples, whose weights nobody knows there"
        raise PlaitError(Problem("U014", what, why=why, fix=("call it in the loss", "leave out processes=one")), FAILED)

    return record
