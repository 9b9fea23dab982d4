"""Jobs with several losses and optimizers equal one device in float64 under each plan that supports them; bugs are detected."""

from typing import Any

import jobs_phased
import pytest
import torch
from rarely import every, sampled
from torch import nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.engine.passes import ActivePhase, Passes
from plait.proof.verify import verify

PLANS = ("dp=2", "fsdp=2", "tp=2", "dp=2 microbatches=2", "dp=2 fsdp=2", "fsdp=2 zero_stage=1 microbatches=2", "fsdp=2 tp=2",
         "dp=2 offload=optimizer", "dp=3")  # fmt: skip
CASES = [(name, text) for name in jobs_phased.ALL for text in PLANS]


@pytest.mark.messages
@pytest.mark.parametrize("name, text", sampled(5, every(7, CASES)))
def test_equal(name: str, text: str) -> None:
    verdict = verify(jobs_phased.ALL[name](), Plan.parse(text))
    assert verdict.equal and not verdict.inexact, (verdict.code, verdict.parameter, verdict.cause)


def refused(text: str) -> list[str]:
    with pytest.raises(PlaitError) as raised:
        verify(jobs_phased.wgan_gp(), Plan.parse(text))
    return raised.value.codes


@pytest.mark.parametrize("text", ("pp=2", "cp=2", "dp=2 grad_compression=bf16", "replica_groups=2", "dp=2 processes=one"))
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    assert "P091" in refused(text)


def seen(monkeypatch: pytest.MonkeyPatch, plan: str = "dp=2") -> str:
    """The verdict's code for the job with a bug."""
    return verify(jobs_phased.wgan_gp(), Plan.parse(plan)).code


@pytest.mark.parametrize("plan", ("dp=2", "fsdp=2"))
def test_a_leaking_gradient_is_seen(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's phase also propagates gradients into the critic, and the critic's next phase adds to them."""
    monkeypatch.setattr(ActivePhase, "get_backward_inputs", lambda self: None)
    monkeypatch.setattr(ActivePhase, "drop_other_gradients", lambda self: None)
    assert seen(monkeypatch, plan)


def test_a_phase_in_the_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    due = ActivePhase.iterate_phases
    monkeypatch.setattr(ActivePhase, "iterate_phases", lambda self, step: due(self, step + 1))
    assert seen(monkeypatch)


def test_an_optimizer_of_another_phase_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's phase steps all optimizers: the critic moves by its momentum without its own gradient."""
    begin = ActivePhase._activate

    def swapped(self: ActivePhase, phase: plait.Phase | None) -> None:
        begin(self, phase)
        if phase is not None:
            other = next(name for name in self.rank_model.optimizer.each if name != phase.name)  # type: ignore[attr-defined]
            self.rank_model.optimizer.turn = other  # type: ignore[attr-defined]

    monkeypatch.setattr(ActivePhase, "_activate", swapped)
    assert seen(monkeypatch)


@pytest.mark.slow
def test_the_same_noise_in_every_phase_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Passes.forward

    def quiet(self: Passes, *given: Any) -> Any:
        name, self.turns.name = self.turns.name, ""
        try:
            return forward(self, *given)
        finally:
            self.turns.name = name

    monkeypatch.setattr(Passes, "forward", quiet)
    assert seen(monkeypatch)


def test_one_rank_trains_as_a_loop_by_hand() -> None:
    """By hand: alternating requires_grad, two optimizers, no plait."""
    job = jobs_phased.actor_critic()
    torch.manual_seed(job.seed)
    model = jobs_phased.ActorCritic()
    actor = torch.optim.Adam([*model.body.parameters(), *model.policy.parameters()], lr=1e-2, betas=(0.5, 0.9))
    critic = torch.optim.SGD(model.value.parameters(), lr=0.05, momentum=0.9)
    with Engine(job, "dp=1") as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            out = model(micro.inputs)
            advantage = (micro.targets["return"] - out[1]).detach()
            loss = -(out[0].gather(-1, micro.targets["action"][:, None]).squeeze(-1) * advantage).mean()
            actor.zero_grad()
            loss.backward()
            actor.step()
            critic.zero_grad()
            F.mse_loss(model(micro.inputs)[1], micro.targets["return"]).backward()
            critic.step()
            step = engine.step(batch)
            assert step.phases["actor"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, parameter in engine.model.named_parameters():
            torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-4, atol=1e-6)


def phase(name: str = "one", **given: object) -> plait.Phase:
    fields = {"trains": ("0.*",), "loss": F.mse_loss, "optimizer": jobs_phased.adam} | given
    return plait.Phase(name, **fields)  # type: ignore[arg-type]


def job(*phases: plait.Phase, **given: object) -> plait.Job:
    fields = {"model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "data": list, "batch": 1, "steps": 1}
    return plait.Job(**fields | {"phases": phases or None} | given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "code, make",
    (
        ("J004", lambda: job()),
        ("J004", lambda: job(phase(), loss=F.mse_loss)),
        ("J004", lambda: job(phase(), optimizer=jobs_phased.adam)),
        ("J004", lambda: job(phase(every=0))),
        ("J004", lambda: job(phase(trains="0.*"))),
        ("P090", lambda: job(phase(), phase())),
        ("P090", lambda: job(phase(every=2))),
        ("P090", lambda: job(phase(), phase("two", trains=("nothing.*",))).model()),
        ("P090", lambda: job(phase(), phase("two", trains=("*.bias",))).model()),
    ),
)
def test_phases_that_cannot_be_meant(code: str, make) -> None:
    with pytest.raises(PlaitError) as raised:
        make()
    assert raised.value.codes[0] == code
    assert all(problem.fix for problem in raised.value.problems)


def test_what_no_phase_trains_is_frozen_and_names_stay() -> None:
    model = job(phase()).model()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False,
    }  # fmt: skip
    assert type(model).__name__ == "Sequential"
    x = torch.randn(3, 2)
    assert [*model(x)] == ["one"]
    with torch.no_grad():
        assert torch.equal(model.eval()(x), nn.Sequential.forward(model, x))
