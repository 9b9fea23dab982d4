"""A job's data as a `DataLoader`: its data set and its `collate_fn` are used, and what else it says has to be what the job says.

plait makes the batches itself, shared out over all devices, so a loader that makes others than the job is refused: another
`batch_size` than `Job.batch`, a sampler that is not the order of the job, a batch sampler, a last batch that is dropped. What says
how samples are read, and not which (`num_workers`, `pin_memory`, `generator`), is plait's own.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job

WHERE = "Job(data=…)"
SHARED = "plait makes the batches, shared out over all devices"


class LoaderStream:
    """The samples of a `DataLoader` over an iterable, and its `collate_fn`."""

    def __init__(self, loader: DataLoader[Any]):
        self.dataset = loader.dataset
        self.loader: DataLoader[Any] | None = loader
        if loader.collate_fn is not default_collate:
            self.collate: Callable[[list[Any]], Any] = loader.collate_fn

    def __getattr__(self, name: str) -> Any:
        """What else the data set has, such as `state_dict`."""
        if name in ("dataset", "collate") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class LoaderSamples(LoaderStream):
    """The samples of a `DataLoader` over data that is read by index, and its `collate_fn`."""

    def __len__(self) -> int:
        return len(self.dataset)  # pyrefly: ignore

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]


def unwrapped(data: object) -> Any:
    """The samples of a loader that makes batches; anything else as it is."""
    if not isinstance(data, DataLoader) or data.batch_sampler is None:
        return data
    kind = LoaderStream if isinstance(data.dataset, IterableDataset) else LoaderSamples
    return kind(data)


def with_batch(job: Job, batch: int | None) -> Job:
    """The job with the batch that a command asks for (None: its own), whatever its loader says."""
    if batch is None or batch == job.batch:
        return job

    def data() -> Any:
        found = unwrapped(job.data())
        if isinstance(found, LoaderStream):
            found.loader = None
        return found

    return replace(job, batch=batch, data=data)


def check(job: Job, data: object) -> None:
    """J007 when a loader makes other batches than the job."""
    loader = data.loader if isinstance(data, LoaderStream) else None
    if loader is not None and (problems := [*_problems(job, loader)]):
        raise PlaitError(problems)


def _problems(job: Job, loader: DataLoader[Any]) -> Iterator[Problem]:
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = f"the data is a DataLoader with a batch sampler of its own, {type(batches).__name__}"
        fix = ("Job(order=…)    the order of an epoch's samples", "Job(token_budget=…)    steps of so many tokens")
        yield Problem("J007", what, SHARED, WHERE, (*fix, "give its dataset"))
        return
    if batches.batch_size != job.batch:
        what = f"the data is a DataLoader with batch_size={batches.batch_size}, and Job(batch={job.batch})"
        why = f"{SHARED}: Job.batch counts the samples of a step over all of them"
        fix = (f"batch={batches.batch_size}", f"DataLoader(…, batch_size={job.batch})", "give its dataset")
        yield Problem("J007", what, why, WHERE, fix)
    if job.order is not None:
        return
    indexed = not isinstance(loader.dataset, IterableDataset)
    if indexed:
        yield from _of_sampler(batches.sampler, len(loader.dataset))  # pyrefly: ignore
    if batches.drop_last and not (indexed and len(loader.dataset) % job.batch == 0):  # pyrefly: ignore
        what, why = (
            "the data is a DataLoader with drop_last=True",
            "without an order that says so no sample is left out",
        )
        fix = (f"Job(order=plait.orders.drop_last({job.batch}))",) if indexed else ()
        yield Problem("J007", what, why, WHERE, (*fix, "drop_last=False    the last batch of an epoch is a short one"))


def _of_sampler(sampler: Iterable[object], length: int) -> Iterator[Problem]:
    own = f"the data is a DataLoader with a sampler of its own, {type(sampler).__name__}"
    why = "without Job.order an epoch is a permutation of the data, keyed by Job.seed"
    if isinstance(sampler, SequentialSampler):
        own = "the data is a DataLoader without shuffle=True, whose samples come in sequence"
        fix = ("Job(order=plait.orders.sequential)    in sequence", "DataLoader(…, shuffle=True)    in a permutation")
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return
    elif isinstance(sampler, WeightedRandomSampler):
        fix = ("Job(order=plait.orders.weighted(weights))",)
    elif isinstance(sampler, DistributedSampler):
        fix = ("DataLoader(…, shuffle=True)    plait shares out the samples over ranks",)
    else:
        fix = ("Job(order=lambda seed, epoch, length: …)    the indices that the sampler gives in an epoch",)
    yield Problem("J007", own, why, WHERE, fix)
