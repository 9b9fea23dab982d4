"""A deferred sum over ranks: operations before it give the same result as operations on the sum, and so do gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_regions import of
from torch import Tensor, nn
from torch.nn.functional import dropout

from plait.launch.fork import run_ranks
from plait.model.slices import Slices
from plait.parallel.tensor.sequence.runtime import LazyGather, PartialSum, SequenceParallelUnits, make_plain

SHAPE = 2, 5, 3
CASES: dict[str, Any] = {
    "as it is": lambda x, other, a: x,
    "views of all of it": lambda x, other, a: x[:, 0:][...].view(-1, 5, 3).reshape(x.shape).contiguous(),
    "something that all have": lambda x, other, a: a + (x + a[:4].sum()),
    "broadcast": lambda x, other, a: x + a[None],
    "another sum": lambda x, other, a: x + other,
    "numbers": lambda x, other, a: 3 * (x * torch.tensor(2.0) / 4) * True,
    "no dropout": lambda x, other, a: dropout(dropout(x, 0.0), 0.5, False),
}
NOT_LINEAR: dict[str, Any] = {
    "a product": lambda x, other, a: x * a,
    "another format": lambda x, other, a: (x + a.double()).float(),
    "the first rows": lambda x, other, a: torch.cat([x[:, :1], x[:, 1:]], 1),
    "rows in another order": lambda x, other, a: x[:, [1, 0, 2, 3, 4]],
    "turned": lambda x, other, a: x.transpose(0, 1).reshape(SHAPE),
    "divided by": lambda x, other, a: 7 / (x * x + 1),
    "in place": lambda x, other, a: x.add_(a),
    "a slice in place": lambda x, other, a: (x.__setitem__((slice(None), 0), a[0]), x)[1],
}


def ranked(body: Any) -> None:
    """Run on two and on three ranks."""

    def target(place: Any) -> dict[str, Any]:
        group = place.connect(torch.device("cpu"))
        body(group)
        dist.barrier(group)
        return {}

    for ranks in (2, 3):
        run_ranks(target, ranks)


def compared(group: Any, case: Any, stretched: bool) -> Any:
    """Return a case's result on a deferred sum, after comparing its rows and gradients, and its rows on this rank."""
    handing = SequenceParallelUnits(nn.Module(), Slices(), group)
    rows = handing.split_rows(SHAPE[1])
    shares, others = ([of(k + r, *SHAPE, dtype=torch.float32) for r in range(group.size())] for k in (0, 50))
    a, weight = of(99, 5, 3, dtype=torch.float32).requires_grad_(), of(98, *SHAPE, dtype=torch.float32)
    whole, more = (sum(t, torch.zeros(SHAPE)).requires_grad_() for t in (shares, others))
    expected = case(whole.clone(), more.clone(), a)
    wanted = torch.autograd.grad((expected * weight).sum(), [whole, more, a], allow_unused=True)
    mine = [t[group.rank()].clone().requires_grad_() for t in (shares, others)]
    found = case(*(PartialSum.from_local(t.clone(), handing) for t in mine), a)
    if stretched:
        late = found.reduce_to_shard(1, rows)
        assert isinstance(late, LazyGather)
        assert torch.equal(late.get_local_rows(), rows.take_part(expected, 1, group.rank()))
        loss, again = (late.get_local_rows() * rows.take_part(weight, 1, group.rank())).sum(), found.full_tensor()
    else:
        again = make_plain(found)
        loss = (again * weight).sum()
    assert torch.equal(again, expected)
    got = torch.autograd.grad(loss, [*mine, a], allow_unused=True)
    for x, y in zip(got, wanted):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y)), (x, y)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_linear_is_done_to_the_shares(name: str) -> None:
    def body(group: Any) -> None:
        assert isinstance(compared(group, CASES[name], True), PartialSum)
        assert isinstance(compared(group, CASES[name], False), PartialSum)

    ranked(body)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_is_done_to_the_sum(name: str) -> None:
    def body(group: Any) -> None:
        x = compared(group, NOT_LINEAR[name], False)
        assert name == "a slice in place" or not isinstance(x, PartialSum)

    ranked(body)


def test_it_is_summed_once() -> None:
    """A sum that was gathered stays gathered. A sum that was reduced to a sequence shard is gathered from this shard."""

    def body(group: Any) -> None:
        made: list[str] = []

        class Heard(SequenceParallelUnits):
            def leave_region(self, x: Tensor, *how: Any) -> Tensor:
                made.append("scattered")
                return super().leave_region(x, *how)

            def sum_ranks(self, x: Tensor) -> Tensor:
                made.append("summed")
                return super().sum_ranks(x)

            def gather_full(self, x: Tensor, *how: Any) -> Tensor:
                made.append("gathered")
                return super().gather_full(x, *how)

        handing = Heard(nn.Module(), Slices(), group)
        rows, whole = handing.split_rows(5), of(0, *SHAPE) * group.size()
        x = PartialSum.from_local(of(0, *SHAPE), handing)
        assert torch.equal(x.full_tensor(), whole) and x.reduce_to_shard(1, rows) is x.full_tensor() and torch.equal(x + 1, whole + 1)
        y = PartialSum.from_local(of(0, *SHAPE), handing)
        assert (
            y.reduce_to_shard(1, rows) is y.reduce_to_shard(1, rows) and torch.equal(y.full_tensor(), whole) and torch.equal(y + 1, whole + 1)
        )
        assert made == ["summed", "scattered", "gathered"]

    ranked(body)
