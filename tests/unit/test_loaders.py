"""Common forms of a job's data: a DataLoader with the job's batches, and Hugging Face's data sets."""

import dataclasses
from typing import Any

import pytest
import torch
from jobs import Numbers, make
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

import plait
from plait import PlaitError
from plait.config.plan import Plan
from plait.data.loaders import override_batch
from plait.data.sampling import open_job_data
from plait.proof.verify import verify


def job(order: Any = None, **settings: Any) -> plait.Job:
    settings = {"batch_size": 8, "shuffle": True} | settings
    made = make(lambda: nn.Linear(6, 1), data=lambda: DataLoader(Numbers(21), **settings), loss=F.mse_loss, batch=8)
    return dataclasses.replace(made, order=order)


def refused(made: plait.Job) -> str:
    with pytest.raises(PlaitError) as error:
        open_job_data(made)
    assert set(error.value.codes) == {"J007"}
    return str(error.value)


def one(samples: list[Any]) -> dict[str, Any]:
    """A collate_fn that returns one dict, as Hugging Face's do."""
    x, y = zip(*samples)
    return {"input": torch.stack(x), "labels": torch.stack(y)}


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(Numbers(21))


def test_what_says_how_samples_are_read_is_plaits_own() -> None:
    assert len(open_job_data(job(num_workers=2, pin_memory=True, generator=torch.Generator()))) == 21
    assert len(open_job_data(job(shuffle=False, drop_last=True, order=plait.orders.drop_last(8)))) == 21


WRONG = {
    "batch_size=4, and Job(batch=8)": {"batch_size": 4},
    "plait.orders.sequential": {"shuffle": False},
    "plait.orders.weighted": {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * 21, 21)},
    "plait splits": {"shuffle": False, "sampler": DistributedSampler(Numbers(21), 2, 0)},
    "the sampler's indices": {"shuffle": False, "sampler": [1, 2, 3]},
    "plait.orders.drop_last(8)": {"drop_last": True},
    "a batch sampler of its own": {"shuffle": False, "batch_size": 1, "batch_sampler": [[1, 2], [3]]},
}


@pytest.mark.parametrize("told", WRONG)
def test_a_loader_that_makes_other_batches_is_refused(told: str) -> None:
    assert told in refused(job(**WRONG[told]))


def test_a_batch_sampler_of_torch_is_its_sampler() -> None:
    batches = BatchSampler(range(21), 8, False)
    assert "in sequence" not in refused(job(shuffle=False, batch_size=1, batch_sampler=batches))
    open_job_data(job(plait.orders.sequential, shuffle=False, batch_size=1, batch_sampler=batches))


def test_a_command_that_gives_the_batch_overrules_it() -> None:
    assert len(open_job_data(override_batch(job(), 4))) == 21 and override_batch(job(), 4).batch == 4


def test_a_proof_refuses_it_too() -> None:
    with pytest.raises(PlaitError, match="batch_size=4"):
        verify(job(batch_size=4), Plan.parse("dp=2"))


def test_a_loader_with_a_collate_fn_is_proved() -> None:
    assert verify(job(collate_fn=one), Plan.parse("dp=2 microbatches=2")).equal


def test_a_loader_of_an_iterable_is_proved() -> None:
    made = dataclasses.replace(job(), data=lambda: DataLoader(Endless(), batch_size=8, collate_fn=one))
    assert verify(made, Plan.parse("dp=2")).equal
    dropping = dataclasses.replace(made, data=lambda: DataLoader(Endless(), batch_size=8, drop_last=True))
    assert "drop_last=False" in refused(dropping)


def rows() -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {"input": torch.randn(30, 6, generator=g).tolist(), "label": torch.randn(30, 1, generator=g).tolist()}


@pytest.mark.parametrize("streamed", [0, 1])
def test_a_data_set_of_hugging_face_is_proved(streamed: int) -> None:
    """Its samples are dicts of lists. Tested as a map-style data set and as a stream."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(rows())
    made = dataclasses.replace(job(), data=lambda: data.to_iterable_dataset(num_shards=2) if streamed else data)
    verdict = verify(made, Plan.parse("dp=2"))
    assert verdict.equal, verdict.to_dict()
