"""The operations of a unit call's forward: matrix products, elements moved by other operators, and operator launches.

`model/meter.py` records them for two batch sizes, and `fit_products` finds the dims that grow with the batch. The planner predicts their time.
Floating-point
operations are those of matrix products and convolutions, by torch's formulas (`torch.utils.flop_counter`) and a few for operators that
torch lacks. A multiplication and an addition count as two.

This file also defines the values of a sketch: units, unit calls, and their costs. `model/sketch.py` measures them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from plait.tensors.torch_private import OpOverload, schema, storage_key
from plait.tensors.trees import EMPTY_TEMPLATE, ProbeSizes, Template, flatten_tensors


def count_operator_flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    """Count the floating-point operations of one call of an operator, such as `torch.ops.aten.mm.default`."""
    from torch.utils.flop_counter import flop_registry  # imports triton, only needed when a model runs

    packet = func.overloadpacket
    formula = EXTRA_FORMULAS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def get_argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return the value of an operator's argument or its default; None if it has no such argument."""
    for i, argument in enumerate(schema(func).arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None


def _count_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count two products: query with key, and weights with value. Shapes: [b, h, s, d]; causal masks are not deducted."""
    b, h, s, d = query.shape
    return 2 * b * h * s * key.shape[2] * (d + value.shape[3])


def _count_recurrent(input: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """Count one direction of one layer: input [time, batch, width] through both matrices at every step."""
    return 2 * input.shape[0] * input.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _count_cudnn_rnn(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Count all layers and directions: the matrices among the weights, at every step."""
    return 2 * input.shape[0] * input.shape[1] * sum(w.numel() for w in weights if w.dim() == 2)


def _count_grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count a grouped product: each row of `left` [rows, k] uses one of the matrices [groups, k, n]."""
    return 2 * left.numel() * right.shape[-1]


def _count_mv(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


aten = torch.ops.aten
EXTRA_FORMULAS = {
    getattr(aten, name): formula
    for name, formula in {
        "_scaled_dot_product_flash_attention_for_cpu": _count_attention,
        "mkldnn_rnn_layer": _count_recurrent,
        "_cudnn_rnn": _count_cudnn_rnn,
        "_grouped_mm": _count_grouped,
        "mv": _count_mv,
    }.items()
    if hasattr(aten, name)
}
"""Formulas for operators that torch lacks."""


@dataclass(frozen=True)
class MatrixProduct:
    """A product [rows, inner] @ [inner, columns] in the forward pass of one sample: `batch` in parallel, `times` in sequence."""

    rows: float
    inner: float
    columns: float
    batch: float = 1.0
    times: float = 1.0
    fused: bool = False
    """It is part of one kernel that keeps its intermediate values, as in flash attention."""
    grows: Literal["rows", "batch", ""] = "rows"
    """The dim that grows with the number of samples."""
    causal: bool = False
    """The kernel skips keys after a query (`is_causal=True` of scaled_dot_product_attention). A kernel with a mask argument does not, for any mask.
    `flops` count the full square."""
    convolution: bool = False

    @property
    def flops(self) -> float:
        """Operations of the forward pass of one sample. A causal product counts its full square."""
        return 2 * self.rows * self.inner * self.columns * self.batch * self.times


@dataclass(frozen=True)
class Product(MatrixProduct):
    """A matrix product computed by a unit call."""

    weight: str = ""
    """Name of the parameter that is its second matrix; "" for a product of two activations."""


@dataclass
class OpStats:
    """Operator statistics of one call. `moved`: elements moved, by the number of result elements, which separates wide from narrow activations."""

    products: list[Product] = field(default_factory=list)
    moved: Counter[int] = field(default_factory=Counter)
    operators: int = 0
    keys: int = 0
    """Elements of keys and values of attention."""

    def add(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        names: Mapping[int, str],
    ) -> int:
        """Add one operator and return its floating-point operations. `names`: parameter names by storage."""
        flops = count_operator_flops(func, args, kwargs, result)
        inputs, results = list(flatten_tensors(args)), list(flatten_tensors(result))
        if flops:
            self.operators += 1
            self.products += _list_products(func, args, kwargs, results, flops, names)
            if func.overloadpacket in ATTENTION_OPERATORS:
                self.keys += args[1].numel() + args[2].numel()
            return flops
        stores = {storage_key(t) for t in inputs}
        fresh = [t for t in results if storage_key(t) not in stores]
        if fresh or (results and schema(func).is_mutable):
            self.operators += 1
            size = sum(t.numel() for t in inputs if t.dim()) + sum(t.numel() for t in (fresh or results))
            self.moved[max(t.numel() for t in results)] += size
        return 0


ATTENTION_OPERATORS = frozenset(
    getattr(aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    ) if hasattr(aten, name)
)  # fmt: skip
MATRIX_ARGUMENTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
"""Positions of the two matrices in the arguments."""


def _list_products(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor], flops: int, names: Mapping[int, str]
) -> list[Product]:
    """Return the matrix products of one operator."""
    packet = func.overloadpacket
    weight = next((names[storage_key(t)] for t in flatten_tensors(args) if t.dim() > 1 and storage_key(t) in names), "")
    if packet in ATTENTION_OPERATORS:
        b, h, s, d = args[0].shape
        keys, wide = args[1].shape[2], args[2].shape[3]
        shape = Product(s, d, keys, b * h, fused=True, causal=bool(get_argument(func, args, kwargs, "is_causal")))
        return [shape, replace(shape, inner=keys, columns=wide)]
    if packet in MATRIX_ARGUMENTS:
        left, right = (args[i] for i in MATRIX_ARGUMENTS[packet])
        batch = left.shape[0] if left.dim() == 3 else 1
        if storage_key(left) in names and storage_key(right) not in names:  # weight @ x, as a transposed linear layer
            left, right = right.mT, left.mT
        return [Product(left.shape[-2], left.shape[-1], right.shape[-1], batch, weight=weight)]
    out = results[0]
    columns = out.shape[1] if out.dim() > 1 else 1
    rows = max(1, out.numel() // max(1, columns))
    turned = "convolution" in packet.__name__
    return [Product(rows, flops / 2 / rows / max(1, columns), columns, weight=weight, convolution=turned)]


def fit_products(small: OpStats, large: OpStats | None, sizes: ProbeSizes) -> list[Product]:
    """Return the products per sample from those of two batch sizes. From one batch alone, all products are assumed to grow."""
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
    return [replace(p, times=p.times * n) for p, n in Counter(products).items()]  # merge equal products


@dataclass(frozen=True)
class LinearCost:
    """A quantity of one unit call in a batch of n samples: fixed + per_sample * n."""

    fixed: float
    per_sample: float

    def for_batch(self, samples: float) -> float:
        """Return the quantity for a batch of `samples` samples."""
        return self.fixed + self.per_sample * samples


ZERO_COST = LinearCost(0.0, 0.0)


@dataclass(frozen=True)
class Unit:
    """A submodule that is not split further: the granularity of sharding, recomputation, pipeline stages and timing."""

    name: str
    kind: str
    """Class name of the module."""
    parameters: tuple[str, ...]
    """Names of its parameters, as in `named_parameters` of the complete model."""
    weights: int
    """Bytes of its parameters."""
    closed: bool
    """Its parameters are used inside its own calls only: not tied to another unit, not used by code between units."""
    repeated: bool
    """It is one of several siblings of the same class: a block."""
    experts: int = 0
    """Bytes of its experts that are sharded by ranks and no longer among its parameters, on the rank with most of them."""


@dataclass(frozen=True)
class OperationCounts:
    """The operations of a forward, for one sample."""

    products: tuple[Product, ...] = ()
    wide: float = 0.0
    """Elements moved by operators with results as large as the unit's output."""
    inner: float = 0.0
    """Elements moved by all other operators, between the unit's linear maps."""
    operators: float = 0.0
    keys: float = 0.0
    """Elements of keys and values of attention."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit, in the order of the forward pass. Costs are those of the forward pass."""

    unit: str
    needs: tuple[int, ...]
    """Earlier calls on whose outputs its inputs depend, directly or through code between units."""
    flops: LinearCost
    inputs: LinearCost
    """Bytes of its input tensors."""
    output: LinearCost
    """Bytes of its output tensors."""
    saved: LinearCost
    """Bytes that autograd saves for its backward, without parameters and tensors saved before. Inputs shared by several calls, such as a mask, count
    in
    equal parts."""
    work: OperationCounts = field(default_factory=OperationCounts, compare=False)
    """The operations of its forward."""
    backward: bool = True
    """Backward computes a gradient of its output: this or an earlier call has trained parameters, and the output is not detached."""
    writes: bool = False
    """It modifies an input tensor in place."""
    back: int | str | None = None
    """Position or name of an argument that it modifies and returns."""
    leaks: tuple[int, ...] = ()
    """Later calls that depend on its values other than through its output. -1: Python numbers in code between units; -2: the loss; -3: either of
    them, with a known use."""
    aside: tuple[int, ...] = ()
    """Later calls that get such values (-2: the model's output), with or without using them."""
    fresh: LinearCost = ZERO_COST
    """Bytes of its input storages without parameters and buffers, which its recomputation keeps. Inputs shared by several calls, such as a mask,
    count in
    equal parts."""
    given: int = 0
    """Number of its input tensors: another number means another path through the model's code."""
    template: Template = EMPTY_TEMPLATE
    """The structure of its output."""
