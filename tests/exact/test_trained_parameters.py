"""The set of trained parameters stays constant: unfreezing one raises an error in its step, and freezing one means a missing gradient."""

from typing import Any

import jobs
import pytest
from rarely import rarely
from torch import Tensor, nn

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.verify import verify


class Changing(nn.Module):
    """Layers whose parameters are frozen, unfrozen or hooked in a forward pass, at a count that a buffer keeps in training."""

    def __init__(self, frozen: str, change: str, at: int):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)
        self.change, self.at, self.calls = change, at, 0
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls > self.at:
            kind, _, name = self.change.partition(" ")
            if kind == "hook" and self.calls == self.at + 1:
                self.get_submodule(name).weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
            elif kind in ("thaw", "freeze"):
                self.get_submodule(name).requires_grad_(kind == "thaw")
        x = self.first(x)
        return self.head(x + self.second(x))


def steps(place: Place, frozen: str, change: str, plan: str, callback: str = "") -> dict[str, Any]:
    """The number of steps of a run, and the error that it then raises."""

    class Changes(plait.Callback):
        def on_step(self, engine: Any, step: Any) -> None:
            if step.step == 3 and callback:
                kind, _, name = callback.partition(" ")
                engine.model.get_submodule(name).requires_grad_(kind == "thaw")

    job, made = jobs.make(lambda: Changing(frozen, change, 2), clip=0.1), 0
    try:
        with Engine(job, plan, place=place, device="cpu", callbacks=[Changes()]) as engine:
            for batch in engine.batches():
                engine.step(batch)
                made += 1
    except PlaitError as error:
        return {"made": made, "code": error.codes[0], "what": error.problems[0].what}
    return {"made": made, "code": "", "what": ""}


@pytest.mark.parametrize("frozen, change, callback, plan, code, made", [
    ("first", "thaw first", "", "dp=1", "P094", 2),
    ("first", "", "thaw first", "dp=2", "P094", 2),
    pytest.param("second", "thaw second.2", "", "dp=2", "P094", 2, marks=pytest.mark.slow),
    pytest.param("first", "thaw first", "", "fsdp=2", "P094", 2, marks=pytest.mark.slow),
    pytest.param("first", "", "thaw first", "fsdp=2", "P094", 2, marks=pytest.mark.slow),
    pytest.param("second", "thaw second", "", "tp=2", "P094", 2, marks=pytest.mark.slow),
    pytest.param("first", "thaw first", "", "pp=2", "P094", 2, marks=pytest.mark.slow),
    pytest.param("", "hook head", "", "dp=2", "P093", 2, marks=pytest.mark.slow),
    pytest.param("", "hook first.0", "", "fsdp=2", "P093", 2, marks=pytest.mark.slow),
    pytest.param("", "hook first.0", "", "dp=1", "", 6, marks=pytest.mark.slow),
    pytest.param("first", "", "freeze second", "fsdp=2", "", 6, marks=pytest.mark.slow),
])  # fmt: skip
def test_thawing_is_refused_in_its_step(frozen: str, change: str, callback: str, plan: str, code: str, made: int) -> None:
    ran = fork.run_ranks(lambda place: steps(place, frozen, change, plan, callback), Plan.parse(plan).world)
    assert all((rank["code"], rank["made"]) == (code, made) for rank in ran), ran


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp=2", "tp=2", *rarely("dp=2", "pp=2", "fsdp=2 tp=2", "fsdp=2 zero_stage=1", "fsdp=2 offload=optimizer")])
def test_freezing_works(plan: str) -> None:
    verdict = verify(jobs.make(lambda: Changing("", "freeze second", 1), clip=0.1), Plan.parse(plan))
    assert verdict.equal, (verdict.cause, verdict.first_wrong)
