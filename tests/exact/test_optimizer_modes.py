"""Optimizers with a train and an eval mode: evaluation, averaging, export and resume equal a plain loop."""

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from optimizers_with_modes import KINDS, Normalized, PolyakSGD
from rarely import sampled
from saved import read_checkpoint_tensors
from torch import Tensor, nn

import plait
from plait.checkpoint.export import ExportOptions, export_weights
from plait.checkpoint.foreign_weights import open_weights
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine import engine as engine_module
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.proof import reference
from plait.proof.verify import verify

STEPS = 5


def squares(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": (outputs - targets).square().flatten()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1))


def job(kind: str, **fields: Any) -> plait.Job:
    return jobs.make(
        model, optimizer=lambda p: KINDS[kind](p), evaluate=plait.Evaluate(jobs.Numbers, squares), **fields
    )


def plain(made: plait.Job) -> tuple[float, dict[str, Tensor]]:
    """The metric and the weights in eval mode, of a plain loop."""
    torch.manual_seed(made.seed)
    net, data = made.model(), made.data()
    optimizer = made.optimizer(list(net.parameters()))
    modes = optimizer.chain["inner"][0] if hasattr(optimizer, "chain") else optimizer
    modes.train()
    stream = reference.iterate_samples(made, data)
    for _ in range(STEPS):
        x, y = (torch.stack(rows) for rows in zip(*next(stream)[2]))
        made.loss(net(x), y).backward()
        optimizer.step()
        net.zero_grad()
    modes.eval()
    with torch.no_grad():
        return float((net(data.x) - data.y).square().mean()), {n: p.clone() for n, p in net.named_parameters()}


def trained(made: plait.Job, text: str, folder: Path) -> dict[str, Any]:
    """Train, evaluate, save, and continue; then the same again from the checkpoint."""

    def steps(engine: Engine, number: int) -> None:
        for batch, _ in zip(engine.batches(), range(number)):
            engine.step(batch)

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(made, text, place=place, device="cpu", directory=folder)
        weights = lambda: {n: p.tensor.tolist() for n, p in engine.rank_model.get_parts().items()}  # noqa: E731
        steps(engine, STEPS)
        before = weights()
        metric = engine.evaluate()["error"]
        told = {"metric": metric, "unchanged": weights() == before}
        engine.save(9)
        steps(engine, 2)
        straight = weights()
        engine.resume()
        told |= {"again": engine.evaluate()["error"] == metric}
        steps(engine, 2)
        return told | {"resumed": weights() == straight}

    return fork.run_ranks(rank, Plan.parse(text).world)[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    sampled(30, [(k, t) for k in KINDS for t in ("dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "dp=2 offload=optimizer")]),
)  # fmt: skip
def test_a_run_is_the_plain_loop(kind: str, text: str, tmp_path: Path) -> None:
    made = job(kind, steps=20)
    told, (metric, weights) = trained(made, text, tmp_path / "a"), plain(made)
    assert told["metric"] == pytest.approx(metric, rel=1e-4)
    assert told["unchanged"] and told["again"] and told["resumed"], told
    path = tmp_path / f"a/step-{STEPS:06d}"
    export_weights(path, tmp_path / "out.safetensors", ExportOptions(10**9))
    exported, trained_weights = open_weights(tmp_path / "out.safetensors"), read_checkpoint_tensors(path)
    for name, expected in weights.items():
        torch.testing.assert_close(exported.read_full(name), expected, rtol=2e-4, atol=2e-5)
    assert any(not torch.allclose(trained_weights[f"model/{n}"], w, rtol=1e-3) for n, w in weights.items())


PLANS = ("fsdp=2", "pp=2 microbatches=2", "tp=2", "dp=2", "fsdp=2 tp=2", "dp=2 processes=one", "dp=2 offload=optimizer", "fsdp=2 zero_stage=1")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text"), [(k, t) for i, t in enumerate(PLANS) for k in [*KINDS][i % 2 :: 2]])
def test_verify_says_equal(kind: str, text: str) -> None:
    verdict = verify(job(kind), Plan.parse(text))
    assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize("text", ("dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2 offload=optimizer"))
def test_the_average_is_of_the_weights_in_eval_mode(text: str) -> None:
    verdict = verify(job("interpolated", ema=plait.EMA(0.5)), Plan.parse(text))
    assert verdict.equal, verdict


@pytest.mark.slow
def test_an_evaluation_in_train_mode_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(engine_module, "use_evaluated_weights", lambda rank_model: nullcontext())
    verdict = verify(job("polyak"), Plan.parse("dp=2"), seconds=0.0)
    assert not verdict.equal, verdict


def test_groups_have_no_weights_to_evaluate() -> None:
    with pytest.raises(PlaitError) as caught:
        fork.run_ranks(lambda place: Engine(job("polyak"), "replica_groups=2 sync_every=2", place=place, device="cpu"), 2)
    assert caught.value.problems[0].code == "P066" and "PolyakSGD" in caught.value.problems[0].what


def test_an_evaluation_that_changes_the_training_is_refused(tmp_path: Path) -> None:
    made = dataclasses.replace(job("polyak"), optimizer=Normalized)
    with pytest.raises(PlaitError) as caught:
        fork.run_ranks(lambda place: Engine(made, "dp=1", place=place, device="cpu", directory=tmp_path).save(1), 1)
    assert caught.value.problems[0].code == "K011" and "Normalized" in caught.value.problems[0].what


def test_combined_optimizers_change_mode_together() -> None:
    net = model()
    inner = PolyakSGD([net[0].weight])
    made = dataclasses.replace(
        job("polyak"), optimizer=lambda p: plait.CombinedOptimizer(inner, torch.optim.SGD(p[1:], lr=0.1))
    )
    from plait.model.parameter_groups import build_optimizer

    build_optimizer(made, dict(net.named_parameters()))
    assert inner.training
