"""What torch learns of a model's operations on fake tensors, learned once: in the process that workers are forked from."""

from contextlib import suppress

import torch

from plait.config.job import Job
from plait.data.batch import is_map
from plait.model.sketch import sketch
from plait.proof import reference


def rehearse(job: Job) -> None:
    """Run the job's model on fake tensors. What is wrong with it, the test will see."""
    with suppress(Exception):
        data = job.data()
        samples = [data[0] if is_map(data) else next(iter(data))]
        inputs = lambda n: reference._ready(reference._collate(data, samples * n), torch.float64, "cpu")[0]  # noqa: E731
        sketch(reference.make_model(job, torch.float64, "cpu"), inputs, reference.call)
