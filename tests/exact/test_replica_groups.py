"""Replica groups in several processes equal k models in one process: each technique, optimizer, loss and layout. In special cases they
equal dp.

A cross-section of the list always runs; `prove` runs all of it.
"""

from itertools import product
from pathlib import Path

import jobs
import jobs_compressed
import pytest
from launched import TEST_JOB
from rarely import crossed, every, sampled

from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.proof.algorithms import registry
from plait.proof.verdict import Verdict, format_verdict
from plait.proof.verify import verify

KINDS = (
    "sync_every=2",
    "sync_every=2 warmup_sync_steps=2",
    "outer_sync=diloco sync_every=2",
    "outer_sync=diloco sync_every=3 outer_lr=0.5 outer_momentum=0.3 warmup_sync_steps=1",
    "outer_sync=diloco sync_every=4 num_fragments=2 fragment_delay=1 fragment_alpha=0.5",
    "outer_sync=diloco sync_every=3 num_fragments=3 fragment_delay=2",
    "sync_every=2 grad_compression=int8",
    "outer_sync=diloco sync_every=2 grad_compression=powersgd compression_rank=1",
    "outer_sync=diloco sync_every=4 num_fragments=2 fragment_delay=2 grad_compression=bf16",
)
LIST = list(product(jobs_compressed.MODELS, KINDS, ("adamw", "sgd"), (True, False), (True, False), (1, 2)))[::5]


def proved(job: str, text: str, **fields: object) -> Verdict:
    made = jobs_compressed.job(job, **fields) if job in jobs_compressed.MODELS else jobs.ALL[job]()  # type: ignore[arg-type]
    return verify(made, Plan.parse(text))


@pytest.mark.parametrize("model, kind, optimizer, clipped, ragged, microbatches", sampled(3, every(12, LIST)))
def test_equal_to_the_algorithm(
    model: str, kind: str, optimizer: str, clipped: bool, ragged: bool, microbatches: int
) -> None:
    groups = 2 + (microbatches + ragged) % 2
    clip = {"clip": 1.0} if clipped else {}
    verdict = proved(
        model, f"replica_groups={groups} {kind} microbatches={microbatches}", optimized=optimizer, ragged=ragged, **clip
    )
    assert verdict.equal, verdict.cause
    assert verdict.forced["clipped"] == clipped
    assert verdict.algorithm is not None and verdict.algorithm.distance > 1e-6
    assert "EQUAL to the algorithm (one process) · " in format_verdict(verdict, model)


INSIDE = (
    "dp=2",
    "fsdp=2",
    "tp=2",
    "pp=2",
    "pp=2 microbatches=2",
    "dp=2 fsdp=2",
    "fsdp=2 zero_stage=1",
    "dp=2 activation_checkpointing=full",
    "fsdp=2 offload=optimizer",
)


@pytest.mark.parametrize(
    "kind, inside", sampled(4, every(5, crossed(2, [k for k in KINDS if "compression" not in k], INSIDE)))
)
def test_other_axes_inside_a_group(kind: str, inside: str) -> None:
    verdict = proved("mlp", f"replica_groups=2 {kind} {inside}")
    assert verdict.equal and verdict.algorithm is not None, verdict.cause


@pytest.mark.parametrize("name", sampled(3, every(4, tuple(jobs.ALL))))
def test_other_jobs(name: str) -> None:
    for kind in ("sync_every=2", "outer_sync=diloco sync_every=3 fragment_delay=1"):
        verdict = proved(name, f"replica_groups=2 {kind}")
        assert verdict.equal, verdict.cause


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups=2",  # sync in each step, an optimizer that is linear in the gradient, no clipping, equal sample weights
        "replica_groups=3 dp=2",
        "replica_groups=2 outer_sync=diloco outer_lr=1 outer_momentum=0.0",
    ],
)
def test_what_should_be_dp_is(text: str) -> None:
    verdict = verify(jobs_compressed.job("pictures", "sgd"), Plan.parse(text))
    assert verdict.equal and verdict.algorithm is not None, verdict.cause
    assert verdict.algorithm.distance < 1e-12


def test_steps_at_the_start_are_dp() -> None:
    """With AdamW, clipping and different sample weights, as long as each step is one of `warmup_sync_steps`."""
    job = jobs_compressed.job("pictures", "adamw", True, clip=1.0)
    with pytest.MonkeyPatch.context() as patch:
        own = tuple(registry.ReferenceAlgorithm(o.is_enabled, o.train, o.describe, o.strategies, o.by_local_batch) for o in registry.ALGORITHMS)
        patch.setattr(registry, "ALGORITHMS", own)
        verdict = verify(job, Plan.parse("replica_groups=2 dp=2 warmup_sync_steps=8 sync_every=5"))
    assert verdict.equal and verdict.algorithm is not None, verdict.cause
    assert verdict.algorithm.distance < 1e-12
    assert "equal to dp here" in format_verdict(verdict, "pictures")


@pytest.mark.parametrize("optimizer, clip", [("adamw", None), ("sgd", 0.01)])
def test_what_should_not_be_dp_is_not(optimizer: str, clip: float | None) -> None:
    verdict = verify(jobs_compressed.job("pictures", optimizer, clip=clip), Plan.parse("replica_groups=2"))
    assert verdict.equal and verdict.algorithm is not None and verdict.algorithm.distance > 1e-4


@pytest.mark.parametrize(
    "text, code, told",
    [
        ("replica_groups=64", "P012", "never get a sample"),
        ("replica_groups=2 processes=one", "P019", "at least one process"),
        ("replica_groups=2 outer_sync=diloco sync_every=2 num_fragments=3", "P064", "after each step"),
        ("replica_groups=2 outer_sync=diloco sync_every=2 fragment_delay=2", "P064", "sent again"),
        ("replica_groups=2 tp=2 grad_compression=int8", "P080", "shard of a tensor"),
        ("sync_every=4", "P030", "replica_groups"),
        ("replica_groups=2 num_fragments=2 sync_every=4", "P030", "outer_sync=diloco"),
        ("replica_groups=2 outer_sync=diloco staleness=2", "P030", "outer_sync=async"),
    ],
)
def test_what_cannot_work_is_refused(text: str, code: str, told: str) -> None:
    with pytest.raises(PlaitError) as error:
        check_plan(jobs_compressed.job("words"), Plan.parse(text))
    assert any(p.code == code and told in f"{p.what} {p.why} {p.fix}" for p in error.value.problems), str(error.value)


@pytest.mark.slow
def test_too_many_fragments_are_refused() -> None:
    with pytest.raises(PlaitError, match="P064") as error:
        proved("words", "replica_groups=2 outer_sync=diloco sync_every=40 num_fragments=30")
    assert "units" in str(error.value)


@pytest.mark.slow
@pytest.mark.messages
def test_a_dry_run_sends_the_same() -> None:
    verdict = proved("words", "replica_groups=2 dp=2")
    assert verdict.equal, verdict.cause


@pytest.mark.parametrize("plan", ("replica_groups=2 sync_every=4", "dp=2 grad_compression=int8"))
def test_fewer_ranks_cannot_go_on(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", TEST_JOB, "--plan", plan, "--allow-shrink"]) == 2
    assert "P065" in capsys.readouterr().err and not (tmp_path / "runs").exists()
