"""How large the buckets are in which gradients are summed: on processors as they were measured, on devices as DDP's."""

import torch
from torch.nn.parallel import DistributedDataParallel

from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.parallel.data.buckets import ON_CPU, ON_DEVICES, bucket_bytes, fill
from plait.planner import late
from plait.planner.formulas import Cores, Software, TimeModel
from plait.planner.from_sketch import Workload

MIB = 1 << 20
FLOATS = [((MIB // 8,), torch.float32)] * 128
"""Half a MiB each, 64 MiB in all."""


def test_sizes() -> None:
    assert bucket_bytes(torch.device("cpu")) == (8 * MIB, 8 * MIB)
    assert bucket_bytes(torch.device("cuda", 1)) == (MIB, 25 * MIB)
    assert f"a default size of {ON_DEVICES.other >> 20} MiB" in " ".join(str(DistributedDataParallel.__doc__).split())


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    assert [len(b) for b in fill(FLOATS)] == [16] * 8 == [len(b) for b in fill(FLOATS, size=ON_CPU)]
    found = fill(FLOATS, size=ON_DEVICES)
    assert [len(b) for b in found] == [2, 50, 50, 26] and found[0] == [127, 126]
    assert sorted(i for b in found for i in b) == list(range(128))


def test_a_tensor_larger_than_a_bucket_fills_it_and_each_format_has_a_first_one() -> None:
    large = ((64 * MIB,), torch.float32)
    assert fill([large, large, large], size=ON_DEVICES) == [[2], [1], [0]]
    half = ((MIB // 2,), torch.bfloat16)
    single = ((MIB // 4,), torch.float32)
    assert fill([half, single] * 2, size=ON_DEVICES) == [[3], [2], [1], [0]]
    assert fill([half, single] * 3, size=ON_DEVICES) == [[5], [4], [3, 1], [2, 0]]
    assert fill([single] * 4, apart={0, 1}, size=ON_DEVICES) == [[3], [2], [1], [0]]


def test_the_planner_prices_these_buckets() -> None:
    """On devices a model of 101 MiB is five messages, one of them small; in processes it is thirteen of 8 MiB."""
    asked: list[float] = []

    class Noting(Machine):
        def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
            asked.append(size)
            return size

    named = Machine.named("h100")
    machine = Noting(**{name: getattr(named, name) for name in named.__dataclass_fields__})
    numbers = 101 * MIB / 4
    for software, first, count, last in (
        (Software(), MIB, 4, 25 * MIB),
        (Software(cores=Cores(1e-6)), 8 * MIB, 12, 93 * MIB / 12),
    ):
        asked.clear()
        whole, exposed = late.buckets(TimeModel(Workload("", ()), machine, software), Plan(dp=2), numbers)
        assert asked == [first, last] and exposed == last and whole == first + count * last == 101 * MIB
    asked.clear()
    assert late.buckets(TimeModel(Workload("", ()), machine), Plan(dp=2), 100) == (400, 400) and asked == [400]
