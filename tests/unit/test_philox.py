"""Keyed random numbers on a device equal those of the host, from the Triton kernel (interpreted here) and from torch's operators.

Without a GPU the kernel is run by Triton's interpreter, and compiled for devices that are not present. If Triton is not
installed (torch for CPU does not include it), these tests are skipped. The operators are always tested.
"""

import math
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from itertools import pairwise
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from plait.model.build_model import run_model
from plait.model.sketch import sketch_model
from plait.parallel.context.attention import _DropoutDraws
from plait.randomness import distributions, philox
from plait.randomness.distributions import RULES, OperatorCall, locate_numbers, make_philox_key, redraw
from plait.randomness.keyed import Randomness
from plait.randomness.philox import (
    LOW_32_BITS,
    KeepRange,
    StreamPart,
    draw_bits,
    draw_mask_by,
    draw_uniform,
    fill_by_operators,
    make_attention_range,
    make_dropout_range,
)
from plait.randomness.sub_block import Axis, Box, LocalRowsRule, SubBlocks, iter_boxes, split_box
from plait.tensors.rows import Rows

TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")
CPU = torch.device("cpu")
FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@st.composite
def axes(draw: Any) -> list[Axis]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 7))
        marks = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
        ranges = tuple((a, b - a) for a, b in zip(marks[::2], marks[1::2]))
        found.append((size, draw(st.sampled_from([ranges[::-1], ranges, ((0, size),)]))))
    return found


def held_shape(held: list[Axis]) -> torch.Size:
    return torch.Size(sum(n for _, n in ranges) for _, ranges in held)


def by_boxes(numbers: StreamPart, draw: Any = fill_by_operators) -> np.ndarray:
    """The 32-bit numbers in the order of a device's writes, box by box."""
    out = torch.zeros(held_shape(numbers.axes), dtype=torch.int32)
    for box in iter_boxes(numbers.start, numbers.axes, numbers.strides):
        draw(out, numbers.key, box, None)
    return out.numpy().view(np.uint32)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are filled like those on a device: by torch's operators."""
    drawn = philox._draw_on_device
    monkeypatch.setattr(
        distributions, "draw_mask_by", lambda shape, n, keep, dtype, _: drawn(torch.empty(shape, dtype=dtype), n, keep)
    )
    monkeypatch.setattr(
        distributions, "draw_uniform", lambda shape, n, _: drawn(torch.empty(shape, dtype=torch.float64), n, None)
    )


@given(st.integers(0, 2**128 - 1), st.one_of(st.integers(0, 100), st.integers(2**32 - 9, 2**60)), st.integers(1, 200))
def test_operators_draw_the_bits_of_numpy(philox_key: int, start: int, count: int) -> None:
    out = torch.zeros(count, dtype=torch.int32)
    fill_by_operators(out, philox_key, Box(start, 0, ((count, 1, 1),)), None)
    assert np.array_equal(out.numpy().view(np.uint32), draw_bits(philox_key, start, count))


def test_operators_draw_many_numbers_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "NUMBERS_AT_ONCE", 1000)
    out = torch.zeros(10_007, dtype=torch.int32)
    fill_by_operators(out, 5, Box(2**32 - 77, 0, ((10_007, 1, 1),)), None)
    assert np.array_equal(out.numpy().view(np.uint32), draw_bits(5, 2**32 - 77, 10_007))


@settings(deadline=None)
@given(axes(), st.sampled_from([0, 3, 2**32 - 20, 2**41 + 5]))
def test_operators_draw_any_sub_block(held: list[Axis], start: int) -> None:
    whole = draw_bits(7, start, math.prod(size for size, _ in held)).reshape([size for size, _ in held])
    rows = [[i for f, n in ranges for i in range(f, f + n)] for _, ranges in held]
    assert np.array_equal(by_boxes(StreamPart.from_axes(7, start, held)), whole[np.ix_(*rows)])


@given(axes(), st.integers(1, 40), st.integers(1, 3))
def test_pieces_are_the_box(held: list[Axis], numbers: int, dims: int) -> None:
    strides = StreamPart.from_axes(0, 0, held).strides
    for box in iter_boxes(3, held, strides):
        found = {}
        for piece in split_box(box, numbers, dims):
            assert piece.size <= numbers and len(piece.dims) <= dims
            assert piece.dims[-1][1] == 1 or piece.dims[-1][0] == 1
            found |= elements(piece)
        assert found == elements(box) and len(found) == box.size


def elements(box: Box) -> dict[int, int]:
    """The memory position of each number of a box."""
    found = {box.at: box.first}
    for size, apart, stride in box.dims:
        found = {at + i * stride: first + i * apart for at, first in found.items() for i in range(size)}
    return found


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1 / 3, 0.999999, 1e-9, 1.0])
def test_masks_are_those_of_the_host(dtype: torch.dtype, p: float) -> None:
    """Both equal the masks that torch's operators make of the uniform numbers."""
    whole = StreamPart.from_axes(make_philox_key("m"), 2**35 + 1, [(40, ((0, 40),)), (50, ((0, 50),))])
    scale = 1 / (1 - p) if p < 1 else 0.0
    words = torch.from_numpy(draw_bits(make_philox_key("m"), 2**35 + 1, 2000).astype(np.float64)).view(40, 50)
    for keep, expected in (
        (make_dropout_range(p), (words >= min(round(p * 2**32), LOW_32_BITS)).to(dtype).mul_(scale)),
        (make_attention_range(1 - p, dtype), ((words + 0.5) * 2.0**-32 < 1 - p).to(dtype) / (1 - p if p < 1 else 1.0)),
    ):
        host = draw_mask_by(torch.Size((40, 50)), whole, keep, dtype, CPU)
        assert torch.equal(host, expected)
        assert torch.equal(philox._draw_on_device(torch.empty(40, 50, dtype=dtype), whole, keep), host)


def test_the_ends_of_what_stays() -> None:
    """A number is kept exactly if its uniform number is below the bound, also next to 0 and 1, where float64 values are dense."""
    for stays in (2.0**-33, np.nextafter(2.0**-33, 1), 0.3, np.nextafter(1.0, 0), 1.0, 1 - 2.0**-33, 0.0):
        low, high, value = make_attention_range(float(stays), torch.float64)
        near = np.array([w for w in {0, 1, high - 1, high, high + 1, LOW_32_BITS} if 0 <= w <= LOW_32_BITS], np.uint64)
        kept = (near >= low) & (near <= high) & (value != 0)
        assert np.array_equal(kept, (near + 0.5) * 2.0**-32 < stays), stays


FUNCTIONS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.3),
    "rand": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.4),
    "no batch": lambda x: x * torch.rand(5),
    "batch in the middle": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "batch last": lambda x: F.dropout(x.permute(1, 2, 0), 0.3).permute(2, 0, 1),
}


class Of(torch.nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cut", [None, Rows.make_zigzag(6, 2), Rows.from_sizes([1, 3, 2])], ids=["whole", "zigzag", "uneven"])
def test_functions_draw_the_same_on_a_device(name: str, cut: Rows | None, request: pytest.FixtureRequest) -> None:
    model = Of(FUNCTIONS[name])
    sketched = sketch_model(model, lambda n: torch.ones(n, 6, 5), run_model)
    randomness = Randomness(5, sketched.places).install(model)
    x, found = torch.rand(4, 6, 5), []
    for device in (False, True):
        if device:
            request.getfixturevalue("on_device")
        for rank in range(1 if cut is None else len(cut.ranks)):
            randomness.sub_blocks = None if cut is None else SubBlocks(sketched.drawn, LocalRowsRule(cut, rank))
            given = x if cut is None else cut.take_part(x, 1, rank).contiguous()
            with torch.no_grad(), randomness.forward_pass(2, 7, 4):
                found.append(model(given))
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:]))


def test_other_devices_are_drawn_on_by_operators() -> None:
    """A tensor without memory simulates them, and numpy is not used."""
    drawn = draw_mask_by(
        torch.Size((3, 4)),
        StreamPart.from_axes(1, 2, [(12, ((0, 12),))]),
        KeepRange(0, LOW_32_BITS, 1.0),
        torch.float32,
        torch.device("meta"),
    )
    assert drawn.shape == (3, 4) and drawn.is_meta


@pytest.mark.parametrize("dtype", FORMATS)
def test_native_dropout_is_keyed_as_bernoulli_is(dtype: torch.dtype) -> None:
    """On CUDA attention draws by native dropout, and on a CPU by bernoulli."""
    p, x = 0.3, torch.rand(4, 50).to(dtype) + 0.5
    where, place = [1, 2, 4, 4], "layer#1#1"
    drop = torch.ops.aten.native_dropout.default
    out, stayed = redraw(drop(x, p, True), OperatorCall(drop, (x, p, True), {}), where, place, 0)
    draw = torch.ops.aten.bernoulli_.float
    drawn = redraw(torch.empty_like(x), OperatorCall(draw, (torch.empty_like(x), 1 - p), {}), where, place, 0)
    assert stayed.dtype is torch.bool and torch.equal(stayed, drawn == 1)
    assert torch.equal(out, x * drawn.div(1 - p))
    before = drop(x, p, False)
    assert torch.equal(redraw(before, OperatorCall(drop, (x, p, False), {}), where, place, 0)[0], x)


def test_native_dropout_under_autograd() -> None:
    model = Of(lambda x: torch.native_dropout(x, 0.5, True)[0])
    places = sketch_model(model, lambda n: torch.ones(n, 6), run_model).places
    randomness, x = Randomness(3, places).install(model), torch.ones(8, 6, requires_grad=True)
    parts = []
    for first, count in ((0, 8), (0, 3), (3, 5)):
        with randomness.forward_pass(1, first, count):
            out = model(x[first : first + count])
        parts.append(out.detach())
        (slope,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(slope[first : first + count], out), "what was dropped has no gradient"
    assert torch.equal(parts[0], torch.cat(parts[1:])) and set(parts[0].unique().tolist()) == {0.0, 2.0}


def test_attention_of_a_stretch_draws_as_the_whole() -> None:
    cut = Rows.make_zigzag(8, 2)
    randomness = Randomness(3, {"": 0}).install(Of(lambda x: x))
    randomness.sub_blocks = SubBlocks({}, lambda *_: None)
    call = SimpleNamespace(q=torch.ones(2, 3, 8, 4), dropout=0.4)
    with randomness.forward_pass(1, 5, 2):
        whole = _DropoutDraws(randomness, 2, 3, True)
        kept = whole.draw_mask(call, [*whole.list_axes(), (8, ((0, 8),)), (8, ((0, 8),))])
        for rank in range(2):
            rows = [*whole.list_axes(), (8, cut.ranks[rank]), (8, ((0, 8),))]
            assert torch.equal(whole.draw_mask(call, rows), cut.take_part(kept, 2, rank))
    uniforms = draw_uniform(kept.shape, locate_numbers(kept.shape, [3, 1, 5, 2], whole.place, 0), CPU)
    assert torch.equal(kept, RULES["bernoulli"](uniforms, 0.6).float() / 0.6)


def test_numbers_drawn_by_operators_are_fair() -> None:
    out = torch.empty(2**20, dtype=torch.float64)
    fill_by_operators(out, make_philox_key("fair"), Box(2**40, 0, ((2**20, 1, 1),)), None)
    x = out.numpy()
    assert 0 < x.min() < 1e-5 and 1 - 1e-5 < x.max() < 1
    assert abs(x.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(x)) and abs(x.var() - 1 / 12) < 4 * math.sqrt(
        1 / 180 / len(x)
    )
    counts = np.bincount((x * 1024).astype(int), minlength=1024)
    assert abs(((counts - 1024) ** 2 / 1024).sum() - 1023) < 4 * math.sqrt(2 * 1023)
    assert all(abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 4 / math.sqrt(len(x)) for lag in range(1, 17))


# — the Triton kernel —


def with_triton(code: str, interpreted: bool = True) -> str:
    """The output of a new process: Triton checks for its interpreter when it is imported."""
    code = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n{code}"
    with TemporaryDirectory() as cache:
        how = {"TRITON_INTERPRET": str(int(interpreted)), "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": cache}
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | how, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


INTERPRETED = """
import numpy as np, torch
from plait.randomness.philox import KeepRange, StreamPart, draw_bits, fill_by_operators, make_attention_range, make_dropout_range
from plait.randomness.philox_kernel import launch_kernel as by_kernel
from plait.randomness.sub_block import Box, iter_boxes
def same(key, box, out, keep=None, **how):
    expected = out.clone()
    by_kernel(out, key, box, keep, **how)
    fill_by_operators(expected, key, box, keep)
    assert torch.equal(out, expected), (box, out.dtype, keep)
"""


@TRITON
@pytest.mark.slow
def test_the_kernel_draws_the_bits_of_numpy() -> None:
    with_triton(
        INTERPRETED
        + """
for key in (1, 2**64 - 1, 2**127 + 2**63 + 5, 0x123456789ABCDEF0FEDCBA9876543210):
    for start, count in ((0, 1), (1, 300), (7, 5), (8, 8), (2**32 - 3, 300), (2**32, 5), (2**40 + 3, 5000), (2**60 + 1, 9)):
        out = torch.zeros(count, dtype=torch.int32)
        by_kernel(out, key, Box(start, 0, ((count, 1, 1),)), None)
        assert (out.numpy().view(np.uint32) == draw_bits(key, start, count)).all(), (key, start, count)
"""
    )


@TRITON
@pytest.mark.slow
def test_the_kernel_draws_any_sub_block() -> None:
    with_triton(
        INTERPRETED
        + """
import random
chosen = random.Random(3)
for case in range(24):
    axes = []
    for _ in range(chosen.randint(1, 5)):
        size = chosen.randint(1, 12)
        marks = sorted(chosen.sample(range(size + 1), min(size + 1, 2 * chosen.randint(0, 2))))
        axes.append((size, tuple((a, b - a) for a, b in zip(marks[::2], marks[1::2])) or ((0, size),)))
    numbers = StreamPart.from_axes(7 << 90 | case, chosen.choice([0, 5, 2**32 - 50, 2**45 + 3]), axes)
    shape = [sum(n for _, n in ranges) for _, ranges in axes]
    if case % 3 == 0:  # the dims in another order in memory
        shape, strides = shape[::-1], [int(np.prod(shape[:i])) for i in range(len(shape))]
        numbers = numbers._replace(strides=strides)
    for box in iter_boxes(numbers.start, axes, numbers.strides):
        same(numbers.key, box, torch.zeros(shape, dtype=torch.int32), counters=64)
        same(numbers.key, box, torch.zeros(shape, dtype=torch.float64))
"""
    )


@TRITON
@pytest.mark.slow
def test_the_kernel_writes_the_masks_of_the_host() -> None:
    with_triton(
        INTERPRETED
        + """
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    for p in (0.0, 0.1, 1 / 3, 0.5, 0.999999, 1e-9, 1.0):
        for keep in (make_dropout_range(p), make_attention_range(1 - p, dtype)):
            same(9 << 70, Box(2**33 - 7, 0, ((200, 1, 1),)), torch.zeros(200, dtype=dtype), keep)
"""
    )


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 2**32 - 5_000_000, 2**50 + 3])
def test_the_kernel_draws_ten_million_bits_of_numpy(start: int) -> None:
    with_triton(
        INTERPRETED
        + f"""
for begin in range(0, 10**7, 10**6):
    out = torch.zeros(10**6, dtype=torch.int32)
    by_kernel(out, 77 << 64 | 5, Box({start} + begin, 0, ((10**6, 1, 1),)), None, counters=2**15)
    assert (out.numpy().view(np.uint32) == draw_bits(77 << 64 | 5, {start} + begin, 10**6)).all()
"""
    )


COMPILED = """
import torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from plait.randomness import philox_kernel
from plait.randomness.sub_block import Box
target = GPUTarget({target})
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda *_: 0, get_current_target=lambda: target,
    get_active_torch_device=lambda: torch.device("cpu"),
))
kernel, made = philox_kernel._draw, []
class Compile:
    def __getitem__(self, grid):
        return lambda *given: made.append(kernel.warmup(*given, grid=grid))
philox_kernel._draw = Compile()
"""


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("target", ["'cuda', 80, 32", "'cuda', 90, 32", "'hip', 'gfx942', 64"])
def test_the_kernel_compiles_for_devices(target: str) -> None:
    told = with_triton(
        COMPILED.format(target=target)
        + """
mask = (5, 2**32 - 1, 2.0)
for dtype, keep, dims in (
    (torch.bfloat16, mask, ((8, 1, 1),)), (torch.float16, mask, ((3, 9, 8), (8, 1, 1))),
    (torch.float64, mask, ((2, 90, 80), (2, 45, 40), (2, 9, 8), (8, 1, 1))),
    (torch.float64, None, ((3, 90, 80), (2, 9, 8), (8, 1, 1))), (torch.int32, None, ((8, 1, 1),)),
):
    philox_kernel.launch_kernel(torch.zeros(160, dtype=dtype), 7, Box(2**40, 0, dims), keep)
print(*(("cubin" in one.asm) + 2 * ("hsaco" in one.asm) for one in made))
""",
        interpreted=False,
    )
    assert told.split() == ["2" if "hip" in target else "1"] * 5


@TRITON
@pytest.mark.slow
def test_no_step_waits_for_the_compiler() -> None:
    """Triton compiles again for sizes of another kind, for 1, and for multiples of 16. It does not for arguments that a step changes."""
    told = with_triton(
        COMPILED.format(target="'cuda', 90, 32")
        + """
for key in (1, 16, 2**127 + 5, 16 << 64):
    for first, at, size in ((0, 0, 1), (1, 1, 16), (2**40, 16, 100), (2**31, 7, 1000)):
        for keep in ((0, 2**32 - 1, 0.0), (1, 5, 1.0), (2**31, 2**32 - 1, 1.5)):
            philox_kernel.launch_kernel(torch.zeros(4096), key, Box(first, at, ((size, 1, 1),)), keep)
            philox_kernel.launch_kernel(torch.zeros(4096), key, Box(first, at, ((2, size + 5, size), (size, 1, 1))), keep)
print(len({one.hash for one in made}))
""",
        interpreted=False,
    )
    assert told.split() == ["2"], "one for each number of dims"


# — which implementation draws —


def test_the_kernel_is_not_asked_for_without_a_gpu() -> None:
    assert philox.load_kernel(CPU) is None and philox.load_kernel(torch.device("meta")) is None


@pytest.mark.parametrize("fault", ["missing", "broken", "wrong"])
def test_operators_draw_where_the_kernel_cannot(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_kernel(out: Tensor, *_: Any) -> None:
        if fault == "broken":
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(philox, "find_spec", lambda name: None if fault == "missing" else object())
    monkeypatch.setitem(sys.modules, "plait.randomness.philox_kernel", SimpleNamespace(launch_kernel=by_kernel))
    monkeypatch.setattr(philox.torch, "empty", lambda *size, **_: torch.zeros(*size, dtype=torch.float64))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert philox.load_kernel.__wrapped__(torch.device("cuda", 0)) is None
    says = {"missing": [], "broken": ["no C compiler"], "wrong": ["differ from numpy's"]}[fault]
    assert len(told) == len(says) and all(word in str(w.message) for word, w in zip(says, told))


def test_a_stream_has_no_seams() -> None:
    """Boxes that are adjacent in the stream: for any split of a tensor, its parts equal those of the full tensor."""
    whole, marks = draw_bits(3, 2**32 - 500, 1000), [0, 1, 8, 9, 500, 507, 1000]
    for a, b in pairwise(marks):
        out = torch.zeros(b - a, dtype=torch.int32)
        fill_by_operators(out, 3, Box(2**32 - 500 + a, 0, ((b - a, 1, 1),)), None)
        assert np.array_equal(out.numpy().view(np.uint32), whole[a:b])
