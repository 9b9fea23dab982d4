"""Uneven local batches equal one device, in float64, combined with any other axis; bugs that only they reveal are detected."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import jobs_moe
import jobs_padded
import pytest
from rarely import every, sampled

from plait import Job
from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.data import loading
from plait.data.batch import BatchShare, MicroBatch
from plait.engine import train_step
from plait.proof.verify import verify

DATA = (
    "dp=3 batch_split=4:2:1", "dp=2 batch_split=1:3 microbatches=2", "fsdp=2 batch_split=3:1",
    "fsdp=2 zero_stage=1 batch_split=1:3 microbatches=2", "fsdp=3 zero_stage=2 batch_split=4:2:1", "dp=2 fsdp=2 batch_split=4:1:2:1",
    "dp=2 batch_split=auto", "dp=3 batch_split=auto microbatches=2", "fsdp=2 batch_split=auto",
)  # fmt: skip
OTHERS = (
    "dp=2 tp=2 batch_split=1:3", "dp=2 pp=2 microbatches=2 batch_split=3:1", "dp=2 cp=2 batch_split=1:3",
    "dp=2 tp=2 batch_split=auto", "fsdp=2 pp=2 microbatches=3 batch_split=auto",
)  # fmt: skip


def equal(job: Job, text: str) -> None:
    verdict = verify(job, Plan.parse(text))
    assert verdict.equal, (verdict.code, verdict.cause)


@pytest.mark.parametrize(
    ("name", "text"),
    sampled(6, every(13, [(n, t) for i, n in enumerate(n for n in jobs.ALL if n != "recomputed") for t in DATA])),
)
def test_jobs(name: str, text: str) -> None:
    plan = Plan.parse(text)
    verdict = verify(jobs.ALL[name](), plan)
    named = name in ("batch_norm", "odd") and plan.microbatches > 1
    assert verdict.equal or (named and verdict.code == "V010"), (verdict.code, verdict.cause)
    assert bool(verdict.inexact) == named


@pytest.mark.parametrize(
    ("name", "text"),
    sampled(
        2, every(7, [(n, t) for n in ("attention", "mlp", "ragged") for t in OTHERS if n != "mlp" or "cp" not in t])
    ),
)
def test_other_axes(name: str, text: str) -> None:
    equal(jobs.ALL[name](), text)


@pytest.mark.parametrize(
    ("job", "text"),
    every(
        5,
        [(job, text) for job in (jobs_padded.tagger, jobs_padded.pooled, jobs_moe.gpt)
         for text in ("dp=2 batch_split=3:1", "dp=2 batch_split=auto microbatches=2", "dp=3 batch_split=1:3:1")],
    ),
)  # fmt: skip
def test_padding_and_mixtures(job: Callable[[], Job], text: str) -> None:
    if job is jobs_moe.gpt and "microbatches" in text:  # the balance loss of its experts is per micro-batch
        verdict = verify(job(), Plan.parse(text))
        assert verdict.code == "V010" and "global batch" in verdict.cause, (verdict.code, verdict.cause)
    else:
        equal(job(), text)


@pytest.mark.slow
@pytest.mark.parametrize("text", every(2, ["dp=2 ep=2 batch_split=1:3", "dp=2 ep=2 batch_split=auto"]))
def test_experts_elsewhere(text: str) -> None:
    equal(jobs_moe.gpt(), text)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    "text", every(3, ["dp=2 batch_split=3:1", "dp=2 batch_split=auto", "fsdp=2 batch_split=1:3"])
)
def test_all_that_a_proof_does(text: str) -> None:
    """Messages as in a dry run, batches of the job's own size, number formats, held-out metrics."""
    equal(replace(jobs.mlp(), evaluate=None), text)


# — bugs —


def different(job: Job, plan: str, probe: str) -> None:
    verdict = verify(job, Plan.parse(plan))
    assert verdict.exit_code == DIFFERENT, verdict.to_dict()
    assert probe in [p.code for p in verdict.probes if not p.equal], verdict.to_dict()


def test_weights_of_unequal_shares_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's mean counts the same, independent of its local batch."""
    monkeypatch.setattr(train_step, "sum_batch_weight", lambda training, batch, weights: sum(weights) * training.plan.ranks)
    different(jobs.mlp(), "dp=2 batch_split=3:1", "G")


@pytest.mark.parametrize("plan", ["dp=2 batch_split=3:1", "dp=2 batch_split=auto"])
def test_shares_that_differ_between_ranks(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """Rank 1 computes a different batch split than rank 0: samples are lost, or doubled."""
    real = BatchShare.compute_sizes

    def sizes(self: BatchShare, size: int) -> tuple[int, ...]:
        found = real(self, size)
        return found[::-1] if self.rank == 1 else found

    monkeypatch.setattr(BatchShare, "compute_sizes", sizes)
    different(jobs.mlp(), plan, "D")


def test_a_rank_that_changes_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split is the same on all ranks, but one rank applies it late."""
    real = BatchShare.at_step
    monkeypatch.setattr(BatchShare, "at_step", lambda self, step: real(self, step - (self.rank == 1 and step > 1)))
    different(jobs.mlp(), "dp=2 batch_split=auto", "D")


@pytest.mark.slow
def test_random_numbers_keyed_as_if_shares_were_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its own samples, but the masks of others."""
    real = loading.make_micro_batch

    def part(data: Any, samples: list[Any], first: int, ids: list[int]) -> MicroBatch:
        made = real(data, samples, first, ids)
        return replace(made, first=first and 3)  # with equal local batches of five samples, one starts there

    monkeypatch.setattr(loading, "make_micro_batch", part)
    different(jobs.mlp(), "dp=2 batch_split=3:1", "G")
