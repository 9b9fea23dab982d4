"""Experts sharded over ranks equal one device in float64, with their balance loss, or the plan is rejected or named as not exact."""

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import jobs_moe
import jobs_pipeline
import pytest
import torch
from rarely import every, rarely, sampled

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp import groups
from plait.proof.verify import verify

JOBS = {
    "gpt": jobs_moe.gpt,
    "always": lambda: jobs_moe.gpt(always=True),
    "mixtral": lambda: dataclasses.replace(jobs_moe.mixtral(), loss=jobs_moe.balanced),
    "qwen3": lambda: dataclasses.replace(jobs_moe.qwen3(), loss=jobs_moe.balanced),
    "gpt_oss": jobs_moe.gpt_oss,
    "twice": lambda: jobs_moe.gpt(depth=1, times=2),
    "dense": jobs_pipeline.moe,
    "plain": lambda: jobs_moe.gpt(loss=jobs_moe.plain_loss),
    "stacked": lambda: jobs_moe.gpt(stacked=True),
}
TRIED = (
    ("gpt", "ep=2"), ("mixtral", "fsdp=2 ep=2"), ("qwen3", "dp=2 fsdp=2 ep=4"), ("gpt", "dp=2 fsdp=2 ep=2"),
    ("mixtral", "ep=2 activation_checkpointing=full"), ("always", "dp=3 ep=3"), ("twice", "ep=2"), ("mixtral", "dp=2 ep=2 offload=optimizer"),
    ("stacked", "ep=2 token_dispatcher=allgather"), ("gpt_oss", "dp=4 ep=2 token_dispatcher=allgather"),
    ("stacked", "dp=3 ep=3 activation_checkpointing=full token_dispatcher=allgather"), ("stacked", "fsdp=2 ep=2 token_dispatcher=allgather"),
    ("mixtral", "fsdp=2 ep=2 token_dispatcher=allgather"), ("dense", "dp=4 ep=2"), ("gpt_oss", "fsdp=2 ep=2"),
    ("plain", "fsdp=2 ep=2 microbatches=2"),
)  # fmt: skip
PLANS = (
    "ep=2",
    "ep=4",
    "dp=3 ep=3",
    "fsdp=2 ep=2",
    "dp=2 fsdp=2 ep=4",
    "dp=2 fsdp=2 ep=2",
    "dp=4 ep=2 activation_checkpointing=selective",
    "fsdp=2 ep=2 offload=optimizer",
)
MORE = [(job, plan) for job in JOBS for plan in PLANS if (job, plan) not in TRIED]
TOO_MANY = [("dense", plan) for plan in PLANS if "ep=4" in plan]
"""The job has three experts."""


def equal(job: plait.Job, plan: str) -> None:
    verdict = verify(job, Plan.parse(plan))
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause)
    assert not verdict.inexact and verdict.forced["clipped"]


@pytest.mark.parametrize("name, plan", sampled(3, every(5, TRIED)))
def test_experts(name: str, plan: str) -> None:
    equal(JOBS[name](), plan)


@pytest.mark.parametrize(
    "noise, plan",
    sampled(
        20,
        (
            ("gumbel", "ep=2"), ("normal", "ep=2 activation_checkpointing=full"), ("jitter", "fsdp=2 ep=2"), ("scaled", "dp=2 fsdp=2 ep=2"),
            ("dropout", "ep=2"), ("module", "ep=2"), ("hidden", "dp=3 ep=3"), ("python", "ep=2"), ("gumbel_softmax", "ep=2"),
            ("normal", "pp=2 dp=2 ep=2 microbatches=2"),
        ),
    ),
)  # fmt: skip
def test_a_router_that_draws_noise(noise: str, plan: str) -> None:
    """The layer's code runs twice, and chooses the same experts both times."""
    equal(jobs_moe.gpt(noise=noise, loss=jobs_moe.plain_loss, depth=2 if "pp" in plan else 1), plan)


@pytest.mark.prove
@pytest.mark.parametrize("name, plan", [pair for pair in MORE if pair not in TOO_MANY])
def test_experts_under_more_plans(name: str, plan: str) -> None:
    equal(JOBS[name](), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    (
        "pp=2 fsdp=2 ep=2 microbatches=2 schedule=zb zero_stage=2",
        pytest.param("pp=2 ep=2 microbatches=2", marks=pytest.mark.prove),
        pytest.param("pp=2 dp=3 ep=3 microbatches=2 schedule=zbv stages_per_rank=2", marks=pytest.mark.prove),
    ),
)
def test_experts_of_a_stage(plan: str) -> None:
    """Rows are sent back once, in the same half of a backward, including on a rank without rows in a micro-batch."""
    equal(JOBS["plain"](), plan)


@pytest.mark.parametrize(
    "name, plan",
    sampled(2, (*rarely(("gpt", "dp=2"), ("gpt", "dp=2 fsdp=2")), ("mixtral", "fsdp=2"), ("gpt", "pp=2 dp=2"))),
)
def test_a_balance_loss_without_shared_experts(name: str, plan: str) -> None:
    equal(JOBS[name](), plan)


def test_a_loss_that_compares_samples() -> None:
    """Its rows are this rank's samples, its columns the samples of all ranks."""

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out @ plait.global_batch(out).T).logsumexp(1).mean() - (out * target).mean()

    equal(jobs.make(lambda: torch.nn.Linear(6, 1), loss=loss), "dp=3")


@pytest.mark.slow
def test_a_balance_of_micro_batches_is_named() -> None:
    verdict = verify(jobs_moe.gpt(), Plan.parse("ep=2 microbatches=2"))
    assert verdict.code == "V010" and "micro-batch" in verdict.inexact[0]


class Centred(torch.nn.Module):
    """Subtracts the batch's mean in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x - plait.global_mean(torch.tanh(x)))


def test_a_mean_inside_the_model() -> None:
    equal(jobs.make(Centred), "dp=3")
    verdict = verify(jobs.make(Centred), Plan.parse("dp=2 processes=one"))
    assert verdict.code == "V010" and "processes=one" in verdict.inexact[0]


@pytest.mark.slow
def test_a_balance_of_each_rank_is_named() -> None:
    verdict = verify(jobs_moe.gpt(loss=jobs_moe.local_balance), Plan.parse("dp=2"))
    assert verdict.code == "V013"


@pytest.mark.slow
def test_experts_that_drop_tokens_are_named() -> None:
    verdict = verify(jobs_moe.gpt(loss=jobs_moe.plain_loss, capacity=1.0), Plan.parse("ep=2"))
    assert verdict.code in ("", "V010") and "blocks.0.moe drop tokens" in verdict.inexact[0]


@pytest.mark.parametrize(
    "job, plan, code",
    sampled(
        2,
        (
            (jobs_moe.gpt, "dp=3 ep=2", "P050"),
            (jobs_moe.gpt, "ep=8", "P051"),
            (jobs.mlp, "ep=2", "P051"),
            (lambda: dataclasses.replace(jobs_moe.mixtral(), optimizer=torch.optim.Adafactor), "ep=2", "P022"),
        ),
    ),
)
def test_what_cannot_be_shared_out_is_refused(job: Any, plan: str, code: str) -> None:
    with pytest.raises(PlaitError) as caught:
        verify(dataclasses.replace(job(), batch=24), Plan.parse(plan))
    assert caught.value.problems[0].code == code


def test_a_torch_that_knows_one_mesh_cannot_shard_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "fsdp_placement", object)
    with pytest.raises(PlaitError, match="a separate mesh") as caught:
        verify(dataclasses.replace(jobs_moe.gpt(), batch=24), Plan.parse("fsdp=4 ep=2"))
    assert caught.value.codes == ["H010"]


def losses(job: plait.Job, plan: str, steps: int, folder: Path, resume: bool = False) -> list[float]:
    """The losses of each step, on rank 0; a checkpoint is saved."""

    def run(place: Place) -> dict[str, Any]:
        engine = Engine(job, plan, place=place, directory=folder, cast=torch.float64)
        if resume:
            engine.resume()
        source = engine.batches()
        found = [engine.step(next(source)).loss for _ in range(steps)]
        engine.save()
        return {"losses": found, "measured": engine.evaluate()}

    told = fork.run_ranks(run, Plan.parse(plan).world)
    assert all(other["measured"] == told[0]["measured"] for other in told)
    return [*told[0]["losses"], *told[0]["measured"].values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, plans", (("gpt", ("ep=2", "dp=1", "fsdp=2 ep=2")), *rarely(("mixtral", ("dp=2", "ep=4", "ep=2"))))
)
def test_a_checkpoint_is_resumed_with_other_owners(name: str, plans: tuple[str, ...], tmp_path: Path) -> None:
    job = JOBS[name]()
    first = (lambda out: out[0]) if name == "gpt" else (lambda out: out.logits)
    told = plait.Evaluate(lambda: jobs_moe.Rows(n=5, length=4), lambda out, y: {"top": first(out).amax(-1)})
    job = dataclasses.replace(job, evaluate=told)
    whole = losses(job, "dp=1", 6, tmp_path / "whole")
    found: list[float] = []
    for i, plan in enumerate(plans):
        *steps, measured = losses(job, plan, 2, tmp_path / "parts", resume=i > 0)
        found += steps
    assert [*found, measured] == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("precision", ("bf16", "fp32"))
def test_experts_in_the_formats_of_training(precision: str, tmp_path: Path) -> None:
    def run(place: Place) -> dict[str, Any]:
        engine = Engine(JOBS["mixtral"](), f"fsdp=2 ep=2 precision={precision}", place=place, directory=tmp_path)
        source = engine.batches()
        return {"losses": [engine.step(next(source)).loss for _ in range(3)]}

    for told in fork.run_ranks(run, 2):
        assert all(0 < loss < 10 for loss in told["losses"])
