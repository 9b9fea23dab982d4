"""Small models have small units, which would all be gathered with the root: here each is a group of its own.

What torch learns of a model's operations on fake tensors, it learns once: in the process that all workers are forked from.
"""

from contextlib import suppress
from typing import Any

import pytest
import torch

from plait import gathering, reference, verify
from plait.data import is_map
from plait.job import Job
from plait.sketch import sketch


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GROUP_BYTES", 0)
    monkeypatch.setattr(gathering, "TINY", 0)


@pytest.fixture(autouse=True)
def operations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verify._reference

    def known(job: Job, *rest: Any) -> Any:
        with suppress(Exception):  # what is wrong with a job, verify will say
            rehearse(job)
        return plain(job, *rest)

    monkeypatch.setattr(verify, "_reference", known)


def rehearse(job: Job) -> None:
    """Run the job's model on fake tensors."""
    data = job.data()
    samples = [data[0] if is_map(data) else next(iter(data))]
    inputs = lambda n: reference._ready(reference._collate(data, samples * n), torch.float64, "cpu")[0]  # noqa: E731
    sketch(reference._model(job, torch.float64, "cpu"), inputs, reference._call)
