"""The samples of each step: a pure function of (seed, step), independent of the layout.

The order of an epoch is a permutation keyed by (seed, epoch), or the job's own (`data/sampling.py`). Step k takes the next `batch` samples,
or fewer under a token budget. The last batch of an epoch is short; it is never padded or dropped. Local batches are contiguous ranges of
the batch, possibly of unequal sizes, and micro-batches are contiguous ranges of a local batch. Augmentation inside ``dataset[i]`` may use
Python's, numpy's or torch's own generators. They are seeded by (seed, epoch, i) in every process, so neither the rank nor the number of
loader workers changes a sample.

Every rank reads an iterable data set in full and keeps its local batch. If it has a ``state_dict``, checkpoints store it; otherwise a
resumed run reads up to its position.

[Note: Local batch sizes]
Local batches are proportional to weights, in integers. Sizes depend on the batch size and the weights alone, so every rank can
compute those of all ranks. If weights change during training, they change at a step that no rank has started to read (`SplitSchedule`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.plan import Plan
from plait.data.batch_rows import SampleRows
from plait.data.loaders import unwrap_loader
from plait.randomness.keyed import preserve_host_state, seed_host
from plait.tensors.float64 import WidenAllMode
from plait.tensors.rows import split_evenly
from plait.tensors.torch_private import tree_map_only

SplitWeights = tuple[int, ...]
"""Relative size of each local batch; empty: all equal."""


def split_by_weights(size: int, parts: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Split `size` samples in proportion to `parts` by largest remainder; the first entries win ties.

    Each entry has at least `least` samples if there are enough. With fewer samples, as many entries as possible are nonempty.

    >>> split_by_weights(8, (3, 1)), split_by_weights(7, (1, 1, 1))
    ((6, 2), (3, 2, 2))
    >>> split_by_weights(7, (100, 1, 1), 2), split_by_weights(2, (3, 2, 1))
    ((3, 2, 2), (1, 1, 0))

    """
    count = len(parts)
    if size < count:
        favoured = set(sorted(range(count), key=lambda i: (-parts[i], i))[:size])
        return tuple(int(i in favoured) for i in range(count))
    least, held = min(least, size // count), dict[int, int]()
    while True:
        free = [i for i in range(count) if i not in held]
        rest, whole = size - sum(held.values()), sum(parts[i] for i in free)
        small = [i for i in free if rest * parts[i] < least * whole]
        if not small:
            break
        held |= dict.fromkeys(small, least)
    found = held | {i: rest * parts[i] // whole for i in free}
    left = size - sum(found.values())
    for i in sorted(free, key=lambda i: (-(rest * parts[i] % whole), i))[:left]:
        found[i] += 1
    return tuple(found[i] for i in range(count))


class SplitSchedule:
    """Weights of the batch split for every step, with at most one change ahead.

    The table is in shared memory, so loader processes see a change too. A change applies only to steps that no process has started to read
    (see `count_prefetched_steps`).

    """

    def __init__(self, ranks: int):
        self.table: Tensor = torch.ones(2, ranks + 1, dtype=torch.int64).share_memory_()
        """Before and after a change: the first step, and the weights."""
        self.table[:, 0] = 0

    def weights_at(self, step: int) -> SplitWeights:
        """Return the weights of step number `step`, counted from 0."""
        before, after = self.table.tolist()
        return tuple((after if step >= after[0] else before)[1:])

    @property
    def last_change(self) -> tuple[int, SplitWeights]:
        """(step of the latest change, past or scheduled; the weights from that step on)."""
        step, *parts = self.table[1].tolist()
        return step, tuple(parts)

    def change(self, step: int, parts: Sequence[int]) -> None:
        """Schedule new weights from `step` on. Requires that the previous change has taken effect."""
        self.table[0] = self.table[1]
        self.table[1] = torch.tensor([step, *parts])

    def to_rows(self) -> list[list[int]]:
        """Return the table for a checkpoint."""
        return self.table.tolist()

    def restore(self, rows: list[list[int]]) -> None:
        """Restore the table from a checkpoint."""
        self.table.copy_(torch.tensor(rows))


class RotatingSplit(SplitSchedule):
    """Schedule for proofs: from the second step on, one rank after the other has three times the weight of the others."""

    def weights_at(self, step: int) -> SplitWeights:
        """Return equal weights for the first step, as in a dry run."""
        count = self.table.shape[1] - 1
        return tuple(3 if step and i == (step - 1) % count else 1 for i in range(count))


def count_prefetched_steps(workers: int) -> int:
    """Return the number of steps ahead that may already be read; each loader process fetches two steps."""
    return 2 * workers + 2


@dataclass(frozen=True)
class Position:
    """Position of a run in its data: `step` steps done, next sample `start` of `epoch`, `samples` seen in total.

    `state`: the iterable data set's own state at this position, if it has one.

    """

    step: int = 0
    epoch: int = 0
    start: int = 0
    samples: int = 0
    state: object = None


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one rank: samples first … first + count − 1 of the global batch.

    If `count` is 0, inputs and targets are a sample of another rank, for a forward pass that every rank must run.

    """

    first: int
    count: int
    inputs: object
    targets: object
    ids: tuple[int, ...]
    samples: tuple[Any, ...] = ()
    """The collated samples, if the data set has its own `collate` (see `data/padding.py`)."""


@dataclass(frozen=True)
class Batch:
    """One step's work for one rank. `size`: samples over all ranks; `next_position`: the position after the step."""

    position: Position
    size: int
    micro_batches: tuple[MicroBatch, ...]
    next_position: Position
    digests: tuple[int, ...] = ()
    """For an iterable: digests of all samples of the batch, on every rank."""
    idle_micro_batches: tuple[MicroBatch, ...] = ()
    """Placeholder micro-batches for a rank whose shard of an iterable has ended."""
    all_samples: tuple[Any, ...] = ()
    """For an iterable with its own `collate`: all samples of the batch."""
    max_share: int = 0
    """Largest local batch among the ranks of a step; 0: sizes are as equal as possible."""

    @property
    def count(self) -> int:
        return sum(m.count for m in self.micro_batches)


@dataclass(frozen=True)
class BatchShare:
    """Local batch number `rank` of `ranks`, split into `microbatches` micro-batches.

    With several replica groups, the batch is split over the groups and then over each group's ranks. `weights`: relative sizes of the local
    batches; empty: all equal. With a `schedule` the weights depend on the step (see `at_step`).

    """

    rank: int = 0
    ranks: int = 1
    microbatches: int = 1
    group: int = 0
    groups: int = 1
    weights: SplitWeights = ()
    schedule: SplitSchedule | None = field(default=None, compare=False)

    @staticmethod
    def from_plan(plan: Plan, share: int, group: int = 0) -> "BatchShare":
        """Return local batch number `share` of a replica group of a plan; with `batch_split=auto`, the initial one."""
        return BatchShare(share, plan.ranks, plan.microbatches, group, plan.replica_groups, plan.parts)

    def at_step(self, step: int) -> "BatchShare":
        """Return this local batch with the weights of step number `step`."""
        return self if self.schedule is None else replace(self, weights=self.schedule.weights_at(step))

    @property
    def is_uneven(self) -> bool:
        """Whether local batches may differ by more than one sample."""
        return self.schedule is not None or len(set(self.weights)) > 1

    def compute_sizes(self, size: int) -> tuple[int, ...]:
        """Return the size of each local batch of the group, for a global batch of `size`."""
        return split_by_weights(self.locate_group(size)[1], self.weights or (1,) * self.ranks, self.microbatches)

    def locate_group(self, size: int) -> tuple[int, int]:
        """Return (first, count) of the replica group's samples in a global batch of `size`."""
        return split_evenly(size, self.groups, self.group)

    def locate_micro_batches(self, size: int) -> list[tuple[int, int]]:
        """Return (first, count) of each micro-batch in a global batch of `size`; a count may be 0 in a short batch."""
        start, held = self.locate_group(size)[0], self.compute_sizes(size)
        first, count = sum(held[: self.rank]), held[self.rank]
        inside = [split_evenly(count, self.microbatches, i) for i in range(self.microbatches)]
        return [(start + first + offset, n) for offset, n in inside]


class MapStyle(Protocol):
    """A data set with random access by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> object: ...


Data = MapStyle | Iterable[object]


def is_map(data: object) -> TypeGuard[MapStyle]:
    """Return whether the data set has access by index (torch's IterableDataset inherits a `__getitem__` that only raises)."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def open_data(make: Callable[[], Any], where: str = "Job(data=…)") -> Any:
    """Return the checked result of `make()`. A single-use iterator is created again for every pass."""
    data = validate_data(make(), where)
    if is_map(data) or not _is_single_use(data):
        return data
    if make() is data:
        what = f"the job's data is a single {type(data).__name__}, which can be read only once"
        why = "every call of the function returns the same object; each epoch, and the check of the first sample, needs its own"
        raise PlaitError(Problem("J007", what, why, where, ("data=lambda: …    create a new one in every call",)))
    return ReopenedIterable(make)


def open_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a version of `make` that caches data with access by index, once per process."""
    held: dict[int, Any] = {}

    def cached_data() -> Any:
        if (here := os.getpid()) in held:
            return held[here]
        fresh = make()
        if is_map(fresh):
            held[here] = fresh
        return fresh

    return cached_data


def _is_single_use(data: object) -> bool:
    """Return whether the data is a generator or a builtin iterator over one (map, zip, itertools)."""
    return isinstance(data, Iterator) and type(data).__module__ in ("builtins", "itertools")


def _copy_attributes(data: object, into: object, *names: str) -> None:
    for name in names:
        if hasattr(data, name):
            setattr(into, name, getattr(data, name))


class ReopenedIterable:
    """An iterable that calls `make` for every pass. `like`: data set whose `collate` and `set_epoch` it copies."""

    def __init__(self, make: Callable[[], Any], like: object = None):
        self.make = make
        _copy_attributes(like, self, "collate", "set_epoch")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def unshard_iterable(data: Data) -> Data:
    """Return an iterable without its `shard` method, for a rank that represents all ranks."""
    return ReopenedIterable(lambda: data, data) if hasattr(data, "shard") and not is_map(data) else data


def open_first_sample(make: Callable[[], Any], data: object, where: str = "Job(data=…)") -> Any:
    """Return data for `make_sketch_batch`. For an iterable this is a fresh one, since reading would advance `data`."""
    return data if is_map(data) else _FirstSample(open_data(make, where))


class _FirstSample:
    """Data set of the first sample of an iterable."""

    def __init__(self, data: Iterable[object]):
        with preserve_host_state():
            self.sample = next(iter(data), None)
        if self.sample is None:
            raise empty_data_error("it ended without a sample")
        _copy_attributes(data, self, "collate", "sketched_beside")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        return self.sample


def seeded_sample(data: MapStyle, seed: int, epoch: int, i: int) -> object:
    """Return sample `i`, with the host generators seeded for that epoch and sample."""
    seed_host(seed, "sample", epoch, i)
    return data[i]


def empty_data_error(why: str, where: str = "") -> PlaitError:
    """J007 for data without samples."""
    return PlaitError(Problem("J007", "the data is empty", why=why, where=where))


def validate_data(data: object, where: str) -> Any:
    """Return the data, or the samples of a `DataLoader`, if it is readable and nonempty. J007 otherwise."""
    data = unwrap_loader(data)
    if is_map(data):
        if len(data) == 0:
            raise empty_data_error("len(data) = 0", where)
    elif not hasattr(data, "__iter__"):
        what = f"the data is a {type(data).__name__}, which cannot be read"
        fix = ("add  __len__ and __getitem__,  or  __iter__,  to its class",)
        raise PlaitError(Problem("J007", what, where=where, fix=fix))
    return data


LABEL_NAMES = ("labels", "label", "targets", "target", "y")
"""Keys of the targets in a sample that is a dict, most likely first."""
LABEL_FIX = f"name the targets of a dict {', '.join(LABEL_NAMES[:-1])} or {LABEL_NAMES[-1]}; the other values are the inputs"


def collate(data: object, samples: list[Any]) -> tuple[Any, Any]:
    """Return (inputs, targets) of some samples, by the data set's own `collate` or torch's default.

    For a dict the targets are the value of the first key in `LABEL_NAMES`, and the inputs are the other values. J007.

    """
    if hasattr(data, "collate"):
        collated = data.collate(samples)
        if (found := split_pair(collated)) is None:
            what = "the data's `collate` does not return a pair (inputs, targets)"
            why, fix = f"it returned {_describe_sample(collated)}", ("return inputs, targets", LABEL_FIX)
            raise PlaitError(Problem("J007", what, why=why, fix=fix))
        return found
    if split_pair(samples[0]) is None:
        raise PlaitError(_no_pair_problem(samples[0]))
    try:
        pairs = split_pair(default_collate([lists_to_tensors(sample) for sample in samples]))
        assert pairs is not None
    except (RuntimeError, TypeError, KeyError) as error:
        shapes = list(dict.fromkeys(_describe_sample(s) for s in samples))
        if len(shapes) == 1 and not isinstance(error, TypeError):
            raise
        what = f"{len(samples)} samples cannot be collated: {summarize_error(error)}"
        why = "torch's default_collate requires samples of one shape; here are " + ", and ".join(shapes[:2])
        fix = ("give all samples one shape", "give the data set  collate(samples) -> (inputs, targets),  which pads")
        fix += ("DataLoader(…, collate_fn=…)    with a function that pads",)
        raise PlaitError(Problem("J007", what, why=why, fix=fix)) from error
    return pairs


def split_pair(value: object) -> tuple[Any, Any] | None:
    """Return (inputs, targets) of a pair, or of a dict with a key in `LABEL_NAMES` and others; None for other values."""
    if isinstance(value, Mapping):
        label = next((name for name in LABEL_NAMES if name in value), None)
        inputs = {name: leaf for name, leaf in value.items() if name != label}
        return (inputs, value[label]) if label is not None and inputs else None
    return (value[0], value[1]) if isinstance(value, (tuple, list)) and len(value) == 2 else None


def lists_to_tensors(sample: object) -> Any:
    """Convert lists of numbers in a dict to tensors, since torch's default collate would transpose lists."""
    if not isinstance(sample, Mapping):
        return sample
    return {name: _as_tensor(leaf) if isinstance(leaf, list) else lists_to_tensors(leaf) for name, leaf in sample.items()}


def _as_tensor(values: list[Any]) -> Any:
    first = next(iter(values), None)
    while isinstance(first, list):
        first = next(iter(first), None)
    try:
        return torch.tensor(values) if isinstance(first, (bool, int, float)) else values
    except (ValueError, TypeError):  # rows of unequal lengths, or other values
        return values


def _no_pair_problem(sample: object) -> Problem:
    """J007 with a fix for the sample's own keys."""
    fix = ("return inputs, targets    from __getitem__ (inputs may be a tensor, a tuple or a dict)",)
    fix += (LABEL_FIX,) if isinstance(sample, Mapping) else ()
    return Problem("J007", "a sample is not a pair (inputs, targets)", why=f"it is {_describe_sample(sample)}", fix=fix)


def _describe_sample(value: object) -> str:
    """Describe a sample briefly."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + ", ".join(map(str, list(value)[:8]))
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: " + "; ".join(map(_describe_sample, value[:4]))
    return f"a {type(value).__name__}"


def make_sketch_batch(data: Data, count: int) -> tuple[Any, Any]:
    """Return a collated batch that repeats the first sample `count` times. The random generators are restored.

    If the data has `sketched_beside()`, the batch repeats the first of its samples, padded to the lengths of all of them.

    """
    with preserve_host_state():
        company = data.sketched_beside() if hasattr(data, "sketched_beside") else []
        sample = company[0] if company else data[0] if is_map(data) else next(iter(data))
    samples = [tree_map_only(Tensor, lambda t: t, sample) for _ in range(count)]
    return collate_with_others(data, samples, company) if company else collate(data, samples)


@preserve_host_state()
def find_sample_rows(data: object, sample: object) -> SampleRows:
    """Return the location of samples in the result of the data set's `collate`. The random generators are restored."""
    return SampleRows(collate(data, [sample]), collate(data, [sample, sample]))


def collate_with_others(data: object, samples: list[Any], company: list[Any]) -> tuple[Any, Any]:
    """Collate the samples together with others and drop the others' rows, so that shapes match the full batch."""
    rows, alone = find_sample_rows(data, samples[0]), collate(data, samples)
    together = collate(data, [*samples, *company])
    pair = rows.take_first(together, len(samples), len(samples) + len(company))
    return pair if rows.contains(pair, alone) else alone


def make_micro_batch(data: object, samples: list[Any], first: int, ids: list[int]) -> "MicroBatch":
    """Return the micro-batch of these samples. Without ids its count is 0, and it has one of `samples`, from another rank."""
    samples = samples[: len(ids) or 1]
    inputs, targets = collate(data, samples)
    kept = tuple(samples) if hasattr(data, "collate") else ()
    return MicroBatch(first, len(ids), inputs, targets, tuple(ids), kept)


def max_micro_batch_size(batch: int, shares: int, microbatches: int) -> int:
    """Return the largest number of samples in a micro-batch on a device."""
    return -(-batch // (shares * microbatches))


WeightFunction = Callable[[Any], Any] | None


def weigh_micro_batch(weight: WeightFunction, micro: MicroBatch) -> float:
    """Return the divisor of a micro-batch's mean loss: `Job.weight` of its targets, or its number of samples.

    It is computed in float64, so that the weights of micro-batches add up to the weight of the batch.

    """
    if micro.count == 0:
        return 0.0
    if weight is None:
        return float(micro.count)
    with WidenAllMode():
        value = weight(micro.targets)
        return float(value.sum() if isinstance(value, Tensor) else value)
