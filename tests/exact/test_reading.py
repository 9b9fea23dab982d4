"""Code that reads numbers from tensors takes another way where a step has other numbers than the trial of a plan had."""

from dataclasses import replace
from typing import Any

import jobs_reading
import pytest
from rarely import every
from torch import Tensor

from plait.config.plan import Plan
from plait.engine.build import sketch_without_ranks
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.model.make import CPU
from plait.proof.verify import verify


class Wide(jobs_reading.Rows):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x.double(), y.double()


def losses(kind: str, plan: str) -> list[float]:
    """Of four steps in float64: in the first and in the third are samples with a large number."""
    model = lambda: jobs_reading.Model(jobs_reading.KINDS[kind]).double()  # noqa: E731
    job = replace(jobs_reading.job(kind), model=model, data=Wide, steps=4)

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(job, plan, place=place, device="cpu")
        return {"losses": [float(engine.step(batch).loss) for batch in engine.batches()]}

    return fork.run(rank, Plan.parse(plan).world)[-1]["losses"]


CASES = [(kind, plan) for kind in jobs_reading.KINDS for plan in ("tp=2", "cp=2", "cp=2 cp_method=ulysses")]


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan", every(2, CASES))
def test_training_is_that_of_one_device(kind: str, plan: str) -> None:
    assert losses(kind, plan) == pytest.approx(losses(kind, "dp=1"), rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan", every(4, [*CASES[::-1], *((kind, "tp=2 cp=2") for kind in jobs_reading.KINDS)]))
def test_proved(kind: str, plan: str) -> None:
    verdict = verify(jobs_reading.job(kind), Plan.parse(plan))
    assert verdict.equal, repr(verdict)


def test_what_is_between_layers_stays_whole() -> None:
    """No number of the trial is large: its code is run as if one were."""
    for kind in ("between", "early", "rare"):
        slices = sketched(kind)
        assert not any("up" in name for group in slices.groups for name in group.columns)
        assert any("if other numbers are read at jobs_reading.py:" in why for _, _, why in slices.whole), slices.whole
    assert any("up" in name for group in sketched("checked").groups for name in group.columns)


def sketched(kind: str) -> Any:
    found = sketch_without_ranks(jobs_reading.job(kind), Plan.parse("tp=2"), CPU)
    assert found is not None
    return found.slices


def test_units_that_read_numbers_of_some_positions_run_on_all() -> None:
    for kind in ("positions", "scaled", "between"):  # the last also in the second block, where numbers of the trial are large
        slices = sketched(kind)
        assert not slices.stretches and any("number" in why for _, why in slices.unstretched)
    assert sketched("listed").stretches, "its numbers say which rows a layer is for: of a stretch they are the stretch's"
