"""Keyed random numbers drawn on the tensor's device: Philox 4x64-10, with the same bits as numpy on any device.

numpy draws tensors on the CPU. On a device, one launch of a Triton kernel draws each box of the rank's sub-block
(`randomness/philox_kernel.py`). Nothing is copied to the device, and the host does not wait. Without Triton, torch's
own operators on 64-bit integers compute the same. Before the first draw on a device, the kernel is compared with numpy
once. If they differ, torch's operators draw there.

[Note: 4x64]
torch's own generators are 4x32. Both pass the same randomness tests, and numpy implements 4x64 in C. On a CPU, 4x32
made of numpy's or torch's operators is three to five times as slow (docs/decisions/0026-keyed-numbers-on-devices.md).

Paper
    Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3 (SC).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from plait.randomness.sub_block import Axis, Box, draw_sub_block, iter_boxes, split_box

NUMBERS_AT_ONCE = 2**21
"""Numbers that torch's operators compute at a time. They need about twenty bytes per number, or eight times that for
scattered ones."""
LOW_32_BITS = 0xFFFFFFFF
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


class StreamPart(NamedTuple):
    """The numbers of a stream that a tensor is drawn from."""

    key: int
    start: int
    """Position in the stream of the tensor whose sub-block is drawn."""
    axes: Sequence[Axis]
    """Dims of that tensor in the order of the stream, outermost first, with the local ranges of each."""
    strides: Sequence[int]
    """Stride of each axis in the contiguous memory of the drawn tensor."""

    @classmethod
    def from_axes(cls, key: int, start: int, axes: Sequence[Axis]) -> "StreamPart":
        """Make the part for a sub-block whose dims are in memory in the order of the stream."""
        held = [sum(length for _, length in ranges) for _, ranges in axes]
        return cls(key, start, axes, [math.prod(held[i + 1 :]) for i in range(len(held))])


class KeepRange(NamedTuple):
    """Rule of a mask for 32-bit numbers: `value` from `low` to `high`, zero otherwise."""

    low: int
    high: int
    value: float


def draw_bits(philox_key: int, start: int, count: int) -> np.ndarray:
    """Return elements start … start + count − 1 of the stream of a key, as uint32."""
    block, skip = divmod(start, 8)  # one Philox counter yields four 64-bit words: eight elements
    raw = Philox(key=philox_key, counter=block).random_raw((skip + count + 1) // 2)
    return raw.view(np.uint32)[skip : skip + count]


def make_dropout_range(p: float) -> KeepRange:
    """Return the rule of a dropout mask: 1 / (1 − p) for sufficiently large numbers."""
    return KeepRange(min(round(p * 2**32), LOW_32_BITS), LOW_32_BITS, 1.0 / (1.0 - p) if p < 1.0 else 0.0)


def make_attention_range(stays: float, dtype: torch.dtype) -> KeepRange:
    """Return the rule of attention dropout as in torch's operators: 1 / `stays` if a uniform number is below `stays`."""
    below = math.ceil(Fraction(stays) * 2**32 - Fraction(1, 2))  # numbers w with (w + 0.5) / 2³² < stays
    if below <= 0:
        return KeepRange(0, LOW_32_BITS, 0.0)
    return KeepRange(0, below - 1, 1.0 / stays if dtype is torch.float64 else float(np.float32(1.0) / np.float32(stays)))


def draw_mask_by(shape: torch.Size, numbers: StreamPart, keep: KeepRange, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw a mask of keyed numbers on the device."""
    if device.type != "cpu":
        return _draw_on_device(torch.empty(shape, dtype=dtype, device=device), numbers, keep)
    words = _draw_on_host(numbers)
    kept = words >= np.uint32(keep.low)
    if keep.high < LOW_32_BITS:
        kept &= words <= np.uint32(keep.high)
    return torch.from_numpy(np.ascontiguousarray(kept)).reshape(shape).to(dtype).mul_(keep.value)


def draw_uniform(shape: torch.Size, numbers: StreamPart, device: torch.device) -> Tensor:
    """Draw keyed numbers in the open interval (0, 1), in float64, on the device."""
    if device.type != "cpu":
        return _draw_on_device(torch.empty(shape, dtype=torch.float64, device=device), numbers, None)
    return torch.from_numpy(np.asarray((_draw_on_host(numbers) + 0.5) * 2.0**-32)).reshape(shape)


def _draw_on_host(numbers: StreamPart) -> np.ndarray:
    """Draw the numbers by numpy as uint32, in the order of the tensor's memory."""
    stream, axes = partial(draw_bits, numbers.key), numbers.axes
    if any(held != ((0, size),) for size, held in axes):
        drawn = draw_sub_block(stream, numbers.start, axes)
    else:
        sizes = [size for size, _ in axes]
        drawn = stream(numbers.start, math.prod(sizes)).reshape(sizes)
    return drawn.transpose(sorted(range(drawn.ndim), key=lambda axis: -numbers.strides[axis]))


def _draw_on_device(out: Tensor, numbers: StreamPart, keep: KeepRange | None) -> Tensor:
    by_kernel = load_kernel(out.device) if out.dtype in _FORMATS else None
    for box in iter_boxes(numbers.start, numbers.axes, numbers.strides):
        (by_kernel or fill_by_operators)(out, numbers.key, box, keep)
    return out


_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Fill = Callable[[Tensor, int, Box, KeepRange | None], None]
"""(tensor, key, box, keep): writes the numbers of the box into the tensor."""


@cache
def load_kernel(device: torch.device) -> Fill | None:
    """Return the Triton kernel if it works on this device and equals numpy, or None."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from plait.randomness.philox_kernel import launch_kernel as by_kernel

        tried, start = torch.empty(3, 5, dtype=torch.float64, device=device), 2**33 + 5
        by_kernel(tried, 1 << 127 | 7, Box(start, 0, ((3, 9, 5), (5, 1, 1))), None)
        expected = (draw_bits(1 << 127 | 7, start, 27).reshape(3, 9)[:, :5] + 0.5) * 2.0**-32
        if np.array_equal(tried.cpu().numpy(), expected):
            return by_kernel
        why = "its numbers differ from numpy's"
    except Exception as error:  # such as a missing compiler or an old device: Triton raises various exceptions
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"random numbers on {device} are drawn by torch's operators instead of the Triton kernel: {why}", stacklevel=2)
    return None


def fill_by_operators(out: Tensor, key: int, box: Box, keep: KeepRange | None) -> None:
    """Write the numbers of a box like the kernel, by torch's operators on 64-bit integers, which all devices have."""
    for one in split_box(box, NUMBERS_AT_ONCE, len(box.dims)):
        sizes, strides = [d[0] for d in one.dims], [d[2] for d in one.dims]
        words = _compute_words(key, one, out.device).view(sizes)
        target = out.as_strided(sizes, strides, out.storage_offset() + one.at)
        if keep is not None:
            target.copy_(((words >= keep.low) & (words <= keep.high)).to(out.dtype).mul_(keep.value))
        elif out.dtype is torch.float64:
            target.copy_((words.to(torch.float64) + 0.5) * 2.0**-32)
        else:
            target.copy_(words)


def _compute_words(key: int, box: Box, device: torch.device) -> Tensor:
    """Return the 32-bit numbers of a box, as int64 of shape [runs, run]."""
    *outer, (run, _, _) = box.dims
    first = torch.full((1,), box.first, dtype=torch.int64, device=device)
    for size, apart, _ in outer:
        first = (first[:, None] + torch.arange(size, device=device) * apart).flatten()
    skip = first & 7
    counters = (box.first % 8 + run + 7) // 8 if not outer else (run + 14) // 8
    counter = ((first >> 3) + 1)[:, None] + torch.arange(counters, device=device)  # numpy increments the counter before it draws
    drawn = torch.stack([half for word in _philox(counter, key) for half in (word & LOW_32_BITS, _upper_half(word))], -1).flatten(1)
    if not outer:
        return drawn[:, box.first % 8 : box.first % 8 + run]
    return drawn.gather(1, skip[:, None] + torch.arange(run, device=device))


def _philox(counter: Tensor, key: int) -> tuple[Tensor, ...]:
    """Return the four words of each counter. Products of int64 keep their lowest 64 bits, which are the same for
    unsigned integers."""
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter, zero, zero, zero
    keys = [key & (1 << 64) - 1, key >> 64]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_multiply_64_bits(c, m) for c, m in zip((c0, c2), MULTIPLIERS))
        c0, c1, c2, c3 = high1 ^ c1 ^ _as_signed(keys[0]), low1, high0 ^ c3 ^ _as_signed(keys[1]), low0
        keys = [k + i & (1 << 64) - 1 for k, i in zip(keys, INCREMENTS)]
    return c0, c1, c2, c3


def _multiply_64_bits(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of unsigned products, computed from 32-bit halves."""
    a, b, c, d = _upper_half(x), x & LOW_32_BITS, number >> 32, number & LOW_32_BITS
    ad, cb = a * d, b * c
    carried = _upper_half(b * d) + (ad & LOW_32_BITS) + (cb & LOW_32_BITS)
    return a * c + _upper_half(ad) + _upper_half(cb) + _upper_half(carried), x * _as_signed(number)


def _upper_half(x: Tensor) -> Tensor:
    return (x >> 32) & LOW_32_BITS


def _as_signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
