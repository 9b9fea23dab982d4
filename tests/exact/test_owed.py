"""A sum over ranks that is made later: what is done to it before is what would be done to the sum, and so are gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_regions import of
from torch import Tensor, nn
from torch.nn.functional import dropout

from plait.launch.fork import run
from plait.model.slices import Slices
from plait.parallel.tensor.sequence.runtime import LazyGather, PartialSum, SequenceParallelUnits, plain

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
    """On two and on three ranks."""

    def target(place: Any) -> dict[str, Any]:
        group = place.connect(torch.device("cpu"))
        body(group)
        dist.barrier(group)
        return {}

    for ranks in (2, 3):
        run(target, ranks)


def compared(group: Any, case: Any, stretched: bool) -> Any:
    """What a case gives of a sum that is owed, after its rows and gradients were compared; its rows on this rank too."""
    handing = SequenceParallelUnits(nn.Module(), Slices(), group)
    rows = handing.split(SHAPE[1])
    shares, others = ([of(k + r, *SHAPE, dtype=torch.float32) for r in range(group.size())] for k in (0, 50))
    a, weight = of(99, 5, 3, dtype=torch.float32).requires_grad_(), of(98, *SHAPE, dtype=torch.float32)
    whole, more = (sum(t, torch.zeros(SHAPE)).requires_grad_() for t in (shares, others))
    expected = case(whole.clone(), more.clone(), a)
    wanted = torch.autograd.grad((expected * weight).sum(), [whole, more, a], allow_unused=True)
    mine = [t[group.rank()].clone().requires_grad_() for t in (shares, others)]
    found = case(*(PartialSum.of(t.clone(), handing) for t in mine), a)
    if stretched:
        late = found.stretch(1, rows)
        assert isinstance(late, LazyGather)
        assert torch.equal(late.mine(), rows.take(expected, 1, group.rank()))
        loss, again = (late.mine() * rows.take(weight, 1, group.rank())).sum(), found.whole()
    else:
        again = plain(found)
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
    """What was made whole stays whole, and what was made a stretch is gathered from there."""

    def body(group: Any) -> None:
        made: list[str] = []

        class Heard(SequenceParallelUnits):
            def left(self, x: Tensor, *how: Any) -> Tensor:
                made.append("scattered")
                return super().left(x, *how)

            def summed(self, x: Tensor) -> Tensor:
                made.append("summed")
                return super().summed(x)

            def gathered(self, x: Tensor, *how: Any) -> Tensor:
                made.append("gathered")
                return super().gathered(x, *how)

        handing = Heard(nn.Module(), Slices(), group)
        rows, whole = handing.split(5), of(0, *SHAPE) * group.size()
        x = PartialSum.of(of(0, *SHAPE), handing)
        assert torch.equal(x.whole(), whole) and x.stretch(1, rows) is x.whole() and torch.equal(x + 1, whole + 1)
        y = PartialSum.of(of(0, *SHAPE), handing)
        assert (
            y.stretch(1, rows) is y.stretch(1, rows) and torch.equal(y.whole(), whole) and torch.equal(y + 1, whole + 1)
        )
        assert made == ["summed", "scattered", "gathered"]

    ranked(body)
