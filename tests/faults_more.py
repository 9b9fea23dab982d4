"""Faults of other kinds than those of `faults_outside.py`, written after the causes were: how well they hold elsewhere."""

from typing import Any

import jobs_faulty as jobs
import torch
import torch.distributed as dist
from faulty import Fault, Patches, Truth, all_reduce, all_to_all, optimizer_step, rank, received
from torch import Tensor, nn
from torch.nn import functional as F

ALL: list[Fault] = []
FIRST, EMBED, WORDS = ("first.weight",), ("embed.weight",), ("words.weight",)


def fault(name: str, job: Any, plan: str, truth: Truth, *also: str) -> Any:
    def add(patch: Any) -> Any:
        ALL.append(Fault(name, job, plan, patch, truth, also))
        return patch

    return add


@fault("a norm layer trains without its weight on one rank", jobs.text, "dp=2",
       Truth("weights", ("blocks.0.norm1.weight",), ("blocks.0",)))  # fmt: skip
def _(patches: Patches) -> None:
    """The first that is met: it is multiplied with as if it were a constant."""
    met: list[int] = []

    def around(real: Any, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        if type(x) is Tensor and weight is not None and not met:
            met.append(id(weight))
        lost = rank() == 1 and id(weight) in met
        return real(x, shape, weight.detach() if lost else weight, bias, eps)

    patches.wrap(F, "layer_norm", around)


@fault("an activation saturates on one rank", jobs.net, "dp=2", Truth("between", FIRST, ("mid",), rank=0))
def _(patches: Patches) -> None:
    patches.wrap(
        Tensor, "tanh", lambda real, x: real(x).clamp(-0.5, 0.5) if rank() == 0 and x.shape[-1] == 9 else real(x)
    )


@fault("an embedding forgets a word on one rank", jobs.untied, "fsdp=2", Truth("forward", EMBED, ("embed",), rank=1))
def _(patches: Patches) -> None:
    patches.wrap(
        F, "embedding", lambda real, x, *a, **k: real(x, *a, **k) * (1 - (x[..., None] == x[0, 0]) * float(rank() == 1))
    )


@fault("cross entropy smooths its labels on one rank", jobs.text, "dp=2", Truth("loss", EMBED, rank=1))
def _(patches: Patches) -> None:
    patches.wrap(F, "cross_entropy", lambda real, x, y, **k: real(x, y, **{**k, "label_smoothing": 0.1 * rank()}))


@fault("targets are shifted on one rank", jobs.text, "pp=2 microbatches=2", Truth("loss", EMBED, micro=1))
def _(patches: Patches) -> None:
    """The second micro-batch of a step has two samples of nine words."""
    patches.wrap(F, "cross_entropy", lambda real, x, y, **k: real(x, y.roll(1) if len(y) == 18 else y, **k))


@fault("a sum over three ranks misses the third", jobs.net, "dp=3", Truth("reduction", FIRST, axis="dp"))
def _(patches: Patches) -> None:
    def before(n: int, t: Tensor, own: Tensor) -> None:
        if rank() == 2:
            t[:141].zero_()

    all_reduce(patches, lambda t: t.dim() == 1 and t.numel() > 141, lambda n, t, own: None, before=before)


@fault("two parameters' sums change places", jobs.net, "dp=2", Truth("reduction", ("mid.bias",), axis="dp"))
def _(patches: Patches) -> None:
    def change(n: int, t: Tensor, own: Tensor) -> None:
        a, b = t[1:8].clone(), t[8:15].clone()
        t[1:8], t[8:15] = b, a

    all_reduce(patches, lambda t: t.dim() == 1 and t.numel() > 141, change)


@fault("gradients over copies of slices are averaged", jobs.untied, "dp=2 tp=2", Truth("reduction", EMBED, axis="dp"))
def _(patches: Patches) -> None:
    flat = lambda t: t.dim() == 1 and t.numel() > 100  # noqa: E731
    all_reduce(patches, flat, lambda n, t, own: t.div_(2), ranks=([0, 2], [1, 3]))


@fault("a message between stages comes transposed", jobs.text, "pp=2 microbatches=2",
       Truth("message", EMBED, axis="pp", rank=1, micro=0))  # fmt: skip
def _(patches: Patches) -> None:
    def change(n: int, t: Tensor) -> None:
        if n % 2 == 0:
            t.copy_(t.flip(-1))

    received(patches, lambda t, tag: t.dim() == 3 and tag >= 32768, change)


@fault(
    "a message between stages is rounded",
    jobs.untied,
    "pp=2 microbatches=2",
    Truth("message", EMBED, axis="pp", rank=1),
)
def _(patches: Patches) -> None:
    received(patches, lambda t, tag: t.dim() == 3 and tag >= 32768, lambda n, t: t.copy_(t.float()))


@fault("experts' results are rounded on their way", jobs.mixture, "ep=2", Truth("forward", WORDS, ("blocks.0",), "ep"))
def _(patches: Patches) -> None:
    all_to_all(patches, lambda t: t.is_floating_point(), lambda n, t: t.mul_(256).round_().div_(256))


@fault("a gathered weight is rounded", jobs.net, "fsdp=2", Truth("gather", (*FIRST, "mid.weight"), axis="fsdp"))
def _(patches: Patches) -> None:
    received(patches, lambda t, tag: tag < 16384 and t.numel() == 40, lambda n, t: t.copy_(t.float()))


@fault("the betas are others from step 2 on", jobs.net, "dp=2", Truth("optimizer", FIRST, step=2))
def _(patches: Patches) -> None:
    def around(step: Any, made: Any, n: int) -> None:
        for group in made.param_groups:
            group["betas"] = (0.8, 0.99) if n else group["betas"]
        step()

    optimizer_step(patches, torch.optim.AdamW, around)


@fault("weights are averaged after a step", jobs.net, "dp=2", Truth("optimizer", ("first.bias",), step=3))
def _(patches: Patches) -> None:
    def around(step: Any, made: Any, n: int) -> None:
        before = [p.detach().clone() for g in made.param_groups for p in g["params"]]
        step()
        if n == 2:
            with torch.no_grad():
                for p, was in zip((p for g in made.param_groups for p in g["params"]), before):
                    if p.shape == (9,):
                        p.copy_((p + was) / 2)

    optimizer_step(patches, torch.optim.AdamW, around)


@fault("gradients are clipped by value first", jobs.net, "dp=2", Truth("clip", FIRST))
def _(patches: Patches) -> None:
    def around(real: Any, gradients: Any, *args: Any, **kwargs: Any) -> Tensor:
        found = list(gradients)
        for g in found:
            g.clamp_(-0.01, 0.01)
        return real(found, *args, **kwargs)

    patches.wrap(nn.utils, "get_total_norm", around)


@fault("the running mean is another's", jobs.normal, "dp=2", Truth("buffers", ("norm.running_mean",)))
def _(patches: Patches) -> None:
    patches.wrap(Tensor, "lerp_", lambda real, x, y, w: real(x, y + 0.01 if w == 0.2 and x.shape == (9,) else y, w))


@fault("a backward sum of slices is rounded", jobs.text, "tp=2 sequence_parallel=false",
       Truth("backward", EMBED, axis="tp"), "loss")  # fmt: skip
def _(patches: Patches) -> None:
    def change(n: int, t: Tensor, own: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            t.copy_(t.float())

    all_reduce(patches, lambda t: t.dim() == 3, change)


@fault("a rank reads its batch backwards", jobs.net, "dp=2", Truth("data", FIRST, rank=1))
def _(patches: Patches) -> None:
    patches.wrap(
        torch,
        "stack",
        lambda real, ts, *a, **k: real(list(ts)[::-1] if rank() == 1 and ts[0].shape == (6,) else ts, *a, **k),
    )


@fault("the sum over ranks of the loss's weights is a rank's own", jobs.weighted, "dp=2", Truth("loss", EMBED))
def _(patches: Patches) -> None:
    def around(real: Any, t: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = t.clone()
        work = real(t, *args, **kwargs)
        if t.dim() == 0 and float(before) > 0:
            t.copy_(before)
        return work

    patches.wrap(dist, "all_reduce", around)
