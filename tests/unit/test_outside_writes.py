"""What a trial writes into tensors from outside is undone; and what it makes is gone when it is not used any more."""

import torch
from torch import Tensor, nn

from plait.model.mutations import FollowedWrites, OutsideWrites
from plait.tensors.float64 import Shadow, Wide
from plait.tensors.torch_private import storage_key


def test_a_trial_keeps_no_memory_that_it_does_not_use() -> None:
    """Of the process: 40 results of 16 MB each, and gradients."""
    layer = nn.Linear(2000, 2000, bias=False)
    with FollowedWrites() as trial:
        began = resident()
        for _ in range(40):
            layer(torch.ones(2000, 2000)).sum().backward()
            layer.weight.grad = None
        assert resident() - began < 400 << 20
        assert len(trial.own) < 20 and len(trial._origins) < 20


def test_a_number_that_is_used_again_is_another_storage() -> None:
    table = torch.zeros(3)
    with OutsideWrites():
        for _ in range(100):
            torch.ones(3).mul_(2)
        table.add_(1)
    assert table.tolist() == [0, 0, 0]


def test_shadows_end_with_what_they_stand_for() -> None:
    before = len(Shadow.known)
    kept = torch.zeros(8)
    with Wide():
        for _ in range(20):
            torch.from_numpy(torch.zeros(1 << 20).numpy()).add_(1.0)
        kept += 1e-12
    assert len(Shadow.known) <= before + 2
    assert storage_key(kept) in Shadow.known
    del kept
    assert len(Shadow.known) <= before + 1


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_trial_is_undone() -> None:
    average: Tensor = torch.ones(4)
    with FollowedWrites() as trial:
        trial.mark(weight := torch.zeros(4))
        average.mul_(0.9).add_(weight)
    assert trial.follows and average.tolist() == [1.0] * 4
