"""What a `DataLoader` says of training: which samples, in which order, put together how, and how many at once.

Of a loader a job takes its data set, its `collate_fn` and whether it shuffles. The batches themselves plait makes, of the size of
all devices' together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from plait import PlaitError
from plait.config.errors import Problem
from plait.data.batch import LABELS, Data, MapStyle, checked, is_map
from plait.data.orders import drop_last, sequential
from plait.data.sampling import Order

Split = Callable[[Any], tuple[Any, Any]]
"""A batch -> (inputs, targets)."""
PASSED_ON = ("set_epoch", "state_dict", "load_state_dict", "shard")
"""What plait may ask of a data set besides its samples."""


@dataclass(frozen=True)
class Loaded:
    """What is read: `data` makes the job's data, `batch` is the loader's, `length` the samples of an epoch (0: unknown)."""

    data: Callable[[], Any]
    batch: int
    length: int
    order: Order | None

    def steps(self, batch: int) -> int:
        """Optimizer steps of an epoch in batches of so many samples; the last one may be short."""
        return ceil(self.length / batch)

    def steps_made(self, batch: int) -> Callable[[int], int]:
        """Samples seen -> optimizer steps made, where the last batch of an epoch may be short."""
        if not self.length:
            return lambda samples: samples // batch
        return lambda samples: samples // self.length * self.steps(batch) + samples % self.length // batch

    def length_of(self, batch: int, steps: int | None, epochs: float | None, code: str) -> int:
        """Optimizer steps of the whole training, given either way."""
        if (steps is None) == (epochs is None):
            what = (
                "steps and epochs both say how long to train" if steps is not None else "nothing says how long to train"
            )
            raise PlaitError(Problem(code, what, fix=("steps=N", "epochs=N")))
        if steps is not None:
            return steps
        if not self.length:
            raise PlaitError(Problem(code, "the data has no length, so an epoch has none", fix=("steps=N",)))
        return ceil(self.steps(batch) * (epochs or 0))

    def epochs_made(self, code: str) -> Callable[[int], int]:
        """Samples seen -> epochs done."""
        if not self.length:
            raise PlaitError(Problem(code, "a scheduler goes by epochs, and the data has no length"))
        return lambda samples: samples // self.length


class _Split:
    """A data set whose samples are put together by a `collate_fn`, and each batch split."""

    def __init__(self, dataset: Data, collate: Callable[[list[Any]], Any], split: Split):
        self.split = split
        if collate is not default_collate:
            self.collate = lambda samples: split(collate(samples))
        for name in PASSED_ON:
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def one(self, sample: object) -> Any:
        """A sample as the job's data has it: what torch's `default_collate` puts together is split before."""
        return sample if hasattr(self, "collate") else self.split(sample)


class IndexedSamples(_Split):
    """The same of a data set that is read by index."""

    def __init__(self, dataset: MapStyle, collate: Callable[[list[Any]], Any], split: Split):
        super().__init__(dataset, collate, split)
        self.samples = dataset

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.one(self.samples[i])


class StreamedSamples(_Split):
    """The same of an iterable."""

    def __init__(self, dataset: Iterable[object], collate: Callable[[list[Any]], Any], split: Split):
        super().__init__(dataset, collate, split)
        self.samples = dataset

    def __iter__(self) -> Iterator[Any]:
        return map(self.one, self.samples)


def pair(code: str) -> Split:
    """Splits a batch that is a pair, or a dict with labels. Raises `PlaitError` with the adapter's code for another."""

    def split(batch: object) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            label = next((name for name in LABELS if name in batch), None)
            if label is not None:
                return {k: v for k, v in batch.items() if k != label}, batch[label]
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        told = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        told = f"{told} of {len(batch)}" if isinstance(batch, (tuple, list)) else told
        why = f"a batch is a {told}" if not isinstance(batch, Mapping) else f"a batch is {told}"
        fix = ("split=lambda batch: (inputs, targets)    inputs: a tuple or a dict is what the model is called with",)
        raise PlaitError(Problem(code, "it does not show which part of a batch are the targets", why=why, fix=fix))

    return split


def labels_kept(split: Split) -> Split:
    """The whole batch as inputs, for a model that computes its loss itself; its targets beside them."""
    return lambda batch: (dict(batch) if isinstance(batch, Mapping) else batch, split(batch)[1])


def read(loader: object, split: Split, code: str, *, world: int = 1, order: Order | None = None) -> Loaded:
    """What a loader, or a data set without one, says. `world`: processes whose loaders each have such batches; `order`: instead of
    the sampler's. Raises `PlaitError` with the adapter's code."""
    if not isinstance(loader, DataLoader):
        return _of(checked(loader, "the data"), default_collate, split, 0, order)
    dataset, collate = checked(loader.dataset, "DataLoader(…)"), loader.collate_fn
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "the DataLoader makes batches by a rule of its own"
        why = "plait cuts every batch over the devices, so a job says how many samples a step has and in which order they come"
        raise PlaitError(Problem(code, what, why=why, fix=("DataLoader(…, batch_size=N)", "Job(order=…)")))
    size = batches.batch_size
    if is_map(dataset) and order is None:
        order = _order(batches.sampler, len(dataset), code)
    if batches.drop_last and is_map(dataset):
        unit = size * world
        if len(dataset) < unit:
            raise PlaitError(Problem(code, f"drop_last leaves nothing of {len(dataset)} samples in batches of {unit}"))
        left = len(dataset) // unit * unit
        return _of(dataset, collate, split, size, drop_last(unit, order), left)
    return _of(dataset, collate, split, size, order)


def _of(
    dataset: Data, collate: Callable[[list[Any]], Any], split: Split, batch: int, order: Order | None, length: int = 0
) -> Loaded:
    if is_map(dataset):
        made = IndexedSamples(dataset, collate, split)
        return Loaded(lambda: made, batch, length or len(dataset), order)
    stream = StreamedSamples(checked(dataset, "the data"), collate, split)
    return Loaded(lambda: stream, batch, 0, order)


def _order(sampler: object, length: int, code: str) -> Order | None:
    """The order of an epoch that a sampler of torch stands for. None: a permutation."""
    if type(sampler) is SequentialSampler:
        return sequential
    known = isinstance(sampler, RandomSampler) and type(sampler).__module__.partition(".")[0] in ("torch", "accelerate")
    if known and not sampler.replacement and sampler.num_samples == length:
        return None
    what = f"the DataLoader's sampler is a {type(sampler).__name__} that a job cannot read"
    why = "the order of samples is a function of (seed, epoch), so that it is the same under every plan and after a resume"
    fix = ("order=lambda seed, epoch, length: …    the indices of an epoch's samples", "shuffle=True")
    raise PlaitError(Problem(code, what, why=why, fix=fix))
