"""A rank without samples in a short batch runs a sample of another rank with weight zero: models get no empty batch."""

import dataclasses
from typing import Any

import jobs_moe
import pytest
import torch
from jobs_ragged import JOBS
from rarely import rarely, sampled

import plait
from plait.config.plan import Plan
from plait.data.batch import BatchShare, Position
from plait.data.loading import iter_batches
from plait.data.sampling import Sampling
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.verify import verify

EQUAL = [n for n in JOBS if n != "called"]
CASES = [
    *sampled(len(EQUAL), ((n, "dp=2") for n in EQUAL)),
    *sampled(1, rarely(*((n, t) for t in ("fsdp=2", "dp=3", "dp=2 activation_checkpointing=full", "dp=2 fsdp=2") for n in EQUAL))),
]


@pytest.mark.parametrize("name, text", CASES)
def test_models_that_take_no_empty_batch_are_equal(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(text))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("text", ("dp=2", "fsdp=2", "dp=3"))
def test_statistics_of_a_direct_call_are_named_and_the_proof_ends(text: str) -> None:
    verdict = verify(JOBS["called"](), Plan.parse(text))
    assert verdict.code == "V010" and "direct call" in verdict.cause, verdict.to_dict()


class _Few:
    def __init__(self, data: Any, length: int):
        self.data, self.length = data, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.data[i]


def after_a_short_batch(text: str) -> dict[str, float]:
    """The evaluation after an epoch of 13 samples in batches of 12, whose last batch has one sample."""
    made = jobs_moe.gpt(jobs_moe.plain_loss)
    few = _Few(made.data(), 13)
    evaluation = plait.Evaluate(made.data, lambda o, y: {"largest": o[0].amax((1, 2))})
    job = dataclasses.replace(made, data=lambda: few, evaluate=evaluation, steps=2)

    def run(place: Place) -> dict[str, float]:
        engine = Engine(job, text, place=place, cast=torch.float64)
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()

    return fork.run_ranks(run, Plan.parse(text).world)[-1]


@pytest.mark.slow
def test_a_rank_that_had_no_sample_counts_again_in_an_evaluation() -> None:
    """Experts must not mistake its samples for those of another rank."""
    assert after_a_short_batch("dp=2 ep=2")["largest"] == pytest.approx(after_a_short_batch("dp=1")["largest"], rel=1e-9)


class _OneIsBroken:
    """Sample 0 cannot be read, and the job's order omits it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        if i == 0:
            raise OSError("image file is truncated")
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x.sum()[None]


def test_the_sample_of_another_rank_is_one_of_the_step() -> None:
    share, order = BatchShare(rank=1, ranks=2), lambda seed, epoch, length: torch.arange(1, 20)
    sampling = Sampling(20, 9, 0, order)
    steps = iter_batches(_OneIsBroken(), 9, 0, share, Position(), sampling=sampling)
    last = [next(steps) for _ in range(3)][-1]
    assert (last.size, last.micro_batches[0].count, last.micro_batches[0].ids) == (1, 0, ())
    assert torch.equal(last.micro_batches[0].inputs[0], _OneIsBroken()[19][0])
