"""Code that branches on tensor values takes a different branch if a step's values differ from those in a plan's trial."""

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
from plait.model.build_model import CPU
from plait.proof.verify import verify


class Wide(jobs_reading.Rows):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x.double(), y.double()


def losses(kind: str, plan: str) -> list[float]:
    """The losses of four steps in float64. The first and the third have samples with a large value."""
    model = lambda: jobs_reading.Model(jobs_reading.KINDS[kind]).double()  # noqa: E731
    job = replace(jobs_reading.job(kind), model=model, data=Wide, steps=4)

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(job, plan, place=place, device="cpu")
        return {"losses": [float(engine.step(batch).loss) for batch in engine.batches()]}

    return fork.run_ranks(rank, Plan.parse(plan).world)[-1]["losses"]


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
    """The trial has no large value, but the code must run as if there were one."""
    for kind in ("between", "early", "rare"):
        slices = sketched(kind)
        assert not any("up" in name for group in slices.groups for name in group.columns)
        assert any("if other values are read at jobs_reading.py:" in why for _, _, why in slices.unsliced), slices.unsliced
    assert any("up" in name for group in sketched("checked").groups for name in group.columns)


def sketched(kind: str) -> Any:
    found = sketch_without_ranks(jobs_reading.job(kind), Plan.parse("tp=2"), CPU)
    assert found is not None
    return found.slices


def test_units_that_read_numbers_of_some_positions_run_on_all() -> None:
    for kind in ("positions", "scaled", "between"):  # the last also in the second block, where the trial has large values
        slices = sketched(kind)
        assert not slices.sequence_units and any("value" in why for _, why in slices.full_sequence_units)
    assert sketched("listed").sequence_units, "its numbers say which rows a layer is for: of a stretch they are the stretch's"
