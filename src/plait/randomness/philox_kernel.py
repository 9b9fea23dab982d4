"""Philox 4x64-10 as a Triton kernel: the numbers of any box of a stream, written where they belong.

A program computes a few counters of Philox, of which each gives eight 32-bit numbers, and writes those of them that the box
has: as a dropout mask, as uniform numbers, or as they are. The only traffic is what is written.
This file is imported for tensors on a GPU alone (`randomness/philox.py`), where torch brings Triton along.
"""

import struct
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.randomness.sub_block import Box, pieces

OUTER = 3
"""Dims of a box, beside the last one, that one launch can do."""
LARGEST = 2**29
"""Numbers of one launch: the counters that they touch can be counted in 32 bits."""
COUNTERS = 256
"""Counters that a program computes: 2048 numbers."""


def fill(out: Tensor, key: int, box: Box, keep: tuple[int, int, float] | None, counters: int = COUNTERS) -> None:
    """Write the numbers of a box into `out`: a mask by (low, high, value), or uniform ones in float64, or int32 as they are."""
    how = "mask" if keep is not None else "uniform" if out.dtype is torch.float64 else "words"
    low, high, value = keep or (0, 0, 0.0)
    stream = [_signed(key, 64), _signed(key >> 64, 64)]
    kept = [_signed(low, 32), _signed(high, 32), _bits(value)]
    for one in pieces(box, LARGEST, OUTER + 1):
        *outer, (run, _, step) = one.dims
        rows = one.size // run
        runs = (one.first % 8 + run + 7) // 8 if rows == 1 else (run + 14) // 8  # counters that a run can touch
        dims = [*[(1, 0, 0)] * (OUTER - len(outer)), *outer]
        numbers = [one.first, one.at, *kept, rows * runs, runs, run, step, *(n for dim in dims for n in dim)]
        with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
            _draw[(triton.cdiv(rows * runs, counters),)](out, *stream, *numbers, how, len(outer), counters)


def _signed(number: int, width: int) -> int:
    """The lowest `width` bits as a signed number, so that Triton has the same type of it whatever it is."""
    number &= (1 << width) - 1
    return number - (1 << width) if number >> (width - 1) else number


def _bits(value: float) -> int:
    """A number's 64 bits: Triton takes a float in 32."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


@triton.jit
def _philox(counter, key0, key1):
    """The four 64-bit words of each counter, in the order in which numpy gives them."""
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
    """The 32-bit numbers of 64-bit words, low half first."""
    return tl.interleave(word.to(tl.uint32), (word >> 32).to(tl.uint32))


@triton.jit
def _in_dim(row, size, apart, written):
    """Of elements numbered by `row`: their number in the dims outside this one, and where they are along it, in both memories."""
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
    """Numbers of a box of DIMS + 1 dims: `total` counters, `runs` of them for each of its runs of `run` numbers."""
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
    counter = ((first >> 3) + begin + 1).to(tl.uint64)  # numpy counts before it draws
    zero = zero.to(tl.uint64)
    w0, w1, w2, w3 = _philox(counter, zero + key0.to(tl.uint64), zero + key1.to(tl.uint64))
    drawn = _halves(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
    lane = tl.arange(0, 8)[None, :]
    place = begin[:, None] * 8 - (first & 7).to(tl.int32)[:, None] + lane  # in the run
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
