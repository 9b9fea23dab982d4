"""Ring attention by torch's kernels for CUDA, as doubled in `attention_kernels.py`: its results compared with one device."""

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from exact.test_ring import CASES, given, plain

from device.attention_kernels import CALLS, MODE
from plait.parallel.context import ring
from plait.tensors.rows import Rows

FORMATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def worst_of(case: str, dtype: torch.dtype, zigzag: bool) -> float:
    """Return the largest difference from one device, in float64, relative to the largest value there."""
    group = dist.group.WORLD
    tensors, how = given(case)
    upstream = torch.randn(
        plain(*tensors[:3], how).shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    output = plain(*tensors[:3], how)
    whole = torch.autograd.grad(output, tensors, upstream)
    cut = (Rows.make_zigzag if zigzag else Rows.make_even)(tensors[0].shape[2], group.size())
    mine = lambda t: cut.take_part(t, 2, group.rank())  # noqa: E731
    there = lambda t: t.to(dtype if t.is_floating_point() else t.dtype).to("cuda", non_blocking=True)  # noqa: E731
    local = [there(mine(t.detach()).clone()).requires_grad_() for t in tensors[:3]]
    mask, kept = (t if t is None or t.shape[-2] == 1 else mine(t) for t in (how["mask"], how["kept"]))
    learned = len(tensors) > 3
    mask = mask if mask is None else there(mask.detach().clone()).requires_grad_(learned)
    scores = ring.Scores(
        1 / math.sqrt(tensors[0].shape[-1]), how["causal"], mask, kept if kept is None else there(kept), learned
    )
    out = ring.compute_ring_attention(*local, scores, ring.Ring(group, cut))
    out.backward(there(mine(upstream)))
    pairs = [(out, mine(output)), *((t.grad, mine(w)) for t, w in zip(local, whole))]
    if learned:  # each rank has its rows of it, or a partial sum for the one row
        found = mask.grad.double()
        one = tensors[3].shape[-2] == 1
        if one:
            dist.all_reduce(found)
        pairs.append((found, whole[3] if one else mine(whole[3])))
    return max(float((a.detach().cpu().double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def kernels_used(dtype: str, lenient: bool = False, cudnn: bool = False) -> Any:
    """For each case, with contiguous and zigzag shards: the worst difference, and the kernels that were called."""
    found = {}
    with mock.patch.dict(MODE, lenient=lenient, cudnn=cudnn):
        for case in CASES:
            for zigzag in (False, True):
                CALLS.clear()
                worst = worst_of(case, FORMATS[dtype], zigzag)
                found[f"{case}{' zigzag' if zigzag else ''}"] = [worst, sorted(CALLS)]
    return found


def ring_float64(rank: int) -> Any:
    return kernels_used("float64", lenient=True)


def ring_float64_by_operators(rank: int) -> Any:
    return kernels_used("float64")


def ring_float32(rank: int) -> Any:
    return kernels_used("float32")


def ring_bfloat16(rank: int) -> Any:
    return kernels_used("bfloat16")


def ring_float16_by_cudnn(rank: int) -> Any:
    return kernels_used("float16", cudnn=True)


PROBES = (ring_float64, ring_float64_by_operators, ring_float32, ring_bfloat16, ring_float16_by_cudnn)
