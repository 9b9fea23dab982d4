"""Compressed all-reduces in several processes equal their algorithm in one process, for each format, optimizer, loss and layout.

A cross-section of the list always runs; `prove` runs more.
"""

from itertools import product
from typing import Any

import jobs
import jobs_compressed
import pytest
import torch
from rarely import every, sampled

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.algorithms.registry import get_train_function
from plait.proof.verdict import format_verdict
from plait.proof.verify import verify

KINDS = ("grad_compression=bf16", "grad_compression=int8", "grad_compression=powersgd compression_rank=1", "grad_compression=powersgd")
LIST = list(product(jobs_compressed.MODELS, KINDS, ("adamw", "sgd"), (True, False), (True, False), (1, 2)))[::5]


@pytest.mark.parametrize("model, kind, optimizer, clipped, ragged, microbatches", sampled(4, every(4, LIST)))
def test_equal_to_the_algorithm(
    model: str, kind: str, optimizer: str, clipped: bool, ragged: bool, microbatches: int
) -> None:
    """A job with clipping clips in each step, by the norm of the reduced gradient."""
    copies = 2 + (microbatches + ragged) % 2
    verdict = verify(
        jobs_compressed.job(model, optimizer, ragged, clip=1.0 if clipped else None),
        Plan.parse(f"dp={copies} {kind} microbatches={microbatches}"),
    )
    assert verdict.equal, verdict.cause
    assert verdict.forced["clipped"] == clipped
    assert verdict.algorithm is not None and verdict.algorithm.distance > 1e-6
    assert verdict.inexact[0].startswith("gradients are summed as")
    assert "EQUAL to the algorithm (one process) · " in format_verdict(verdict, model)


@pytest.mark.parametrize(
    "name, text", every(2, [("mlp", "dp=4 grad_compression=int8"), ("ragged", "dp=2 grad_compression=powersgd"), ("vae",
        "dp=3 grad_compression=bf16"),
                            ("attention", "dp=2 grad_compression=int8 microbatches=2"), ("branches", "dp=3 grad_compression=powersgd")])
)  # fmt: skip
def test_other_jobs(name: str, text: str) -> None:
    verdict = verify(jobs.ALL[name](), Plan.parse(text), steps=6)
    assert verdict.equal and verdict.algorithm is not None, verdict.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, text", every(3, [("ragged", "pp=2 dp=2 grad_compression=int8"), ("mlp",
        "pp=2 dp=2 grad_compression=powersgd compression_rank=1 microbatches=2"),
                            ("ragged", "dp=2 tp=2 grad_compression=bf16")])
)  # fmt: skip
def test_copies_of_parts(name: str, text: str) -> None:
    """With stages, two of which share a weight: its gradient is summed over them before it is compressed. Also with tp."""
    verdict = verify(jobs.ALL[name](), Plan.parse(text))
    assert verdict.equal and verdict.algorithm is not None, verdict.cause


@pytest.mark.messages
@pytest.mark.parametrize("kind", every(2, KINDS[1:]))
def test_a_dry_run_sends_the_same(kind: str) -> None:
    """The same if the samples determine which parameters a rank uses."""
    verdict = verify(jobs_compressed.job("courses"), Plan.parse(f"dp=2 {kind}"))
    assert verdict.equal, verdict.cause


def test_a_rank_as_large_as_the_matrices_is_dp() -> None:
    verdict = verify(jobs_compressed.job("words"), Plan.parse("dp=2 grad_compression=powersgd compression_rank=7"))
    assert verdict.equal and verdict.algorithm is not None
    assert verdict.algorithm.distance < 1e-13
    assert "equal to dp here" in format_verdict(verdict, "words")
    assert verdict.to_dict()["algorithm"]["equal_to_one_device"] is True


def test_without_compression_there_is_no_algorithm_of_its_own() -> None:
    assert get_train_function(Plan.parse("dp=2")) is None
    assert verify(jobs_compressed.job("words"), Plan.parse("dp=2")).algorithm is None


def test_batch_statistics_are_named() -> None:
    """Replicas share batch statistics in each forward pass; the algorithm in one process computes them per local batch."""
    verdict = verify(jobs.batch_norm(), Plan.parse("dp=2 grad_compression=int8"))
    assert verdict.code == "V010" and "batch statistics" in verdict.cause


@pytest.mark.parametrize(
    "text, code, told",
    [
        ("grad_compression=int8", "P030", "dp=2"),
        ("fsdp=2 grad_compression=bf16", "P080", "residual"),
        ("dp=2 fsdp=2 grad_compression=bf16", "P080", "residual"),
        ("dp=2 cp=2 grad_compression=int8", "P080", "same samples"),
        ("dp=2 ep=2 grad_compression=int8", "P080", "an expert"),
        ("dp=2 tp=2 grad_compression=int8", "P080", "scale"),
        ("dp=2 tp=2 grad_compression=powersgd", "P080", "directions"),
        ("dp=2 grad_compression=int8 precision=fp16", "P080", "loss scale"),
        ("dp=2 grad_compression=int8 processes=one", "P080", "no messages"),
    ],
)
def test_what_cannot_work_is_refused(text: str, code: str, told: str) -> None:
    with pytest.raises(PlaitError) as error:
        check_plan(jobs_compressed.job("words"), Plan.parse(text))
    assert any(p.code == code and told in f"{p.why} {p.fix}" for p in error.value.problems), str(error.value)


def test_a_step_that_is_left_out_leaves_the_residuals() -> None:
    """A step that is not finite is skipped on all ranks, and leaves no trace: its sums do not enter the residuals."""

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(jobs_compressed.job("pictures"), "dp=2 grad_compression=int8", place=place, device="cpu", on_nan="skip")
        kept = lambda: {n: t.clone() for n, t in engine.rank_model.techniques.compressor.state().items()}  # noqa: E731
        found, held = [], kept()
        for step, batch in zip(range(4), engine.batches()):
            if step == 2 and place.rank == 1:
                batch.micro_batches[0].inputs[0, 0] = torch.nan
            skipped, now = engine.step(batch).skipped, kept()
            found.append([skipped, all(torch.equal(t, held[n]) for n, t in now.items())])
            held = now
        return {"steps": found, "finite": all(bool(t.isfinite().all()) for t in held.values())}

    assert (
        fork.run_ranks(rank, 2)
        == [{"steps": [[False, False], [False, False], [True, True], [False, False]], "finite": True}] * 2
    )
