"""Philox 4x64-10 as a Triton kernel that draws any box of a stream directly into a tensor.

A program computes some Philox counters, each of which gives eight 32-bit numbers. It writes those that belong to the
box: as a dropout mask, as uniform numbers, or unchanged. The only memory traffic is the output. This file is only
imported for tensors on a GPU (`randomness/philox.py`), where torch includes Triton.
"""

import struct
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.randomness.sub_block import Box, split_box

MAX_OUTER_DIMS = 3
"""Maximum number of dims of a box in one launch, in addition to the last one."""
MAX_LAUNCH_NUMBERS = 2**29
"""Maximum numbers of one launch, so that their counters can be counted in 32 bits."""
COUNTERS_PER_PROGRAM = 256
"""Counters that a program computes, for 2048 numbers."""


def launch_kernel(out: Tensor, key: int, box: Box, keep: tuple[int, int, float] | None, counters: int = COUNTERS_PER_PROGRAM) -> None:
    """Write the numbers of a box into `out`: a mask by (low, high, value), or uniform numbers in float64, or raw int32."""
    how = "mask" if keep is not None else "uniform" if out.dtype is torch.float64 else "words"
    low, high, value = keep or (0, 0, 0.0)
    stream = [_as_signed(key, 64), _as_signed(key >> 64, 64)]
    kept = [_as_signed(low, 32), _as_signed(high, 32), _float_bits(value)]
    for one in split_box(box, MAX_LAUNCH_NUMBERS, MAX_OUTER_DIMS + 1):
        *outer, (run, _, step) = one.dims
        rows = one.size // run
        runs = (one.first % 8 + run + 7) // 8 if rows == 1 else (run + 14) // 8  # counters that a run may touch
        dims = [*[(1, 0, 0)] * (MAX_OUTER_DIMS - len(outer)), *outer]
        numbers = [one.first, one.at, *kept, rows * runs, runs, run, step, *(n for dim in dims for n in dim)]
        with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
            _draw[(triton.cdiv(rows * runs, counters),)](out, *stream, *numbers, how, len(outer), counters)


def _as_signed(number: int, width: int) -> int:
    """Return the lowest `width` bits as a signed integer, so that Triton always infers the same type."""
    number &= (1 << width) - 1
    return number - (1 << width) if number >> (width - 1) else number


def _float_bits(value: float) -> int:
    """Return the 64 bits of a number, because Triton passes floats in 32 bits."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


@triton.jit
def _philox(counter, key0, key1):
    """Return the four 64-bit words of each counter, in numpy's order."""
    c0, c1, c2, c3 = counter, counter * 0, counter * 0, counter * 0
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2E7470EE14C6C93), c0 * 0xD2E7470EE14C6C93
        high1, low1 = tl.umulhi(c2, 0xCA5A826395121157), c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = key0 + 0x9E3779B97F4A7C15
        key1 = key1 + 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def _halves(word):
    """Return the 32-bit numbers of 64-bit words, low half first."""
    return tl.interleave(word.to(tl.uint32), (word >> 32).to(tl.uint32))


@triton.jit
def _in_dim(row, size, apart, written):
    """Split element numbers `row` at one dim: numbers in the outer dims, and offsets along this dim in the stream and
    in memory."""
    rest = row // size
    where = (row - rest * size).to(tl.int64)
    return rest, where * apart, where * written


@triton.jit(do_not_specialize=[
    "key0", "key1", "first", "at", "low", "high", "value", "total", "runs", "run",
    "size0", "apart0", "written0", "size1", "apart1", "written1", "size2", "apart2", "written2",
])  # fmt: skip
def _draw(
    out, key0: tl.int64, key1: tl.int64, first: tl.int64, at: tl.int64, low, high, value: tl.int64, total, runs, run, step,
    size0, apart0: tl.int64, written0: tl.int64, size1, apart1: tl.int64, written1: tl.int64,
    size2, apart2: tl.int64, written2: tl.int64, HOW: tl.constexpr, DIMS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Draw a box of DIMS + 1 dims. `total` counters in all, `runs` of them for each run of `run` numbers."""
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = index < total
    zero = (index * 0).to(tl.int64)
    first, at, begin = zero + first, zero + at, index
    if DIMS > 0:
        row, begin = index // runs, index % runs
        row, further, on = _in_dim(row, size2, apart2, written2)
        first, at = first + further, at + on
        if DIMS > 1:
            row, further, on = _in_dim(row, size1, apart1, written1)
            first, at = first + further, at + on
        if DIMS > 2:
            row, further, on = _in_dim(row, size0, apart0, written0)
            first, at = first + further, at + on
    counter = ((first >> 3) + begin + 1).to(tl.uint64)  # numpy increments the counter before it draws
    zero = zero.to(tl.uint64)
    w0, w1, w2, w3 = _philox(counter, zero + key0.to(tl.uint64), zero + key1.to(tl.uint64))
    drawn = _halves(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
    lane = tl.arange(0, 8)[None, :]
    place = begin[:, None] * 8 - (first & 7).to(tl.int32)[:, None] + lane  # position in the run
    inside = tl.reshape(inside[:, None] & (place >= 0) & (place < run), (COUNT * 8,))
    target = out + tl.reshape(at[:, None] + place.to(tl.int64) * step, (COUNT * 8,))
    if HOW == "mask":
        number = value.to(tl.int64).to(tl.float64, bitcast=True)
        if out.dtype.element_ty != tl.float64:
            number = number.to(tl.float32)
        kept = (drawn >= low.to(tl.uint32)) & (drawn <= high.to(tl.uint32))
        tl.store(target, tl.where(kept, number, 0.0).to(out.dtype.element_ty), mask=inside)
    elif HOW == "uniform":
        tl.store(target, (drawn.to(tl.float64) + 0.5) * 2.3283064365386963e-10, mask=inside)
    else:
        tl.store(target, drawn.to(tl.int32, bitcast=True), mask=inside)
