"""Conversion of keyed random bits into the numbers of random operators, for `randomness/keyed.py`.

Each place has a stream. Element i of the place's global tensor (batch dim first) is number i of the stream.
`randomness/philox.py` draws it on the tensor's device. Each distribution uses one uniform number per element, so the
position in the stream never depends on drawn values.

[Note: Graphs]
Equal compiled units use one graph, though each draws different random numbers. The graph is the same for all blocks, so
it cannot contain a place. A dropout layer in a compiled unit passes its name in the unit and the index of its call. The
operator that draws finds the current unit outside of the graph.
"""

import hashlib
import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.errors import PlaitError, Problem
from plait.randomness.philox import StreamPart, draw_mask_by, draw_uniform, make_attention_range, make_dropout_range
from plait.randomness.sub_block import SubBlocks
from plait.tensors.torch_private import RECURRENT, FakeTensor, OpOverload

PLAIN_DROPOUTS = (F.dropout, torch.dropout)
DROPOUTS = (*PLAIN_DROPOUTS, F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
COMPOSITES = frozenset({
    F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, F.rrelu, torch.rrelu,
    F.scaled_dot_product_attention, F.multi_head_attention_forward, F.gumbel_softmax, F.fractional_max_pool2d,
    F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices, torch.rrelu_,
    torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_,
    nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_,
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.native_dropout, torch.bernoulli, torch.normal,
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.multinomial, torch.poisson, torch.binomial, *RECURRENT,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
    Tensor.random_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_, Tensor.multinomial,
})  # fmt: skip
"""Functions that may draw inside. Each runs under `KeyedDraws` (`randomness/keyed.py`), which intercepts the draws."""


def has_packed_dropout(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a recurrent function applies dropout between its layers to a packed sequence. Arguments: (data,
    batch sizes, state, weights, bias, layers, dropout, training, …). Rows of packed data are sorted by time and length,
    so they cannot be split by samples."""
    packed = (*RECURRENT, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    return func in packed and len(args) > 7 and isinstance(args[3], (list, tuple)) and args[5] > 1 and args[6] > 0 and bool(args[7])


def make_philox_key(*words: object) -> int:
    """Return a 128-bit Philox key of the words: the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=16).digest(), "little")


def find_rule_name(func: OpOverload) -> str:
    """Return the name under which a random operator may be in `REDRAWN`; equal for its in-place and `_like` variants."""
    return func.overloadpacket.__name__.rstrip("_").removesuffix("_like")


class OperatorCall(NamedTuple):
    """A call of one of torch's operators."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def redraw(
    result: Tensor | tuple[Tensor, Tensor],
    call: OperatorCall,
    where: list[int],
    place: str,
    dim: int | None,
    windows: SubBlocks | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Overwrite the result of a random operator with keyed numbers."""
    drawn, name = result if isinstance(result, Tensor) else result[0], find_rule_name(call.func)
    if isinstance(drawn, FakeTensor):
        return result
    numbers = locate_numbers(drawn.shape, where, place, dim, windows)
    if not isinstance(result, Tensor):
        return _redraw_dropout(*result, call.args, numbers)
    between = draw_uniform(drawn.shape, numbers, drawn.device)
    digits = MANTISSA_BITS.get(drawn.dtype) if name in ("rand", "uniform") else None
    if digits is not None:
        between = (torch.floor(between * 2.0**digits) + 0.5) * 2.0**-digits
    return drawn.copy_(RULES[name](between, *_parse_distribution(name, *call)))


def fill_with_median(result: Tensor | tuple[Tensor, Tensor], call: OperatorCall) -> Tensor | tuple[Tensor, Tensor]:
    """Overwrite the result of a random operator with its value at one half; `native_dropout` keeps all elements."""
    if isinstance(result, Tensor):
        half, name = torch.full(result.shape, 0.5, dtype=torch.float64, device=result.device), find_rule_name(call.func)
        return result if isinstance(result, FakeTensor) else result.copy_(RULES[name](half, *_parse_distribution(name, *call)))
    output, stayed = result
    if not isinstance(output, FakeTensor):
        stayed.fill_(True)
        output.copy_(call.args[0])
    return result


def _redraw_dropout(output: Tensor, stayed: Tensor, args: tuple[Any, ...], numbers: StreamPart) -> tuple[Tensor, Tensor]:
    """Replace the result of `native_dropout` by a keyed mask. CUDA attention uses it for its dropout."""
    input, p, training = (*args, True)[:3]
    if training is not False:
        drawn = draw_mask_by(output.shape, numbers, make_attention_range(1.0 - p, output.dtype), output.dtype, output.device)
        stayed.copy_(drawn != 0)
        output.copy_(input * drawn)
    return output, stayed


MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
"""Binary digits of uniform numbers that a dtype can represent, so that none rounds up to 1."""


def locate_numbers(
    shape: torch.Size, where: list[int], place: str, dim: int | None, windows: SubBlocks | None = None
) -> StreamPart:
    """Return the numbers of a place's global stream for this rank's samples and sub-blocks of a tensor."""
    seed, step, first, samples = where
    if dim == -1:  # a place that the sketch did not see (a branch taken for the first time)
        like = [d for d, n in enumerate(shape) if n == samples]
        dim = like[0] if like else None
    dim = None if dim is not None and dim >= len(shape) else dim  # another draw was at this place in the sketch, where more code ran before
    philox_key, strides = make_philox_key(seed, "draw", step, place), [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    axes = None if windows is None else windows.find_axes(place, dim, shape, samples)
    batched = dim is not None and samples != 0
    order = [dim, *(d for d in range(len(shape)) if d != dim)] if batched else range(len(shape))
    apart = [strides[d] for d in order]
    if axes is None:
        start = first * (math.prod(shape) // samples) if batched else 0
        return StreamPart(philox_key, start, [(shape[d], ((0, shape[d]),)) for d in order], apart)
    if not batched:
        return StreamPart(philox_key, 0, axes, apart)
    apart.insert(0, apart[0] * (shape[dim] // samples))  # samples, then the rows of one sample
    return StreamPart(philox_key, first * math.prod(size for size, _ in axes[1:]), axes, apart)


def draw_mask(
    x: Tensor, where: Tensor, place: str, dim: int | None, p: float, windows: SubBlocks | None = None
) -> Tensor:
    """Draw the mask of `Randomness.draw_dropout_mask`; the operator `plait::mask` calls it."""
    if isinstance(x, FakeTensor):
        return x.new_empty(x.shape)
    numbers, dtype = locate_numbers(x.shape, where.tolist(), place, dim, windows), x.dtype.to_real()
    return draw_mask_by(x.shape, numbers, make_dropout_range(p), dtype, x.device).to(x.dtype)


ROW_DISTANCE = 1 << 40
"""Distance between the rows of a nested tensor in the stream of a place; larger than any row."""


def draw_nested(x: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    """Apply dropout to a nested tensor. Each row has its own part of the stream, independent of the lengths of other
    rows."""
    seed, step, first, samples = where.tolist()
    rows, philox_key = x.unbind(), make_philox_key(seed, "draw", step, place)
    before = first * (len(rows) // samples) if samples else 0
    masks = []
    for i, row in enumerate(rows, before):
        shape = row.shape
        numbers = StreamPart.from_axes(philox_key, i * ROW_DISTANCE, [(n, ((0, n),)) for n in shape])
        masks.append(draw_mask_by(shape, numbers, make_dropout_range(p), x.dtype, x.device))
    if x.layout is not torch.jagged:
        return x * torch.nested.as_nested_tensor(masks, dtype=x.dtype, device=x.device)
    offsets, lengths = x.offsets(), x.lengths()  # pyrefly: ignore
    if lengths is not None or isinstance(x.size(1), int):  # rows with gaps between them, or transposed
        return torch.nested.as_nested_tensor([row * m for row, m in zip(rows, masks)], layout=torch.jagged)
    return torch.nested.nested_tensor_from_jagged(x.values() * torch.cat(masks), offsets)


class DropoutCall(NamedTuple):
    """Arguments of a dropout function. `drops`: it draws, because it is training and p is not 0."""

    func: Callable[..., Any]
    input: Tensor
    p: float
    drops: bool
    inplace: bool

    def with_input(self, input: Tensor) -> "DropoutCall":
        """Return the same call with another input."""
        return DropoutCall(self.func, input, self.p, self.drops, self.inplace)


def parse_dropout_call(
    func: Callable[..., Any],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> DropoutCall:
    """Parse a call of one of `DROPOUTS`. Functions of torch.nn.functional take (input, p, training, inplace), torch's
    take (input, p, train)."""
    return DropoutCall(func, input, p, training and train and p != 0.0, inplace)


def find_mask_shape(call: DropoutCall) -> torch.Size:
    """Return the shape of a dropout function's mask: that of its input, or one element per feature."""
    func, input = call.func, call.input
    if func in PLAIN_DROPOUTS:
        return input.shape
    unbatched = (func is F.dropout1d and input.dim() == 2) or (func is F.dropout3d and input.dim() == 4)
    kept = 1 if unbatched else 2
    return input.shape[:kept] + (1,) * (input.dim() - kept)


def _normal(u: Tensor, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
    return torch.special.ndtri(u) * std + mean


def _integers(u: Tensor, low: int = 0, high: int = 2**24) -> Tensor:
    return torch.floor(u * (high - low)) + low


RULES = {
    "bernoulli": lambda u, p=0.5: u < p,
    "rand": lambda u, low=0.0, high=1.0: low + u * (high - low),
    "uniform": lambda u, low=0.0, high=1.0: low + u * (high - low),
    "randn": _normal,
    "normal": _normal,
    "exponential": lambda u, rate=1.0: -torch.log(u) / rate,
    "randint": _integers,
    "random": _integers,
    "cauchy": lambda u, median=0.0, sigma=1.0: median + sigma * torch.tan(torch.pi * (u - 0.5)),
    "log_normal": lambda u, mean=1.0, std=2.0: torch.exp(_normal(u, mean, std)),
    "geometric": lambda u, p=0.5: torch.ceil(torch.log(u) / np.log1p(-p)),
}
"""Operator name -> function (uniform numbers, distribution arguments) -> drawn values."""
REDRAWN = frozenset({*RULES, "native_dropout"})
"""Operators whose draws are replaced (`redraw`)."""


def _parse_distribution(name: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the distribution arguments among an operator's arguments."""
    if name in ("rand", "randn"):
        return []
    if name == "randint":
        low_high = [a for a in args if isinstance(a, int)]
        return low_high if len(low_high) == 2 else [0, *low_high]
    if name == "bernoulli" and func.overloadpacket.__name__ == "bernoulli" and len(args) == 1:
        return [args[0]]
    into_tensor = name != "normal" or func.overloadpacket.__name__.endswith("_")
    numbers = [a for a in args[into_tensor:] if isinstance(a, (int, float, Tensor))]
    if name == "random" and len(numbers) == 1:
        numbers = [0, *numbers]
    names = ("p", "mean", "std", "from", "to", "lambd", "median", "sigma")
    return numbers + [v for k, v in kwargs.items() if k in names]


@torch.library.custom_op("plait::mask", mutates_args=())
def _mask(x: Tensor, where: Tensor, place: str, dim: int, p: float) -> Tensor:
    return draw_mask(x, where, place, None if dim == -2 else dim, p)


@_mask.register_fake
def _(x: Tensor, where: Tensor, place: str, dim: int, p: float) -> Tensor:
    return x.new_empty(x.shape)


def mask_op(x: Tensor, where: Tensor, place: str, dim: int | None, p: float) -> Tensor:
    """Draw a dropout mask as one opaque operator for torch.compile. `dim`: −1 if unknown, None if there is no batch
    dim."""
    if not torch.compiler.is_compiling():
        return draw_mask(x, where, place, dim, p)
    return _mask(x, where, place, -2 if dim is None else dim, p)


DROPOUT_LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d, nn.Dropout3d: F.dropout3d,
}  # fmt: skip
"""Layers that draw one mask per call, with the function that they call."""
Draw = Callable[[Tensor, str, float], Tensor]
"""(tensor like the mask, place in the unit, p) -> mask."""
UNIT_DRAW: ContextVar[Draw | None] = ContextVar("unit", default=None)
"""Draws the masks of the compiled unit that runs now."""


@torch.library.custom_op("plait::unit_mask", mutates_args=())
def _unit_mask(like: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    return _draw_in_unit(like, place, p)


@_unit_mask.register_fake
def _(like: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    return like.new_empty(like.shape)


def _draw_in_unit(like: Tensor, place: str, p: float) -> Tensor:
    draw = UNIT_DRAW.get()
    if draw is None:
        what = f"the compiled code around {place.split('#')[0]} draws random numbers outside of any unit"
        why = "an activation checkpoint in the model's own code recomputes a part of a compiled unit, where plait cannot find its place"
        raise PlaitError(
            Problem(
                "J014", what, why=why, fix=("activation_checkpointing=full instead of the model's checkpoint", "compile=false")
            )
        )
    return draw(like, place, p)


def install_unit_dropout(module: nn.Module, name: str, calls: dict[str, int], where: Tensor) -> None:
    """Let a dropout layer draw inside of its compiled unit, where it has the name `name`.

    `calls`: number of calls of each layer in this call of the unit. `where`: the tensor of seed, step and samples,
    which is an input of the graph, so that masks are never constants. The layers of all units get the same class and
    similar attributes. An attribute of a single module would cause a recompilation.
    """
    vars(module).update(_name=name, _unit_calls=calls, _where=where)
    module.__class__ = _make_unit_class(type(module))


@cache
def _make_unit_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_UnitDropout, kind), {"_func": staticmethod(DROPOUT_LAYERS[kind])})


class _UnitDropout(nn.Module):
    _name: str
    _unit_calls: dict[str, int]
    _where: Tensor
    _func: Callable[..., Tensor]
    p: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout like the layer's own forward."""
        self._unit_calls[self._name] = number = self._unit_calls.get(self._name, 0) + 1
        if not self.training or self.p == 0.0:
            return input
        shape = find_mask_shape(DropoutCall(self._func, input, self.p, True, self.inplace))
        like = input.detach() if shape == input.shape else input.new_empty(shape)
        draw = _unit_mask if torch.compiler.is_compiling() else _draw_now
        mask = draw(like, self._where, f"{self._name}#{number}#1", self.p)
        return input.mul_(mask) if self.inplace else input * mask


def _draw_now(like: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    return _draw_in_unit(like, place, p)
