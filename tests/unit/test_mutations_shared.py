"""Values that a forward pass computes with `global_mean` and `global_batch` are equal on all ranks. Other values differ."""

from typing import Any

import jobs_higher
import pytest
import torch
from torch import Tensor, nn

import plait
from plait.config.plan import Plan
from plait.engine.build import sketch_without_ranks
from plait.model.build_model import CPU
from plait.model.sketch import sketch_model
from plait.parallel.mutations import find_lost_write, list_inexact_buffers
from plait.proof import reference

WRITERS = {
    "mean of all": (lambda x: plait.global_mean(x), True),
    "mean through a function": (lambda x: plait.global_mean(x.square()).sqrt() + 1, True),
    "rows of all": (lambda x: plait.global_batch(x).amax(0), True),
    "own mean": (lambda x: x.mean(0), False),
    "both": (lambda x: plait.global_mean(x) + 0.1 * x.amax(0), False),
    "rows chosen by a rank's own": (lambda x: plait.global_batch(x).index_select(0, x.mean(1).argmax()[None])[0], False),
    "view of the rows": (lambda x: plait.global_batch(x)[0] + x[0], False),
}


class _Written(nn.Module):
    kept: Tensor

    def __init__(self, make: Any, weight: bool) -> None:
        super().__init__()
        self.make, self.last = make, nn.Linear(4, 2)
        kept = torch.ones(4)
        if weight:
            self.kept = nn.Parameter(kept)
        else:
            self.register_buffer("kept", kept)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept.lerp_(self.make(x), 0.5)
        return self.last(x + self.kept)


@pytest.mark.parametrize("weight", [False, True], ids=["buffer", "weight"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_copies_write_alike_is_known(name: str, weight: bool) -> None:
    make, alike = WRITERS[name]
    found = sketch_model(_Written(make, weight), lambda n: torch.randn(n, 4), reference.call_model)
    assert found.from_samples == ("kept",)
    for text, exact in (("dp=2", alike), ("dp=2 cp=2", False), ("dp=2 processes=one", False)):
        plan = Plan.parse(text)
        named = find_lost_write(plan, found, ()) is not None if weight else [*list_inexact_buffers(plan, found, 2)] != []
        assert named is not exact, text


def test_no_weight_is_taken_for_what_is_made_from_samples() -> None:
    """Torch frees an unused fake tensor, and another one gets the number of its storage. The last bias was reported by mistake."""
    found = sketch_without_ranks(jobs_higher.job("vmap"), Plan.parse("dp=2"), CPU)
    assert not found.from_samples and not found.rank_dependent


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_instance_norms_are_made_from_samples(training: bool) -> None:
    """torch's schema does not mark the operator's write: replicas had different statistics, without a warning."""
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True), nn.Conv1d(4, 2, 1))
    model[1].train(training)
    found = sketch_model(model, lambda n: torch.randn(n, 4, 6), reference.call_model)
    assert set(found.rank_dependent) == ({"1.running_mean", "1.running_var"} if training else set())
