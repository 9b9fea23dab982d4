"""The double of NCCL finds operations that NCCL would mix up or wait for forever, and reports the queued operations of each rank."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device import nccl
from plait.config.errors import PlaitError
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.data import batch_norm

GATHER_WHOLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SUM_PARTS = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The newer names, without torch's deprecation warning."""
Ranks = Callable[[int, int], Any]
"""The function of one rank: (rank, world)."""
PATIENCE = 6.0
"""Seconds after which a rank that waits for another is a fault, more than the usual delay between ranks of a busy machine."""


def ran(work: Ranks, world: int = 2, **rules: Any) -> list[Any]:
    """Return the result of each rank, with the double."""

    def rank(place: Place) -> dict[str, Any]:
        place.connect(torch.device("cpu"))
        return {"value": work(place.rank, world)}

    with nccl.instead_of_gloo(**{"patience": 30.0, **rules}):
        return [told["value"] for told in fork.run_ranks(rank, world)]


def fault(work: Ranks, world: int = 2, **rules: Any) -> str:
    """Return the message of the rank that detects the fault."""
    with pytest.raises(PlaitError) as caught:
        ran(work, world, **rules)
    (told,) = [text for text in [caught.value.trace or ""] if "Fault: " in text] or [str(caught.value)]
    return told.rpartition("Fault: ")[2]


def ones(n: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def both_queues(told: str, *words: str) -> None:
    """Assert that a fault names the queue of each rank."""
    rows = told.split("what the ranks of this group have asked for:")[1].split("\nrank ")
    assert len(rows) == 1 + len(words), told
    for row, word in zip(rows[1:], words):
        assert word in row, told


# — supported operations —


def normalised(rank: int, world: int) -> list[list[float]]:
    """Batch normalization of this rank's three rows, and their gradient."""
    torch.manual_seed(5)
    layer, rows = torch.nn.Sequential(torch.nn.BatchNorm1d(4, dtype=torch.float64)), torch.randn(6, 4, dtype=torch.float64)
    if world > 1:
        batch_norm.sync_batch_norms(layer, ["0"], dist.group.WORLD)
        rows = rows[3 * rank :][:3].clone()
    out = layer(rows.requires_grad_())
    (out**3).sum().backward()
    assert rows.grad is not None
    return [*out.tolist(), *rows.grad.tolist()]


def test_statistics_of_a_batch_are_gathered_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_lists(*args: object, **given: object) -> None:
        raise AssertionError("a list of parts, which torch copies")

    whole = torch.tensor(normalised(0, 1), dtype=torch.float64).view(2, 6, 4)
    monkeypatch.setattr(dist, "all_gather", of_lists)
    for rank, found in enumerate(ran(normalised)):
        expected = whole[:, 3 * rank :][:, :3]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64).view(2, 3, 4), expected, rtol=1e-12, atol=1e-12)


def collectives(rank: int, world: int) -> list[list[float]]:
    """Each collective once, also with shards of unequal sizes."""
    total, own = ones() * (rank + 1), ones(rank + 1) * rank
    dist.all_reduce(total)
    most = torch.tensor([rank, -rank])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags)
    gathered = [torch.zeros(k + 1) for k in range(world)]
    dist.all_gather(gathered, own)
    whole, part = torch.zeros(2 * world), torch.zeros(2)
    GATHER_WHOLE(whole, ones(2) * rank)
    SUM_PARTS(part, torch.arange(2.0 * world))
    uneven = torch.zeros(rank + 1)
    dist.reduce_scatter(uneven, [ones(k + 1) * k for k in range(world)])
    sent = torch.full((rank + world, 2), float(rank))
    splits = [rank + 1 if k == rank else 1 for k in range(world)]
    dist.all_to_all_single(got := torch.zeros_like(sent), sent, splits, splits)
    from_last = ones(2) * rank
    dist.broadcast(from_last, world - 1)
    rooted = ones(1) * (rank + 1)
    dist.reduce(rooted, 0)
    rows = [torch.zeros(1) for _ in range(world)] if rank == 0 else None
    dist.gather(ones(1) * rank, rows)
    dealt = torch.zeros(1)
    dist.scatter(dealt, [ones(1) * k for k in range(world)] if rank == 0 else None)
    dist.barrier()
    found = [total, most, flags, *gathered, whole, part, uneven, got[:, 0], from_last, rooted, dealt]
    return [t.tolist() for t in (*found, *(rows or ()))]


def test_collectives_give_what_gloo_gives() -> None:
    found = ran(collectives, 3)
    for rank, told in enumerate(found):
        uneven = [rank] * rank + [rank] if rank else [0.0]
        crossed = [float(k) for k in range(3) for _ in range(rank + 1 if k == rank else 1)]
        assert told[:3] == [[6.0] * 3, [2, 0], [True, False]]
        assert told[3:6] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        assert told[6:9] == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [6.0 * rank, 6.0 * rank + 3], [3.0 * x for x in uneven]]
        assert told[9:11] == [crossed, [2.0, 2.0]]
        assert told[12] == [float(rank)]
    assert found[0][11] == [6.0] and found[0][13:] == [[0.0], [1.0], [2.0]]


def messages(rank: int, world: int) -> list[float]:
    """Both directions in one order, then a batch of both, then a group of two."""
    other, got = 1 - rank, torch.zeros(2)
    asks = [lambda: dist.isend(ones(2) * (rank + 1), other, tag=3 + rank), lambda: dist.irecv(got, other, tag=4 - rank)]
    for work in [ask() for ask in (asks if rank == 0 else asks[::-1])]:
        work.wait()
    also = torch.zeros(1)
    batch = [dist.P2POp(dist.isend, ones(1) * rank, other), dist.P2POp(dist.irecv, also, other)]
    for work in dist.batch_isend_irecv(batch if rank else batch[::-1]):
        work.wait()
    pair = dist.new_group([0, 1])
    dist.all_reduce(got, group=pair)
    return [*got.tolist(), *also.tolist()]


@pytest.mark.parametrize("bound", (False, True))
def test_messages(bound: bool) -> None:
    assert ran(messages, bound=bound) == [[3.0, 3.0, 1.0], [3.0, 3.0, 0.0]]


def test_results_are_there_once_they_are_waited_for() -> None:
    def early(rank: int, world: int) -> list[bool]:
        total, count, got = ones(), torch.ones(2, dtype=torch.int64), ones()
        works = [dist.all_reduce(total, async_op=True), dist.all_reduce(count, async_op=True)]
        works.append(dist.isend(total, 1) if rank == 0 else dist.irecv(got, 0))
        before = [bool(total.isnan().all()), bool((count < 0).all()), bool(got.isnan().any()) == (rank == 1)]
        for work in works[:2]:
            work.wait()
        return [*before, total.tolist() == [2.0] * 3, count.tolist() == [2, 2]]

    assert ran(early) == [[True] * 5] * 2


# — detected faults —


def test_collectives_in_another_order_on_one_rank() -> None:
    def work(rank: int, world: int) -> None:
        works = [lambda: dist.all_reduce(ones(), async_op=True), lambda: dist.broadcast(ones(5), 1, async_op=True)]
        for made in [ask() for ask in (works if rank == 0 else works[::-1])]:
            made.wait()

    told = fault(work)
    assert "differ in their collectives: rank 0 is at all_reduce of 3 float32; rank 1 is at broadcast of 5 float32" in told
    both_queues(told, "all_reduce of 3 float32", "broadcast of 5 float32, root 1")


@pytest.mark.parametrize(
    "tensors, words",
    (
        ([ones(3), ones(4)], ("3 float32", "4 float32")),
        ([ones(3), ones(3, torch.float64)], ("3 float32", "3 float64")),
    ),
    ids=("sizes", "formats"),
)
def test_other_sizes_or_formats(tensors: list[torch.Tensor], words: tuple[str, str]) -> None:
    told = fault(lambda rank, world: dist.all_reduce(tensors[rank]))
    assert f"rank 0 is at all_reduce of {words[0]}; rank 1 is at all_reduce of {words[1]}" in told
    both_queues(told, *words)


def test_another_root() -> None:
    assert "root 0; rank 1 is at broadcast of 3 float32, root 1" in fault(lambda rank, _: dist.broadcast(ones(), rank))


@pytest.mark.slow
def test_a_collective_that_one_rank_does_not_come_to() -> None:
    def work(rank: int, world: int) -> None:
        dist.all_reduce(ones())
        if rank:
            time.sleep(30)
        dist.all_reduce(ones(7))

    told = fault(work, patience=PATIENCE)
    assert f"rank 0 has waited {PATIENCE:g} s for the other ranks to come to all_reduce of 7 float32" in told
    both_queues(told, "its host waits for all_reduce of 7", "nothing more; the last was all_reduce of 3 float32")


@pytest.mark.slow
def test_a_communicator_that_one_rank_does_not_come_to() -> None:
    told = fault(lambda rank, _: dist.all_reduce(ones()) if rank == 0 else time.sleep(30), patience=PATIENCE)
    assert "rank 0 makes its communicator (all ranks 0, 1) for all_reduce" in told
    both_queues(told, "its host makes the communicator", "has asked for nothing yet")


@pytest.mark.parametrize("bound", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_both_ends_send_first(bound: bool) -> None:
    """gloo, and NCCL for small messages, would accept it."""

    def work(rank: int, world: int) -> None:
        works = [dist.isend(ones(), 1 - rank), dist.irecv(ones(), 1 - rank)]
        for made in works:
            made.wait()

    told = fault(work, bound=bound, patience=PATIENCE if bound else 30)
    assert (f"has waited {PATIENCE:g} s for rank" if bound else "ranks 0 and 1 both send to each other first") in told
    both_queues(told, "send of 3 float32 to rank 1 (tag 0)", "send of 3 float32 to rank 0 (tag 0)")


def crossed(rank: int, world: int) -> None:
    """Sent in one order, received in another. gloo compares tags and would deliver each message to the matching receive."""
    move = dist.isend if rank == 0 else dist.irecv
    for made in [move(ones(), 1 - rank, tag=tag) for tag in ((1, 2) if rank == 0 else (2, 1))]:
        made.wait()


def test_a_tag_that_is_needed() -> None:
    told = fault(crossed)
    assert "messages are out of order" in told and "NCCL looks at no tags" in told
    both_queues(told, "to rank 1 (tag 1)", "from rank 0 (tag 2)")


def test_a_message_of_another_size() -> None:
    told = fault(lambda rank, _: dist.send(ones(3), 1) if rank == 0 else dist.recv(ones(4), 0))
    assert "is to send 3 float32 where rank 1 is to recv 4 float32" in told or "is to recv 4 float32 where rank 0" in told


@pytest.mark.slow
def test_three_ranks_that_wait_in_a_circle() -> None:
    def work(rank: int, world: int) -> None:
        dist.barrier()
        dist.send(ones(), (rank + 1) % world)
        dist.recv(ones(), (rank - 1) % world)

    assert "what the ranks of this group have asked for" in fault(work, 3, patience=PATIENCE)


@pytest.mark.slow
def test_a_message_in_a_batch_meets_no_message_outside() -> None:
    """They run on two communicators."""

    def work(rank: int, world: int) -> None:
        dist.all_reduce(ones())
        if rank == 0:
            dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 1)])[0].wait()
        else:
            dist.recv(ones(), 0)

    assert "batch of (send of 3 float32 to rank 1" in fault(work, patience=PATIENCE)


@pytest.mark.parametrize(
    "tensor, words",
    (
        (torch.ones(4, 2).t(), "Tensors must be contiguous: shape (2, 4), strides (1, 2)"),
        (torch.ones(4, dtype=torch.int16), "not supported for NCCL process group: torch.int16"),
    ),
    ids=("strides", "format"),
)
def test_tensors_that_nccl_does_not_take(tensor: torch.Tensor, words: str) -> None:
    assert words in fault(lambda rank, world: dist.all_reduce(tensor))


def test_splits_that_do_not_fit_each_other() -> None:
    def work(rank: int, world: int) -> None:
        dist.all_to_all_single(torch.zeros(4), ones(4), [2, 2], [1, 3] if rank else [2, 2])

    assert "rank 1 sends rank 0 1 numbers where that one receives 2" in fault(work)


def test_parts_of_a_reduce_scatter_that_do_not_fit() -> None:
    told = fault(lambda rank, world: SUM_PARTS(torch.zeros(2), ones(5)))
    assert "5 float32 are not 2 times 2 float32" in told


def test_a_tensor_that_is_written_before_its_message_has_gone() -> None:
    def work(rank: int, world: int) -> None:
        t = ones()
        made = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
        t += 1
        made.wait()

    assert "rank 0 has written into a tensor that it had given to send of 3 float32 to rank 1" in fault(work)
