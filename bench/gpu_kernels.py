"""Measures kernels that run only on a device: masks of keyed dropout, attention kernels of a ring, and fused optimizers.

Values are compared with numpy's bits, with attention of one device in float64, and with the optimizer's loop. Times are compared
with those of torch's own operator.
"""

from functools import partial
from typing import Any

import torch
from gpu_looks import Look, Row, Setting, timed
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from plait.parallel.context import attention_kernels, ring
from plait.parallel.context.attention_kernels import AttentionInputs, Scores
from plait.randomness import philox
from plait.randomness.philox import StreamPart

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {"CPU": "flash (CPU)", "FLASH": "flash", "EFFICIENT": "memory-efficient", "CUDNN": "cuDNN"}
APART = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
"""The allowed distance of attention in a format from float64, relative to the largest value: a few roundings of the format. This is no
proof; `plait verify` is one, in float64, where only plait's own kernels compute."""
GIGA = 1e9


def looks(setting: Setting) -> dict[str, Look]:
    found: dict[str, Look] = {"masks: bits": partial(mask_bits, setting)}
    for name in ("fp32", "bf16"):
        found[f"masks: {name}, of 1e9 elements"] = partial(mask_speed, setting, name)
    for name in ("bf16", "fp16", "fp32"):
        for causal in (True, False):
            found[f"attention: {name}, {'causal' if causal else 'in full'}"] = partial(attention, setting, name, causal)
    for kind in ("SGD", "Adam", "AdamW"):
        found[f"optimizer: {kind}"] = partial(optimizer, setting, kind)
    return found


# — masks —


def mask_bits(setting: Setting) -> Row:
    """Compare ten million values, offsets beyond 2^32, and sub-blocks: the bits of the device equal those of numpy."""
    count, tried = 10**7 if setting.gpu else 10**5, 0
    far, keep = 2**35 + 3, philox.make_dropout_range(0.1)
    parts = [
        ((count,), ((count, ((0, count),)),)),
        ((64, 3, 33), ((64, ((0, 64),)), (9, ((2, 3),)), (100, ((7, 33),)))),
        ((5, 40), ((11, ((1, 2), (6, 3))), (40, ((0, 40),)))),
    ]
    for shape, axes in parts:
        for start in (0, far):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                numbers = StreamPart.from_axes(1 << 100 | 12345, start, axes)
                here = philox.draw_mask_by(torch.Size(shape), numbers, keep, dtype, setting.device).cpu()
                there = philox.draw_mask_by(torch.Size(shape), numbers, keep, dtype, torch.device("cpu"))
                assert torch.equal(here, there), f"{shape} from {start} in {dtype}: not numpy's bits"
                tried += here.numel()
    by = "Triton kernel" if philox.load_kernel(setting.device) is not None else "numpy" if not setting.gpu else ""
    assert by, "the Triton kernel is not used on this device: see the warning above"
    return {"saw": f"{by}: equal in {tried:,} numbers"}


def mask_speed(setting: Setting, name: str) -> Row:
    """Measure seconds for 10^9 elements and the bytes written, against torch's own dropout of the same size."""
    dtype, count = FORMATS[name], 2**27 if setting.gpu else 2**16
    numbers, keep = StreamPart.from_axes(7, 0, ((count, ((0, count),)),)), philox.make_dropout_range(0.1)
    took = timed(lambda: philox.draw_mask_by(torch.Size((count,)), numbers, keep, dtype, setting.device), setting, 0.3)
    x = torch.ones(count, dtype=dtype, device=setting.device)
    own = timed(lambda: dropout(x, 0.1), setting, 0.3)
    written = count * x.element_size()
    return {
        "ms": took / count * GIGA * 1e3,
        "GB/s": written / took / GIGA,
        "torch's dropout ms": own / count * GIGA * 1e3,
    }


# — attention —


def attention(setting: Setting, name: str, causal: bool) -> Row:
    """Compare forward and backward over two blocks of keys, as a ring of two ranks sums them, with one device in float64."""
    batch, heads, length, width = (2, 16, 4096, 128) if setting.gpu else (1, 2, 64, 16)
    torch.manual_seed(1)
    made = lambda n: torch.randn(batch, heads, n, width, device=setting.device).to(FORMATS[name])  # noqa: E731
    small = min(length, 1024)
    kernel = _named(made(small), causal)
    q, k, v, grad = (made(small) for _ in range(4))
    found, exact = _ring(q, k, v, grad, causal), _whole(*(t.double() for t in (q, k, v, grad)), causal)
    apart = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact))
    assert apart < APART[name], f"{kernel}: {apart:.1e} from one device in float64"
    q, k, v, grad = (made(length) for _ in range(4))
    took = timed(lambda: _ring(q, k, v, grad, causal, 1), setting, 0.2)
    own = timed(lambda: _whole(q, k, v, grad, causal), setting, 0.2)
    flops = 14 * batch * heads * length**2 * width / (2 if causal else 1)
    row = {"kernel": kernel, "apart": f"{apart:.1e}", "ms": took * 1e3, "torch's attention ms": own * 1e3}
    return row | {"TFLOP/s": flops / took / 1e12}


def _named(t: Tensor, causal: bool) -> str:
    """Return the name of the kernel that plait uses."""
    chosen = attention_kernels.choose_kernel(t, t, t, Scores(t.shape[-1] ** -0.5, causal))
    return next(
        (told for name, told in NAMES.items() if getattr(attention_kernels, name) is chosen),
        "none: plait's own products",
    )


def _ring(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, ranks: int = 2) -> list[Tensor]:
    """Compute output and gradients, block by block of queries and keys."""
    scale, results = q.shape[-1] ** -0.5, []
    blocks = [t.chunk(ranks, 2) for t in (q, k, v, grad)]
    into = [[torch.zeros_like(t, dtype=ring.get_sum_dtype(t.dtype)) for t in blocks[n]] for n in (1, 2)]
    for i, (mine, given) in enumerate(zip(blocks[0], blocks[3])):
        out, lse = ring.make_empty_output(mine, blocks[2][0])
        seen = [(j, Scores(scale, causal and i == j)) for j in range(ranks) if not causal or j <= i]
        for j, scores in seen:
            ring.merge_block(out, lse, ring.ring_forward(mine, blocks[1][j], blocks[2][j], scores))
        dq = torch.zeros_like(mine, dtype=ring.get_sum_dtype(mine.dtype))
        for j, scores in seen:
            parts = ring.backward(given, AttentionInputs(mine, blocks[1][j], blocks[2][j]), out.to(mine.dtype), lse, scores)
            for to, part in zip((dq, into[0][j], into[1][j]), parts):
                to += part
        results.append((out, dq))
    outs, dqs = zip(*results)
    return [torch.cat(outs, 2), torch.cat(dqs, 2), torch.cat(into[0], 2), torch.cat(into[1], 2)]


def _whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """Compute output and gradients with torch's attention."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


# — optimizers —


def optimizer(setting: Setting, kind: str) -> Row:
    """Compare the weights of the three forms of an update, and measure the bytes that the fused one reads and writes."""
    shapes = [(768, 3072), (3072, 768), (768, 768), (768,)] * 36 if setting.gpu else [(32, 8), (8,)] * 4
    times, left = {}, {}
    for form in ("loop", "foreach", "fused"):
        torch.manual_seed(1)
        weights = [torch.nn.Parameter(torch.randn(shape, device=setting.device)) for shape in shapes]
        how: dict[str, Any] = {"foreach": form == "foreach"} | ({"fused": True} if form == "fused" else {})
        if form == "fused":
            how.pop("foreach")
        made = getattr(torch.optim, kind)(weights, lr=1e-3, **how)
        for each in weights:
            each.grad = torch.ones_like(each)
        made.step()
        left[form] = [each.detach().clone() for each in weights]
        times[form] = timed(made.step, setting, 0.1)
    for form in ("foreach", "fused"):
        torch.testing.assert_close(left[form], left["loop"], rtol=1e-5, atol=1e-6)
    moved = sum(torch.Size(shape).numel() for shape in shapes) * 4 * (3 if kind == "SGD" else 7)
    row: Row = {f"{form} ms": took * 1e3 for form, took in times.items()}
    return row | {"fused GB/s": moved / times["fused"] / GIGA}
