"""The table of faults that a proof must detect and name, in the order of a training step: sums, parts, passes, messages, optimizer, data.

`ALL` has 137 rows (`faulty.py`). Each row changes torch alone and uses no name of plait's. Positions in a message of gradients are those
of the parameters of `jobs_faulty.Net`, last parameter first. The last section was written after the causes. It measures how well they
apply to new faults.
"""

from collections.abc import Callable
from typing import Any

import jobs_faulty as jobs
import pytest
import torch
import torch.distributed as dist
from faulty import (
    MILLIONTH,
    Change,
    Fault,
    Patch,
    Results,
    Truth,
    counted,
    flip,
    fp32,
    halves,
    instead,
    keep,
    of_shape,
    optimizer_step,
    part,
    rank,
    times,
    wrapping,
    zero,
)
from torch import Tensor, nn
from torch.nn import functional as F

ALL: list[Fault] = []
SPANS = {"last.bias": (0, 1), "last.weight": (1, 8), "mid.bias": (8, 15), "mid.weight": (15, 78), "first.bias": (78, 87),
         "first.weight": (87, 141), "": (0, 141)}  # fmt: skip
FIRST, EMBED, WORDS = ("first.weight",), ("embed.weight",), ("words.weight",)
DP, FSDP, TP, CP, PP = "dp=2", "fsdp=2", "tp=2", "cp=2", "pp=2 microbatches=3"
PLAIN, THREE = "tp=2 sequence_parallel=false", "dp=2 microbatches=3"
BLOCK = tuple((f"blocks.{i}",) for i in range(3))


def add(name: str, job: Callable[[], Any], plan: str, truth: Truth, patch: Patch, *also: str) -> None:
    """Add a row to the table."""
    ALL.append(Fault(name, job, plan, patch, truth, also))


def flat(t: Tensor, tag: int) -> bool:
    """Whether a message has all gradients of `Net`."""
    return t.dim() == 1 and t.numel() > 141


def shared(t: Tensor, tag: int) -> bool:
    """Whether a message has the gradients that slices of `Text` share."""
    return t.dim() == 1 and t.numel() > 60


def of(*sizes: int, tags: range = range(1 << 30)) -> Callable[[Tensor, int], bool]:
    """Return a filter for tensors with these element counts, in messages with these tags."""
    return lambda t, tag: t.numel() in sizes and tag in tags


def hidden(t: Tensor, tag: int) -> bool:
    """Whether a message has activations."""
    return t.dim() == 3


def floating(t: Tensor, tag: int) -> bool:
    return t.is_floating_point()


def copies(ranks: list[int]) -> bool:
    """Whether a group has ranks with the same slices, under dp=2 tp=2."""
    return ranks in ([0, 2], [1, 3])


def pairs(ranks: list[int]) -> bool:
    return len(ranks) == 2


# — sums of gradients over replicas —


def summed(name: str, of: str, change: Change, step: int = 1, only: int | None = None) -> None:
    """Add a fault in the sum over replicas of one parameter's gradient, or of all gradients."""
    truth = Truth("reduction", (of,) if of else FIRST, axis="dp", rank=only, step=step)
    add(name, jobs.net, DP, truth, Results("all_reduce", flat, step=step, only=only).changed(part(*SPANS[of], change)))


def _largest(real: Any, t: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not flat(t, 0):
        return real(t, *args, **kwargs)
    rest = t[141:].clone()
    work = real(t, *args, **{**kwargs, "op": dist.ReduceOp.MAX, "async_op": False})
    real(rest, *args, **{**kwargs, "async_op": False})
    t[141:] = rest
    return _Done() if kwargs.get("async_op") else work


class _Done:
    def wait(self, *timeout: Any) -> None: ...


summed("the sum of one parameter is dropped", "mid.weight", keep)
summed("the sum of one parameter is dropped on one rank", "mid.weight", keep, only=1)
summed("the sum of one parameter is doubled", "first.weight", times(2))
summed("the sum of one parameter is scaled", "last.bias", times(1.5))
summed("a mean where a sum belongs", "", times(0.5))
summed("the sums are doubled from step 3 on", "mid.weight", times(2), step=3)
summed("no sum at all from step 2 on", "", keep, step=2)
summed("a sum is off by a millionth", "mid.weight", MILLIONTH)
summed("a sum is rounded to fp32", "mid.weight", fp32)
summed("a sum is rounded to bf16", "mid.weight", lambda t, *_: t.copy_(t.bfloat16()))
summed("a sum is in another order", "mid.weight", flip)
summed("a sum is zero", "mid.bias", zero)
summed("a sum is zero on one rank from step 3 on", "mid.bias", zero, only=1, step=3)
summed("one element of a sum is lost", "first.weight", lambda t, *_: t[7:8].zero_())
summed("a sum has the wrong sign", "last.weight", times(-1))

GIVES = Results("all_reduce", flat, only=1, given=True)
add("rank 1 gives nothing to the sum", jobs.net, DP, Truth("reduction", FIRST, axis="dp"), GIVES.changed(part(0, 141, zero)))
add("rank 1 gives twice to the sum of a parameter", jobs.net, DP, Truth("reduction", ("mid.weight",), axis="dp"),
    GIVES.changed(part(15, 78, times(2))))  # fmt: skip
add("the largest instead of the sum", jobs.net, DP, Truth("reduction", FIRST, axis="dp"), wrapping(dist, "all_reduce", _largest))
add("a sum is that of the step before", jobs.net, DP, Truth("reduction", ("mid.weight",), axis="dp", step=2),
    Results("all_reduce", flat).changed(part(15, 78, instead(-1))))  # fmt: skip
add("copies of shards are not summed", jobs.net, "dp=2 fsdp=2", Truth("reduction", FIRST, axis="dp"),
    Results("all_reduce", of(35, 40, 8), among=pairs).changed(keep))  # fmt: skip
add("one copy's shards are summed twice", jobs.net, "dp=2 fsdp=2", Truth("reduction", ("mid.weight",), axis="dp"),
    Results("all_reduce", of(40), among=pairs).changed(lambda t, given, _: t.add_(given)))  # fmt: skip
add("slices are not summed over copies", jobs.text, "dp=2 tp=2", Truth("reduction", EMBED, axis="dp"),
    Results("all_reduce", lambda t, tag: t.numel() > 60, among=copies).changed(keep))  # fmt: skip
add("norms on stretches are not summed", jobs.text, TP, Truth("reduction", ("blocks.0.norm1",), axis="tp"),
    Results("all_reduce", shared).changed(keep))  # fmt: skip
add("norms on stretches are not summed on rank 1", jobs.text, TP, Truth("reduction", ("blocks.0.norm1",), axis="tp", rank=1),
    Results("all_reduce", shared, only=1).changed(keep))  # fmt: skip
OVER_CP = Results("all_reduce", lambda t, tag: t.numel() > 1000)
add("stretches' gradients are not summed", jobs.text, CP, Truth("reduction", EMBED, axis="cp"), OVER_CP.changed(part(0, 1640, keep)))
add("stretches' gradients are averaged", jobs.text, CP, Truth("reduction", EMBED, axis="cp"), OVER_CP.changed(part(0, 1640, times(0.5))))
add("the tied weight's gradient is not summed over stages", jobs.text, PP, Truth("reduction", EMBED, axis="pp"),
    Results("all_reduce", of(137)).changed(keep))  # fmt: skip
add("the tied weight's gradient is doubled from step 3 on", jobs.text, PP, Truth("reduction", EMBED, axis="pp", step=3),
    Results("all_reduce", of(137), step=3).changed(part(0, 136, times(2))))  # fmt: skip

# — shards of gradients and of weights, in messages —

SCATTERED, GATHERED = range(16385, 32768), range(16384)


def scattered(name: str, size: int, parameter: str, change: Change, only: int | None = 0, step: int = 1) -> None:
    truth = Truth("reduction", (parameter,), axis="fsdp", rank=only, step=step)
    add(name, jobs.net, FSDP, truth, Results("irecv", of(size, tags=SCATTERED), step=step, only=only).changed(change))


def gathered(name: str, size: int, unit: str, change: Change, only: int | None = 0, step: int = 1) -> None:
    """Add a fault in a gathered shard. Each shard is gathered twice in a step."""
    truth = Truth("gather", (*FIRST, f"{unit}.weight"), (unit,), "fsdp", only, step=step)
    add(name, jobs.net, FSDP, truth, Results("irecv", of(size, tags=GATHERED), each=2, step=step, only=only).changed(change))


def scaled_by_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def around(real: Any, self: Any) -> Any:
        result = real(self)
        for p in self.fsdp_params:
            if rank() == 1 and tuple(p.unsharded_param.shape) == (7, 9):
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p.unsharded_param):
                    p.unsharded_param.data.mul_(1.01)
        return result

    wrapping(FSDPParamGroup, "wait_for_unshard", around)(monkeypatch)


scattered("a part of the gradient is lost", 40, "mid.weight", zero)
scattered("a part of the gradient counts twice", 40, "mid.weight", times(2), only=None)
scattered("parts of the gradient are swapped", 35, "first.weight", flip)
scattered("a part of the gradient is lost from step 2 on", 8, "last.weight", zero, step=2)
scattered("a part of the gradient is off by a millionth", 35, "first.weight", MILLIONTH)
gathered("a gathered part is zero", 40, "mid", zero)
gathered("a gathered part is in another order", 35, "first", flip)
gathered("a gathered part is off by a millionth", 40, "mid", MILLIONTH)
gathered("a gathered part is zero from step 2 on", 35, "first", zero, only=None, step=2)
gathered("a gathered part is that of the step before", 40, "mid", instead(-2), only=1, step=2)
add("FSDP2's gathered weight is scaled on one rank", jobs.net, FSDP, Truth("gather", FIRST, ("mid",), "fsdp", 1), scaled_by_fsdp2, "forward")

# — micro-batches —


def backwards(name: str, plan: str, factor: Callable[[int, int], float], truth: Truth) -> None:
    """Add a fault that scales the gradient at the start of a backward pass by `factor(number of the micro-batch, rank)`."""
    each = int(plan.rpartition("=")[2])
    around = lambda n, real, self, *args, **kwargs: real(self * factor(n % each, rank()), *args, **kwargs)  # noqa: E731
    add(name, jobs.net, plan, truth, counted(Tensor, "backward", around))


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the parameters in the graph of a loss."""
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


def overwritten(name: str, which: Callable[[int, Tensor], bool], truth: Truth) -> None:
    """Add a fault that drops gradients before a backward pass if `which(number of the pass, parameter)`."""

    def around(n: int, real: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for p in leaves(self):
            if p.grad is not None and which(n, p):
                p.grad.zero_()
        real(self, *args, **kwargs)

    add(name, jobs.net, THREE, truth, counted(Tensor, "backward", around))


backwards("a micro-batch is lost on one rank", THREE, lambda m, r: 0.0 if (m, r) == (1, 1) else 1.0, Truth("loss", FIRST, rank=1, micro=1))
backwards("a micro-batch counts twice", THREE, lambda m, r: 2.0 if m == 2 else 1.0, Truth("loss", FIRST, micro=2))
backwards("micro-batches are averaged once more", THREE, lambda m, r: 1 / 3, Truth("loss", FIRST))
backwards("a rank's loss is off by a millionth", "dp=2 microbatches=1", lambda m, r: 1 + 1e-6 * r, Truth("loss", FIRST, rank=1))
backwards("ranks of unequal shares count alike", "dp=2 microbatches=1", lambda m, r: (5 / 6, 5 / 4)[r], Truth("loss", FIRST))
backwards("the loss is summed over ranks", "fsdp=2 microbatches=1", lambda m, r: 2.0, Truth("loss", FIRST))
backwards("the loss has the wrong sign in one micro-batch", "fsdp=2 microbatches=2", lambda m, r: -1.0 if (m, r) == (0, 1) else 1.0,
          Truth("loss", FIRST, rank=1, micro=0))  # fmt: skip
overwritten("the last micro-batch overwrites a parameter's gradient", lambda n, p: tuple(p.shape) == (7, 9),
            Truth("accumulation", ("mid.weight",)))  # fmt: skip
overwritten("one rank's first micro-batch is overwritten", lambda n, p: n % 3 == 1 and rank() == 1, Truth("accumulation", FIRST, rank=1))

# — what torch computes, on one rank —


class _Backward(torch.autograd.Function):
    """The identity in forward; it changes the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return ctx.change(grad), None


def linear(only: int, change: Callable[[Tensor], Tensor]) -> Patch:
    """Add a fault in the output of the linear map from 9 to 7 features."""

    def around(real: Any, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        out = real(x, weight, bias)
        return change(out) if tuple(weight.shape) == (7, 9) and rank() == only else out

    return wrapping(F, "linear", around)


add("a linear map is off by a millionth on one rank", jobs.net, DP, Truth("forward", FIRST, ("mid",), rank=1), linear(1, lambda y: y * (1 + 1e-6)))
add("a linear map forgets a row", jobs.net, FSDP, Truth("forward", FIRST, ("mid",), rank=0), linear(0, lambda y: torch.cat([y[:-1], y[-1:] * 0])))
add("a linear map's gradient is scaled", jobs.net, DP, Truth("backward", FIRST, ("mid", "first"), rank=1),
    linear(1, lambda y: _Backward.apply(y, lambda grad: grad * 0.5)), "weights")  # fmt: skip
add("a gradient's rows are permuted", jobs.text, DP, Truth("backward", EMBED, ("blocks.2", "blocks.1"), rank=0), wrapping(
    F, "gelu", lambda real, x, *a, **k: _Backward.apply(real(x, *a, **k), lambda grad: grad.flip(0)) if rank() == 0 else real(x, *a, **k)
))  # fmt: skip
add("a layer norm has another epsilon on one rank", jobs.text, DP, Truth("forward", EMBED, BLOCK[0], rank=1), wrapping(
    F, "layer_norm", lambda real, x, shape, weight=None, bias=None, eps=1e-5: real(x, shape, weight, bias, eps * (1 + rank()))
))  # fmt: skip
add("the mask of attention is forgotten on one rank", jobs.text, DP, Truth("forward", EMBED, BLOCK[0], rank=1), wrapping(
    F, "scaled_dot_product_attention",
    lambda real, q, k, v, *a, **kw: real(q, k, v, *a, **{**kw, "is_causal": kw.get("is_causal") and rank() == 0}),
))  # fmt: skip
add("the loss is a sum on one rank", jobs.net, DP, Truth("loss", FIRST, rank=1), wrapping(
    F, "mse_loss", lambda real, x, y, **k: real(x, y, reduction="sum") if rank() == 1 else real(x, y)
))  # fmt: skip

# — slices —


def shares(name: str, number: int, change: Change, kind: str, unit: tuple[str, ...], step: int = 1, only: int | None = None) -> None:
    """Add a fault in the all-reduce with index `number` of the 14 that sum partial results in a step."""
    where = Results("all_reduce", hidden, 14, number, step, only)
    add(name, jobs.text, PLAIN, Truth(kind, EMBED, unit, "tp", step=step), where.changed(change))


def stretches(name: str, number: int, change: Change, only: int, unit: tuple[str, ...]) -> None:
    where = Results("irecv", lambda t, tag: t.dim() == 3 and tag == 65536, 28, number, only=only)
    add(name, jobs.text, TP, Truth("forward", EMBED, unit, "tp"), where.changed(change))


shares("the sum of a block's slices is dropped", 3, keep, "forward", BLOCK[1])
shares("the sum of a block's slices is doubled", 6, times(2), "forward", BLOCK[2])
shares("the sum of an embedding's rows is dropped", 0, keep, "forward", ("embed",))
shares("a sum of slices is off by a millionth on rank 1", 1, MILLIONTH, "forward", BLOCK[0], only=1)
shares("a sum of slices is doubled from step 3 on", 4, times(2), "forward", BLOCK[1], 3)
shares("the backward sum of a block is dropped", 9, keep, "backward", ("blocks.1", "blocks.2"))
shares("the backward sum of a head is dropped", 7, keep, "backward", ("norm", "head"))
shares("the backward sum of a block is doubled on rank 1", 12, times(2), "backward", BLOCK[0], only=1)
stretches("a gathered stretch is in another order", 1, lambda t, *_: t.copy_(t.flip(1)), 0, BLOCK[0])
stretches("a gathered stretch is zero", 7, zero, 1, BLOCK[1])
stretches("a share of a stretch's sum is lost", 4, zero, 0, BLOCK[0])
stretches("a share of an embedding's sum is lost", 0, zero, 1, ("embed", "blocks.0"))
add("a vocabulary's largest is a rank's own", jobs.untied, TP, Truth("loss", EMBED, axis="tp"),
    Results("all_reduce", lambda t, tag: t.dim() == 1 and t.numel() in (18, 27)).changed(keep), "backward")  # fmt: skip
add("a vocabulary's sum is a rank's own", jobs.untied, TP, Truth("loss", EMBED, axis="tp"),
    Results("all_reduce", lambda t, tag: t.dim() == 2 and t.shape[0] == 2).changed(keep), "backward")  # fmt: skip

# — sequence shards, stages, experts —


def ring(name: str, number: int, change: Change, only: int, kind: str, unit: tuple[str, ...]) -> None:
    """Add a fault in a message of the ring. In a step of three blocks, 3 messages are sent forward and 6 backward."""
    where = Results("batch_isend_irecv", lambda t, tag: True, 9, number, only=only)
    add(name, jobs.text, CP, Truth(kind, EMBED, unit, "cp", only), where.changed(change))


def heads(name: str, number: int, change: Change, only: int, kind: str, unit: tuple[str, ...]) -> None:
    """Add a fault in a message that exchanges sequence shards and heads. A step sends 12 forward and 12 backward."""
    where = Results("all_to_all_single", floating, 24, number, only=only)
    add(name, jobs.text, "cp=2 cp_method=ulysses", Truth(kind, EMBED, unit, "cp"), where.changed(change))


def stage(name: str, kind: str, micro: int, change: Change, step: int = 1) -> None:
    """Add a fault in a message between stages."""
    forward = kind == "message"
    where = Results("irecv", lambda t, tag: tag >= 32768 and t.dim() == (3 if forward else 1), 3, micro, step)
    add(name, jobs.untied, PP, Truth(kind, EMBED, axis="pp", rank=int(forward), micro=micro, step=step), where.changed(change))


def routed(name: str, number: int, change: Change, only: int, truth: Truth, *also: str) -> None:
    """Add a fault in a message to experts or back. A step sends 4 forward and 4 backward."""
    add(name, jobs.mixture, "ep=2", truth, Results("all_to_all_single", floating, 8, number, only=only).changed(change), *also)


ring("keys that come round are zero", 0, zero, 1, "forward", BLOCK[0])
ring("keys and values are swapped", 1, halves, 1, "forward", BLOCK[1])
ring("values that come round are off by a millionth", 2, MILLIONTH, 0, "forward", BLOCK[2])
ring("gradients of keys do not come home", 4, zero, 0, "backward", ("blocks.1", "blocks.2"))
heads("chunks of an all-to-all in another order", 0, halves, 1, "forward", BLOCK[0])
heads("an all-to-all brings zeros", 7, zero, 0, "forward", BLOCK[1])
heads("an all-to-all of gradients brings zeros", 14, zero, 0, "backward", ("blocks.1", "blocks.2"))
stage("a message between stages has the wrong sign", "message", 0, times(-1))
stage("a message between stages loses a row", "message", 1, lambda t, *_: t[-1].zero_())
stage("a message between stages is that of the micro-batch before", "message", 2, instead(-1))
stage("a message between stages is that of the step before", "message", 1, instead(-3), 2)
stage("a message between stages is off by a millionth from step 2 on", "message", 1, MILLIONTH, 2)
stage("a gradient between stages is scaled", "backward message", 0, part(0, -1, times(0.5)))
stage("a gradient between stages is lost", "backward message", 2, part(0, -1, zero))
stage("a gradient between stages is that of the micro-batch before", "backward message", 2, instead(-1))
routed("tokens come to experts in another order", 0, flip, 0, Truth("forward", WORDS, BLOCK[0], "ep"))
routed("tokens are dropped on their way to experts", 2, part(0, 3, zero), 1, Truth("forward", WORDS, BLOCK[1], "ep"))
routed("results of experts come back scaled", 3, MILLIONTH, 0, Truth("forward", WORDS, BLOCK[1], "ep", 0))
routed("gradients of tokens are lost", 5, zero, 1, Truth("backward", WORDS, ("blocks.0", "blocks.1"), "ep", 1))
routed("gradients come to experts doubled", 4, times(2), 0, Truth("backward", WORDS, ("blocks.1", "blocks.0"), "ep"), "weights")


def _topk(real: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    values, chosen = real(self, *args, **kwargs)
    return (values, chosen.flip(-1)) if rank() == 1 else (values, chosen)


add("tokens go to each other's experts on one rank", jobs.mixture, "ep=2", Truth("forward", WORDS, BLOCK[0], rank=1), wrapping(Tensor, "topk", _topk))
add("the gate's weights are lost on one rank", jobs.mixture, "ep=2", Truth("backward", WORDS, ("blocks.0", "blocks.1"), rank=1), wrapping(
    Tensor, "softmax", lambda real, x, *a, **k: real(x, *a, **k).detach() if rank() == 1 else real(x, *a, **k)
), "weights")  # fmt: skip

# — statistics and random numbers —


GATHER_METHOD = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"


def _own_statistics(real: Any, group: dist.ProcessGroup, found: Tensor, mine: Tensor, *args: Any) -> Any:
    work = real(group, found, mine, *args)
    if mine.is_floating_point() and mine.numel() == 19:
        work.wait()
        found.view(-1, 19).copy_(mine)
    return work


def _own_masks(real: Any, self: Any, x: Tensor) -> Tensor:
    """Draw the same mask for each sample, on each rank."""
    if not self.training or self.p == 0.0 or type(x) is not Tensor:
        return real(self, x)
    numbers = (torch.arange(x[0].numel(), dtype=x.dtype) * 12.9898).sin() * 43758.5453
    return x * (numbers.frac().abs().view(x.shape[1:]) >= self.p) / (1 - self.p)


def _others(real: Any, self: Any, x: Tensor) -> Tensor:
    again = torch._C._current_graph_task_id() != -1
    return real(self, x).flip(1) if again else real(self, x)


def dropout(name: str, job: Callable[[], Any], plan: str, truth: Truth, around: Callable[..., Tensor]) -> None:
    add(name, job, plan, truth, wrapping(nn.Dropout, "forward", around))


add("statistics are of a rank's own samples", jobs.normal, DP, Truth("forward", FIRST, ("norm",), "dp"),
    wrapping(dist.ProcessGroup, GATHER_METHOD, _own_statistics), "statistics")  # fmt: skip
add("gradients of statistics are not summed", jobs.normal, DP, Truth("backward", FIRST, ("first",), "dp"),
    Results("all_reduce", of(18)).changed(keep), "weights")  # fmt: skip
add("running statistics stand still on one rank", jobs.normal, DP, Truth("buffers", ("norm.running_mean",), rank=1), wrapping(
    Tensor, "lerp_", lambda real, x, *a, **k: x if rank() == 1 and a[1:] == (0.2,) else real(x, *a, **k)
))  # fmt: skip
dropout("masks are alike on all ranks", jobs.dropping, DP, Truth("random", FIRST, ("drop",)), _own_masks)
dropout("masks are alike in all samples", jobs.text_dropping, PP, Truth("random", EMBED, BLOCK[0]), _own_masks)
dropout("no values are dropped on one rank", jobs.dropping, FSDP, Truth("random", FIRST, ("drop",), rank=1),
        lambda real, self, x: x if rank() == 1 else real(self, x))  # fmt: skip
dropout("masks of a recomputation are others", jobs.text_dropping, "fsdp=2 activation_checkpointing=full", Truth("recompute", EMBED, BLOCK[2]),
    _others)

# — clipping, optimizer —


def clipped(name: str, plan: str, factor: Callable[[], float], step: int = 1) -> None:
    around = lambda n, real, *args, **kwargs: real(*args, **kwargs) * (factor() if n + 1 >= step else 1.0)  # noqa: E731
    add(name, jobs.net, plan, Truth("clip", FIRST, step=step), counted(nn.utils, "get_total_norm", around))


def optimizer(name: str, names: tuple[str, ...], around: Any, rank: int | None = None, step: int = 1) -> None:
    add(name, jobs.net, DP, Truth("optimizer", names, rank=rank, step=step), optimizer_step(around))


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


def _set(key: str, value: float, *shape: int) -> Any:
    """Set a value in the optimizer's state of the parameters with this shape, after each step."""

    def around(step: Any, made: Any, n: int) -> None:
        step()
        for p in of_shape(made, *shape):
            made.state[p][key].fill_(value)

    return around


def _moved(shape: tuple[int, ...], factor: float, since: int = 1, until: float = float("inf"), only: int | None = None) -> Any:
    def around(step: Any, made: Any, n: int) -> None:
        before = [p.detach().clone() for p in of_shape(made, *shape)]
        step()
        if since <= n + 1 <= until and only in (None, rank()):
            with torch.no_grad():
                for p, was in zip(of_shape(made, *shape), before):
                    p.copy_(was + factor * (p - was))

    return around


def _rounded(step: Any, made: Any, n: int) -> None:
    step()
    with torch.no_grad():
        for p in of_shape(made, 9, 6):
            p.copy_(p.float())


clipped("one rank clips by another norm", DP, lambda: 1.0 + rank())
clipped("clipping by half the norm", DP, lambda: 0.5)
clipped("clipping by a rank's own part of the norm", FSDP, lambda: 0.7 if rank() == 1 else 1.0)
clipped("clipping by half the norm from step 3 on", DP, lambda: 0.5, 3)
optimizer("a rank skips its second update", FIRST, lambda step, made, n: None if n == 1 and rank() == 1 else step(), 1, 2)
optimizer("a parameter is never updated", ("mid.weight",), _skip_one)
optimizer("the learning rate is higher from step 3 on", FIRST, _rate(1.1, "lr", 3), step=3)
optimizer("weight decay is doubled", FIRST, _rate(2.0, "weight_decay", 1))
optimizer("a moment is forgotten", ("mid.weight",), _set("exp_avg", 0.0, 7, 9))
add("a momentum is forgotten", jobs.momentum, DP, Truth("optimizer", ("mid.weight",), step=1),
    optimizer_step(_set("momentum_buffer", 0.0, 7, 9), torch.optim.SGD))  # fmt: skip
optimizer("the count of steps stands still", FIRST, _set("step", 1.0, 9, 6), step=2)
optimizer("an update is off by a millionth", ("mid.weight",), _moved((7, 9), 1 + 1e-6))
optimizer("an update is halved on one rank from step 3 on", ("last.weight",), _moved((1, 7), 0.5, 3, only=1), 1, 3)
optimizer("two updates in step 2", FIRST, lambda step, made, n: (step(), step()) if n == 1 else step(), step=2)
optimizer("weights are rounded to fp32", FIRST, _rounded)

# — data —


def collated(name: str, only: int | None, samples: Callable[[Any], Any] = list, batch: Callable[[Any], Any] = lambda pair: pair) -> None:
    """Add a fault in the data: `samples` changes them before they are collated, `batch` changes the (inputs, targets) pair afterwards."""

    def around(real: Any, given: list[Any], *args: Any, **kwargs: Any) -> Any:
        mine = only in (None, rank())
        return batch(real(samples(given), *args, **kwargs)) if mine else real(given, *args, **kwargs)

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        import torch.utils.data._utils.collate as inner

        wrapping(inner, "collate", around)(monkeypatch)

    add(name, jobs.net, DP, Truth("data", FIRST, rank=only), patch)


collated("a sample is repeated on one rank", 1, lambda s: [*s[:-1], s[0]])
collated("targets belong to other samples", None, batch=lambda pair: [pair[0], pair[1].flip(0)])
collated("inputs are rounded on one rank", 0, batch=lambda pair: [pair[0].bfloat16().to(pair[0].dtype), pair[1]])
collated("targets are scaled on one rank", 1, batch=lambda pair: [pair[0], pair[1] * 1.01])
add("noise in the samples is a rank's own", jobs.augmented, DP, Truth("data", FIRST), wrapping(
    torch, "randn", lambda real, *a, **k: real(*a, **k) * (1 + 0.1 * rank()) if a == (6,) else real(*a, **k)
))  # fmt: skip

# — written after the causes —


def _without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the weight of the first call as a constant, on rank 1."""
    met: list[int] = []

    def around(real: Any, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        if type(x) is Tensor and weight is not None and not met:
            met.append(id(weight))
        lost = rank() == 1 and id(weight) in met
        return real(x, shape, weight.detach() if lost else weight, bias, eps)

    wrapping(F, "layer_norm", around)(monkeypatch)


def _swapped(t: Tensor, *_: Any) -> None:
    t[1:8], t[8:15] = t[8:15].clone(), t[1:8].clone()


def _betas(step: Any, made: Any, n: int) -> None:
    for group in made.param_groups:
        group["betas"] = (0.8, 0.99) if n else group["betas"]
    step()


def _clamped(real: Any, gradients: Any, *args: Any, **kwargs: Any) -> Tensor:
    found = list(gradients)
    for g in found:
        g.clamp_(-0.01, 0.01)
    return real(found, *args, **kwargs)


def _backward_fp32(t: Tensor, *_: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        t.copy_(t.float())


BETWEEN = Results("irecv", lambda t, tag: t.dim() == 3 and tag >= 32768)
add("a norm layer trains without its weight on one rank", jobs.text, DP, Truth("weights", ("blocks.0.norm1.weight",), BLOCK[0]), _without_weight)
add("an activation saturates on one rank", jobs.net, DP, Truth("between", FIRST, ("mid",), rank=0), wrapping(
    Tensor, "tanh", lambda real, x: real(x).clamp(-0.5, 0.5) if rank() == 0 and x.shape[-1] == 9 else real(x)
))  # fmt: skip
add("an embedding forgets a word on one rank", jobs.untied, FSDP, Truth("forward", EMBED, ("embed",), rank=1), wrapping(
    F, "embedding", lambda real, x, *a, **k: real(x, *a, **k) * (1 - (x[..., None] == x[0, 0]) * float(rank() == 1))
))  # fmt: skip
add("cross entropy smooths its labels on one rank", jobs.text, DP, Truth("loss", EMBED, rank=1), wrapping(
    F, "cross_entropy", lambda real, x, y, **k: real(x, y, **{**k, "label_smoothing": 0.1 * rank()})
))  # fmt: skip
add("targets are shifted on one rank", jobs.text, "pp=2 microbatches=2", Truth("loss", EMBED, micro=1), wrapping(
    F, "cross_entropy", lambda real, x, y, **k: real(x, y.roll(1) if len(y) == 18 else y, **k)
))  # fmt: skip  the second micro-batch of a step has two samples of nine words
add("a sum over three ranks misses the third", jobs.net, "dp=3", Truth("reduction", FIRST, axis="dp"),
    Results("all_reduce", flat, only=2, given=True).changed(part(0, 141, zero)))  # fmt: skip
add("two parameters' sums change places", jobs.net, DP, Truth("reduction", ("mid.bias",), axis="dp"),
    Results("all_reduce", flat).changed(_swapped))  # fmt: skip
add("gradients over copies of slices are averaged", jobs.untied, "dp=2 tp=2", Truth("reduction", EMBED, axis="dp"),
    Results("all_reduce", lambda t, tag: t.dim() == 1 and t.numel() > 100, among=copies).changed(times(0.5)))  # fmt: skip
add("a message between stages comes transposed", jobs.text, "pp=2 microbatches=2", Truth("message", EMBED, axis="pp", rank=1, micro=0),
    Results("irecv", BETWEEN.counts, 2, 0).changed(lambda t, *_: t.copy_(t.flip(-1))))  # fmt: skip
add("a message between stages is rounded", jobs.untied, "pp=2 microbatches=2", Truth("message", EMBED, axis="pp", rank=1), BETWEEN.changed(fp32))
add("experts' results are rounded on their way", jobs.mixture, "ep=2", Truth("forward", WORDS, BLOCK[0], "ep"),
    Results("all_to_all_single", floating).changed(lambda t, *_: t.mul_(256).round_().div_(256)))  # fmt: skip
add("a gathered weight is rounded", jobs.net, FSDP, Truth("gather", (*FIRST, "mid.weight"), axis="fsdp"),
    Results("irecv", of(40, tags=GATHERED)).changed(fp32))  # fmt: skip
add("the betas are others from step 2 on", jobs.net, DP, Truth("optimizer", FIRST, step=2), optimizer_step(_betas))
add("weights are averaged after a step", jobs.net, DP, Truth("optimizer", ("first.bias",), step=3), optimizer_step(_moved((9,), 0.5, 3, 3)))
add("gradients are clipped by value first", jobs.net, DP, Truth("clip", FIRST), wrapping(nn.utils, "get_total_norm", _clamped))
add("the running mean is another's", jobs.normal, DP, Truth("buffers", ("norm.running_mean",)), wrapping(
    Tensor, "lerp_", lambda real, x, y, w: real(x, y + 0.01 if w == 0.2 and x.shape == (9,) else y, w)
))  # fmt: skip
add("a backward sum of slices is rounded", jobs.text, PLAIN, Truth("backward", EMBED, axis="tp"),
    Results("all_reduce", hidden).changed(_backward_fp32), "loss")  # fmt: skip
add("a rank reads its batch backwards", jobs.net, DP, Truth("data", FIRST, rank=1), wrapping(
    torch, "stack", lambda real, ts, *a, **k: real(list(ts)[::-1] if rank() == 1 and ts[0].shape == (6,) else ts, *a, **k)
))  # fmt: skip
add("the sum over ranks of the loss's weights is a rank's own", jobs.weighted, DP, Truth("loss", EMBED),
    Results("all_reduce", lambda t, tag: t.dim() == 0 and float(t) > 0).changed(keep))  # fmt: skip
