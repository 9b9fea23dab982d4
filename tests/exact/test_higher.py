"""Higher-order operators, compiled modules and custom operators: opaque, and the same training under each plan."""

from typing import Any

import jobs_higher
import pytest
import torch
from jobs import make
from rarely import rarely
from torch import nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.model.fake_model import sketch_fake_model
from plait.model.sketch_table import format_sketch, outline_sketch
from plait.planner.dryrun.dry_run import dry_run
from plait.planner.plan_request import PlanRequest
from plait.proof.verify import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # a warning of torch while it compiles
]
PLANS = ("dp=2", "fsdp=2", "pp=2 microbatches=2")
QUICK = [("cond", "fsdp=2"), ("script", "dp=2")]
ALL = [(kind, plan) for kind in jobs_higher.KINDS for plan in ("dp=1", *PLANS, "dp=1 activation_checkpointing=full",
    "dp=1 activation_checkpointing=selective")
       if (kind, plan) not in QUICK and not (kind in ("script", "trace") and plan == "fsdp=2")
       and not (kind == "vmap" and ("pp" in plan or "checkpointing" in plan))]  # fmt: skip
OPAQUE = ("cond", "while_loop", "scan")


def equal(kind: str, plan: str) -> None:
    verdict = verify(jobs_higher.job(kind), Plan.parse(plan))
    assert verdict.equal and not verdict.inexact, verdict.cause


@pytest.mark.prove
@pytest.mark.parametrize("plan", ("pp=2 microbatches=2", "dp=1 activation_checkpointing=full"))
def test_units_that_cannot_be_measured_are_named(plan: str) -> None:
    with pytest.raises(PlaitError, match="P073"):
        verify(jobs_higher.job("vmap"), Plan.parse(plan))


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan", (*rarely(QUICK[0]), QUICK[1]))
def test_some_are_the_same_training(kind: str, plan: str) -> None:
    equal(kind, plan)


@pytest.mark.prove
@pytest.mark.parametrize("kind, plan", ALL)
def test_all_are_the_same_training(kind: str, plan: str) -> None:
    equal(kind, plan)


@pytest.mark.prove
@pytest.mark.parametrize("kind", jobs_higher.KINDS)
@pytest.mark.parametrize("plan", ("tp=2", "cp=2"))
def test_what_would_have_to_look_inside_is_exact_or_refused_by_name(kind: str, plan: str) -> None:
    try:
        equal(kind, plan)
    except PlaitError as error:
        assert error.codes[0] in ("P034", "P040", "P071", "P073") and error.exit_code == 2


@pytest.mark.slow
def test_a_sketch_says_what_it_does_not_count() -> None:
    for kind in OPAQUE:
        _, sketch = sketch_fake_model(jobs_higher.job(kind))
        assert not sketch.unmeasured and len(sketch.units) == 5 and not sketch.differentiates and not sketch.unkeyed
        assert f"not counted: operations of {kind}, in 1, 2, 3" in format_sketch(outline_sketch(sketch, 1), "job.py")


@pytest.mark.slow
def test_a_dry_run_and_a_plan_of_one_work() -> None:
    assert dry_run(jobs_higher.job("cond"), Plan.parse("fsdp=2")).fullest.peak.total > 0
    found = PlanRequest.from_job(jobs_higher.job("script"), "job.py", _machine())
    refused = found.make_refusal()
    assert "cannot be sharded" in refused(Plan.parse("fsdp=2")) and not refused(Plan.parse("dp=2"))


def _machine() -> Any:
    from plait.config.machine import Machine

    return Machine.from_name("h100x2")


@pytest.mark.parametrize("plan", ("fsdp=2", "tp=2"))
def test_a_compiled_module_is_not_taken_apart(plan: str) -> None:
    with pytest.raises(PlaitError, match="P071") as error:
        verify(jobs_higher.job("trace"), Plan.parse(plan))
    assert "1.part" in str(error.value) and plan in str(error.value)


class Counting(nn.Module):
    """Counts its calls in a buffer, or has a buffer that is never written."""

    calls: torch.Tensor

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.second, self.counts = nn.Linear(6, 8), nn.Linear(8, 1), counts
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls.add_(1)
        return self.second(torch.tanh(self.first(x)) / self.calls)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ("dp=2", "microbatches=2"))
def test_a_model_that_is_compiled_as_a_whole_is_the_same_training(plan: str) -> None:
    verdict = verify(make(lambda: torch.jit.script(Counting(False))), Plan.parse(plan))
    assert verdict.equal and not verdict.inexact, verdict.cause


@pytest.mark.slow
@pytest.mark.parametrize("whole", (True, False))
@pytest.mark.parametrize("part", (lambda: Counting(True), lambda: nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1))))
def test_buffers_that_a_compiled_module_writes_are_named(whole: bool, part: Any) -> None:
    model = (lambda: torch.jit.script(part())) if whole else lambda: nn.Sequential(torch.jit.script(part()))
    with pytest.raises(PlaitError, match="P071") as error:
        verify(make(model), Plan.parse("dp=2"))
    assert "is written by a module that torch.jit has compiled" in str(error.value) and error.value.exit_code == 2


class Inside(jobs_higher.Block):
    """Draws random numbers that no torch mode can intercept."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x.clone() * torch.rand_like(x), (x,))


def test_random_numbers_inside_are_named() -> None:
    _, sketch = sketch_fake_model(make(lambda: nn.Sequential(nn.Linear(6, 8), Inside(), nn.Linear(8, 1))))
    assert sketch.unkeyed == ("1",)


def test_plain_pytorch_is_blamed_only_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = make(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(7, 1)))
    with pytest.raises(PlaitError, match="J011"):
        verify(broken, Plan.parse("dp=1"))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the watcher has a defect")

    monkeypatch.setattr("plait.proof.reference.sketch_model", fails)
    with pytest.raises(PlaitError, match="P072") as error:
        verify(jobs_higher.job("function"), Plan.parse("dp=1"))
    assert "in plain PyTorch works" in str(error.value)
