"""Evaluation uses every sample once, for any number of ranks, and draws the same random numbers for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import Evaluate, Job
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.data.loading import DevicePrefetcher
from plait.engine.evaluate import evaluate
from plait.launch.place import Place
from plait.losses.global_batch import BatchPeers
from plait.parallel.mesh import Mesh
from plait.parallel.rank_model import Techniques

from .datasets import Augmented, Plain, Sized, Stream, Torch

CPU = torch.device("cpu")


class Watch(nn.Module):
    """Records its mode in every forward pass."""

    def __init__(self, modes: list[bool]):
        super().__init__()
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return x


def evaluated(
    data: Any, rank: int, ranks: int | Plan, model: nn.Module | None = None, batch: int = 6
) -> list[tuple[int, list[float]]]:
    """The samples that one of `ranks` ranks receives from the evaluation set `data`."""
    seen: list[tuple[int, list[float]]] = []

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        seen.extend((int(t), x.tolist()) for x, t in zip(outputs, targets, strict=True))
        return {"ids": targets}

    plan = ranks if isinstance(ranks, Plan) else Plan(dp=ranks)
    job = Job(
        model=int, loss=int, data=int, optimizer=int, batch=batch, steps=1, evaluate=Evaluate(lambda: data, metrics)
    )
    mean = evaluate(
        SimpleNamespace(job=job, plan=plan, module=model or nn.Identity(), device=CPU, mesh=Mesh(plan, rank), batch_peers=BatchPeers(),
                        setup=SimpleNamespace(place=Place(rank, plan.world), device_copies=DevicePrefetcher(CPU), cast=None), techniques=Techniques())
    )  # fmt: skip
    assert mean == ({"ids": sum(i for i, _ in seen) / len(seen)} if seen else {})
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
@pytest.mark.parametrize("data", [Plain(10), Stream(10), Augmented(10, "all")])
def test_evaluation_sees_every_sample_once(data: Any, ranks: int) -> None:
    rows = [row for rank in range(ranks) for row in evaluated(data, rank, ranks)]
    assert sorted(i for i, _ in rows) == list(range(10))
    assert dict(rows) == dict(evaluated(data, 0, 1))


@pytest.mark.parametrize(
    ("plan", "most"), [("dp=2 microbatches=3", 2), ("fsdp=4", 2), ("microbatches=8", 1), ("dp=2 processes=one", 4)]
)
def test_a_forward_has_no_more_samples_than_training(plan: str, most: int) -> None:
    sizes: list[int] = []

    class Noting(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return x

    evaluated(Plain(20), 0, Plan.parse(plan), Noting(), batch=8)
    assert max(sizes) == most


def test_an_empty_evaluation_set() -> None:
    for data in (Plain(0), Stream(0)):
        with pytest.raises(PlaitError, match="J007"):
            evaluated(data, 0, 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_noisy_iterable_draws_the_same_for_any_number_of_ranks(ranks: int) -> None:
    rows = [row for rank in range(ranks) for row in evaluated(Stream(10, noisy=True), rank, ranks)]
    assert dict(rows) == dict(evaluated(Stream(10, noisy=True), 0, 1))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(Torch, id="IterableDataset"),
        pytest.param(Sized, id="with_len"),
    ],
)
def test_torchs_iterable(data: type) -> None:
    assert len(evaluated(data(), 0, 2)) == 5


def test_the_model_is_in_eval_mode_and_trains_on() -> None:
    model, modes = nn.Dropout(0.5), []
    evaluated(Plain(4), 0, 1, nn.Sequential(model, Watch(modes)), batch=3)
    assert modes == [False, False]
    assert model.training


def test_a_frozen_layer_stays_frozen() -> None:
    model = nn.Sequential(nn.Dropout(0.5).eval(), nn.Identity())
    evaluated(Plain(4), 0, 1, model)
    assert not model[0].training
