"""Data whose items are complete batches is rejected, in every form. Samples with a leading dim of their own are accepted."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from jobs import Numbers, make
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import plait
from plait import PlaitError
from plait.config.plan import Plan
from plait.data import loading
from plait.data.sampling import open_job_data, open_sketch_data
from plait.proof.activation_recorder import take_first
from plait.proof.scenario import harden
from plait.proof.verify import verify

X, Y = Numbers(64).x, Numbers(64).y
EIGHT = 8


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(64), **({"batch_size": 8, "shuffle": True} | settings))


class Wrapped:
    """A loader inside an object that is not a loader."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Sized(Wrapped):
    def __len__(self) -> int:
        return len(self.inner)


class Ready(IterableDataset):
    """Batches, whose size is in an attribute."""

    def __init__(self, batch_size: int = 8):
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        for k in range(0, 64, self.batch_size):
            yield X[k : k + self.batch_size], Y[k : k + self.batch_size]


class Rows(Dataset):
    """Batches by index, as Keras's sequences are."""

    batch = 8

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return X[i * self.batch : (i + 1) * self.batch], Y[i * self.batch : (i + 1) * self.batch]


class BatchedRows(Dataset):
    """The same, recognizable only by its name."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return {"x": X[i * EIGHT : (i + 1) * EIGHT], "labels": Y[i * EIGHT : (i + 1) * EIGHT]}


class ByList(Dataset):
    """Accepts a list of indices, as torch passes it to `__getitems__`."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: Any) -> Any:
        return X[i], Y[i]


def batches() -> Iterator[Any]:
    for k in range(0, 64, 8):
        yield X[k : k + 8], Y[k : k + 8]


def grouped(source: Any, batch_size: int) -> Iterator[Any]:
    rows = iter(source)
    while group := [row for row, _ in zip(rows, range(batch_size))]:
        yield tuple(map(torch.stack, zip(*group)))


def _batched(source: Any, count: int) -> Iterator[Any]:
    yield from grouped(source, count)


class Stage:
    """As pipelines of WebDataset store their steps: a generator function, and its arguments."""

    def __init__(self, source: Any, step: Callable[..., Iterator[Any]], *args: Any):
        self.source, self.step, self.args = source, step, args

    def __iter__(self) -> Iterator[Any]:
        return self.step(self.source, *self.args)


def of_hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = {"input": X.tolist(), "label": Y.tolist()}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset().batch(8)


BATCHES: dict[str, Callable[[], Any]] = {
    "a generator over a loader": lambda: (batch for batch in loader()),
    "a mapped loader": lambda: map(tuple, loader()),
    "a wrapped loader": lambda: Wrapped(loader()),
    "a wrapped loader with a length": lambda: Sized(loader()),
    "a wrapped mapped loader": lambda: Wrapped(Wrapped(loader(batch_size=4, shuffle=False))),
    "bulk loading": lambda: DataLoader(ByList(), batch_size=None, sampler=BatchSampler(SequentialSampler(X), 8, False)),
    "an iterable": lambda: Ready(),
    "an iterable in a loader": lambda: DataLoader(Ready(4), batch_size=None),
    "an iterable in a loader that batches": lambda: DataLoader(Ready(4), batch_size=8),
    "by index": lambda: Rows(),
    "by index, by name": lambda: BatchedRows(),
    "a generator": lambda: batches(),
    "a function with a size": lambda: Stage(Numbers(64), grouped, 8),
    "a partial function": lambda: Stage(Numbers(64), partial(grouped, batch_size=4)),
    "a stage of a pipeline": lambda: Stage(Numbers(64), _batched, 16),
    "hugging face": of_hugging_face,
}


class Sequences(Dataset):
    """Sequences as long as the batch is large, with a label at each position: one sample each."""

    def __init__(self, length: int = 8):
        self.length, self.block_size = length, length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        g = torch.Generator().manual_seed(i)
        return torch.randn(self.length, 6, generator=g), torch.randn(self.length, 1, generator=g)


class Streamed(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from (Sequences()[i] for i in range(64))


def collate_batch(samples: list[Any]) -> Any:
    return tuple(map(torch.stack, zip(*samples)))


class Taken:
    """Samples extracted from a loader's batches."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in loader():
            yield from zip(x, y)


SAMPLES: dict[str, Callable[[], Any]] = {
    "sequences": lambda: Sequences(),
    "sequences in a loader": lambda: DataLoader(Sequences(), batch_size=8, shuffle=True),
    "sequences in a loader with a collate_fn": lambda: DataLoader(
        Sequences(), batch_size=8, shuffle=True, collate_fn=collate_batch
    ),
    "a stream of sequences": lambda: Streamed(),
    "a stream of sequences in a loader": lambda: DataLoader(Streamed(), batch_size=8),
    "a generator of sequences": lambda: (Sequences()[i] for i in range(64)),
    "samples out of batches": lambda: Taken(),
    "pairs of numbers": lambda: Numbers(64),
}


def job(data: Callable[[], Any]) -> plait.Job:
    return make(lambda: nn.Linear(6, 1), data=data, loss=F.mse_loss, batch=8)


def looked_at(data: Callable[[], Any]) -> None:
    made = job(data)
    opened = open_job_data(made)
    loading.check_not_batches(made, opened, open_sketch_data(made, opened)[0])


@pytest.mark.parametrize("name", BATCHES)
def test_ready_batches_are_refused(name: str) -> None:
    with pytest.raises(PlaitError) as error:
        looked_at(BATCHES[name])
    assert error.value.codes == ["J007"] and "ready batches" in str(error.value), error.value


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_with_a_leading_dim_are_not(name: str) -> None:
    looked_at(SAMPLES[name])


class Padded(Sequences):
    """Sequences that are padded together, so a proof keeps samples of the first batch for the sketch."""

    collate = staticmethod(collate_batch)


@pytest.mark.parametrize("length", [2, 3, 5, 6])
def test_what_plait_wraps_around_data_does_not_say_that_it_has_batches(length: int) -> None:
    hard = harden(job(lambda: Padded(length)), Plan.parse("dp=2"), 1)
    for data in (hard.data(), take_first(Padded(length), 4)):
        loading.check_not_batches(dataclasses.replace(hard, batch=length if length > 3 else 8), data, data[0])


@pytest.mark.slow
def test_a_proof_and_its_ranks_refuse_ready_batches() -> None:
    with pytest.raises(PlaitError, match="ready batches of 8"):
        verify(job(BATCHES["a wrapped loader"]), Plan.parse("dp=2"))
