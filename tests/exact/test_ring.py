"""Ring and Ulysses attention equal attention on one device, forward and backward, in float64."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from plait.config.plan import Plan
from plait.engine.traffic import Traffic
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.context import attention, ring
from plait.tensors.rows import Rows

CASES = (
    "full",
    "causal",
    "grouped",
    "padded",
    "packed",
    "bias",
    "learned",
    "one_row",
    "narrow_values",
    "dropout",
    "uneven",
)


def given(case: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return (queries, keys, values and other tensors with a gradient), and the mask and other arguments."""
    g = torch.Generator().manual_seed(CASES.index(case))
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()  # noqa: E731
    t, kv, width = (19 if case == "uneven" else 16), (2 if case in ("grouped", "packed") else 4), 8
    q, k, v = draw(2, 4, t, width), draw(2, kv, t, width), draw(2, kv, t, 6 if case == "narrow_values" else width)
    causal = case in ("causal", "grouped", "uneven", "dropout")
    mask, more = None, []
    if case == "padded":
        mask = torch.ones(2, 1, 1, t, dtype=torch.bool)
        mask[0, ..., 5:] = False
    elif case == "packed":  # documents, and rows in which all keys are masked
        document = torch.arange(t) // 5
        mask = ((document[:, None] == document) & (torch.arange(t)[:, None] >= torch.arange(t)))[None, None]
        mask = mask & (torch.arange(t) != 3)[:, None]
    elif case == "bias":
        mask = torch.randn(1, 4, t, t, generator=g, dtype=torch.float64)
    elif case == "learned":
        mask = draw(1, 4, t, t)
        more = [mask]
    elif case == "one_row":
        mask = draw(2, 1, 1, t)
        more = [mask]
    kept = None
    if case == "dropout":
        kept = (torch.rand(2, 4, t, t, generator=g) > 0.3).double() / 0.7
    return [q, k, v, *more], {"mask": mask, "causal": causal, "kept": kept}


def plain(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
    if how["kept"] is None:
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, how["mask"], is_causal=how["causal"], enable_gqa=grouped)
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (torch.softmax(scores, -1) * how["kept"]) @ v


def split(case: str, place: Place) -> dict[str, Any]:
    torch.set_num_threads(1)
    group = place.connect(torch.device("cpu"))
    rank, ranks = place.rank, place.world
    tensors, how = given(case)
    upstream = torch.randn(
        plain(*tensors[:3], how).shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    whole = torch.autograd.grad(plain(*tensors[:3], how), tensors, upstream)
    output = plain(*tensors[:3], how)
    worst, traffic = {}, Traffic(rank, Plan(cp=ranks))
    for name in ("ring", "zigzag", "ulysses"):
        cut = (Rows.make_zigzag if name == "zigzag" else Rows.make_even)(tensors[0].shape[2], ranks)
        mine = lambda t, cut=cut: cut.take_part(t, 2, rank)  # noqa: E731
        local = [mine(t.detach()).clone().requires_grad_() for t in tensors[:3]]
        mask, kept = how["mask"], how["kept"]
        scale = 1 / math.sqrt(tensors[0].shape[-1])
        if name == "ulysses":
            if case == "dropout" or tensors[0].shape[1] % ranks:
                continue
            exchange = attention.HeadExchange(group, cut)
            q, k, v = local[0], *(attention.repeat_kv_heads(t, local[0].shape[1], ranks) for t in local[1:])
            q, k, v = (exchange.exchange_for_heads(t) for t in (q, k, v))
            m = mask if mask is None or mask.dim() < 4 else exchange.take_local_heads(mask)
            out = exchange.exchange_for_rows(plain(q, k, v, {**how, "mask": m}))
        else:
            m = mask if mask is None or mask.shape[-2] == 1 else mine(mask)
            scores = ring.Scores(scale, how["causal"], m, None if kept is None else mine(kept), len(tensors) > 3)
            with traffic.watch():
                out = ring.compute_ring_attention(*local, scores, ring.Ring(group, cut))
        worst[name] = float((out - mine(output)).detach().abs().max())
        out.backward(mine(upstream))
        for t, w in zip(local, whole):
            worst[name] = max(worst[name], float((t.grad - mine(w)).abs().max()))
        if len(tensors) > 3:
            found = tensors[3].grad
            tensors[3].grad = None
            dist.all_reduce(found, group=group)
            worst[name] = max(worst[name], float((found - whole[3]).abs().max()))
    return {"worst": worst, "sent": traffic.total_by_op()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("case", CASES)
def test_equal(case: str, ranks: int) -> None:
    for result in fork.run_ranks(lambda place: split(case, place), ranks, fork.Listener(lambda *_: None)):
        assert all(w < 1e-12 for w in result["worst"].values()) and len(result["worst"]) >= 2, result


def test_work_is_balanced() -> None:
    """With zigzag, each rank computes the same number of products in each step, and no masked block."""

    class Group:
        def __init__(self, at: int):
            self.at = at

        def rank(self) -> int:
            return self.at

        def size(self) -> int:
            return 4

    cut = Rows.make_zigzag(64, 4)
    work = []
    for rank in range(4):
        mine = ring.Ring(Group(rank), cut)
        jobs = [[(len(range(16)[r]) * len(range(16)[c]), d) for r, c, d in mine.list_blocks(s, True)] for s in range(4)]
        assert all(len(j) == 1 for j in jobs)
        work.append(sorted(j[0] for j in jobs))
    assert all(w == work[0] for w in work) and work[0] == [(128, False)] * 3 + [(256, True)]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_sixteen_bits_without_a_kernel_come_near_thirty_two(dtype: torch.dtype) -> None:
    """As on a device without torch's kernel for CPUs, and for scores with dropout: sums are in float32."""
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 6, 8, generator=g).to(dtype) for _ in range(4))
    kept = (torch.rand(2, 4, 6, 6, generator=g) > 0.2).float() / 0.8
    found = []
    for wide in (False, True):
        tensors = [t.float() if wide else t for t in (q, k, v)]
        scores = ring.Scores(8**-0.5, True, kept=kept)
        out, lse = ring.ring_forward(*tensors, scores)
        given = out if wide else out.to(dtype)
        found.append([out, *ring.backward(grad.to(given.dtype), tuple(tensors), given, lse, scores)[:3]])
    for near, exact in zip(*found):
        assert near.dtype == torch.float32 and torch.allclose(near, exact, atol=0.05)


def test_a_mask_of_the_least_number_of_float32_hides_keys_in_sixteen_bits() -> None:
    """In 16 bits this value is minus infinity: a query with all keys of a block masked adds nothing from it."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 8, generator=g).bfloat16() for _ in range(3))
    mask = torch.zeros(1, 1, 8, 8).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    scores = ring.Scores(0.5, mask=mask)
    out, lse = ring.make_empty_output(q, v)
    for at in (slice(0, 4), slice(4, 8)):
        part = scores.select(slice(None), at, False)
        ring.merge_block(out, lse, ring.ring_forward(q, k[:, :, at], v[:, :, at], part))
    whole = F.scaled_dot_product_attention(*(t.float() for t in (q, k, v)), mask, scale=0.5)
    assert torch.allclose(out, whole, atol=2e-2), (out - whole).abs().max()
