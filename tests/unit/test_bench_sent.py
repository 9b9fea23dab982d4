"""The benches' counter of collectives: it sees all of them, including those that torch's DTensor calls inside an operator."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from plait.launch.fork import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from sent import Sent

RANKS = 2


def plain(rank: int, mesh: Any) -> list[tuple[str, float]]:
    """Collectives of tensors. Returns the bytes that each sends."""
    x = torch.ones(10)
    dist.all_reduce(x)
    dist.all_gather([torch.empty(10), torch.empty(10)], x)
    dist.reduce_scatter(torch.empty(5), [x[:5], x[5:]])
    dist.all_to_all([torch.empty(5), torch.empty(5)], [x[:5], x[5:]])
    works = [
        dist.isend(torch.ones(7, dtype=torch.int64), 1 - rank),
        dist.irecv(torch.empty(7, dtype=torch.int64), 1 - rank),
    ]
    for work in works:
        work.wait()
    dist.barrier()
    return [("allreduce_", 40), ("allgather_", 40), ("reduce_scatter_", 20), ("alltoall_", 20), ("send", 56)]


def asked(rank: int, mesh: Any) -> list[tuple[str, float]]:
    """Explicit redistributions of DTensors."""
    DTensor.from_local(torch.ones(4, 6), mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    DTensor.from_local(torch.ones(4, 6), mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
    DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)]).full_tensor()
    return [("all_reduce", 96), ("reduce_scatter_tensor", 48), ("all_gather_into_tensor", 96)]


def inside(rank: int, mesh: Any) -> list[tuple[str, float]]:
    """Implicit collectives: a partial sum is squared, and a loss is computed from logits that are sharded by vocabulary."""
    (DTensor.from_local(torch.ones(3), mesh, [Partial()]) ** 2).to_local()
    logits = torch.randn(6, 8, requires_grad=True)
    with loss_parallel():
        cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]), torch.arange(6)).backward()
    assert logits.grad is not None
    return [("all_reduce", 12), *[("all_reduce", 24)] * 3]  # largest, sum of exponentials, the target's


@pytest.mark.parametrize("body", (plain, asked, inside))
def test_every_collective_is_counted(body: Any) -> None:
    """Their number and sizes equal those that torch's profiler records for the process group."""

    def target(place: Any) -> dict[str, Any]:
        place.connect(torch.device("cpu"))
        mesh = init_device_mesh("cpu", (RANKS,))
        body(place.rank, mesh)  # the first call creates groups
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen, Sent(RANKS) as counter:
            expected = body(place.rank, mesh)
        names = [event.name for event in seen.events()]
        return {"expected": [list(m) for m in expected], "messages": counter.messages, "names": names}

    found = run_ranks(target, RANKS)[0]
    assert found["messages"] == found["expected"]
    works = [n for n in found["names"] if n.startswith("gloo:") and n not in ("gloo:barrier", "gloo:recv")]
    lists = sum(op == "reduce_scatter_" for op, _ in found["expected"])  # gloo sums each part separately
    assert len(works) == len(found["expected"]) + lists * (RANKS - 1), works


def test_an_unknown_collective_is_an_error() -> None:
    def target(place: Any) -> dict[str, Any]:
        place.connect(torch.device("cpu"))
        with Sent(RANKS), pytest.raises(NotImplementedError, match="broadcast_"):
            dist.broadcast(torch.ones(1), 0)
        return {}

    run_ranks(target, RANKS)
