"""Keyed numbers drawn where the tensor is: Philox 4x64-10 on any device, with the bits that numpy gives on the host.

A tensor on the CPU is drawn by numpy. A tensor on a device is drawn there, by one launch of a Triton kernel for each box of the
sub-block that the rank holds (`randomness/philox_kernel.py`): nothing is copied to the device, and the host does not wait.
Where there is no Triton, torch's own operators on 64-bit integers compute the same. Before a device's first numbers the
kernel is tried against numpy, once; were they unlike, operators would draw there.

Why 4x64 and not the 4x32 of torch's own generators: both pass the same tests of randomness, and numpy has 4x64 in C.
Made of numpy's or torch's operators, 4x32 is three to five times as slow on a CPU (docs/decisions/0026-keyed-numbers-on-devices.md).

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

from plait.randomness.sub_block import Axis, Box, boxes, pieces, sub_block

AT_ONCE = 2**21
"""Numbers that operators compute at a time: they need some twenty bytes for each, or eight times that where they lie apart."""
LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


class StreamPart(NamedTuple):
    """Which numbers of a stream a tensor is drawn from."""

    key: int
    start: int
    """The number of the stream at which the tensor begins whose sub-block is drawn."""
    axes: Sequence[Axis]
    """The dims of that tensor in the order of the stream, outermost first, and what is held of each."""
    strides: Sequence[int]
    """Of each axis in the memory of what is drawn, which is contiguous."""

    @classmethod
    def of(cls, key: int, start: int, axes: Sequence[Axis]) -> "StreamPart":
        """The numbers of a sub-block whose dims lie in memory in the order of the stream."""
        held = [sum(length for _, length in ranges) for _, ranges in axes]
        return cls(key, start, axes, [math.prod(held[i + 1 :]) for i in range(len(held))])


class Keep(NamedTuple):
    """What becomes of 32-bit numbers in a mask: `value` where they are from `low` to `high`, zero elsewhere."""

    low: int
    high: int
    value: float


def bits(philox_key: int, start: int, count: int) -> np.ndarray:
    """Elements start … start + count − 1 of the stream of that key, as uint32."""
    block, skip = divmod(start, 8)  # one Philox counter yields four 64-bit words, eight elements
    raw = Philox(key=philox_key, counter=block).random_raw((skip + count + 1) // 2)
    return raw.view(np.uint32)[skip : skip + count]


def dropping(p: float) -> Keep:
    """The mask of dropout: 1 / (1 − p) where a number is large enough."""
    return Keep(min(round(p * 2**32), LOW), LOW, 1.0 / (1.0 - p) if p < 1.0 else 0.0)


def staying(stays: float, dtype: torch.dtype) -> Keep:
    """The mask of attention's dropout as torch's operators draw it: 1 / `stays` where a uniform number is below `stays`."""
    below = math.ceil(Fraction(stays) * 2**32 - Fraction(1, 2))  # numbers w with (w + 0.5) / 2³² < stays
    if below <= 0:
        return Keep(0, LOW, 0.0)
    return Keep(0, below - 1, 1.0 / stays if dtype is torch.float64 else float(np.float32(1.0) / np.float32(stays)))


def mask(shape: torch.Size, numbers: StreamPart, keep: Keep, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask of keyed numbers, drawn on the device."""
    if device.type != "cpu":
        return _drawn(torch.empty(shape, dtype=dtype, device=device), numbers, keep)
    words = _on_host(numbers)
    kept = words >= np.uint32(keep.low)
    if keep.high < LOW:
        kept &= words <= np.uint32(keep.high)
    return torch.from_numpy(np.ascontiguousarray(kept)).reshape(shape).to(dtype).mul_(keep.value)


def uniform(shape: torch.Size, numbers: StreamPart, device: torch.device) -> Tensor:
    """Keyed numbers in the open interval (0, 1), in float64, drawn on the device."""
    if device.type != "cpu":
        return _drawn(torch.empty(shape, dtype=torch.float64, device=device), numbers, None)
    return torch.from_numpy(np.asarray((_on_host(numbers) + 0.5) * 2.0**-32)).reshape(shape)


def _on_host(numbers: StreamPart) -> np.ndarray:
    """The numbers as uint32, drawn by numpy, in the order of the tensor's memory."""
    stream, axes = partial(bits, numbers.key), numbers.axes
    if any(held != ((0, size),) for size, held in axes):
        drawn = sub_block(stream, numbers.start, axes)
    else:
        sizes = [size for size, _ in axes]
        drawn = stream(numbers.start, math.prod(sizes)).reshape(sizes)
    return drawn.transpose(sorted(range(drawn.ndim), key=lambda axis: -numbers.strides[axis]))


def _drawn(out: Tensor, numbers: StreamPart, keep: Keep | None) -> Tensor:
    by_kernel = kernel(out.device) if out.dtype in _FORMATS else None
    for box in boxes(numbers.start, numbers.axes, numbers.strides):
        (by_kernel or fill)(out, numbers.key, box, keep)
    return out


_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Fill = Callable[[Tensor, int, Box, Keep | None], None]
"""(tensor, key, box, keep): write the numbers of the box into the tensor."""


@cache
def kernel(device: torch.device) -> Fill | None:
    """The Triton kernel, when it runs on this device and draws what numpy draws there; None: operators do."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from plait.randomness.philox_kernel import fill as by_kernel

        tried, start = torch.empty(3, 5, dtype=torch.float64, device=device), 2**33 + 5
        by_kernel(tried, 1 << 127 | 7, Box(start, 0, ((3, 9, 5), (5, 1, 1))), None)
        expected = (bits(1 << 127 | 7, start, 27).reshape(3, 9)[:, :5] + 0.5) * 2.0**-32
        if np.array_equal(tried.cpu().numpy(), expected):
            return by_kernel
        why = "its numbers are not those of numpy"
    except Exception as error:  # a compiler that is missing, a device too old: Triton has many ways to say so
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"random numbers on {device} are drawn by operators, not by the Triton kernel: {why}", stacklevel=2)
    return None


def fill(out: Tensor, key: int, box: Box, keep: Keep | None) -> None:
    """What the kernel does, by torch's operators on 64-bit integers, which all devices have."""
    for one in pieces(box, AT_ONCE, len(box.dims)):
        sizes, strides = [d[0] for d in one.dims], [d[2] for d in one.dims]
        words = _words(key, one, out.device).view(sizes)
        target = out.as_strided(sizes, strides, out.storage_offset() + one.at)
        if keep is not None:
            target.copy_(((words >= keep.low) & (words <= keep.high)).to(out.dtype).mul_(keep.value))
        elif out.dtype is torch.float64:
            target.copy_((words.to(torch.float64) + 0.5) * 2.0**-32)
        else:
            target.copy_(words)


def _words(key: int, box: Box, device: torch.device) -> Tensor:
    """The 32-bit numbers of a box, as int64 of [runs, run]."""
    *outer, (run, _, _) = box.dims
    first = torch.full((1,), box.first, dtype=torch.int64, device=device)
    for size, apart, _ in outer:
        first = (first[:, None] + torch.arange(size, device=device) * apart).flatten()
    skip = first & 7
    counters = (box.first % 8 + run + 7) // 8 if not outer else (run + 14) // 8
    counter = ((first >> 3) + 1)[:, None] + torch.arange(counters, device=device)  # numpy counts before it draws
    drawn = torch.stack([half for word in _philox(counter, key) for half in (word & LOW, _upper(word))], -1).flatten(1)
    if not outer:
        return drawn[:, box.first % 8 : box.first % 8 + run]
    return drawn.gather(1, skip[:, None] + torch.arange(run, device=device))


def _philox(counter: Tensor, key: int) -> tuple[Tensor, ...]:
    """The four words of each counter. Products of int64 keep their lowest 64 bits, which have no sign."""
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter, zero, zero, zero
    keys = [key & (1 << 64) - 1, key >> 64]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(c, m) for c, m in zip((c0, c2), MULTIPLIERS))
        c0, c1, c2, c3 = high1 ^ c1 ^ _signed(keys[0]), low1, high0 ^ c3 ^ _signed(keys[1]), low0
        keys = [k + i & (1 << 64) - 1 for k, i in zip(keys, INCREMENTS)]
    return c0, c1, c2, c3


def _product(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of unsigned products, of halves whose products have 64 bits."""
    a, b, c, d = _upper(x), x & LOW, number >> 32, number & LOW
    ad, cb = a * d, b * c
    carried = _upper(b * d) + (ad & LOW) + (cb & LOW)
    return a * c + _upper(ad) + _upper(cb) + _upper(carried), x * _signed(number)


def _upper(x: Tensor) -> Tensor:
    return (x >> 32) & LOW


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
