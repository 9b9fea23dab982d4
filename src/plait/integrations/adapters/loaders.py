"""Read a `DataLoader`: its samples, their order, their collation and the batch size.

A job takes the dataset, `collate_fn` and shuffling of a loader. plait makes the batches itself, with the global batch size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from plait import PlaitError
from plait.config.errors import Problem
from plait.data.batch import LABEL_NAMES, Data, MapStyle, is_map, validate_data
from plait.data.orders import drop_last, sequential
from plait.data.sampling import Order

Split = Callable[[Any], tuple[Any, Any]]
"""A batch -> (inputs, targets)."""
FORWARDED_NAMES = ("set_epoch", "state_dict", "load_state_dict", "shard")
"""Optional methods of a dataset that plait may call."""


@dataclass(frozen=True)
class LoadedData:
    """Settings of a loader: `data` makes the job's data, `batch` is the batch size, `length` the samples per epoch (0: unknown)."""

    data: Callable[[], Any]
    batch: int
    length: int
    order: Order | None

    def steps_per_epoch(self, batch: int) -> int:
        """Return the optimizer steps per epoch for batches of `batch` samples; the last batch may be short."""
        return ceil(self.length / batch)

    def make_step_counter(self, batch: int) -> Callable[[int], int]:
        """Return a function from samples seen to completed optimizer steps; the last batch of an epoch may be short."""
        if not self.length:
            return lambda samples: samples // batch
        return lambda samples: samples // self.length * self.steps_per_epoch(batch) + samples % self.length // batch

    def count_total_steps(self, batch: int, steps: int | None, epochs: float | None, code: str) -> int:
        """Return the optimizer steps of the training, from a number of steps or of epochs."""
        if (steps is None) == (epochs is None):
            what = (
                "steps and epochs are both given" if steps is not None else "the training length is missing"
            )
            raise PlaitError(Problem(code, what, fix=("steps=N", "epochs=N")))
        if steps is not None:
            return steps
        if not self.length:
            raise PlaitError(Problem(code, "the data has no length, so epochs cannot be counted", fix=("steps=N",)))
        return ceil(self.steps_per_epoch(batch) * (epochs or 0))

    def make_epoch_counter(self, code: str) -> Callable[[int], int]:
        """Return a function from samples seen to completed epochs."""
        if not self.length:
            raise PlaitError(Problem(code, "the scheduler counts epochs, and the data has no length"))
        return lambda samples: samples // self.length


class _SplitSamples:
    """A dataset with a `collate_fn`, each of whose batches is split into inputs and targets."""

    def __init__(self, dataset: Data, collate: Callable[[list[Any]], Any], split: Split):
        self.split = split
        if collate is not default_collate:
            self.collate = lambda samples: split(collate(samples))
        for name in FORWARDED_NAMES:
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def split_sample(self, sample: object) -> Any:
        """Split a sample for torch's `default_collate`; with another `collate_fn` the batch is split instead."""
        return sample if hasattr(self, "collate") else self.split(sample)


class IndexedSamples(_SplitSamples):
    """Split samples of a dataset that is read by index."""

    def __init__(self, dataset: MapStyle, collate: Callable[[list[Any]], Any], split: Split):
        super().__init__(dataset, collate, split)
        self.samples = dataset

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.split_sample(self.samples[i])


class StreamedSamples(_SplitSamples):
    """Split samples of an iterable dataset."""

    def __init__(self, dataset: Iterable[object], collate: Callable[[list[Any]], Any], split: Split):
        super().__init__(dataset, collate, split)
        self.samples = dataset

    def __iter__(self) -> Iterator[Any]:
        return map(self.split_sample, self.samples)


def make_pair_split(code: str) -> Split:
    """Return a function that splits a pair, or a dict with labels. It raises `PlaitError` with the adapter's code for other batches."""

    def split(batch: object) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            label = next((name for name in LABEL_NAMES if name in batch), None)
            if label is not None:
                return {k: v for k, v in batch.items() if k != label}, batch[label]
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        told = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        told = f"{told} of {len(batch)}" if isinstance(batch, (tuple, list)) else told
        why = f"a batch is a {told}" if not isinstance(batch, Mapping) else f"a batch is {told}"
        fix = ("split=lambda batch: (inputs, targets)    a tuple or dict of inputs becomes the model's arguments",)
        raise PlaitError(Problem(code, "the targets of a batch cannot be identified", why=why, fix=fix))

    return split


def keep_labels(split: Split) -> Split:
    """Keep the whole batch as inputs, for a model that computes its loss itself, and return its targets separately."""
    return lambda batch: (dict(batch) if isinstance(batch, Mapping) else batch, split(batch)[1])


def read_loader(loader: object, split: Split, code: str, *, world: int = 1, order: Order | None = None) -> LoadedData:
    """Read a loader, or a dataset without one.

    `world`: number of processes whose loaders each have such batches. `order`: instead of the sampler's. Raises `PlaitError` with the adapter's
    code.
    """
    if not isinstance(loader, DataLoader):
        return _wrap_dataset(validate_data(loader, "the data"), default_collate, split, 0, order)
    dataset, collate = validate_data(loader.dataset, "DataLoader(…)"), loader.collate_fn
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "the DataLoader has a custom batch sampler"
        why = "plait splits every batch over the devices, so a job defines the samples per step and their order"
        raise PlaitError(Problem(code, what, why=why, fix=("DataLoader(…, batch_size=N)", "Job(order=…)")))
    size = batches.batch_size
    if is_map(dataset) and order is None:
        order = _convert_sampler(batches.sampler, len(dataset), code)
    if batches.drop_last and is_map(dataset):
        unit = size * world
        if len(dataset) < unit:
            raise PlaitError(Problem(code, f"drop_last removes all of {len(dataset)} samples, since a batch has {unit}"))
        left = len(dataset) // unit * unit
        return _wrap_dataset(dataset, collate, split, size, drop_last(unit, order), left)
    return _wrap_dataset(dataset, collate, split, size, order)


def _wrap_dataset(
    dataset: Data, collate: Callable[[list[Any]], Any], split: Split, batch: int, order: Order | None, length: int = 0
) -> LoadedData:
    if is_map(dataset):
        made = IndexedSamples(dataset, collate, split)
        return LoadedData(lambda: made, batch, length or len(dataset), order)
    stream = StreamedSamples(validate_data(dataset, "the data"), collate, split)
    return LoadedData(lambda: stream, batch, 0, order)


def _convert_sampler(sampler: object, length: int, code: str) -> Order | None:
    """Convert a sampler of torch to a job's order. None: a random permutation."""
    if type(sampler) is SequentialSampler:
        return sequential
    known = isinstance(sampler, RandomSampler) and type(sampler).__module__.partition(".")[0] in ("torch", "accelerate")
    if known and not sampler.replacement and sampler.num_samples == length:
        return None
    what = f"the DataLoader's sampler is a {type(sampler).__name__} that a job does not support"
    why = "the order of samples is a function of (seed, epoch), so that it is the same under every plan and after a resume"
    fix = ("order=lambda seed, epoch, length: …    the indices of an epoch's samples", "shuffle=True")
    raise PlaitError(Problem(code, what, why=why, fix=fix))
