"""A `DataLoader` as a job's data: its data set and `collate_fn` are used, and its other options must match the job.

plait makes the batches itself and splits them over all devices. So it rejects a loader with other batches than the job: another `batch_size`
than `Job.batch`, a sampler that differs from the job's order, a batch sampler, or `drop_last`. Options that affect only how samples are
read (`num_workers`, `pin_memory`, `generator`) are ignored.
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
SHARED_REASON = "plait makes the batches and splits them over all devices"


class LoaderStream:
    """The samples of a `DataLoader` over an iterable, and its `collate_fn`."""

    def __init__(self, loader: DataLoader[Any]):
        self.dataset = loader.dataset
        self.loader: DataLoader[Any] | None = loader
        if loader.collate_fn is not default_collate:
            self.collate: Callable[[list[Any]], Any] = loader.collate_fn

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the data set, such as `state_dict`."""
        if name in ("dataset", "collate") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class LoaderSamples(LoaderStream):
    """The samples of a `DataLoader` over data with access by index, and its `collate_fn`."""

    def __len__(self) -> int:
        return len(self.dataset)  # pyrefly: ignore

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]


def unwrap_loader(data: object) -> Any:
    """Return the samples of a loader that makes batches; other data unchanged."""
    if not isinstance(data, DataLoader) or data.batch_sampler is None:
        return data
    kind = LoaderStream if isinstance(data.dataset, IterableDataset) else LoaderSamples
    return kind(data)


def override_batch(job: Job, batch: int | None) -> Job:
    """Return the job with batch size `batch` (None: unchanged), ignoring the batch size of its loader."""
    if batch is None or batch == job.batch:
        return job

    def unwrapped_data() -> Any:
        found = unwrap_loader(job.data())
        if isinstance(found, LoaderStream):
            found.loader = None
        return found

    return replace(job, batch=batch, data=unwrapped_data)


def check_loader(job: Job, data: object) -> None:
    """J007 if a loader makes other batches than the job."""
    loader = data.loader if isinstance(data, LoaderStream) else None
    if loader is not None and (problems := [*_find_problems(job, loader)]):
        raise PlaitError(problems)


def _find_problems(job: Job, loader: DataLoader[Any]) -> Iterator[Problem]:
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = f"the data is a DataLoader with a batch sampler of its own, {type(batches).__name__}"
        fix = ("Job(order=…)    the order of an epoch's samples", "Job(token_budget=…)    steps of a number of tokens")
        yield Problem("J007", what, SHARED_REASON, WHERE, (*fix, "pass its dataset"))
        return
    if batches.batch_size != job.batch:
        what = f"the data is a DataLoader with batch_size={batches.batch_size}, and Job(batch={job.batch})"
        why = f"{SHARED_REASON}; Job.batch is the number of samples of a step over all of them"
        fix = (f"batch={batches.batch_size}", f"DataLoader(…, batch_size={job.batch})", "pass its dataset")
        yield Problem("J007", what, why, WHERE, fix)
    if job.order is not None:
        return
    indexed = not isinstance(loader.dataset, IterableDataset)
    if indexed:
        yield from _describe_sampler(batches.sampler, len(loader.dataset))  # pyrefly: ignore
    if batches.drop_last and not (indexed and len(loader.dataset) % job.batch == 0):  # pyrefly: ignore
        what, why = (
            "the data is a DataLoader with drop_last=True",
            "without a Job.order that drops the last batch, every sample is used",
        )
        fix = (f"Job(order=plait.orders.drop_last({job.batch}))",) if indexed else ()
        yield Problem("J007", what, why, WHERE, (*fix, "drop_last=False    the last batch of an epoch is short"))


def _describe_sampler(sampler: Iterable[object], length: int) -> Iterator[Problem]:
    own = f"the data is a DataLoader with a sampler of its own, {type(sampler).__name__}"
    why = "without Job.order an epoch is a permutation of the data, keyed by Job.seed"
    if isinstance(sampler, SequentialSampler):
        own = "the data is a DataLoader without shuffle=True, so its samples are in sequence"
        fix = ("Job(order=plait.orders.sequential)    in sequence", "DataLoader(…, shuffle=True)    in a permutation")
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return
    elif isinstance(sampler, WeightedRandomSampler):
        fix = ("Job(order=plait.orders.weighted(weights))",)
    elif isinstance(sampler, DistributedSampler):
        fix = ("DataLoader(…, shuffle=True)    plait splits the samples over ranks",)
    else:
        fix = ("Job(order=lambda seed, epoch, length: …)    the sampler's indices of an epoch",)
    yield Problem("J007", own, why, WHERE, fix)
