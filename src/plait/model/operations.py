"""What a unit call's forward consists of: products of matrices, elements that other operators move, operators launched.

`model/meter.py` notes it for two batch sizes; `line` finds what grows with the batch. The planner times it. Floating-point
operations are those of products of matrices and convolutions, by torch's own formulas (`torch.utils.flop_counter`) and a few
for operators it has none for; a multiplication and an addition are two.

Units, what calls them, and what a call costs: the values that a sketch is made of. `model/sketch.py` measures them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from plait.tensors.torch_private import OpOverload, schema, storage_key
from plait.tensors.trees import NOTHING, ProbeSizes, Template, flat


def flops_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    """What one call of an operator such as `torch.ops.aten.mm.default` computes."""
    from torch.utils.flop_counter import flop_registry  # imports triton, for who runs a model

    packet = func.overloadpacket
    formula = OURS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def argument_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value of an operator's argument, also if it is left at its default; None if there is no such argument."""
    for i, argument in enumerate(schema(func).arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products: query with key, and the weights with value. [b, h, s, d]; a causal mask is not deducted."""
    b, h, s, d = query.shape
    return 2 * b * h * s * key.shape[2] * (d + value.shape[3])


def _recurrent(input: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """One direction of one layer: input [time, batch, width] through both matrices at every step."""
    return 2 * input.shape[0] * input.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _recurrent_cuda(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """All layers and directions: the matrices among the weights, at every step."""
    return 2 * input.shape[0] * input.shape[1] * sum(w.numel() for w in weights if w.dim() == 2)


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Rows of `left` [rows, k] are dealt out over matrices [groups, k, n]: each row meets one of them."""
    return 2 * left.numel() * right.shape[-1]


def _vector(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


aten = torch.ops.aten
OURS = {
    getattr(aten, name): formula
    for name, formula in {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "mkldnn_rnn_layer": _recurrent,
        "_cudnn_rnn": _recurrent_cuda,
        "_grouped_mm": _grouped,
        "mv": _vector,
    }.items()
    if hasattr(aten, name)
}
"""Formulas for operators of which torch has none."""


@dataclass(frozen=True)
class MatrixProduct:
    """[rows, inner] @ [inner, columns] in the forward pass of one sample, `batch` side by side, `times` in a row."""

    rows: float
    inner: float
    columns: float
    batch: float = 1.0
    times: float = 1.0
    fused: bool = False
    """Inside one kernel that keeps its intermediate values to itself, as flash attention does."""
    grows: Literal["rows", "batch", ""] = "rows"
    """What has more with more samples."""
    causal: bool = False
    """The kernel leaves out keys after a query (`is_causal=True` of scaled_dot_product_attention). A kernel that is given a mask does not,
    whatever the mask says. `flops` are those of the square."""
    convolution: bool = False

    @property
    def flops(self) -> float:
        """Of the forward pass of a sample. A causal product counts with its full square."""
        return 2 * self.rows * self.inner * self.columns * self.batch * self.times


@dataclass(frozen=True)
class Product(MatrixProduct):
    """One that a call of a unit computed."""

    weight: str = ""
    """The parameter that is its second matrix; "" for none: a product of two activations."""


@dataclass
class Effort:
    """What the operators of one call did. `moved`: elements, by those of the result, so that wide values are told from narrow ones."""

    products: list[Product] = field(default_factory=list)
    moved: Counter[int] = field(default_factory=Counter)
    operators: int = 0
    keys: int = 0
    """Elements of keys and values that attention was given."""

    def add(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        names: Mapping[int, str],
    ) -> int:
        """Note one operator; returns its floating-point operations. `names`: of parameters, by storage."""
        flops = flops_of(func, args, kwargs, result)
        inputs, results = list(flat(args)), list(flat(result))
        if flops:
            self.operators += 1
            self.products += _products(func, args, kwargs, results, flops, names)
            if func.overloadpacket in ATTENTION:
                self.keys += args[1].numel() + args[2].numel()
            return flops
        stores = {storage_key(t) for t in inputs}
        fresh = [t for t in results if storage_key(t) not in stores]
        if fresh or (results and schema(func).is_mutable):
            self.operators += 1
            size = sum(t.numel() for t in inputs if t.dim()) + sum(t.numel() for t in (fresh or results))
            self.moved[max(t.numel() for t in results)] += size
        return 0


ATTENTION = frozenset(
    getattr(aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    ) if hasattr(aten, name)
)  # fmt: skip
SECOND = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
"""Where the two matrices stand in the arguments."""


def _products(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor], flops: int, names: Mapping[int, str]
) -> list[Product]:
    """The products of one operator."""
    packet = func.overloadpacket
    weight = next((names[storage_key(t)] for t in flat(args) if t.dim() > 1 and storage_key(t) in names), "")
    if packet in ATTENTION:
        b, h, s, d = args[0].shape
        keys, wide = args[1].shape[2], args[2].shape[3]
        shape = Product(s, d, keys, b * h, fused=True, causal=bool(argument_of(func, args, kwargs, "is_causal")))
        return [shape, replace(shape, inner=keys, columns=wide)]
    if packet in SECOND:
        left, right = (args[i] for i in SECOND[packet])
        batch = left.shape[0] if left.dim() == 3 else 1
        if storage_key(left) in names and storage_key(right) not in names:  # weight @ x, as a transposed linear layer
            left, right = right.mT, left.mT
        return [Product(left.shape[-2], left.shape[-1], right.shape[-1], batch, weight=weight)]
    out = results[0]
    columns = out.shape[1] if out.dim() > 1 else 1
    rows = max(1, out.numel() // max(1, columns))
    turned = "convolution" in packet.__name__
    return [Product(rows, flops / 2 / rows / max(1, columns), columns, weight=weight, convolution=turned)]


def line(small: Effort, large: Effort | None, sizes: ProbeSizes) -> list[Product]:
    """Products of one sample, from those of batches of two sizes; from one batch alone, all is taken to grow."""
    a, b = sizes
    if large is None or len(large.products) != len(small.products):
        return [
            replace(p, rows=p.rows / a) if p.weight else replace(p, batch=p.batch / a, grows="batch")
            for p in small.products
        ]
    products = []
    for p, q in zip(small.products, large.products):
        if q.rows != p.rows:
            products.append(replace(p, rows=(q.rows - p.rows) / (b - a)))
        elif q.batch != p.batch:
            products.append(replace(p, batch=(q.batch - p.batch) / (b - a), grows="batch"))
        else:
            products.append(replace(p, grows=""))
    return [replace(p, times=p.times * n) for p, n in Counter(products).items()]  # equal ones as one


@dataclass(frozen=True)
class Figure:
    """A quantity of one unit call in a batch of n samples: fixed + each * n."""

    fixed: float
    each: float

    def of(self, samples: float) -> float:
        """The quantity in a batch of so many samples."""
        return self.fixed + self.each * samples


ZERO = Figure(0.0, 0.0)


@dataclass(frozen=True)
class Unit:
    """A submodule that is not cut further: the grain of sharding, recompute, stages and timing."""

    name: str
    kind: str
    """The module's class."""
    parameters: tuple[str, ...]
    """Names of its parameters (as `named_parameters` of the whole model has them)."""
    weights: int
    """Bytes of its parameters."""
    closed: bool
    """Its parameters are used inside its own calls only: not tied to another unit's, not touched by code around it."""
    repeated: bool
    """One of several sisters of the same class: a block."""
    experts: int = 0
    """Bytes of experts in it that are not among its parameters any more, since ranks share them out and keep parts of
    them: on the rank that has most."""


@dataclass(frozen=True)
class OperationCounts:
    """What a forward consists of, of one sample."""

    products: tuple[Product, ...] = ()
    wide: float = 0.0
    """Elements that operators move whose result is as large as what the unit returns."""
    inner: float = 0.0
    """The same of all others: what lies between the unit's maps."""
    operators: float = 0.0
    keys: float = 0.0
    """Elements of keys and values."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit, in the order of the forward pass. Figures are those of the forward pass."""

    unit: str
    needs: tuple[int, ...]
    """Earlier calls whose outputs its inputs depend on, through the model's own code between units."""
    flops: Figure
    inputs: Figure
    """Bytes of the tensors it is given."""
    output: Figure
    """Bytes of the tensors it returns."""
    saved: Figure
    """Bytes that autograd keeps for its backward, parameters and what was kept before it not counted. Of what several calls are given, such
    as a mask, each has an equal part."""
    work: OperationCounts = field(default_factory=OperationCounts, compare=False)
    """What its forward consists of."""
    backward: bool = True
    """Backward computes a gradient of its output: the call or an earlier one has trained parameters, and the output is not detached."""
    writes: bool = False
    """It changes a tensor that it is given, in place."""
    back: int | str | None = None
    """Which of its arguments (by place or name), an object that it changed, it returns."""
    leaks: tuple[int, ...] = ()
    """Later calls (-1: numbers of Python in code between units, -2: the loss, -3: either, and it is known what they do with it)
    that depend on what it computed by another way than through its output."""
    aside: tuple[int, ...] = ()
    """The same of all that get hold of such a thing (-2: the model's output), whatever they do with it."""
    fresh: Figure = ZERO
    """Bytes of the storages that it is given, parameters and buffers not counted: what its recomputation keeps. Of what several calls are
    given, such as a mask, each has an equal part."""
    given: int = 0
    """How many tensors it is given: another number is another course of the model's code."""
    template: Template = NOTHING
    """The structure of what it returns."""
