"""Random numbers of a sub-block equal those of the full tensor at the same place: heads, features, sequence shards.

The batch is 4 (or its last 3 samples), so that a window and a part of the batch are combined.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from plait.config.errors import PlaitError
from plait.model.build_model import run_model
from plait.model.sketch import sketch_model
from plait.randomness import sub_block as windows
from plait.randomness.keyed import Randomness
from plait.randomness.philox import draw_bits
from plait.randomness.sub_block import LocalRowsRule, SubBlocks, draw_sub_block, find_differing_dims
from plait.tensors.rows import Rows

BATCH, FIRST = 4, 1
STRETCHES = ((0, BATCH), (FIRST, BATCH - FIRST))


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function, self.drop = function, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def sample_of(shape: tuple[Any, ...], n: int) -> Tensor:
    whole = torch.rand([8 if d == "b" else d for d in shape], generator=torch.Generator().manual_seed(3)) + 0.2
    return whole.narrow(shape.index("b"), 0, n).contiguous()


SHAPES = {  # the shape of a batch, and the dim that is split
    "features": (("b", 3, 6), 2),
    "sequence": (("b", 6, 5), 1),
    "sequence, time first": ((6, "b", 5), 0),
    "images": (("b", 6, 3, 2), 1),
    "long": (("b", 6, 4000), 1),
}
CUTS = {"even": Rows.from_sizes([3, 3]), "uneven": Rows.from_sizes([1, 3, 2]), "empty": Rows.from_sizes([6, 0]), "zigzag": Rows.make_zigzag(6, 2)}
DRAW = {
    "dropout": lambda x: F.dropout(x),
    "dropout in place": lambda x: F.dropout(x.clone(), inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rand_like": lambda x: torch.rand_like(x),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "randint": lambda x: torch.randint(10, x.shape).float(),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "normal": lambda x: torch.normal(x, x),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "layer drop": lambda x: x * torch.rand(1),
    "twice": lambda x: F.dropout(F.dropout(x + 1)),
}
FEATURES = {
    "dropout1d": (lambda x: F.dropout1d(x), ("b", 6, 5), 1),
    "dropout2d": (lambda x: F.dropout2d(x), ("b", 6, 3, 2), 1),
    "dropout3d": (lambda x: F.dropout3d(x), ("b", 6, 3, 2, 2), 1),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.5, True), ("b", 6, 3), 1),
    "sdpa, heads": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), ("b", 6, 3, 4), 1),
    "flattened batch and sequence": (lambda x: F.dropout(x.flatten(0, 1)).view(x.shape), ("b", 6, 5), 1),
    "heads in the batch dim": (lambda x: F.dropout(x.flatten(0, 1)).view(x.shape), ("b", 6, 3, 3), 1),
    "row by row": (lambda x: x * torch.rand(*x.shape[:2], 1), ("b", 6, 5), 1),
    "stochastic depth": (lambda x: x * torch.rand(x.shape[0], 1, 1), ("b", 6, 5), 1),
    "multiples": (lambda x: F.dropout(x.repeat_interleave(4, 1)), ("b", 6, 5), 1),
}
CASES = [(f, *SHAPES[s], c) for (_, f), s, c in product(DRAW.items(), SHAPES, ("zigzag", "uneven"))]
CASES += [(*FEATURES[name], c) for name, c in product(FEATURES, CUTS)]
CASES += [(DRAW["dropout"], *SHAPES["features"], c) for c in CUTS]
NAMES = [f"{n}, {s}, {c}" for n, s, c in product(DRAW, SHAPES, ("zigzag", "uneven"))]
NAMES += [f"{n}, {c}" for n, c in product(FEATURES, CUTS)] + [f"dropout, {c}" for c in CUTS]


def parts_equal(function: Callable[[Tensor], Tensor], shape: tuple[Any, ...], dim: int, cut: Rows) -> None:
    model, b = Of(function), shape.index("b")
    sketched = sketch_model(model, lambda n: sample_of(shape, n), run_model)
    randomness = Randomness(5, sketched.places).install(model)
    x = sample_of(shape, BATCH)
    with torch.no_grad(), randomness.forward_pass(2, 0, BATCH):
        whole = model(x)
    scale = whole.shape[dim] // cut.length
    wide = Rows(tuple(tuple((f * scale, n * scale) for f, n in held) for held in cut.ranks))
    for rank, (first, count) in product(range(len(cut.ranks)), STRETCHES):
        randomness.sub_blocks = SubBlocks(sketched.drawn, LocalRowsRule(cut, rank))
        with torch.no_grad(), randomness.forward_pass(2, first, count):
            found = model(cut.take_part(x.narrow(b, first, count), dim, rank).contiguous())
        assert torch.equal(found, wide.take_part(whole.narrow(b, first, count), dim, rank)), (rank, first)


@pytest.mark.parametrize("function, shape, dim, cut", CASES, ids=NAMES)
def test_a_part_draws_its_numbers_of_the_whole(function: Any, shape: Any, dim: int, cut: str) -> None:
    parts_equal(function, shape, dim, CUTS[cut])


def test_queries_may_be_cut_where_keys_are_whole() -> None:
    shape, cut = ("b", 2, 6, 4), CUTS["zigzag"]
    model = Of(lambda x: F.scaled_dot_product_attention(x, keys[: len(x)], keys[: len(x)], dropout_p=0.5))
    keys = sample_of(shape, 8)
    sketched = sketch_model(model, lambda n: sample_of(shape, n), run_model)
    randomness = Randomness(5, sketched.places).install(model)
    with torch.no_grad(), randomness.forward_pass(0, 0, BATCH):
        whole = model(keys[:BATCH])
    for rank in range(2):
        mine = cut.take_part(keys[:BATCH], 2, rank)
        local = sketch_model(model, lambda n, rank=rank: cut.take_part(sample_of(shape, n), 2, rank), run_model)
        at = find_differing_dims(sketched.drawn, local.drawn)
        assert at == {("#1#1", 2)}, "the queries, and not the keys"
        randomness.sub_blocks = SubBlocks(sketched.drawn, LocalRowsRule(cut, rank, at))
        with torch.no_grad(), randomness.forward_pass(0, 0, BATCH):
            assert torch.allclose(model(mine), cut.take_part(whole, 2, rank), atol=1e-6)


def test_recomputation_draws_by_the_windows_of_its_pass() -> None:
    """Two passes of unequal lengths, whose backward passes run in reverse order, as in a pipeline."""
    model = Of(lambda x: checkpoint(model.drop, x, use_reentrant=False).square())
    sketched = sketch_model(model, lambda n: torch.ones(n, 6, 3), run_model)
    randomness = Randomness(1, sketched.places).install(model)
    at = frozenset({("drop#1#1", 1)})
    passes = []
    for step, cut in enumerate((Rows.from_sizes([4, 2]), Rows.make_zigzag(12, 2))):
        x = torch.ones(2, cut.length, 3)
        randomness.sub_blocks = None
        with torch.no_grad(), randomness.forward_pass(0, 2 * step, 2):
            whole = model(x)
        randomness.sub_blocks = SubBlocks(sketched.drawn, LocalRowsRule(cut, 1, at))
        mine = cut.take_part(x, 1, 1).clone().requires_grad_()
        with randomness.forward_pass(0, 2 * step, 2):
            out = model(mine)
        assert torch.equal(out, cut.take_part(whole, 1, 1))
        passes.append((mine, out, cut.take_part(whole, 1, 1)))
    for mine, out, whole in reversed(passes):
        with randomness.replay():
            out.sum().backward()
        assert torch.equal(mine.grad, 2 * whole), "(x m)² has the gradient 2 m² where x is 1"


def test_sizes_that_do_not_fit_are_errors() -> None:
    shapes, cut = {"#1#1": (1, 6)}, Rows.from_sizes([4, 2])
    with pytest.raises(PlaitError, match="J019"):
        LocalRowsRule(cut, 0)("drop#1#1", 1, None, 4)
    with pytest.raises(ValueError, match="3 rows in dim 1"):
        LocalRowsRule(cut, 0, frozenset({("#1#1", 1)}))("#1#1", 1, 6, 3)
    with pytest.raises(ValueError, match="local ranges"):
        SubBlocks(shapes, lambda *_: (6, ((0, 2),))).find_axes("#1#1", 0, (2, 3), 2)
    assert SubBlocks(shapes, LocalRowsRule(cut, 0)).find_axes("#1#1", 0, (2, 6), 2) is None
    assert SubBlocks(shapes, LocalRowsRule(cut, 0)).find_axes("#1#1", 0, (2, 4), 2) == [
        (2, ((0, 2),)),
        (1, ((0, 1),)),
        (6, ((0, 4),)),
    ]


def test_the_sketch_says_what_one_sample_draws() -> None:
    model = Of(lambda x: F.dropout(x.flatten(0, 1)) + F.dropout1d(x).flatten(0, 1) + torch.rand(5))
    found = sketch_model(model, lambda n: torch.ones(n, 6, 5), run_model)
    assert found.drawn == {"#1#1": (6, 5), "#1#2": (1, 6, 1), "#1#3": (5,)}
    assert found.places == {"#1#1": 0, "#1#2": 0, "#1#3": None}


@st.composite
def axes(draw: Any) -> list[windows.Axis]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 7))
        marks = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
        ranges = tuple((a, b - a) for a, b in zip(marks[::2], marks[1::2]))
        found.append((size, draw(st.sampled_from([ranges[::-1], ranges, ((0, size),)]))))
    return found


@settings(deadline=None)
@given(axes(), st.integers(0, 5), st.sampled_from([1, 4, 30, windows.RESTART_COST]))
def test_a_sub_block_is_cut_out_of_the_stream(held: list[windows.Axis], first: int, chunk: int) -> None:
    sizes = [size for size, _ in held]
    rows = [[i for f, n in ranges for i in range(f, f + n)] for _, ranges in held]
    drawn = []

    def stream(start: int, count: int) -> np.ndarray:
        drawn.append(count)
        return draw_bits(7, start, count)

    start = first * int(np.prod(sizes[1:]))
    before, windows.RESTART_COST = windows.RESTART_COST, chunk
    try:
        found = draw_sub_block(stream, start, held)
    finally:
        windows.RESTART_COST = before
    whole = draw_bits(7, start, int(np.prod(sizes))).reshape(sizes)
    assert np.array_equal(found, whole[np.ix_(*rows)] if found.size else found)
    assert max(drawn, default=0) <= max(chunk, found.size)
