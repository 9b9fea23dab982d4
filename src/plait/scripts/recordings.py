"""What the recorder of each process left (`scripts/recorder.py`): its batches, steps and epochs, and which batches a step used."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from plait.scripts.values import StoredTensor


class ProcessStart(msgspec.Struct, frozen=True, tag_field="is", tag="start"):
    """A process before its first forward pass that trains. `group`: ranks that share its rows (tensor parallelism)."""

    rank: int
    world: int
    weights: dict[str, StoredTensor]
    trainable: list[str]
    batch_norms: list[str]
    group: list[int]


class ReadBatch(msgspec.Struct, frozen=True, tag_field="is", tag="batch"):
    """A batch that a process read. `source`: the pass of a loader that gave it, empty if the model got rows that no loader read."""

    source: str
    rows: list[str]
    indices: list[int | str] | None
    labels: list[int] | None
    stored: dict[str, StoredTensor]
    shapes: list[list[int]]


class OptimizerStep(msgspec.Struct, frozen=True, tag_field="is", tag="step"):
    """A step of an optimizer; `step` counts those of the first one, `drew` says that random numbers were drawn between batch and loss.

    `after`: gradients as backward leaves them, in the first step; `gradients`: before clipping, as far as it was seen.
    """

    step: int
    optimizer: int
    kind: str
    formats: list[str]
    lr: dict[str, float]
    decay: dict[str, float]
    without: list[str]
    losses: list[float]
    source: str
    drew: bool
    after: dict[str, StoredTensor]
    gradients: dict[str, StoredTensor]
    applied: dict[str, StoredTensor]
    weights: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    complete: bool


class PassOrder(msgspec.Struct, frozen=True, tag_field="is", tag="epoch"):
    """The batches of one pass, as indices, in the script's own order, and the rows of its own first batch."""

    source: str
    order: list[list[Any]]
    own: int
    complete: bool


_DECODER = msgspec.json.Decoder(ProcessStart | ReadBatch | OptimizerStep | PassOrder)


@dataclass(frozen=True)
class Recording:
    """Of one process that trained."""

    start: ProcessStart
    batches: tuple[ReadBatch, ...]
    steps: tuple[OptimizerStep, ...]
    orders: Mapping[str, PassOrder]

    @cached_property
    def rounds(self) -> tuple[tuple[OptimizerStep, ...], ...]:
        """The steps of all optimizers, by those of the first."""
        found = defaultdict[int, list[OptimizerStep]](list)
        for step in self.steps:
            found[step.step].append(step)
        return tuple(tuple(steps) for _, steps in sorted(found.items()))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The passes that rounds read from, in order."""
        return tuple(dict.fromkeys(steps[0].source for steps in self.rounds))

    @cached_property
    def used(self) -> tuple[tuple[ReadBatch, ...], ...]:
        """The batches of each round. Those of a pass belong to its rounds in order: as many as losses were differentiated, else equally many."""
        found = list[tuple[ReadBatch, ...]]()
        for source in self.sources:
            read = [batch for batch in self.batches if batch.source == source]
            counts = [sum(len(step.losses) for step in steps) for steps in self.rounds if steps[0].source == source]
            if sum(counts) > len(read) or (len(counts) > 1 and len(read) >= 2 * sum(counts)):
                counts = [len(read) // len(counts)] * len(counts)
            found += [tuple(read[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
        return tuple(found)

    @cached_property
    def passes(self) -> tuple[list[Any], ...]:
        """All indices of each pass that steps read from, as the script's own sampler drew them."""
        orders = (self.orders.get(source) for source in self.sources)
        return tuple([i for batch in order.order for i in batch] for order in orders if order and order.order and order.complete)


def recordings(folder: Path) -> tuple[Recording, ...]:
    """Of all processes that stepped an optimizer, by rank."""
    found = (_recording(path) for path in sorted(folder.glob("*.jsonl")))
    return tuple(sorted((each for each in found if each is not None), key=lambda each: each.start.rank))


def _recording(path: Path) -> Recording | None:
    events = list[ProcessStart | ReadBatch | OptimizerStep | PassOrder]()
    with contextlib.suppress(msgspec.DecodeError):  # torn: the process was ended
        for line in path.read_bytes().splitlines():
            events.append(_DECODER.decode(line))
    starts = [each for each in events if isinstance(each, ProcessStart)]
    batches = tuple(each for each in events if isinstance(each, ReadBatch))
    steps = tuple(each for each in events if isinstance(each, OptimizerStep) and each.complete)
    orders = {each.source: each for each in events if isinstance(each, PassOrder)}
    return Recording(starts[0], batches, steps, orders) if starts and steps else None


def unlike(first: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> list[str]:
    """The names in both of tensors that are not the same, bit for bit."""
    return [name for name, t in first.items() if other.get(name, t) != t]
