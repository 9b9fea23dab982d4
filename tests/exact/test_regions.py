"""Sharded regions: values and gradients at each boundary equal those of the full tensors, bit for bit if ranks have replicas."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.launch.fork import run_ranks
from plait.tensors import collectives
from plait.tensors.rows import Rows

CUTS = {
    2: (
        Rows.from_sizes([3, 2]),
        Rows.from_sizes([5, 0]),
        Rows.make_zigzag(5, 2),
        Rows((((3, 2),), ((0, 3),))),
        Rows.make_even(4, 2),
        Rows.make_zigzag(8, 2),
    ),
    3: (
        Rows.from_sizes([3, 1, 2]),
        Rows.from_sizes([0, 5, 0]),
        Rows.make_zigzag(8, 3),
        Rows.make_even(7, 3),
        Rows.make_even(6, 3),
    ),
}
FORMATS = (torch.float64, torch.float32, torch.bfloat16)


def ranked(ranks: int, body) -> None:
    """Run `body(group)` on this many ranks; its assertions run there."""

    def target(place):
        group = place.connect(torch.device("cpu"))
        body(group)
        dist.barrier(group)
        return {}

    run_ranks(target, ranks)


def of(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, so that sums are exact in each format."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def pairs(group, cuts: tuple[Rows, ...] = ()) -> None:
    """Each function alone against its specification, in each format, for each dim and split."""
    rank, ranks = group.rank(), group.size()
    for dtype in FORMATS:
        mine = of(rank, 2, 3, dtype=dtype).requires_grad_()
        everything = [of(r, 2, 3, dtype=dtype) for r in range(ranks)]
        out = collectives.reduce_from_region(mine, group)
        assert torch.equal(out, sum(everything))
        (grad,) = torch.autograd.grad(out, mine, everything[0])
        assert torch.equal(grad, everything[0]), "a copy's gradient is not summed again"
        out = collectives.copy_to_region(mine, group)
        assert torch.equal(out, mine)
        (grad,) = torch.autograd.grad(out, mine, everything[rank])
        assert torch.equal(grad, sum(everything))
        for cut in cuts or CUTS[ranks]:
            for dim in (0, 1, -1):
                borders(group, cut, dim, dtype)


def borders(group, cut: Rows, dim: int, dtype: torch.dtype) -> None:
    rank, ranks, shape = group.rank(), group.size(), [2, 3, 4]
    shape[dim] = cut.length
    whole = of(99, *shape, dtype=dtype)
    shares = [of(r, *shape, dtype=dtype) for r in range(ranks)]
    own = lambda t: cut.take_part(t, dim, rank)  # noqa: E731
    x = own(whole).clone().requires_grad_()
    for function, expected in ((collectives.gather_from_region, own(shares[0])), (collectives.gather_partial, own(sum(shares)))):
        out = function(x, dim, cut, group)
        assert torch.equal(out, whole) and out.is_contiguous()
        given = shares[0] if function is collectives.gather_from_region else shares[rank]
        assert torch.equal(torch.autograd.grad(out, x, given)[0], expected), (function, cut, dim)
    for function, expected in ((collectives.scatter_to_region, own(shares[rank])), (collectives.reduce_scatter_region, own(sum(shares)))):
        y = shares[rank].clone().requires_grad_()
        out = function(y, dim, cut, group)
        assert torch.equal(out, expected) and out.is_contiguous()
        assert torch.equal(torch.autograd.grad(out, y, own(whole).clone())[0], whole), (function, cut, dim)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_border_and_its_adjoint(ranks: int) -> None:
    ranked(ranks, pairs)


def as_on_devices(group) -> None:
    """Equal shards, by the library's own collectives of one tensor. (gloo rejects unequal ones; tests/device has them.)"""
    token = collectives.DIRECT_DEVICES.set(())
    told = Counter[str]()
    try:
        with Told(told):
            pairs(group, tuple(cut for cut in CUTS[group.size()] if len(set(cut.sizes)) == 1))
    finally:
        collectives.DIRECT_DEVICES.reset(token)
    assert set(told) == {"_reduce_scatter_base_", "_allgather_base_", "allreduce_"}


class Told(TorchDispatchMode):
    def __init__(self, found: Counter[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.found[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_border_by_the_collectives_of_devices(ranks: int) -> None:
    ranked(ranks, as_on_devices)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x @ up) @ down


def blocks(group, recomputed: bool) -> None:
    """Two sliced layers with a norm between them, full and sharded, with the sequence sharded outside of the regions or not."""
    rank, cut, rows = group.rank(), Rows.make_even(7, group.size()), Rows.make_zigzag(9, group.size())
    whole = [of(k, *shape).div(16).requires_grad_() for k, shape in enumerate(((2, 9, 3), (3, 7), (7, 3), (3,)))]
    x, up, down, gain = whole
    loss = (torch.layer_norm(mlp(x, up, down), [3], gain) + mlp(x, up, down)).square().sum()
    expected = torch.autograd.grad(loss, whole)
    keep = (lambda f, *a: checkpoint(f, *a, use_reentrant=False)) if recomputed else (lambda f, *a: f(*a))
    for sequence in (False, True):
        own = [cut.take_part(up, 1, rank), cut.take_part(down, 0, rank)]
        mine = [t.detach().clone().requires_grad_() for t in (x, *own, gain)]

        def region(x: Tensor, up: Tensor, down: Tensor, sequence: bool = sequence) -> Tensor:
            if sequence:
                return collectives.reduce_scatter_region(
                    mlp(collectives.gather_partial(x, 1, rows, group), up, down), 1, rows, group
                )
            return collectives.reduce_from_region(mlp(collectives.copy_to_region(x, group), up, down), group)

        a, g = mine[0], mine[3]
        if sequence:
            a, g = collectives.scatter_to_region(a, 1, rows, group), collectives.copy_to_region(g, group)
        b = keep(region, a, mine[1], mine[2])
        y = torch.layer_norm(b, [3], g) + b
        y = collectives.gather_from_region(y, 1, rows, group) if sequence else y
        out = y.square().sum()
        assert abs(float((out - loss).detach())) < 1e-12
        found = torch.autograd.grad(out, mine)
        right = [expected[0], cut.take_part(expected[1], 1, rank), cut.take_part(expected[2], 0, rank), expected[3]]
        assert max(float((f - r).abs().max()) for f, r in zip(found, right) if f.numel()) < 1e-12
        for copy in (found[0], found[3]):
            assert torch.equal(collectives.all_reduce_copy(copy, group, dist.ReduceOp.MAX), copy), "the same on every rank"


@pytest.mark.parametrize("ranks, recomputed", [(2, False), (3, True)])
def test_a_sliced_model_has_the_gradients_of_the_whole(ranks: int, recomputed: bool) -> None:
    ranked(ranks, lambda group: blocks(group, recomputed))


def seconds(group) -> None:
    """A gradient of a gradient, as in force-field models."""
    rank, cut = group.rank(), Rows.make_even(5, group.size())
    x, w = of(1, 4).div(8).requires_grad_(), of(2, 4, 5).div(8).requires_grad_()
    (force,) = torch.autograd.grad(torch.sin(x @ w).sum(), x, create_graph=True)
    expected = torch.autograd.grad(force.square().sum(), (x, w))
    y, v = x.detach().requires_grad_(), cut.take_part(w, 1, rank).detach().clone().requires_grad_()
    energy = collectives.reduce_from_region(torch.sin(collectives.copy_to_region(y, group) @ v).sum(), group)
    (force,) = torch.autograd.grad(energy, y, create_graph=True)
    found = torch.autograd.grad(force.square().sum(), (y, v))
    assert torch.allclose(found[0], expected[0], rtol=1e-12)
    assert torch.allclose(found[1], cut.take_part(expected[1], 1, rank), rtol=1e-12)


def test_borders_can_be_differentiated_twice() -> None:
    ranked(2, seconds)


def writes(group) -> None:
    """Activations are overwritten in place right after a boundary, as `ReLU(inplace=True)` does."""
    x, cut = of(group.rank(), 5, 4).requires_grad_(), CUTS[2][0]
    for border in (
        lambda t: collectives.reduce_from_region(t, group),
        lambda t: collectives.gather_from_region(collectives.scatter_to_region(t, 0, cut, group), 0, cut, group),
    ):
        border(x * 1).relu_().sum().backward()
    with pytest.raises(RuntimeError, match="modified inplace"):
        collectives.copy_to_region(x * 1, group).relu_()  # it would also overwrite x, which other code uses
    with pytest.raises(ValueError, match="5 rows, not"):
        collectives.gather_from_region(x, 0, cut, group)


def test_what_follows_a_border_may_write_in_place() -> None:
    ranked(2, writes)


@given(st.integers(0, 40), st.integers(1, 6))
def test_a_cut_covers_every_row_once(length: int, ranks: int) -> None:
    for cut in (Rows.make_even(length, ranks), Rows.make_zigzag(length, ranks)):
        rows = [row for ranges in cut.ranks for first, n in ranges for row in range(first, first + n)]
        assert sorted(rows) == list(range(length)) and cut.length == length
        assert max(cut.sizes) - min(cut.sizes) <= 2
        taken = [cut.take_part(torch.arange(length), 0, rank) for rank in range(ranks)]
        assert torch.cat(taken).tolist() == rows
