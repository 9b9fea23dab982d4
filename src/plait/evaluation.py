"""Evaluation that does not know the layout: sums and counts over all ranks, every sample exactly once.

The evaluation set is shared out without padding, ranks add up values and their number, and one sum over the ranks
gives the mean. Averaging the ranks' means instead counts the samples of a smaller share more. Where a forward pass
gathers parameters, a rank whose share has ended runs along on a sample of another's, and its outputs are dropped.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.build import Built, call, move
from plait.data import collate, is_map, split
from plait.exchange import exchange
from plait.randomness import seed_host
from plait.sharded import Shards
from plait.strategies.precision import autocast


def evaluate(built: Built) -> dict[str, float]:
    """The mean of each of the job's metrics over its evaluation set; {} when it has none. All ranks call it."""
    job, place = built.job, built.place
    if job.evaluate is None:
        return {}
    sums: dict[str, Tensor] = {}
    modes = [(m, m.training) for m in built.model.modules()]
    built.model.eval()
    try:
        with torch.no_grad(), autocast(built.device.type, built.precision):
            rank, ranks = built.plan.share(place.rank), built.plan.ranks
            for pair, count in _share(job.evaluate.data(), job.batch, job.seed, rank, ranks):
                together = isinstance(getattr(built.reducer, "inner", built.reducer), Shards) or built.plan.ep > 1
                if not count and not together:
                    continue
                inputs, targets = move(pair, built.device, built.cast)
                outputs, here = _outputs(built, inputs, count or 1)
                if not (count and here):
                    continue
                for name, values in job.evaluate.metrics(outputs, targets).items():
                    values = torch.as_tensor(values).double()
                    row = torch.stack([values.sum(), values.new_tensor(values.numel())]).cpu()
                    sums[name] = sums[name] + row if name in sums else row
    finally:
        for module, training in modes:
            module.training = training
    return _means(built, sums)


def _outputs(built: Built, inputs: Any, samples: int) -> tuple[Any, bool]:
    """The model's outputs, and whether this rank has them: in a pipeline the last stage does."""
    if built.pipe is None:
        return call(built.model, inputs), True
    return built.pipe.forward_only(inputs, samples, lambda: call(built.model, inputs))


def _share(data: Any, batch: int, seed: int, rank: int, ranks: int) -> Iterator[tuple[tuple[Any, Any], int]]:
    """This rank's part of an evaluation set, in order, every sample on exactly one rank; as many batches on each.

    Beside each batch how many of its samples are this rank's: 0 when it is only there to make up the number.
    """
    if is_map(data):
        first, count = split(len(data), ranks, rank)
        for offset in range(0, split(len(data), ranks, 0)[1], batch):  # rank 0's share is the largest
            ids = range(first + offset, first + min(offset + batch, count))
            samples = []
            for i in ids or [0]:
                seed_host(seed, "evaluate", i)
                samples.append(data[i])
            yield collate(data, samples), len(ids)
        return
    source = enumerate(_keyed(data, seed))
    while everyone := [(s, i % ranks == rank) for _, (i, s) in zip(range(batch * ranks), source)]:
        samples = [s for s, mine in everyone if mine]
        yield collate(data, samples or [everyone[0][0]]), len(samples)


def _keyed(data: Any, seed: int) -> Iterator[Any]:
    """Samples of an iterable, the host generators seeded before each."""
    source, i = iter(data), 0
    while True:
        seed_host(seed, "evaluate", i)
        try:
            yield next(source)
        except StopIteration:
            return
        i += 1


def _means(built: Built, sums: dict[str, Tensor]) -> dict[str, float]:
    if built.reducer is not None:
        told = exchange("\n".join(sums).encode(), built.group, built.device)
        names = max(told, key=len).decode().split("\n")  # a rank without samples, or without the outputs, has none
        rows = torch.stack([sums.get(name, torch.zeros(2, dtype=torch.float64)) for name in names]).to(built.device)
        dist.all_reduce(rows, group=built.group)
        sums = dict(zip(names, rows))
    return {name: float(row[0] / row[1]) for name, row in sums.items()}
