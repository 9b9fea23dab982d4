"""Values that a job's code records during a step: `plait.log("aux", value)` in the model's forward or in the loss.

The recorded value of a step is the mean over the global batch, weighted like the loss: each call counts with the weight of its
samples (`Job.weight`; without one, their number). The row that ranks sum in every step also signals new names; ranks then exchange
them once. From then on each name has two elements in that row, a weighted sum and a weight: no step sends an extra message. If
several ranks have the same samples (`tp`), each counts, in both elements.

The second forward pass of activation checkpointing runs within backward, where nothing is recorded.
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
from plait.tensors.collectives import all_gather_bytes
from plait.tensors.torch_private import FakeTensor

CURRENT_RECORDER: ContextVar[Callable[[str, Number], None] | None] = ContextVar("records", default=None)
"""The recorder of the current forward pass; None: nothing is recorded."""
EXCHANGING_NAMES: ContextVar[bool] = ContextVar("agreeing", default=False)
"""Whether ranks are exchanging new names: a one-time message that belongs to no step."""


def log(name: str, value: Number) -> None:
    """Record a value of the current step: its mean over the global batch goes to metrics.jsonl and `Step.logged`.

    `value`: a number, or a tensor of one element: the mean over the samples in this call of the model or the loss. Several calls with
    one name are averaged. Outside a training step it does nothing. U014 for any other value.
    """
    record = CURRENT_RECORDER.get()
    if record is None:
        return
    scalar = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    if not isinstance(name, str) or not scalar:
        what = f"plait.log({name!r}, …) was given {_describe_number(value)}"
        why = "it takes a name and one number: the mean over the current samples"
        raise PlaitError(Problem("U014", what, why=why, fix=("plait.log(name, values.mean())",)), FAILED)
    if not isinstance(value, FakeTensor):  # a value that only another stage has
        record(name, value.detach() if isinstance(value, Tensor) else float(value))


def _describe_number(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def use_recorder(record: Callable[[str, Number], None] | None) -> Iterator[None]:
    """Use `record` for values logged within this context; None disables recording."""
    token = CURRENT_RECORDER.set(record)
    try:
        yield
    finally:
        CURRENT_RECORDER.reset(token)


ZERO_SUM = WeightedSum(0.0, 0.0)


def compute_means(sums: dict[str, WeightedSum]) -> dict[str, float]:
    """Return the weighted mean of each name that any rank logged."""
    return {name: float(each.total) / each.weight for name, each in sums.items() if each.weight}


@dataclass(frozen=True)
class LoggedSums:
    """Values that one rank logged in one step, until the sums over all ranks are read."""

    names: tuple[str, ...]
    """Names that all ranks have, in the order of the row."""
    sums: dict[str, WeightedSum]
    """Sums of this rank."""

    def compute_known_means(self, totals: list[WeightedSum]) -> dict[str, float]:
        """Return the means of the step for those names, from the sums over all ranks."""
        return compute_means(dict(zip(self.names, totals)))

    def list_new_sums(self) -> dict[str, tuple[float, float]]:
        """Return this rank's sums of new names, as JSON values."""
        return {name: (float(each.total), each.weight) for name, each in self.sums.items() if name not in self.names}


class StepLog:
    """Values that one rank logged in a step, and the names that all ranks have."""

    def __init__(self, device: torch.device):
        self.device = device
        self.names: list[str] = []
        """In the order of the row."""
        self.sums: dict[str, WeightedSum] = {}
        """Sums of this step."""
        self.sent = LoggedSums((), {})
        """Values of the step whose row was made last. Ranks may agree on new names between its row and its end."""
        self.is_silent = False
        """Whether nothing is recorded: the step runs on fake tensors."""

    def begin(self) -> None:
        self.sums = {}

    @contextmanager
    def record_weighted(self, weight: float) -> Iterator[None]:
        """Record values of a forward pass or loss with this weight relative to the global batch."""

        def record(name: str, value: Number) -> None:
            before = self.sums.get(name, ZERO_SUM)
            value = value.double().reshape(()).to(self.device) if isinstance(value, Tensor) else value
            self.sums[name] = WeightedSum(before.total + value * weight, before.weight + weight)

        with use_recorder(None if self.is_silent or not weight else record):
            yield

    @property
    def has_new_names(self) -> bool:
        """Whether a name was logged that not all ranks have."""
        return not self.sums.keys() <= set(self.names)

    def send(self) -> list[WeightedSum]:
        """Return this rank's sums for the row of the step, of the names that all ranks have."""
        self.sent = LoggedSums(tuple(self.names), self.sums)
        return [self.sums.get(name, ZERO_SUM) for name in self.names]

    def exchange_new(self, step: LoggedSums, group: ProcessGroup | None) -> dict[str, float]:
        """Return the means of a step in which a rank logged new names. All ranks exchange them, and have them from then on."""
        pairs = self._exchange_sums(step, group)
        self.names += [name for name in pairs if name not in self.names]
        return compute_means(pairs)

    def _exchange_sums(self, step: LoggedSums, group: ProcessGroup | None) -> dict[str, WeightedSum]:
        """Return the sums over all ranks of the new names, in the same order on all ranks."""
        token = EXCHANGING_NAMES.set(True)
        try:
            said = all_gather_bytes(json.dumps(step.list_new_sums()).encode(), group, self.device)
        finally:
            EXCHANGING_NAMES.reset(token)
        found: dict[str, WeightedSum] = {}
        for name, (total, weight) in (pair for text in said for pair in json.loads(text).items()):
            before = found.get(name, ZERO_SUM)
            found[name] = WeightedSum(before.total + total, before.weight + weight)
        return found


def make_thread_recorder() -> Callable[[str, Number], None]:
    """Make a recorder for forward passes in threads of processes=one: it rejects all values."""

    def record(name: str, value: Number) -> None:
        what = f'plait.log("{name}", …) was called in the model under processes=one'
        why = "threads run parts of the samples, whose weights are not available there"
        raise PlaitError(Problem("U014", what, why=why, fix=("call it in the loss", "remove processes=one")), FAILED)

    return record
