"""Run models on fake tensors once in the process that forks the workers, which fills torch's caches for all of them."""

from contextlib import suppress

import torch

from plait.config.job import Job
from plait.data.batch import is_map
from plait.model.sketch import sketch_model
from plait.proof import reference


def rehearse(job: Job) -> None:
    """Run the job's model on fake tensors. Errors are ignored: the test itself will report them."""
    with suppress(Exception):
        data = job.data()
        samples = [data[0] if is_map(data) else next(iter(data))]
        inputs = lambda n: reference._to_device(reference._collate_samples(data, samples * n), torch.float64, "cpu")[0]  # noqa: E731
        sketch_model(reference.make_reference_model(job, torch.float64, "cpu"), inputs, reference.call_model)
