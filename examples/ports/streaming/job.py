"""The same stream as a plait job. The only addition is `shard`, which returns the part of the stream that a rank reads.

    plait train examples/ports/streaming/job.py --plan "dp=2" --steps 10
    plait train examples/ports/streaming/job.py --plan "dp=3" --steps 30 --resume

A shard of every Nth sample works for any number of ranks: the resumed run reads the remaining samples, in the same
batches as on one device.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from before import Stream, make_model
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import plait


class Shared(Stream):
    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        return islice(iter(self), index, None, num_shards)


def job(steps: int = 30) -> plait.Job:
    return plait.Job(
        model=make_model,
        loss=mse_loss,
        data=lambda: DataLoader(Shared(), batch_size=16),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch=16,
        steps=steps,
    )
