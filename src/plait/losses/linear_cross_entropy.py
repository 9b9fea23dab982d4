"""Linear cross-entropy: the loss of a language model without its logits.

What it does
    The logits of 4,096 tokens over 128,000 words are 2 GiB in float32, their gradient as much again, often more than
    all activations of the model. Here the head's product, the softmax and their gradients are computed for `chunk`
    tokens at a time, so that never more than chunk × vocabulary values exist. It is the same loss: only the order of
    rounding differs.

How
    `LinearCrossEntropy.attach` gives the model's last linear layer a forward without a product. It returns a
    `HeadOutput`: the hidden states, and the layer's weight and bias. It passes through the model's output to the
    loss. The gradients of a chunk are computed at once, while its probabilities are there, and only they are kept:
    those of the hidden states and of the weight, which are sums over tokens. Backward multiplies them by its gradient.

Costs
    One gradient of the head's weight from the loss on, and for a moment in backward another one. No product is
    computed twice.

Paper
    Hsu et al. 2024, Liger Kernel: Efficient Triton Kernels for LLM Training.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.tensors.collectives import copy_to_region, reduce_from_region
from plait.tensors.rows import Ranges, Rows
from plait.tensors.sharded_losses import reduce_logits
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import dataclass_leaves, tree_leaves

IGNORED = -100
"""The target that does not count, as in `torch.nn.functional.cross_entropy`."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    chunk: int = 1024,
    *,
    rows: Rows | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute `cross_entropy(linear(hidden, weight, bias), targets, ignore_index=ignore_index)`, `chunk` tokens at a time.

    hidden [..., width], weight [vocabulary, width], bias [vocabulary], targets [...] integers -> scalar: the mean
    over the targets that count. For models that compute their loss in their own forward.

    With `rows` and `group`, weight and bias are this rank's rows of the vocabulary. The loss is the full loss on every rank,
    and the gradients of weight and bias are those of its rows. `hidden` may be a `ShardedTensor` with sharded tokens. The loss
    then covers all tokens, and the gradients of weight and bias are partial sums over the rank's own tokens.
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    count, spread = (targets != ignore_index).sum(), hidden if isinstance(hidden, ShardedTensor) else None
    if spread is not None:
        hidden, targets = spread.local, spread.rows.take_part(targets, spread.shard_dim, spread.group.rank())
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), bias if bias is None else bias.detach()
    held = None
    if rows is not None and group is not None and group.size() > 1:
        hidden, held = copy_to_region(hidden, group), VocabularyRows(rows.ranks[group.rank()], group)
    loss = _ChunkedLoss.apply(hidden, weight, bias, targets, _Options(ignore_index, chunk, count, held))
    return loss if spread is None else reduce_from_region(loss, spread.group)


class VocabularyRows(NamedTuple):
    """The rows of a vocabulary on this rank, and the group of ranks with the others."""

    ranges: Ranges
    group: ProcessGroup


@dataclass(frozen=True)
class _Options:
    """`count`: number of targets in the mean. `vocabulary`: None if this rank has the full vocabulary."""

    ignore_index: int
    chunk: int
    count: Tensor
    vocabulary: VocabularyRows | None


class _ChunkedLoss(torch.autograd.Function):
    """Stores gradients as sums over the tokens: small 16-bit values would vanish before the loss scale multiplies them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        kind = hidden.device.type
        mixed = torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64
        narrow = torch.get_autocast_dtype(kind) if mixed else hidden.dtype
        wide = _widen_dtype(narrow)
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        sums = (
            torch.empty_like(hidden) if need_hidden else None,
            torch.zeros_like(weight, dtype=_widen_dtype(weight.dtype)) if need_weight else None,
            torch.zeros_like(bias, dtype=wide) if need_bias and bias is not None else None,
        )
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(kind, enabled=False):
            h, w, b = hidden.to(narrow), weight.to(narrow), bias if bias is None else bias.to(narrow)
            for start in range(0, len(h), options.chunk):
                rows = slice(start, start + options.chunk)
                counts = (targets[rows] != options.ignore_index).unsqueeze(1)
                index = targets[rows].unsqueeze(1).where(counts, 0)
                p, chosen, at, here = _log_softmax(F.linear(h[rows], w, b), index, wide, options.vocabulary)
                loss -= chosen.where(counts, 0.0).sum()
                if any(ctx.needs_input_grad):
                    p.exp_()
                    if p.shape[1]:
                        p.scatter_add_(1, at, -here.to(p.dtype))
                    p.masked_fill_(~counts, 0.0)
                    _add_gradients(sums, rows, p.to(narrow), h[rows], w)
                del p  # before the next chunk's logits
        ctx.save_for_backward(options.count, *sums)
        ctx.formats = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return loss / options.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        count, *sums = ctx.saved_tensors
        factor = grad_outputs[0] / count.clamp(min=1)
        scaled = [s if s is None else (s.to(factor.dtype) * factor).to(dtype) for s, dtype in zip(sums, ctx.formats)]
        return (*scaled, None, None)


def _log_softmax(
    logits: Tensor, index: Tensor, wide: torch.dtype, held: VocabularyRows | None
) -> tuple[Tensor, ...]:
    """For logits [tokens, words] and targets [tokens, 1]: return the log-probabilities of all words and of the targets.

    Also returns the index of each target among this rank's words, and whether it is one of them.
    """
    if held is None:
        p = F.log_softmax(logits, -1, dtype=wide)
        return p, p.gather(1, index), index, torch.ones_like(index)
    logits = logits.to(wide)
    log_sum, chosen, here, at = (t.unsqueeze(1) for t in reduce_logits(logits, index.squeeze(1), *held))
    return logits - log_sum, chosen - log_sum, at, here


def _widen_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _add_gradients(sums: tuple[Tensor | None, ...], rows: slice, p: Tensor, h: Tensor, w: Tensor) -> None:
    """Add the contribution of the gradient `p` of a chunk's logits [rows, vocabulary] to the three sums."""
    to_hidden, to_weight, to_bias = sums
    if to_hidden is not None:
        to_hidden[rows] = p @ w
    if to_weight is not None and p.dtype == to_weight.dtype:
        to_weight.addmm_(p.t(), h)
    elif to_weight is not None:
        to_weight += p.t() @ h
    if to_bias is not None:
        to_bias += p.sum(0, dtype=to_bias.dtype)


class _HeadParameters:
    """The weight and bias of a head in its forward, as one leaf: no code can mistake them for model outputs."""

    def __init__(self, head: nn.Linear):
        self.weight, self.bias = head.weight, head.bias
        self.rows, self.group = vars(head).get("_rows"), vars(head).get("_ranks")
        """The rows of the vocabulary on each rank of the group, if the head is sharded (see `parallel/tensor/wiring.py`)."""


class _LogitsError(PlaitError, AttributeError):
    """J017: the model computes with its logits."""

    def __init__(self, operation: str):
        what = f"the model computes with its logits ({operation}), which LinearCrossEntropy never makes"
        why = "scaled, capped or shifted logits give another loss than the head's product"
        fix = ("loss=lambda logits, targets: cross_entropy(…)    (makes all logits)",)
        super().__init__(Problem("J017", what, why=why, fix=fix))


def _reject_operation(operation: str):
    def reject(self: "HeadOutput", *args: object) -> NoReturn:
        raise _LogitsError(operation)

    return reject


class HeadOutput(NamedTuple):
    """The output of an attached head in place of logits: its input [..., width], and its weight and bias."""

    hidden: Tensor
    head: _HeadParameters

    __mul__ = __rmul__ = __matmul__ = _reject_operation("*")
    __truediv__ = __rtruediv__ = _reject_operation("/")
    __add__ = __radd__ = _reject_operation("+")
    __sub__ = __rsub__ = _reject_operation("-")
    __neg__ = _reject_operation("-")
    __getitem__ = _reject_operation("[…]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _LogitsError(f".{name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise _LogitsError(getattr(func, "__name__", str(func)))


def _forward_head(head: nn.Linear, hidden: Tensor) -> Any:
    """Run an attached head. In evaluation (eval mode, no gradients) it returns its logits."""
    if head.training or torch.is_grad_enabled():
        return HeadOutput(hidden, _HeadParameters(head))
    return type(head).forward(head, hidden)


@dataclass(frozen=True)
class LinearCrossEntropy:
    """A `Job.loss` for large vocabularies: the exact mean cross-entropy over the targets that count, without the logits.

    >>> loss = LinearCrossEntropy(head="lm_head", chunk=1024)
    >>> job = plait.Job(loss=loss, weight=loss.weight, ...)        # doctest: +SKIP

    `head` names the `nn.Linear` (with or without bias, tied or not) whose output the model returns, anywhere in its
    outputs, untouched. Targets are one integer per token. They are already shifted: the data set decides the target of
    each token. Evaluation gets real logits.
    """

    head: str = "lm_head"
    ignore_index: int = IGNORED
    chunk: int = 1024

    def __post_init__(self) -> None:
        if type(self.chunk) is not int or self.chunk < 1:
            what = f"LinearCrossEntropy(chunk={self.chunk!r}) is not a whole number ≥ 1"
            raise PlaitError(Problem("J016", what, fix=("chunk=1024",)))

    def attach(self, model: nn.Module) -> None:
        """Give the model's head a forward that computes no logits. Raises J016 if there is no such linear layer."""
        head = dict(model.named_modules(remove_duplicate=False)).get(self.head)
        if head is None or not self.head:
            linear = [name for name, m in model.named_modules() if _is_plain_linear(m)]
            hint = did_you_mean(self.head, linear) if linear else "it has no nn.Linear"
            raise PlaitError(Problem("J016", f"the model has no module  {self.head}        {hint}", where=repr(self)))
        if not _is_plain_linear(head):
            what = f"{self.head} is a {type(head).__name__}, not a plain torch.nn.Linear"
            why = "LinearCrossEntropy itself multiplies by the layer's weight and adds its bias, and supports nothing else"
            raise PlaitError(Problem("J016", what, why=why, where=repr(self)))
        head.forward = MethodType(_forward_head, head)

    def weight(self, targets: Tensor) -> Tensor:
        """The number of targets that count: a `Job.weight`."""
        return (targets != self.ignore_index).sum()

    def __call__(self, outputs: object, targets: object) -> Tensor:
        """Compute the loss of a model's outputs. Raises J017 unless they contain the head's output exactly once."""
        dataclass_leaves(outputs)  # registers dataclasses as trees
        headed = [x for x in tree_leaves(outputs, is_leaf=lambda x: isinstance(x, HeadOutput)) if isinstance(x, HeadOutput)]
        if len(headed) != 1:
            what = f"the model's outputs contain the output of {self.head} {len(headed)} times, not once"
            why = f"the model returned {type(outputs).__name__}; {self.head}'s output must be in it, untouched"
            raise PlaitError(Problem("J017", what, why=why, where=repr(self)))
        hidden, head = headed[0]
        tokens = hidden.shape[:-1]
        if not isinstance(targets, Tensor) or (tokens != targets.shape and tokens != (targets.numel(),)):
            form = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            what = f"targets are {form}, the input of {self.head} is {tuple(hidden.shape)}"
            why = "the head needs one target for each input row, already shifted"
            raise PlaitError(Problem("J017", what, why=why, where=repr(self)))
        return linear_cross_entropy(
            hidden, head.weight, targets, head.bias, self.ignore_index, self.chunk, rows=head.rows, group=head.group
        )


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that only multiplies and adds."""
    own = vars(module).get("forward")
    attached = isinstance(own, MethodType) and own.__func__ is _forward_head
    linear = isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or "_rows" in vars(module))
    return linear and (own is None or attached)
