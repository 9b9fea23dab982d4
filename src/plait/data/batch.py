"""Which samples a step sees: a pure function of (seed, step), never of the layout.

The order of an epoch is a permutation keyed by (seed, epoch), or the job's own (`data/sampling.py`). Step k takes the next `batch`
samples of it, or fewer where a token budget says so; the last batch of an epoch is short, never padded and never dropped. Ranks
take contiguous, possibly unequal shares of the batch, micro-batches contiguous parts of a share. Augmentation inside
``dataset[i]`` may use Python's, numpy's or torch's own generators: they are seeded by (seed, epoch, i), whoever loads the sample,
so neither the rank nor the number of loader workers changes it.

An iterable data set is read by every rank in full and each keeps its share; its ``state_dict`` (when it has one)
travels in checkpoints, otherwise a resumed run reads up to where it was.

[Note: Shares]
How many samples of a batch each share has: as many as its part of the whole says, in whole numbers.

Sizes are a function of the batch's size and the parts alone, so every rank knows those of all others. Where parts change while
training, they do so at a step that is known before any rank reads its samples (`Course`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.plan import Plan
from plait.data.batch_rows import SampleRows
from plait.data.loaders import unwrapped
from plait.randomness.keyed import host_kept, seed_host
from plait.tensors.float64 import Widest
from plait.tensors.rows import split
from plait.tensors.torch_private import tree_map_only

Parts = tuple[int, ...]
"""What each share has, relative to the others; empty: all alike."""


def sizes(size: int, parts: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """`size` samples shared out as `parts` say, by largest remainder; the first shares win ties. Where there are enough, none has
    fewer than `least`, and where there are not, none is empty as long as that goes.

    >>> sizes(8, (3, 1)), sizes(7, (1, 1, 1)), sizes(7, (100, 1, 1), 2), sizes(2, (3, 2, 1))
    ((6, 2), (3, 2, 2), (3, 2, 2), (1, 1, 0))
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


class Course:
    """The parts of every step: those before a step, and those from it on. Loader processes see a change too: it is in memory that
    they share. A change is for steps that nobody has begun to read (see `ahead`)."""

    def __init__(self, ranks: int):
        self.table: Tensor = torch.ones(2, ranks + 1, dtype=torch.int64).share_memory_()
        """Before and after a change: the step from which on, and the parts."""
        self.table[:, 0] = 0

    def at(self, step: int) -> Parts:
        """Those of step number `step`, counted from 0."""
        before, after = self.table.tolist()
        return tuple((after if step >= after[0] else before)[1:])

    @property
    def last(self) -> tuple[int, Parts]:
        """(the step of the last change, or of one to come, the parts from it on)."""
        step, *parts = self.table[1].tolist()
        return step, tuple(parts)

    def change(self, step: int, parts: Sequence[int]) -> None:
        """Other parts from `step` on. The change before it has come about."""
        self.table[0] = self.table[1]
        self.table[1] = torch.tensor([step, *parts])

    def rows(self) -> list[list[int]]:
        """For a checkpoint."""
        return self.table.tolist()

    def restore(self, rows: list[list[int]]) -> None:
        """From one."""
        self.table.copy_(torch.tensor(rows))


class InTurn(Course):
    """For proofs: from the second step on, one share after the other has three times what the others have."""

    def at(self, step: int) -> Parts:
        """The first step's are alike, as in a dry run."""
        count = self.table.shape[1] - 1
        return tuple(3 if step and i == (step - 1) % count else 1 for i in range(count))


def ahead(workers: int) -> int:
    """So many steps after those that are done, nobody has begun to read samples: loader processes fetch two steps each."""
    return 2 * workers + 2


@dataclass(frozen=True)
class Position:
    """Where a run is in its data: `step` steps done, next sample `start` of `epoch`, `samples` seen in all.

    `state` is an iterable data set's own state there, when it has one.
    """

    step: int = 0
    epoch: int = 0
    start: int = 0
    samples: int = 0
    state: object = None


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank: samples first … first + count − 1 of the global batch.

    If `count` is 0, inputs and targets are those of a sample of another rank, for a forward pass that every rank must run.
    """

    first: int
    count: int
    inputs: object
    targets: object
    ids: tuple[int, ...]
    samples: tuple[Any, ...] = ()
    """What was collated, where the data set has a `collate` of its own (see `data/padding.py`)."""


@dataclass(frozen=True)
class Batch:
    """One step's work for one rank. `size` samples over all ranks; `after` is the position once it is done."""

    position: Position
    size: int
    micro: tuple[Micro, ...]
    after: Position
    seen: tuple[int, ...] = ()
    """Of an iterable: a digest of all samples of the batch, on every rank."""
    idle: tuple[Micro, ...] = ()
    """What a rank runs along with when its share of an iterable has ended."""
    around: tuple[Any, ...] = ()
    """Of an iterable with a `collate` of its own: all samples of the batch."""
    most: int = 0
    """Samples of the share that has most of them, of those that step together; 0: shares are as equal as can be."""

    @property
    def count(self) -> int:
        return sum(m.count for m in self.micro)


@dataclass(frozen=True)
class BatchShare:
    """Which part of every batch is ours: part `rank` of `ranks`, computed in `microbatches` parts.

    Of several replica groups each has a part of the batch, and ranks have parts of their group's. `parted`: how large shares are to
    each other; empty: all alike. With a `course` they are as it says for a step (see `at`).
    """

    rank: int = 0
    ranks: int = 1
    microbatches: int = 1
    group: int = 0
    groups: int = 1
    parted: Parts = ()
    course: Course | None = field(default=None, compare=False)

    @staticmethod
    def of(plan: Plan, share: int, group: int = 0) -> "BatchShare":
        """Share number `share` of a replica group of a plan; with `batch_split=auto`, as training begins."""
        return BatchShare(share, plan.ranks, plan.microbatches, group, plan.replica_groups, plan.parts)

    def at(self, step: int) -> "BatchShare":
        """This share in step number `step`."""
        return self if self.course is None else replace(self, parted=self.course.at(step))

    @property
    def uneven(self) -> bool:
        """Whether shares may be unlike by more than a sample."""
        return self.course is not None or len(set(self.parted)) > 1

    def sizes(self, size: int) -> tuple[int, ...]:
        """Samples of each share of the group in a global batch of `size`."""
        return sizes(self.of_group(size)[1], self.parted or (1,) * self.ranks, self.microbatches)

    def of_group(self, size: int) -> tuple[int, int]:
        """(first, count) of the replica group's samples in a global batch of `size`."""
        return split(size, self.groups, self.group)

    def parts(self, size: int) -> list[tuple[int, int]]:
        """(first, count) of each micro-batch in a global batch of `size`; a count may be 0 in a short batch."""
        start, held = self.of_group(size)[0], self.sizes(size)
        first, count = sum(held[: self.rank]), held[self.rank]
        inside = [split(count, self.microbatches, i) for i in range(self.microbatches)]
        return [(start + first + offset, n) for offset, n in inside]


class MapStyle(Protocol):
    """A data set that is read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> object: ...


Data = MapStyle | Iterable[object]


def is_map(data: object) -> TypeGuard[MapStyle]:
    """Whether the data set is read by index (torch's IterableDataset inherits a `__getitem__` that only raises)."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def opened(make: Callable[[], Any], where: str = "Job(data=…)") -> Any:
    """What `make()` gives, checked. A generator, which can be read once only, is made again for every reading."""
    data = checked(make(), where)
    if is_map(data) or not _once(data):
        return data
    if make() is data:
        what = f"the job's data is one {type(data).__name__}, and it can be read only once"
        why = "every call of the function gives the same one; each epoch, and the look at the first sample, need their own"
        raise PlaitError(Problem("J007", what, why, where, ("data=lambda: …    make a new one in every call",)))
    return Remade(make)


def opened_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, called once in each process where what it gives is read by index."""
    held: dict[int, Any] = {}

    def data() -> Any:
        if (here := os.getpid()) in held:
            return held[here]
        fresh = make()
        if is_map(fresh):
            held[here] = fresh
        return fresh

    return data


def _once(data: object) -> bool:
    """Whether it is a generator, or what Python's own functions make of one (map, zip, itertools)."""
    return isinstance(data, Iterator) and type(data).__module__ in ("builtins", "itertools")


def _pass_on(data: object, into: object, *names: str) -> None:
    for name in names:
        if hasattr(data, name):
            setattr(into, name, getattr(data, name))


class Remade:
    """What is read once, made again for every reading. `like`: what it has in common with it besides."""

    def __init__(self, make: Callable[[], Any], like: object = None):
        self.make = make
        _pass_on(like, self, "collate", "set_epoch")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def whole(data: Data) -> Data:
    """An iterable without its shares, for a rank that stands for all."""
    return Remade(lambda: data, data) if hasattr(data, "shard") and not is_map(data) else data


def example(make: Callable[[], Any], data: object, where: str = "Job(data=…)") -> Any:
    """What `first_samples` can read beside `data`: of an iterable another one, since reading moves it, read once."""
    return data if is_map(data) else _First(opened(make, where))


class _First:
    """The first sample of an iterable, as a data set."""

    def __init__(self, data: Iterable[object]):
        with host_kept():
            self.sample = next(iter(data), None)
        if self.sample is None:
            raise empty("it ended without a sample")
        _pass_on(data, self, "collate", "sketched_beside")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        return self.sample


def seeded_sample(data: MapStyle, seed: int, epoch: int, i: int) -> object:
    """Sample `i`, the host generators seeded before as they are in that epoch."""
    seed_host(seed, "sample", epoch, i)
    return data[i]


def empty(why: str, where: str = "") -> PlaitError:
    """J007: there is not one sample."""
    return PlaitError(Problem("J007", "the data is empty", why=why, where=where))


def checked(data: object, where: str) -> Any:
    """`data` when it can be read by `batches`, with at least one sample; of a `DataLoader` its samples. J007 otherwise."""
    data = unwrapped(data)
    if is_map(data):
        if len(data) == 0:
            raise empty("len(data) = 0", where)
    elif not hasattr(data, "__iter__"):
        what = f"the data is a {type(data).__name__}, which cannot be read"
        fix = ("give it  __len__ and __getitem__,  or  __iter__",)
        raise PlaitError(Problem("J007", what, where=where, fix=fix))
    return data


LABELS = ("labels", "label", "targets", "target", "y")
"""What the targets are called in a sample that is a dict, the likeliest first."""
NAMED = f"name the targets of a dict {', '.join(LABELS[:-1])} or {LABELS[-1]}; what is beside them are the inputs"


def collate(data: object, samples: list[Any]) -> tuple[Any, Any]:
    """(inputs, targets) of some samples: the data set's own `collate` when it has one, else torch's default. Of a dict the targets
    are what is named as one of `LABELS`, and the inputs the rest. J007."""
    if hasattr(data, "collate"):
        collated = data.collate(samples)
        if (found := pair_of(collated)) is None:
            what = "the data's `collate` does not return a pair (inputs, targets)"
            why, fix = f"it returned {_in_words(collated)}", ("return inputs, targets", NAMED)
            raise PlaitError(Problem("J007", what, why=why, fix=fix))
        return found
    if pair_of(samples[0]) is None:
        raise PlaitError(_no_pair(samples[0]))
    try:
        pairs = pair_of(default_collate([in_tensors(sample) for sample in samples]))
        assert pairs is not None
    except (RuntimeError, TypeError, KeyError) as error:
        shapes = list(dict.fromkeys(_in_words(s) for s in samples))
        if len(shapes) == 1 and not isinstance(error, TypeError):
            raise
        what = f"{len(samples)} samples cannot be put together: {in_a_line(error)}"
        why = "torch's default_collate puts samples of one shape together; here are " + ", and ".join(shapes[:2])
        fix = ("make all samples alike", "give the data set  collate(samples) -> (inputs, targets),  which pads")
        fix += ("DataLoader(…, collate_fn=…)    with one that pads",)
        raise PlaitError(Problem("J007", what, why=why, fix=fix)) from error
    return pairs


def pair_of(value: object) -> tuple[Any, Any] | None:
    """(inputs, targets) of a pair, or of a dict that has one of `LABELS`, and something besides; None of anything else."""
    if isinstance(value, Mapping):
        label = next((name for name in LABELS if name in value), None)
        inputs = {name: leaf for name, leaf in value.items() if name != label}
        return (inputs, value[label]) if label is not None and inputs else None
    return (value[0], value[1]) if isinstance(value, (tuple, list)) and len(value) == 2 else None


def in_tensors(sample: object) -> Any:
    """A sample, the lists of numbers in a dict as tensors: torch's default would take them apart."""
    if not isinstance(sample, Mapping):
        return sample
    return {name: _as_tensor(leaf) if isinstance(leaf, list) else in_tensors(leaf) for name, leaf in sample.items()}


def _as_tensor(values: list[Any]) -> Any:
    first = next(iter(values), None)
    while isinstance(first, list):
        first = next(iter(first), None)
    try:
        return torch.tensor(values) if isinstance(first, (bool, int, float)) else values
    except (ValueError, TypeError):  # rows of several lengths, or not of numbers
        return values


def _no_pair(sample: object) -> Problem:
    """J007 with what to write, from the sample's own keys."""
    fix = ("return inputs, targets    from __getitem__ (inputs may be a tensor, a tuple or a dict)",)
    fix += (NAMED,) if isinstance(sample, Mapping) else ()
    return Problem("J007", "a sample is not a pair (inputs, targets)", why=f"it is {_in_words(sample)}", fix=fix)


def _in_words(value: object) -> str:
    """A sample in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + ", ".join(map(str, list(value)[:8]))
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: " + "; ".join(map(_in_words, value[:4]))
    return f"a {type(value).__name__}"


def first_samples(data: Data, count: int) -> tuple[Any, Any]:
    """A collated batch of `count` samples for the sketch: the first sample, repeated. Leaves the generators as they were.

    `data.sketched_beside()`, where there is one, gives samples: the batch has the first of them, and the lengths of all.
    """
    with host_kept():
        company = data.sketched_beside() if hasattr(data, "sketched_beside") else []
        sample = company[0] if company else data[0] if is_map(data) else next(iter(data))
    samples = [tree_map_only(Tensor, lambda t: t, sample) for _ in range(count)]
    return beside(data, samples, company) if company else collate(data, samples)


@host_kept()
def rows_of(data: object, sample: object) -> SampleRows:
    """Where the samples are in what the data set's `collate` returns. The generators stay as they were."""
    return SampleRows(collate(data, [sample]), collate(data, [sample, sample]))


def beside(data: object, samples: list[Any], company: list[Any]) -> tuple[Any, Any]:
    """The samples collated beside others, without the rows of these: with the shapes of the whole."""
    rows, alone = rows_of(data, samples[0]), collate(data, samples)
    together = collate(data, [*samples, *company])
    pair = rows.first(together, len(samples), len(samples) + len(company))
    return pair if rows.holds(pair, alone) else alone


def part(data: object, samples: list[Any], first: int, ids: list[int]) -> "Micro":
    """The micro-batch of these samples. Without ids its count is 0, and it has one of `samples`, which belongs to another rank."""
    samples = samples[: len(ids) or 1]
    inputs, targets = collate(data, samples)
    kept = tuple(samples) if hasattr(data, "collate") else ()
    return Micro(first, len(ids), inputs, targets, tuple(ids), kept)


def largest(batch: int, shares: int, microbatches: int) -> int:
    """Samples of the largest micro-batch that training runs on a device."""
    return -(-batch // (shares * microbatches))


Weigh = Callable[[Any], Any] | None


def weigh(weight: Weigh, micro: Micro) -> float:
    """What the loss of a micro-batch is a mean over: `Job.weight` of its targets, or its number of samples. It is computed in
    float64, so that the weights of parts add up to that of the whole."""
    if micro.count == 0:
        return 0.0
    if weight is None:
        return float(micro.count)
    with Widest():
        value = weight(micro.targets)
        return float(value.sum() if isinstance(value, Tensor) else value)
