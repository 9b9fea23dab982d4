"""Low precision: all ranks decide about an overflow together, master weights stay fp32, bf16 stays close to fp32."""

from typing import Any

import jobs
import torch

from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place


def losses(place: Place, plan: str) -> dict[str, Any]:
    engine = Engine(jobs.mlp(), Plan.parse(plan), place=place)
    rows = []
    for batch in engine.batches():
        step_row = engine.backward(batch)
        before = [p.detach().clone() for p in engine.model.parameters()]
        step = engine.update(batch, step_row)
        moved = any(not torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
        loss_scale = engine.rank_model.techniques.loss_scale
        rows.append([step.loss, step.skipped, moved, loss_scale.value if loss_scale else 1.0])
    assert all(p.dtype == torch.float32 for p in engine.model.parameters())
    return {"rows": rows}


def overflowing(place: Place) -> dict[str, Any]:
    """Only rank 1 gets an infinity, in its third step, inside its own backward."""
    engine = Engine(jobs.mlp(), Plan.parse("dp=2 precision=fp16"), place=place)
    rows = []
    for batch in engine.batches():
        handle = None
        if batch.position.step == 2 and place.rank == 1:
            handle = engine.model[0].weight.register_hook(lambda g: g + float("inf"))
        before = [p.detach().clone() for p in engine.model.parameters()]
        step = engine.step(batch)
        moved = any(not torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
        rows.append([step.skipped, moved, engine.rank_model.techniques.loss_scale.value, step.samples])
        if handle is not None:
            handle.remove()
    return {"rows": rows}


def test_overflow_on_one_rank_skips_on_all() -> None:
    first, second = (r["rows"] for r in fork.run_ranks(overflowing, 2))
    assert first == second
    assert [row[0] for row in first] == [False, False, True, False, False, False]
    assert [row[1] for row in first] == [True, True, False, True, True, True]
    assert [row[2] for row in first] == [65536.0] * 2 + [32768.0] * 4
    assert first[-1][3] == 64  # samples: the schedule advanced (five batches of 12, then the last 4)


def test_bf16_follows_fp32() -> None:
    full = fork.run_ranks(lambda place: losses(place, "dp=2"), 2)[0]["rows"]
    half = fork.run_ranks(lambda place: losses(place, "dp=2 precision=bf16"), 2)[0]["rows"]
    assert all(abs(a[0] - b[0]) < 0.02 * abs(a[0]) for a, b in zip(full, half))
    assert any(a[0] != b[0] for a, b in zip(full, half))


def test_fp16_trains() -> None:
    rows = fork.run_ranks(lambda place: losses(place, "dp=2 precision=fp16 microbatches=2"), 2)[0]["rows"]
    assert all(row[1] != row[2] for row in rows)  # a step is skipped, or it moves the weights
    assert not rows[-1][1]
