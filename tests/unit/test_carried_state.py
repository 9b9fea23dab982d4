"""State that a model or a loss carries from step to step is in a checkpoint, so a resumed training continues bit for bit."""

import json
import random
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import jobs_stateful
import numpy as np
import pytest
import torch

from plait.checkpoint.plain_values import OpaqueValueError, ValueReader, ValueWriter
from plait.config.errors import PlaitError
from plait.engine.engine import Engine


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def trained(kind: str, folder: Path, resume: bool) -> tuple[dict[str, torch.Tensor], Engine]:
    with Engine(jobs_stateful.job(kind), "dp=1", device="cpu", directory=folder) as engine:
        if resume:
            engine.resume()
        for batch in engine.batches():
            engine.step(batch)
            if engine.position.step == 6 and not resume:
                engine.save()
        return weights(engine), engine


QUICK = ("recurrent", "queued", "collecting", "lazily")
EACH = [*jobs_stateful.LOSSES, *(kind for kind in jobs_stateful.KINDS if kind not in ("unsavable", "opaqueextra"))]


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in EACH])
def test_a_resumed_training_goes_on_with_what_was_carried(kind: str, tmp_path: Path) -> None:
    whole, _ = trained(kind, tmp_path, resume=False)
    resumed, _ = trained(kind, tmp_path, resume=True)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("kind, flag, carried", [("collecting", "collects", {"has_run", "seen"}), ("lazily", "ready", {"calls"})])
def test_an_attribute_that_stands_for_what_a_process_has_is_not_carried(kind: str, flag: str, carried: set[str], tmp_path: Path) -> None:
    """Another process lacks such hooks or functions. With the attribute from a checkpoint its model would run without them."""
    _, engine = trained(kind, tmp_path, resume=False)
    assert engine.rank_model.global_sketch.process_flags == (flag,)
    assert {*engine.carried.snapshot().values} == carried


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["running", "queued", "drawing", "array", "runningloss", "centeredloss"])
def test_building_leaves_what_is_carried_as_it_was_made(kind: str, tmp_path: Path) -> None:
    with Engine(jobs_stateful.job(kind), "dp=1", device="cpu", directory=tmp_path) as engine:
        assert not engine.carried.snapshot().values
        fresh = jobs_stateful.job(kind)
        assert repr(vars(engine.job.loss)) == repr(vars(fresh.loss)) or kind not in jobs_stateful.LOSSES
        if kind == "running":
            assert engine.model.meter == jobs_stateful.Meter()


def test_what_every_step_makes_anew_is_not_saved(tmp_path: Path) -> None:
    assert set(trained("recurrent", tmp_path, resume=False)[1].carried.snapshot().values) == {"hidden"}
    _, engine = trained("scratch", tmp_path / "scratch", resume=False)
    assert not engine.carried.snapshot().values
    assert "similar" not in vars(jobs_stateful.Scratch)


@pytest.mark.slow
def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    engine = trained("unsavable", tmp_path, resume=False)[1]
    assert engine.carried.snapshot().unsaved == {"handle": "jobs_stateful.Handle"}
    with Engine(jobs_stateful.job("unsavable"), "dp=1", device="cpu", directory=tmp_path) as engine:
        engine.resume()
        assert "handle (jobs_stateful.Handle) was not saved: it restarts from its initial value" in engine.checkpoints.job_changes


def test_extra_state_that_cannot_be_saved_is_refused_before_training() -> None:
    with pytest.raises(PlaitError) as refused:
        Engine(jobs_stateful.job("opaqueextra"), "dp=1", device="cpu")
    assert refused.value.codes == ["K024"]


def through_json(value: Any, there: Any = None) -> Any:
    writer = ValueWriter()
    told = json.loads(json.dumps(writer.write(value), allow_nan=False))
    return ValueReader([t.clone() for t in writer.tensors], torch.device("cpu")).read(told, there)


PLAIN = (
    1, True, None, "text", float("inf"), 1 << 70, 2 + 3j, b"bytes", range(3), torch.float16, torch.Size((1, 2)), {1, 2}, (1, (2, 3)),
    [1.5] * 100, list(range(100)), ["packed", 1], {(1, 2): [3], None: "x"}, OrderedDict(a=1), Counter("abca"), deque([1, 2], maxlen=3),
)  # fmt: skip


def test_plain_values_go_through_json() -> None:
    for value in PLAIN:
        again = through_json(value)
        assert again == value and type(again) is type(value)
    for tensor in (torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(3), torch.zeros(0, 3), torch.rand(3, 2).t()):
        again = through_json(tensor)
        assert torch.equal(again, tensor) and again.dtype == tensor.dtype
    assert (through_json(np.arange(4)) == np.arange(4)).all()
    holds_itself: list[Any] = [1]
    holds_itself.append(holds_itself)
    again = through_json(holds_itself)
    assert again[1] is again
    for made in (
        torch.Generator().manual_seed(1),
        np.random.default_rng(1),
        np.random.RandomState(1),
        random.Random(1),
    ):
        assert repr(ValueWriter().write(through_json(made))) == repr(ValueWriter().write(made))
    with pytest.raises(OpaqueValueError):
        through_json(jobs_stateful.Handle(1))
