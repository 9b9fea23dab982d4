"""Faults from outside, in the order of a training step: data, forward, messages, backward, sums, optimizer.

`ALL` is the table: each changes torch in the ranks of a split run (`faulty.py`) and says what is true of it. Positions in
a message of gradients are those of the parameters of `jobs_faulty.Net`, last parameter first.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs_faulty as jobs
import torch
import torch.distributed as dist
from faulty import (
    Fault,
    Patches,
    Truth,
    all_reduce,
    all_to_all,
    batched,
    of_shape,
    optimizer_step,
    rank,
    received,
)
from torch import Tensor
from torch.nn import functional as F

ALL: list[Fault] = []
SPANS = {"last.bias": (0, 1), "last.weight": (1, 8), "mid.bias": (8, 15), "mid.weight": (15, 78), "first.bias": (78, 87),
         "first.weight": (87, 141), "": (0, 141)}  # fmt: skip
FIRST = ("first.weight",)
DP, FSDP, TP, CP, PP = "dp=2", "fsdp=2", "tp=2", "cp=2", "pp=2 microbatches=3"
PLAIN = "tp=2 sequence_parallel=false"
Patch = Callable[[Patches], None]


def fault(name: str, job: Any, plan: str, truth: Truth, *also: str) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        ALL.append(Fault(name, job, plan, patch, truth, also))
        return patch

    return add


def flat(t: Tensor) -> bool:
    """The gradients of `Net` in one message."""
    return t.dim() == 1 and t.numel() > 141


# — sums of gradients over copies —


def summed(name: str, of: str, change: Callable[[Tensor, Tensor], None], **where: Any) -> None:
    """A fault in the sum over copies of one parameter's gradient (or all): `change(its sum, what this rank gave)`."""
    first, end = SPANS[of]
    step, only = where.pop("step", 1), where.pop("only", None)

    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor, given: Tensor) -> None:
            if n + 1 >= step and only in (None, rank()):
                change(t[first:end], given[first:end])

        all_reduce(patches, flat, changed)

    truth = Truth("reduction", (of,) if of else FIRST, axis="dp", rank=only, step=step)
    ALL.append(Fault(name, jobs.net, DP, patch, truth))


summed("the sum of one parameter is dropped", "mid.weight", lambda t, own: t.copy_(own))
summed("the sum of one parameter is dropped on one rank", "mid.weight", lambda t, own: t.copy_(own), only=1)
summed("the sum of one parameter is doubled", "first.weight", lambda t, own: t.mul_(2))
summed("the sum of one parameter is scaled", "last.bias", lambda t, own: t.mul_(1.5))
summed("a mean where a sum belongs", "", lambda t, own: t.div_(2))
summed("the sums are doubled from step 3 on", "mid.weight", lambda t, own: t.mul_(2), step=3)
summed("no sum at all from step 2 on", "", lambda t, own: t.copy_(own), step=2)
summed("a sum is off by a millionth", "mid.weight", lambda t, own: t.mul_(1 + 1e-6))
summed("a sum is rounded to fp32", "mid.weight", lambda t, own: t.copy_(t.float().double()))
summed("a sum is rounded to bf16", "mid.weight", lambda t, own: t.copy_(t.bfloat16().double()))
summed("a sum is in another order", "mid.weight", lambda t, own: t.copy_(t.flip(0)))
summed("a sum is zero", "mid.bias", lambda t, own: t.zero_())
summed("a sum is zero on one rank from step 3 on", "mid.bias", lambda t, own: t.zero_(), only=1, step=3)
summed("one element of a sum is lost", "first.weight", lambda t, own: t[7:8].zero_())
summed("a sum has the wrong sign", "last.weight", lambda t, own: t.neg_())


@fault("rank 1 gives nothing to the sum", jobs.net, DP, Truth("reduction", FIRST, axis="dp"))
def _(patches: Patches) -> None:
    all_reduce(patches, flat, lambda n, t, own: None, before=lambda n, t, own: t[:141].zero_() if rank() == 1 else None)


@fault("rank 1 gives twice to the sum of a parameter", jobs.net, DP, Truth("reduction", ("mid.weight",), axis="dp"))
def _(patches: Patches) -> None:
    all_reduce(
        patches, flat, lambda n, t, own: None, before=lambda n, t, own: t[15:78].mul_(2) if rank() == 1 else None
    )


@fault("the largest instead of the sum", jobs.net, DP, Truth("reduction", FIRST, axis="dp"))
def _(patches: Patches) -> None:
    def around(real: Any, t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not flat(t):
            return real(t, *args, **kwargs)
        rest = t[141:].clone()
        work = real(t, *args, **{**kwargs, "op": dist.ReduceOp.MAX, "async_op": False})
        real(rest, *args, **{**kwargs, "async_op": False})
        t[141:] = rest
        return _Done() if kwargs.get("async_op") else work

    patches.wrap(dist, "all_reduce", around)


class _Done:
    def wait(self, *timeout: Any) -> None: ...


@fault("a sum is that of the step before", jobs.net, DP, Truth("reduction", ("mid.weight",), axis="dp", step=2))
def _(patches: Patches) -> None:
    kept: list[Tensor] = []

    def change(n: int, t: Tensor, own: Tensor) -> None:
        now = t[15:78].clone()
        if kept:
            t[15:78] = kept.pop()
        kept.append(now)

    all_reduce(patches, flat, change)


@fault("copies of shards are not summed", jobs.net, "dp=2 fsdp=2", Truth("reduction", FIRST, axis="dp"))
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() in (35, 40, 8), lambda n, t, own: t.copy_(own), size=2)


@fault("one copy's shards are summed twice", jobs.net, "dp=2 fsdp=2", Truth("reduction", ("mid.weight",), axis="dp"))
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() == 40, lambda n, t, own: t.add_(own), size=2)


@fault("slices are not summed over copies", jobs.text, "dp=2 tp=2", Truth("reduction", ("embed.weight",), axis="dp"))
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() > 60, lambda n, t, own: t.copy_(own), ranks=([0, 2], [1, 3]))


@fault("norms on stretches are not summed", jobs.text, TP, Truth("reduction", ("blocks.0.norm1",), axis="tp"))
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.dim() == 1 and t.numel() > 60, lambda n, t, own: t.copy_(own))


@fault(
    "norms on stretches are not summed on rank 1",
    jobs.text,
    TP,
    Truth("reduction", ("blocks.0.norm1",), axis="tp", rank=1),
)
def _(patches: Patches) -> None:
    shared = lambda t: t.dim() == 1 and t.numel() > 60  # noqa: E731
    all_reduce(patches, shared, lambda n, t, own: t.copy_(own) if rank() == 1 else None)


@fault("stretches' gradients are not summed", jobs.text, CP, Truth("reduction", ("embed.weight",), axis="cp"))
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() > 1000, lambda n, t, own: t[:1640].copy_(own[:1640]))


@fault("stretches' gradients are averaged", jobs.text, CP, Truth("reduction", ("embed.weight",), axis="cp"))
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() > 1000, lambda n, t, own: t[:1640].div_(2))


@fault(
    "the tied weight's gradient is not summed over stages",
    jobs.text,
    PP,
    Truth("reduction", ("embed.weight",), axis="pp"),
)
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() == 137, lambda n, t, own: t.copy_(own))


@fault("the tied weight's gradient is doubled from step 3 on", jobs.text, PP,
       Truth("reduction", ("embed.weight",), axis="pp", step=3))  # fmt: skip
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() == 137, lambda n, t, own: t[:136].mul_(2) if n >= 2 else None)


# — parts of gradients, gathered and summed by messages —


def scattered(
    name: str, size: int, of: str, change: Callable[[Tensor], Any], only: int | None = 0, step: int = 1
) -> None:
    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor) -> None:
            if only in (None, rank()) and n + 1 >= step:
                change(t)

        received(patches, lambda t, tag: t.numel() == size and 16384 < tag < 32768, changed)

    ALL.append(Fault(name, jobs.net, FSDP, patch, Truth("reduction", (of,), axis="fsdp", rank=only, step=step)))


scattered("a part of the gradient is lost", 40, "mid.weight", lambda t: t.zero_())
scattered("a part of the gradient counts twice", 40, "mid.weight", lambda t: t.mul_(2), only=None)
scattered("parts of the gradient are swapped", 35, "first.weight", lambda t: t.copy_(t.flip(0)))
scattered("a part of the gradient is lost from step 2 on", 8, "last.weight", lambda t: t.zero_(), step=2)
scattered("a part of the gradient is off by a millionth", 35, "first.weight", lambda t: t.mul_(1 + 1e-6))


def gathered(name: str, size: int, unit: str, change: Callable[[Tensor, dict[str, Tensor]], Any], **where: Any) -> None:
    only, step = where.get("only", 0), where.get("step", 1)

    def patch(patches: Patches) -> None:
        kept: dict[str, Tensor] = {}

        def changed(n: int, t: Tensor) -> None:
            if only in (None, rank()) and n // 2 + 1 >= step:
                change(t, kept)

        received(patches, lambda t, tag: t.numel() == size and tag < 16384, changed)

    truth = Truth("gather", (*FIRST, f"{unit}.weight"), (unit,), "fsdp", only, step=step)
    ALL.append(Fault(name, jobs.net, FSDP, patch, truth))


def _stale(t: Tensor, kept: dict[str, Tensor]) -> None:
    """What came in the step before: each comes twice in a step."""
    rows = kept.setdefault("rows", t.new_zeros(0, t.numel()))
    kept["rows"] = torch.cat([rows, t[None].clone()])
    if len(rows) >= 2:
        t.copy_(rows[-2])


gathered("a gathered part is zero", 40, "mid", lambda t, k: t.zero_())
gathered("a gathered part is in another order", 35, "first", lambda t, k: t.copy_(t.flip(0)))
gathered("a gathered part is off by a millionth", 40, "mid", lambda t, k: t.mul_(1 + 1e-6))
gathered("a gathered part is zero from step 2 on", 35, "first", lambda t, k: t.zero_(), only=None, step=2)


@fault(
    "a gathered part is that of the step before",
    jobs.net,
    FSDP,
    Truth("gather", (*FIRST, "mid.weight"), ("mid",), "fsdp", 1, step=2),
)
def _(patches: Patches) -> None:
    kept: dict[str, Tensor] = {}
    received(
        patches, lambda t, tag: t.numel() == 40 and tag < 16384, lambda n, t: _stale(t, kept) if rank() == 1 else None
    )


@fault(
    "FSDP2's gathered weight is scaled on one rank",
    jobs.net,
    FSDP,
    Truth("gather", FIRST, ("mid",), "fsdp", 1),
    "forward",
)
def _(patches: Patches) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def around(real: Any, self: Any) -> Any:
        result = real(self)
        for p in self.fsdp_params:
            if rank() == 1 and tuple(p.unsharded_param.shape) == (7, 9):
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p.unsharded_param):
                    p.unsharded_param.data.mul_(1.01)
        return result

    patches.wrap(FSDPParamGroup, "wait_for_unshard", around)


# — micro-batches —


def backwards(name: str, plan: str, factor: Callable[[int, int], float], truth: Truth) -> None:
    """`factor(number of the micro-batch, rank)` on what a backward pass starts from."""
    each = int(plan.rpartition("=")[2])

    def patch(patches: Patches) -> None:
        count = [0]

        def around(real: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
            n = count[0]
            count[0] += 1
            real(self * factor(n % each, rank()), *args, **kwargs)

        patches.wrap(Tensor, "backward", around)

    ALL.append(Fault(name, jobs.net, plan, patch, truth))


THREE = "dp=2 microbatches=3"
backwards("a micro-batch is lost on one rank", THREE, lambda m, r: 0.0 if (m, r) == (1, 1) else 1.0,
          Truth("loss", FIRST, rank=1, micro=1))  # fmt: skip
backwards("a micro-batch counts twice", THREE, lambda m, r: 2.0 if m == 2 else 1.0, Truth("loss", FIRST, micro=2))
backwards("micro-batches are averaged once more", THREE, lambda m, r: 1 / 3, Truth("loss", FIRST))
backwards(
    "a rank's loss is off by a millionth",
    "dp=2 microbatches=1",
    lambda m, r: 1 + 1e-6 * r,
    Truth("loss", FIRST, rank=1),
)
backwards(
    "ranks of unequal shares count alike", "dp=2 microbatches=1", lambda m, r: (5 / 6, 5 / 4)[r], Truth("loss", FIRST)
)
backwards("the loss is summed over ranks", "fsdp=2 microbatches=1", lambda m, r: 2.0, Truth("loss", FIRST))
backwards("the loss has the wrong sign in one micro-batch", "fsdp=2 microbatches=2",
          lambda m, r: -1.0 if (m, r) == (0, 1) else 1.0, Truth("loss", FIRST, rank=1, micro=0))  # fmt: skip


@fault(
    "the last micro-batch overwrites a parameter's gradient", jobs.net, THREE, Truth("accumulation", ("mid.weight",))
)
def _(patches: Patches) -> None:
    def around(real: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for p in leaves(self):
            if tuple(p.shape) == (7, 9) and p.grad is not None:
                p.grad.zero_()
        real(self, *args, **kwargs)

    patches.wrap(Tensor, "backward", around)


def leaves(loss: Tensor) -> list[Tensor]:
    """The parameters that a loss was made of."""
    found, todo, seen = [], [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [one for one, _ in node.next_functions]
    return found


@fault("one rank's first micro-batch is overwritten", jobs.net, THREE, Truth("accumulation", FIRST, rank=1))
def _(patches: Patches) -> None:
    count = [0]

    def around(real: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        n = count[0]
        count[0] += 1
        if n % 3 == 1 and rank() == 1:
            for p in leaves(self):
                if p.grad is not None:
                    p.grad.zero_()
        real(self, *args, **kwargs)

    patches.wrap(Tensor, "backward", around)


# — what torch computes, on one rank —


def function(name: str, job: Any, plan: str, what: tuple[Any, str], around: Any, truth: Truth, *also: str) -> None:
    ALL.append(Fault(name, job, plan, lambda patches: patches.wrap(*what, around), truth, also))


def _linear(shape: tuple[int, int], change: Callable[[Tensor], Tensor], only: int) -> Any:
    def around(real: Any, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        out = real(x, weight, bias)
        return change(out) if tuple(weight.shape) == shape and rank() == only and x.requires_grad | True else out

    return around


function("a linear map is off by a millionth on one rank", jobs.net, DP, (F, "linear"),
         _linear((7, 9), lambda y: y * (1 + 1e-6), 1), Truth("forward", FIRST, ("mid",), rank=1))  # fmt: skip
function("a linear map forgets a row", jobs.net, FSDP, (F, "linear"),
         _linear((7, 9), lambda y: torch.cat([y[:-1], y[-1:] * 0]), 0), Truth("forward", FIRST, ("mid",), rank=0))  # fmt: skip


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return grad * ctx.factor, None


function("a linear map's gradient is scaled", jobs.net, DP, (F, "linear"),
         _linear((7, 9), lambda y: _Scaled.apply(y, 0.5), 1), Truth("backward", FIRST, ("mid", "first"), rank=1), "weights")  # fmt: skip
function("a gradient's rows are permuted", jobs.text, DP, (F, "gelu"),
         lambda real, x, *a, **k: _Flipped.apply(real(x, *a, **k)) if rank() == 0 else real(x, *a, **k),
         Truth("backward", ("embed.weight",), ("blocks.2", "blocks.1"), rank=0))  # fmt: skip


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return grad.flip(0)


function("a layer norm has another epsilon on one rank", jobs.text, DP, (F, "layer_norm"),
         lambda real, x, shape, weight=None, bias=None, eps=1e-5: real(x, shape, weight, bias, eps * (1 + rank())),
         Truth("forward", ("embed.weight",), ("blocks.0",), rank=1))  # fmt: skip
function("the mask of attention is forgotten on one rank", jobs.text, DP, (F, "scaled_dot_product_attention"),
         lambda real, q, k, v, *a, **kw: real(q, k, v, *a, **{**kw, "is_causal": kw.get("is_causal") and rank() == 0}),
         Truth("forward", ("embed.weight",), ("blocks.0",), rank=1))  # fmt: skip
function("the loss is a sum on one rank", jobs.net, DP, (F, "mse_loss"),
         lambda real, x, y, **k: real(x, y, reduction="sum") if rank() == 1 else real(x, y), Truth("loss", FIRST, rank=1))  # fmt: skip


# — slices —


def shares(
    name: str, plan: str, number: int, change: Callable[[Tensor, Tensor], Any], truth: Truth, step: int = 1
) -> None:
    """A fault in the all-reduce of what slices computed: the `number`th of the 14 of a step."""

    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor, own: Tensor) -> None:
            if n % 14 == number and n // 14 + 1 >= step:
                change(t, own)

        all_reduce(patches, lambda t: t.dim() == 3, changed)

    ALL.append(Fault(name, jobs.text, plan, patch, replace(truth, axis="tp", step=step)))


def _on(only: int, change: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    return lambda t, own: change(t, own) if rank() == only else None


EMBED = ("embed.weight",)
shares(
    "the sum of a block's slices is dropped",
    PLAIN,
    3,
    lambda t, own: t.copy_(own),
    Truth("forward", EMBED, ("blocks.1",)),
)
shares(
    "the sum of a block's slices is doubled", PLAIN, 6, lambda t, own: t.mul_(2), Truth("forward", EMBED, ("blocks.2",))
)
shares(
    "the sum of an embedding's rows is dropped",
    PLAIN,
    0,
    lambda t, own: t.copy_(own),
    Truth("forward", EMBED, ("embed",)),
)
shares("a sum of slices is off by a millionth on rank 1", PLAIN, 1, _on(1, lambda t, own: t.mul_(1 + 1e-6)),
       Truth("forward", EMBED, ("blocks.0",)))  # fmt: skip
shares(
    "a sum of slices is doubled from step 3 on",
    PLAIN,
    4,
    lambda t, own: t.mul_(2),
    Truth("forward", EMBED, ("blocks.1",)),
    3,
)
shares("the backward sum of a block is dropped", PLAIN, 9, lambda t, own: t.copy_(own),
       Truth("backward", EMBED, ("blocks.1", "blocks.2")))  # fmt: skip
shares(
    "the backward sum of a head is dropped",
    PLAIN,
    7,
    lambda t, own: t.copy_(own),
    Truth("backward", EMBED, ("norm", "head")),
)
shares("the backward sum of a block is doubled on rank 1", PLAIN, 12, _on(1, lambda t, own: t.mul_(2)),
       Truth("backward", EMBED, ("blocks.0",)))  # fmt: skip


def stretches(name: str, number: int, change: Callable[[Tensor], Any], only: int, truth: Truth) -> None:
    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor) -> None:
            if n % 28 == number and rank() == only:
                change(t)

        received(patches, lambda t, tag: t.dim() == 3 and tag == 65536, changed)

    ALL.append(Fault(name, jobs.text, TP, patch, replace(truth, axis="tp")))


stretches(
    "a gathered stretch is in another order", 1, lambda t: t.copy_(t.flip(1)), 0, Truth("forward", EMBED, ("blocks.0",))
)
stretches("a gathered stretch is zero", 7, lambda t: t.zero_(), 1, Truth("forward", EMBED, ("blocks.1",)))
stretches("a share of a stretch's sum is lost", 4, lambda t: t.zero_(), 0, Truth("forward", EMBED, ("blocks.0",)))
stretches(
    "a share of an embedding's sum is lost", 0, lambda t: t.zero_(), 1, Truth("forward", EMBED, ("embed", "blocks.0"))
)


@fault("a vocabulary's largest is a rank's own", jobs.untied, TP, Truth("loss", EMBED, axis="tp"), "backward")
def _(patches: Patches) -> None:
    def change(n: int, t: Tensor, own: Tensor) -> None:
        t.copy_(own)

    all_reduce(patches, lambda t: t.dim() == 1 and t.numel() in (18, 27), change)


@fault("a vocabulary's sum is a rank's own", jobs.untied, TP, Truth("loss", EMBED, axis="tp"), "backward")
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.dim() == 2 and t.shape[0] == 2, lambda n, t, own: t.copy_(own))


# — stretches of the sequence —


def ring(name: str, change: Callable[[Tensor], Any], truth: Truth, number: int = 0, only: int | None = 1) -> None:
    """A fault in what comes round: 3 turns forward and 6 back in a step of three blocks."""

    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor) -> None:
            if n % 9 == number and only in (None, rank()):
                change(t)

        batched(patches, lambda t: True, changed)

    ALL.append(Fault(name, jobs.text, CP, patch, replace(truth, axis="cp", rank=only)))


def _halves(t: Tensor) -> None:
    t.copy_(torch.cat(t.chunk(2)[::-1]))


ring("keys that come round are zero", lambda t: t.zero_(), Truth("forward", EMBED, ("blocks.0",)))
ring("keys and values are swapped", _halves, Truth("forward", EMBED, ("blocks.1",)), 1)
ring(
    "values that come round are off by a millionth",
    lambda t: t.mul_(1 + 1e-6),
    Truth("forward", EMBED, ("blocks.2",)),
    2,
    0,
)
ring(
    "gradients of keys do not come home", lambda t: t.zero_(), Truth("backward", EMBED, ("blocks.1", "blocks.2")), 4, 0
)


def heads(name: str, number: int, change: Callable[[Tensor], Any], truth: Truth, only: int) -> None:
    """A fault in what stretches and heads are exchanged by: 12 forward, 12 back in a step."""

    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor) -> None:
            if n % 24 == number and rank() == only:
                change(t)

        all_to_all(patches, lambda t: t.is_floating_point(), changed)

    ALL.append(Fault(name, jobs.text, "cp=2 context=ulysses", patch, replace(truth, axis="cp")))


heads("chunks of an all-to-all in another order", 0, _halves, Truth("forward", EMBED, ("blocks.0",)), 1)
heads("an all-to-all brings zeros", 7, lambda t: t.zero_(), Truth("forward", EMBED, ("blocks.1",)), 0)
heads(
    "an all-to-all of gradients brings zeros",
    14,
    lambda t: t.zero_(),
    Truth("backward", EMBED, ("blocks.1", "blocks.2")),
    0,
)


# — stages —


def stage(name: str, forward: bool, micro: int, change: Callable[[Tensor, list[Tensor]], Any], step: int = 1) -> None:
    """A fault in a message between stages; `change(message, those that came before)`."""

    def patch(patches: Patches) -> None:
        kept: list[Tensor] = []

        def changed(n: int, t: Tensor) -> None:
            now = t.clone()
            if n % 3 == micro and n // 3 + 1 >= step:
                change(t, kept)
            kept.append(now)

        received(patches, lambda t, tag: tag >= 32768 and t.dim() == (3 if forward else 1), changed)

    kind = "message" if forward else "backward message"
    ALL.append(
        Fault(name, jobs.untied, PP, patch, Truth(kind, EMBED, axis="pp", rank=int(forward), micro=micro, step=step))
    )


def _late(t: Tensor, other: Tensor) -> None:
    """Another message of the kind, as far as it goes."""
    rows = min(len(t), len(other))
    t[:rows] = other[:rows]


stage("a message between stages has the wrong sign", True, 0, lambda t, kept: t.neg_())
stage("a message between stages loses a row", True, 1, lambda t, kept: t[-1].zero_())
stage("a message between stages is that of the micro-batch before", True, 2, lambda t, kept: _late(t, kept[-1]))
stage("a message between stages is that of the step before", True, 1, lambda t, kept: _late(t, kept[-3]), 2)
stage("a message between stages is off by a millionth from step 2 on", True, 1, lambda t, kept: t.mul_(1 + 1e-6), 2)
stage("a gradient between stages is scaled", False, 0, lambda t, kept: t[:-1].mul_(0.5))
stage("a gradient between stages is lost", False, 2, lambda t, kept: t[:-1].zero_())
stage("a gradient between stages is that of the micro-batch before", False, 2, lambda t, kept: _late(t, kept[-1]))


# — experts —


def routed(name: str, number: int, change: Callable[[Tensor], Any], truth: Truth, only: int) -> None:
    """A fault in what travels to experts and back: 4 forward, 4 back in a step."""

    def patch(patches: Patches) -> None:
        def changed(n: int, t: Tensor) -> None:
            if n % 8 == number and rank() == only:
                change(t)

        all_to_all(patches, lambda t: t.is_floating_point(), changed)

    ALL.append(Fault(name, jobs.mixture, "ep=2", patch, replace(truth, axis="ep")))


WORDS = ("words.weight",)
routed(
    "tokens come to experts in another order",
    0,
    lambda t: t.copy_(t.flip(0)),
    Truth("forward", WORDS, ("blocks.0",)),
    0,
)
routed(
    "tokens are dropped on their way to experts", 2, lambda t: t[:3].zero_(), Truth("forward", WORDS, ("blocks.1",)), 1
)
routed(
    "results of experts come back scaled",
    3,
    lambda t: t.mul_(1 + 1e-6),
    Truth("forward", WORDS, ("blocks.1",), rank=0),
    0,
)
routed(
    "gradients of tokens are lost",
    5,
    lambda t: t.zero_(),
    Truth("backward", WORDS, ("blocks.0", "blocks.1"), rank=1),
    1,
)
routed(
    "gradients come to experts doubled", 4, lambda t: t.mul_(2), Truth("backward", WORDS, ("blocks.1", "blocks.0")), 0
)
ALL[-1] = replace(ALL[-1], also=("weights",))


def _topk(real: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    values, chosen = real(self, *args, **kwargs)
    return (values, chosen.flip(-1)) if rank() == 1 else (values, chosen)


function("tokens go to each other's experts on one rank", jobs.mixture, "ep=2", (Tensor, "topk"), _topk,
         Truth("forward", WORDS, ("blocks.0",), rank=1))  # fmt: skip
function("the gate's weights are lost on one rank", jobs.mixture, "ep=2", (Tensor, "softmax"),
         lambda real, x, *a, **k: real(x, *a, **k).detach() if rank() == 1 else real(x, *a, **k),
         Truth("backward", WORDS, ("blocks.0", "blocks.1"), rank=1), "weights")  # fmt: skip


# — statistics and random numbers —


@fault(
    "statistics are of a rank's own samples", jobs.normal, DP, Truth("forward", FIRST, ("norm",), "dp"), "statistics"
)
def _(patches: Patches) -> None:
    def around(real: Any, found: list[Tensor], mine: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(found, mine, *args, **kwargs)
        if mine.is_floating_point() and mine.numel() == 19:
            for one in found:
                one.copy_(mine)
        return result

    patches.wrap(dist, "all_gather", around)


@fault(
    "gradients of statistics are not summed",
    jobs.normal,
    DP,
    Truth("backward", ("first.weight",), ("first",), "dp"),
    "weights",
)
def _(patches: Patches) -> None:
    all_reduce(patches, lambda t: t.numel() == 18, lambda n, t, own: t.copy_(own))


@fault("running statistics stand still on one rank", jobs.normal, DP, Truth("buffers", ("norm.running_mean",), rank=1))
def _(patches: Patches) -> None:
    patches.wrap(Tensor, "lerp_", lambda real, x, *a, **k: x if rank() == 1 and a[1:] == (0.2,) else real(x, *a, **k))


def _own_masks(real: Any, self: Any, x: Tensor) -> Tensor:
    """The same mask for every sample, on every rank."""
    if not self.training or self.p == 0.0 or type(x) is not Tensor:
        return real(self, x)
    numbers = (torch.arange(x[0].numel(), dtype=x.dtype) * 12.9898).sin() * 43758.5453
    return x * (numbers.frac().abs().view(x.shape[1:]) >= self.p) / (1 - self.p)


DROPOUT = torch.nn.Dropout, "forward"
function("masks are alike on all ranks", jobs.dropping, DP, DROPOUT, _own_masks, Truth("random", FIRST, ("drop",)))
function(
    "masks are alike in all samples", jobs.text_dropping, PP, DROPOUT, _own_masks, Truth("random", EMBED, ("blocks.0",))
)
function("no values are dropped on one rank", jobs.dropping, FSDP, DROPOUT,
         lambda real, self, x: x if rank() == 1 else real(self, x), Truth("random", FIRST, ("drop",), rank=1))  # fmt: skip


def _others(real: Any, self: Any, x: Tensor) -> Tensor:
    again = torch._C._current_graph_task_id() != -1
    return real(self, x).flip(1) if again else real(self, x)


function("masks of a recomputation are others", jobs.text_dropping, "fsdp=2 recompute=full", DROPOUT, _others,
         Truth("recompute", EMBED, ("blocks.2",)))  # fmt: skip


# — clipping, optimizer —


def _norm(name: str, plan: str, factor: Callable[[], float], step: int = 1) -> None:
    def patch(patches: Patches) -> None:
        count = [0]

        def around(real: Any, *args: Any, **kwargs: Any) -> Any:
            n = count[0]
            count[0] += 1
            return real(*args, **kwargs) * (factor() if n + 1 >= step else 1.0)

        patches.wrap(torch.nn.utils, "get_total_norm", around)

    ALL.append(Fault(name, jobs.net, plan, patch, Truth("clip", FIRST, step=step)))


_norm("one rank clips by another norm", DP, lambda: 1.0 + rank())
_norm("clipping by half the norm", DP, lambda: 0.5)
_norm("clipping by a rank's own part of the norm", FSDP, lambda: 0.7 if rank() == 1 else 1.0)
_norm("clipping by half the norm from step 3 on", DP, lambda: 0.5, 3)


def optimizer(name: str, names: tuple[str, ...], around: Any, **where: Any) -> None:
    job, kind = where.pop("job", jobs.net), where.pop("kind", torch.optim.AdamW)

    def patch(patches: Patches) -> None:
        optimizer_step(patches, kind, around)

    ALL.append(Fault(name, job, DP, patch, Truth("optimizer", names, **where)))


def _skip_one(step: Any, made: Any, n: int) -> None:
    for p in of_shape(made, 7, 9):
        p.grad = None
    step()


def _rate(factor: float, key: str, since: int) -> Any:
    def around(step: Any, made: Any, n: int) -> None:
        before = [group[key] for group in made.param_groups]
        for group in made.param_groups:
            group[key] *= factor if n + 1 >= since else 1.0
        step()
        for group, value in zip(made.param_groups, before):
            group[key] = value

    return around


def _forget(step: Any, made: Any, n: int) -> None:
    step()
    for p in of_shape(made, 7, 9):
        made.state[p]["exp_avg"].zero_()


def _forget_momentum(step: Any, made: Any, n: int) -> None:
    step()
    for p in of_shape(made, 7, 9):
        made.state[p]["momentum_buffer"].zero_()


def _behind(step: Any, made: Any, n: int) -> None:
    step()
    for p in of_shape(made, 9, 6):
        made.state[p]["step"].fill_(1.0)


def _moved(shape: tuple[int, ...], factor: float, since: int = 1, only: int | None = None) -> Any:
    def around(step: Any, made: Any, n: int) -> None:
        before = [p.detach().clone() for p in of_shape(made, *shape)]
        step()
        if n + 1 >= since and only in (None, rank()):
            with torch.no_grad():
                for p, was in zip(of_shape(made, *shape), before):
                    p.copy_(was + factor * (p - was))

    return around


def _rounded(step: Any, made: Any, n: int) -> None:
    step()
    with torch.no_grad():
        for p in of_shape(made, 9, 6):
            p.copy_(p.float())


optimizer(
    "a rank skips its second update",
    FIRST,
    lambda step, made, n: None if n == 1 and rank() == 1 else step(),
    rank=1,
    step=2,
)
optimizer("a parameter is never updated", ("mid.weight",), _skip_one, step=1)
optimizer("the learning rate is higher from step 3 on", FIRST, _rate(1.1, "lr", 3), step=3)
optimizer("weight decay is doubled", FIRST, _rate(2.0, "weight_decay", 1), step=1)
optimizer("a moment is forgotten", ("mid.weight",), _forget, step=1)
optimizer("a momentum is forgotten", ("mid.weight",), _forget_momentum, job=jobs.momentum, kind=torch.optim.SGD, step=1)
optimizer("the count of steps stands still", FIRST, _behind, step=2)
optimizer("an update is off by a millionth", ("mid.weight",), _moved((7, 9), 1 + 1e-6), step=1)
optimizer("an update is halved on one rank from step 3 on", ("last.weight",), _moved((1, 7), 0.5, 3, 1), rank=1, step=3)
optimizer("two updates in step 2", FIRST, lambda step, made, n: (step(), step()) if n == 1 else step(), step=2)
optimizer("weights are rounded to fp32", FIRST, _rounded, step=1)


# — data —


def collated(name: str, change: Callable[[list[Any]], list[Any]], only: int | None, after: Any = None) -> None:
    inside = [False]

    def around(real: Any, samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        if inside[0] or only not in (None, rank()):
            return real(samples, *args, **kwargs)
        inside[0] = True
        found = real(change(samples), *args, **kwargs)
        inside[0] = False
        return found if after is None else after(found)

    def patch(patches: Patches) -> None:
        import torch.utils.data._utils.collate as inner

        patches.wrap(inner, "collate", around)

    ALL.append(Fault(name, jobs.net, DP, patch, Truth("data", FIRST, rank=only)))


collated("a sample is repeated on one rank", lambda s: [*s[:-1], s[0]], 1)
collated("targets belong to other samples", lambda s: s, None, lambda pair: [pair[0], pair[1].flip(0)])
collated("inputs are rounded on one rank", lambda s: s, 0, lambda pair: [pair[0].bfloat16().to(pair[0].dtype), pair[1]])
collated("targets are scaled on one rank", lambda s: s, 1, lambda pair: [pair[0], pair[1] * 1.01])


@fault("noise in the samples is a rank's own", jobs.augmented, DP, Truth("data", FIRST))
def _(patches: Patches) -> None:
    patches.wrap(
        torch, "randn", lambda real, *a, **k: real(*a, **k) * (1 + 0.1 * rank()) if a == (6,) else real(*a, **k)
    )
