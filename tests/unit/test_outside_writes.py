"""Writes of a trial to outside tensors are undone, and its results are freed once they are unused."""

import torch
from torch import Tensor, nn

from plait.model.mutations import RestoredWrites, TrackedWrites
from plait.tensors.float64 import Float64Mode, Float64Shadow
from plait.tensors.torch_private import storage_key


def test_a_trial_keeps_no_memory_that_it_does_not_use() -> None:
    """Memory of the process: 40 results of 16 MB each, and gradients."""
    layer = nn.Linear(2000, 2000, bias=False)
    with TrackedWrites() as trial:
        began = resident()
        for _ in range(40):
            layer(torch.ones(2000, 2000)).sum().backward()
            layer.weight.grad = None
        assert resident() - began < 400 << 20
        assert len(trial.own_storages) < 20 and len(trial._origins) < 20


def test_a_number_that_is_used_again_is_another_storage() -> None:
    table = torch.zeros(3)
    with RestoredWrites():
        for _ in range(100):
            torch.ones(3).mul_(2)
        table.add_(1)
    assert table.tolist() == [0, 0, 0]


def test_shadows_end_with_what_they_stand_for() -> None:
    before = len(Float64Shadow.by_storage)
    kept = torch.zeros(8)
    with Float64Mode():
        for _ in range(20):
            torch.from_numpy(torch.zeros(1 << 20).numpy()).add_(1.0)
        kept += 1e-12
    assert len(Float64Shadow.by_storage) <= before + 2
    assert storage_key(kept) in Float64Shadow.by_storage
    del kept
    assert len(Float64Shadow.by_storage) <= before + 1


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_trial_is_undone() -> None:
    average: Tensor = torch.ones(4)
    with TrackedWrites() as trial:
        trial.mark_weights(weight := torch.zeros(4))
        average.mul_(0.9).add_(weight)
    assert trial.has_outside_write and average.tolist() == [1.0] * 4
