"""Evaluation of a sharded model: local batches of different lengths cause no hang, and the mean is that of one device."""

import dataclasses
from typing import Any

import jobs
import pytest
import torch

import plait
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place


class Few(jobs.Stream):
    """An iterable evaluation set."""

    def __init__(self, n: int):
        super().__init__(n)
        self.items = jobs.Numbers(n)


def evaluated(data: Any, plan: str, ranks: int) -> list[dict[str, float]]:
    """Each rank's means after a step, twice, with a step between."""
    evaluate = plait.Evaluate(data, lambda out, y: {"error": (out - y).abs(), "sign": (out * y > 0).double()})
    job = dataclasses.replace(jobs.mlp(), evaluate=evaluate, batch=4)

    def run(place: Place) -> dict[str, float]:
        with torch.random.fork_rng():
            engine = Engine(job, plan, place=place, cast=torch.float64)
            source, found = engine.batches(), {}
            for k in range(2):
                engine.step(next(source))
                found |= {f"{name} {k}": value for name, value in engine.evaluate().items()}
        return found

    return fork.run_ranks(run, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", (1, pytest.param(2, marks=pytest.mark.prove), pytest.param(9, marks=pytest.mark.prove), 13)
)
@pytest.mark.parametrize("kind", (jobs.Numbers, Few))
def test_ranks_with_fewer_batches_run_along(kind: type, length: int) -> None:
    (whole,) = evaluated(lambda: kind(length), "dp=1", 1)
    for plan, ranks in (("fsdp=3 zero_stage=3", 3), ("dp=2 fsdp=2 zero_stage=2 activation_checkpointing=full", 4)):
        for told in evaluated(lambda: kind(length), plan, ranks):
            assert told.keys() == whole.keys() and len(told) == 4
            for name, value in whole.items():
                assert abs(told[name] - value) <= 1e-12, (plan, name)
