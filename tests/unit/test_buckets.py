"""Sizes of the buckets in which gradients are reduced: on CPUs as measured, on devices like DDP's."""

import torch
from torch.nn.parallel import DistributedDataParallel

from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.parallel.data.buckets import CPU_BUCKETS, DEVICE_BUCKETS, fill_buckets, get_bucket_bytes
from plait.planner import sync_costs
from plait.planner.formulas import CoreCosts, RuntimeCosts, TimeModel
from plait.planner.workload import Workload

MIB = 1 << 20
FLOATS = [((MIB // 8,), torch.float32)] * 128
"""Half a MiB each, 64 MiB in total."""


def test_sizes() -> None:
    assert get_bucket_bytes(torch.device("cpu")) == (8 * MIB, 8 * MIB)
    assert get_bucket_bytes(torch.device("cuda", 1)) == (MIB, 25 * MIB)
    assert f"a default size of {DEVICE_BUCKETS.other >> 20} MiB" in " ".join(str(DistributedDataParallel.__doc__).split())


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    assert [len(b) for b in fill_buckets(FLOATS)] == [16] * 8 == [len(b) for b in fill_buckets(FLOATS, size=CPU_BUCKETS)]
    found = fill_buckets(FLOATS, size=DEVICE_BUCKETS)
    assert [len(b) for b in found] == [2, 50, 50, 26] and found[0] == [127, 126]
    assert sorted(i for b in found for i in b) == list(range(128))


def test_a_tensor_larger_than_a_bucket_fills_it_and_each_format_has_a_first_one() -> None:
    large = ((64 * MIB,), torch.float32)
    assert fill_buckets([large, large, large], size=DEVICE_BUCKETS) == [[2], [1], [0]]
    half = ((MIB // 2,), torch.bfloat16)
    single = ((MIB // 4,), torch.float32)
    assert fill_buckets([half, single] * 2, size=DEVICE_BUCKETS) == [[3], [2], [1], [0]]
    assert fill_buckets([half, single] * 3, size=DEVICE_BUCKETS) == [[5], [4], [3, 1], [2, 0]]
    assert fill_buckets([single] * 4, separate={0, 1}, size=DEVICE_BUCKETS) == [[3], [2], [1], [0]]


def test_the_planner_prices_these_buckets() -> None:
    """On devices a model of 101 MiB is five messages, one of them small. In processes it is thirteen of 8 MiB."""
    asked: list[float] = []

    class Noting(Machine):
        def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
            asked.append(size)
            return size

    named = Machine.from_name("h100")
    machine = Noting(**{name: getattr(named, name) for name in named.__dataclass_fields__})
    numbers = 101 * MIB / 4
    for software, first, count, last in (
        (RuntimeCosts(), MIB, 4, 25 * MIB),
        (RuntimeCosts(cores=CoreCosts(1e-6)), 8 * MIB, 12, 93 * MIB / 12),
    ):
        asked.clear()
        whole, exposed = sync_costs.time_buckets(TimeModel(Workload("", ()), machine, software), Plan(dp=2), numbers)
        assert asked == [first, last] and exposed == last and whole == first + count * last == 101 * MIB
    asked.clear()
    assert sync_costs.time_buckets(TimeModel(Workload("", ()), machine), Plan(dp=2), 100) == (400, 400) and asked == [400]
