"""Training with NCCL's rules, along the code paths for devices, equals one device: each axis, pairs of them, each pipeline schedule,
evaluation, checkpoints and proofs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import jobs_context
import jobs_moe
import jobs_pipeline
import pytest
import torch
from rarely import every, rarely

import plait
from device import nccl
from plait.config.errors import PlaitError
from plait.config.keys import SCHEDULES
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp import groups
from plait.proof import full_batch, verify
from plait.tensors.collectives import DIRECT_DEVICES

STEPS = 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of small models are groups of their own; a proof is of the logic alone."""
    monkeypatch.setattr(groups, "GROUP_BYTES", 0)
    monkeypatch.setattr(groups, "TINY_BYTES", 0)
    monkeypatch.setattr(full_batch, "DEFAULT_SECONDS", 0.0)


def evaluated(job: plait.Job) -> plait.Job:
    evaluate = plait.Evaluate(lambda: jobs.Numbers(7), lambda out, y: {"error": (out - y).abs()})
    return dataclasses.replace(job, evaluate=evaluate)


JOBS: dict[str, Callable[[], plait.Job]] = {
    "deep": lambda: evaluated(jobs_pipeline.LISTED["deep"]()),
    "mlp": lambda: evaluated(jobs.mlp()),
    "batch_norm": lambda: evaluated(jobs.batch_norm()),
    "words": jobs_pipeline.LISTED["root_gpt"],
    "ragged": jobs.ragged,
    "attention": jobs_context.OWN["gpt"],
    "experts": jobs_moe.gpt,
    "stream": jobs.stream,
}


def told(job: plait.Job, plan: str, folder: Path | str = "none", resume: bool = False, steps: int = STEPS) -> list[Any]:
    """For each rank: losses, norms, and the metrics after each step. With a folder, a checkpoint is saved there."""

    def run(place: Place) -> dict[str, Any]:
        engine = Engine(job, plan, place=place, directory=folder, cast=torch.float64, device="cpu")
        if resume:
            engine.resume()
        source, found = engine.batches(), []
        for _ in range(steps):
            step = engine.step(next(source))
            found += [step.loss, step.norm, *(engine.evaluate().values() if job.evaluate else ())]
        if folder != "none":
            engine.save()
        return {"numbers": found}

    return [rank["numbers"] for rank in fork.run_ranks(run, Plan.parse(plan).world)]


@cache
def alone(name: str) -> list[float]:
    """The same for one device."""
    return told(JOBS[name](), "dp=1")[0]


@pytest.fixture(params=(False, True), ids=("pairs", "bound"))
def bound(request: pytest.FixtureRequest) -> bool:
    """Whether messages run on the communicator of their group."""
    return request.param


def same(name: str, plan: str, bound: bool = False) -> None:
    one = alone(name)
    with nccl.instead_of_gloo(bound=bound):
        found = told(JOBS[name](), plan)
    for rank in found:
        assert rank == pytest.approx(one, rel=1e-9)


SLOW = pytest.mark.slow
AXES = (
    ("mlp", "dp=2"), ("mlp", "fsdp=2"), ("mlp", "tp=2"), ("deep", "pp=2 microbatches=2"), ("experts", "ep=2"),
    pytest.param("attention", "cp=2", marks=SLOW), pytest.param("attention", "cp=2 cp_method=ulysses", marks=SLOW),
)  # fmt: skip
PAIRS = (
    ("deep", "dp=2 fsdp=2"), ("deep", "dp=2 tp=2"), ("attention", "dp=2 cp=2"), ("deep", "pp=2 dp=2 microbatches=2"),
    ("deep", "fsdp=2 tp=2"), ("attention", "fsdp=2 cp=2 cp_method=ulysses"), ("deep", "pp=2 fsdp=2 microbatches=2"),
    ("words", "pp=2 tp=2 microbatches=2 schedule=zb"), ("attention", "pp=2 cp=2 microbatches=2"), ("attention", "tp=2 cp=2"),
    ("experts", "fsdp=2 ep=2"), ("experts", "dp=3 ep=3"), ("deep", "dp=2 fsdp=2 tp=2"),
)  # fmt: skip
WAYS = (
    ("mlp", "fsdp=2 zero_stage=1 microbatches=2"), ("mlp", "fsdp=3 zero_stage=2"), ("mlp", "fsdp=2 offload=all activation_checkpointing=full"),
    ("deep", "dp=2 offload=optimizer"), ("batch_norm", "dp=2"), ("ragged", "fsdp=2 microbatches=2"), ("stream", "dp=2"),
    ("words", "tp=2 sequence_parallel=true"), ("attention", "cp=3 activation_checkpointing=full"), ("deep", "dp=2 batch_split=2:1"),
)  # fmt: skip
TWICE = {"interleaved": " stages_per_rank=2", "zbv": " stages_per_rank=2"}


@pytest.mark.parametrize("name, plan", AXES)
def test_each_axis(name: str, plan: str) -> None:
    same(name, plan)


@SLOW
@pytest.mark.parametrize("name, plan", every(2, (*PAIRS, *WAYS)))
def test_several_axes_and_other_keys(name: str, plan: str) -> None:
    same(name, plan)


@SLOW
@pytest.mark.parametrize("ranks", (2, *rarely(3, 4)))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_of_a_pipeline(schedule: str, ranks: int, bound: bool) -> None:
    """Also if one stream has all messages of a rank."""
    same("deep", f"pp={ranks} microbatches=4 schedule={schedule}{TWICE.get(schedule, '')}", bound)


@SLOW
def test_a_checkpoint_of_one_plan_is_read_under_another(tmp_path: Path) -> None:
    job = JOBS["deep"]()
    whole = told(job, "dp=1", steps=4)[0]
    with nccl.instead_of_gloo():
        (first, *_) = told(job, "fsdp=2", tmp_path)
        (then, *_) = told(job, "pp=2 microbatches=2", tmp_path, resume=True)
    assert [*first, *then] == pytest.approx(whole, rel=1e-9)


@SLOW
@pytest.mark.parametrize(
    "name, plan",
    (
        ("words", "pp=2 fsdp=2 microbatches=2"), ("experts", "ep=2"),
        *rarely(("attention", "cp=2"), ("words", "tp=2"), ("deep", "dp=2 fsdp=2 zero_stage=2 microbatches=2")),
    ),
)  # fmt: skip
def test_a_proof_and_what_a_dry_run_says_is_sent(name: str, plan: str) -> None:
    with nccl.instead_of_gloo():
        verdict = verify.verify(JOBS[name](), Plan.parse(plan), steps=2)
    assert verdict.equal, verdict
    assert "not compared" not in verdict.to_dict()["probes"]["C"]["detail"]


@pytest.mark.parametrize("plan", ("fsdp=2", "pp=2 microbatches=2"))
def test_the_messages_of_the_cpu_would_wait_for_ever(plan: str) -> None:
    """The code paths for gloo, in which receives are posted ahead and both ends may send first."""
    job = JOBS["deep"]()
    with nccl.instead_of_gloo():
        token = DIRECT_DEVICES.set(("cpu",))
        try:
            with pytest.raises(PlaitError, match=r"Fault: ranks 0 and 1 both|Fault: rank . is to|Fault: messages are out of order"):
                told(job, plan)
        finally:
            DIRECT_DEVICES.reset(token)


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    yield
    alone.cache_clear()
