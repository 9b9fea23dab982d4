"""What a forward pass makes through `global_mean` and `global_batch` is the same on all ranks; what it makes otherwise is not."""

from typing import Any

import jobs_higher
import pytest
import torch
from torch import Tensor, nn

import plait
from plait.config.plan import Plan
from plait.engine.build import sketch_without_ranks
from plait.model.make import CPU
from plait.model.sketch import sketch
from plait.parallel.mutations import apart, refused
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
    found = sketch(_Written(make, weight), lambda n: torch.randn(n, 4), reference.call)
    assert found.sampled == ("kept",)
    for text, exact in (("dp=2", alike), ("dp=2 cp=2", False), ("dp=2 processes=one", False)):
        plan = Plan.parse(text)
        named = refused(plan, found, ()) is not None if weight else [*apart(plan, found, 2)] != []
        assert named is not exact, text


def test_no_weight_is_taken_for_what_is_made_from_samples() -> None:
    """Torch forgets a fake tensor that nobody holds, and another one gets the number of its storage: the last bias was accused."""
    found = sketch_without_ranks(jobs_higher.job("vmap"), Plan.parse("dp=2"), CPU)
    assert not found.sampled and not found.unshared


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_instance_norms_are_made_from_samples(training: bool) -> None:
    """torch's schema does not say that its operator writes them: copies had other statistics, without a word."""
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True), nn.Conv1d(4, 2, 1))
    model[1].train(training)
    found = sketch(model, lambda n: torch.randn(n, 4, 6), reference.call)
    assert set(found.unshared) == ({"1.running_mean", "1.running_var"} if training else set())
