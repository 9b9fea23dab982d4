"""The workload of a model: the costs of its step, independent of machine and plan, built from its sketch.

A `Workload` has the quantities that time and memory depend on: matrix products, bytes moved, and bytes kept, for blocks in the order of the forward
pass. Equal neighbors are one block with a count. All figures are per sample.

Tensor-parallel shards are found for two ranks (`parallel/tensor/find/finder.py`) and assumed for all numbers of ranks. Whether a number
divides the heads is checked when a plan is chosen. Activations between sharded layers are recognized by their size: an operator whose result is as
large as the unit's output works on the unit's own width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from torch import nn

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.build_model import make_model, run_model
from plait.model.experts import MoELayer
from plait.model.fake_model import MOST_REAL_BYTES
from plait.model.operations import MatrixProduct, OperationCounts, Product, Unit, UnitCall
from plait.model.sketch import Sketch
from plait.model.slices import ParameterSlice, Slices
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.expert import mixture_finder as experts
from plait.parallel.spec import ParamSpec, ShardPlan
from plait.parallel.tensor import wiring
from plait.parallel.tensor.choose_slices import compute_trace_budget, find_plan_slices
from plait.parallel.tensor.find.finder import MIN_TRACE_BYTES
from plait.tensors.torch_private import BatchNormBase
from plait.tensors.trees import take_first_tokens

ProductDim = Literal["", "columns", "inner", "batch"]


@dataclass(frozen=True)
class PlannedProduct(MatrixProduct):
    """A matrix product of a workload, and how a plan can shard it."""

    cut: ProductDim = ""
    """The dim that tp shards."""
    weight: bool = True
    """The second matrix is a weight: its gradient is a separate product, which can be delayed."""
    experts: float = 0.0
    """Number of experts over which its rows are routed; 0 if it is not part of an expert."""
    sequence: bool = True
    """Its rows are sequence positions, which `cp` shards."""
    head: float = 0.0
    """Columns of one attention head, if tp shards this weight by columns. If there are fewer heads than ranks, several ranks share a head."""

    def count_columns(self, tp: int) -> float:
        """Return the columns on a rank, if tp shards columns."""
        return max(self.columns / tp, min(self.columns, self.head))


@dataclass(frozen=True)
class Block:
    """A unit, or `count` equal ones in a row. All figures are of one unit and one sample; sizes are in elements."""

    name: str
    count: int = 1
    products: tuple[PlannedProduct, ...] = ()
    weights: float = 0.0
    """Weights without experts."""
    weights_cut: float = 0.0
    """The part of `weights` that tp shards."""
    experts: float = 0.0
    """Weights of experts."""
    moved: float = 0.0
    """Elements read and written by pointwise operators in forward."""
    moved_cut: float = 0.0
    """The part of `moved` between sharded layers, which tp shards with and without sequence parallelism."""
    scores: float = 0.0
    """Attention scores that operators read and write, without a fused kernel."""
    kept: float = 0.0
    """Activations kept for backward."""
    kept_cut: float = 0.0
    """The part of `kept` between sharded layers."""
    kept_selective: float = 0.0
    """The part of `kept` that activation_checkpointing=selective drops."""
    inputs: float = 0.0
    """Inputs, with an equal part of inputs shared with other blocks, such as a mask. Full recomputation keeps them."""
    out: float = 0.0
    """Elements of its output."""
    kernels: float = 0.0
    """Operators in forward."""
    tp_sums: float = 0.0
    """tp all-reduces in forward, each of `out` elements; backward has equally many."""
    keys: float = 0.0
    """Keys and values, which cp exchanges."""
    routed: float = 0.0
    """Elements sent to experts and back."""
    statistics: float = 0.0
    """Number of batch norms whose statistics dp and fsdp all-reduce, in forward and again in backward."""


@dataclass(frozen=True)
class Workload:
    """The blocks of a model's step. `frozen` is the fraction of weights that are not trained."""

    name: str
    blocks: tuple[Block, ...]
    frozen: float = 0.0
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of trained parameters with two dims or more; columns are all dims but the first."""
    tensors: int = 0
    """Number of trained parameters."""

    def compute_low_rank(self, rank: int) -> float:
        """Return the size of rank-`rank` factors of all matrices, with the other parameters, as a fraction of the trained weights."""
        sizes = sum(m * n for m, n in self.matrices)
        thin = sum(min(m * n, rank * (m + n)) for m, n in self.matrices)
        return 1 - (sizes - thin) / max(1.0, self.weights * (1 - self.frozen))

    @property
    def weights(self) -> float:
        return sum((b.weights + b.experts) * b.count for b in self.blocks)

    @property
    def flops(self) -> float:
        """Operations of the forward pass of one sample."""
        return sum(p.flops * b.count for b in self.blocks for p in b.products)


LOSS_COSTS = (8.0, 1.0, 12.0)
"""Elements moved and kept per output element of the model, and operators, of a loss such as cross-entropy."""
PROBE_TOKENS = 2
"""Tokens per row for finding tensor-parallel shards: memory and time grow with them. The shards are checked again when the model is built."""


@dataclass(frozen=True)
class ShardableParts:
    """The parts of a model that tp and ep can shard."""

    slices: Slices = field(default_factory=Slices)
    parameters: tuple[ParameterSlice, ...] = ()
    """All parameters that tp shards, as for two ranks."""
    mixtures: tuple[MoELayer, ...] = ()
    norms: tuple[str, ...] = ()
    """Modules with statistics of the global batch."""
    tp_failure: str = ""
    """The reason why no tensor-parallel shards were found."""

    @cached_property
    def product_dims(self) -> dict[str, ProductDim]:
        """The dim of a product that tp shards, by the name of its weight."""
        columns = [name for group in self.slices.groups for name in group.columns] + [*self.slices.vocabulary]
        found: dict[str, ProductDim] = dict.fromkeys(_name_weights(columns), "columns")
        inner: dict[str, ProductDim] = dict.fromkeys(_name_weights(group.row for group in self.slices.groups), "inner")
        return found | inner

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names of parameters that tp shards."""
        return frozenset(cut.parameter for cut in self.parameters)

    @cached_property
    def expert_parameters(self) -> dict[str, MoELayer]:
        """Mixture of each expert parameter, by its name."""
        return {name: mixture for mixture in self.mixtures for name in mixture.names}


def _name_weights(modules: Iterable[str]) -> list[str]:
    return [f"{name}.weight" if name else "weight" for name in modules]


def make_axis_plan(job: Job, sketch: Sketch, shardable: ShardableParts, ep: int = 2) -> ShardPlan:
    """Return the table (`parallel/spec.py`) of a plan with a few ranks along each axis that splits parameters inside a stage.

    The axes that split a parameter are the same for all numbers of ranks. `ep=1`: experts are split like all parameters.
    """
    return make_shard_plan(job, Plan(fsdp=2 * ep, tp=2, ep=ep), replace(sketch, tp_shards=shardable.parameters, moe_layers=shardable.mixtures))


def build_workload(sketch: Sketch, table: ShardPlan, name: str = "", shardable: ShardableParts | None = None) -> Workload:
    """Build the workload of a sketch. `table` has the axes that split its parameters (`make_axis_plan`)."""
    cuts, specs = shardable or ShardableParts(), {name: spec for name, spec in table.specs.items() if not spec.buffer}
    itemsize = max((spec.dtype.itemsize for spec in specs.values()), default=4)
    units, left = {unit.name: unit for unit in sketch.units}, dict(specs)
    blocks = [_build_between(sketch, [left.pop(n) for n in sketch.rest if n in left], itemsize)]
    for one in sketch.calls:
        own = [left.pop(n) for n in units[one.unit].parameters if n in left]
        blocks.append(_build_block(units[one.unit], one, cuts, own, itemsize))
    blocks += _build_loss(sketch, itemsize)
    trained = sum(prod(shape) for _, shape, _ in sketch.parameters)
    frozen = 1 - trained / max(1, sum(prod(spec.shape) for spec in specs.values()))
    matrices = tuple((shape[0], prod(shape[1:])) for _, shape, _ in sketch.parameters if len(shape) > 1)
    return Workload(name, tuple(_merge_equal(blocks)), frozen, matrices, len(sketch.parameters))


def _build_block(unit: Unit, call: UnitCall, shardable: ShardableParts, own: list[ParamSpec], itemsize: int) -> Block:
    """Build the block of one unit call. `own`: its parameters that are not counted yet; `itemsize`: bytes per element."""
    ways, routed = shardable.product_dims, shardable.expert_parameters
    rows = [g.row for g in shardable.slices.groups if f"{g.row}.".startswith(f"{unit.name}.")]
    tables = [t for t in shardable.slices.vocabulary if f"{t}.".startswith(f"{unit.name}.")]
    mixed = {m.name: m for n, m in routed.items() if n in unit.parameters}.values()
    heads = [p.inner for p in call.work.products if not p.weight and p.batch > 1][:1] if rows else []
    products = tuple(_plan_product(p, ways, routed, heads) for p in call.work.products)
    inner = call.work.inner if rows or tables else 0.0
    kept, out = call.saved.per_sample / itemsize, call.output.per_sample / itemsize
    share = inner / max(1.0, inner + call.work.wide)
    written = (p for p in call.work.products if not p.fused or p.columns <= p.inner)
    made = sum(p.rows * p.columns * p.batch * p.times for p in written)
    given = call.fresh.per_sample / itemsize
    return Block(
        unit.name, 1, products, moved=call.work.wide + call.work.inner, moved_cut=inner,
        kept=kept, kept_cut=kept * share, kept_selective=max(0.0, kept - made - given), inputs=given, out=out,
        kernels=call.work.operators, tp_sums=float(len(rows) + len(tables)), keys=call.work.keys,
        routed=sum(m.rows * max(m.width) for m in mixed),
        statistics=float(sum(f"{name}.".startswith(f"{unit.name}.") for name in shardable.norms)), **_count_by_axes(own),
    )  # fmt: skip


def _count_by_axes(own: list[ParamSpec]) -> dict[str, float]:
    """Count elements of parameters by the axes that split them."""
    found = dict.fromkeys(("weights", "weights_cut", "experts"), 0.0)
    for spec in own:
        found["experts" if spec.expert else "weights"] += prod(spec.shape)
        found["weights_cut"] += prod(spec.shape) if not spec.expert and spec.is_split("tp") else 0
    return found


def _plan_product(product: Product, ways: dict[str, ProductDim], routed: dict[str, MoELayer], heads: Sequence[float]) -> PlannedProduct:
    """Convert a product. `heads`: the width of a head, if tp shards the unit and it has attention."""
    mixture = routed.get(product.weight)
    way = ways.get(product.weight, "")
    if not product.weight and heads:
        way = "batch"  # attention heads lie between the sharded maps
    more: dict[str, Any] = {
        "cut": "" if mixture else way, "weight": bool(product.weight), "experts": float(mixture.experts) if mixture else 0.0,
        "head": max(heads, default=0.0) if way == "columns" else 0.0,
    }  # fmt: skip
    return PlannedProduct(**vars(product) | more)


def _build_between(sketch: Sketch, own: list[ParamSpec], itemsize: int) -> Block:
    """Build one block of the code between units. It runs on every stage and is priced on the first. `own`: parameters that it uses."""
    work: OperationCounts = sketch.work_between
    products = tuple(_plan_product(p, {}, {}, ()) for p in work.products)
    return Block("between units", 1, products, moved=work.wide + work.inner, kept=sketch.saved_between.per_sample / itemsize,
                 kernels=work.operators, **_count_by_axes(own))  # fmt: skip


def _build_loss(sketch: Sketch, itemsize: int) -> list[Block]:
    """Build the block of the loss, which a sketch does not cover. It is estimated from the size of the model's output."""
    if not sketch.needs:
        return []
    out = sum(sketch.calls[i].output.per_sample for i in sketch.needs) / itemsize
    moved, kept, operators = LOSS_COSTS
    return [Block("loss", moved=moved * out, kept=kept * out, inputs=out, out=1.0, kernels=operators)]


def _merge_equal(blocks: Iterable[Block]) -> list[Block]:
    """Merge neighbors with equal costs into one block."""
    found: list[Block] = []
    for block in blocks:
        if found and replace(found[-1], name="", count=1) == replace(block, name="", count=1):
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(block)
    return found


def find_shardable(sketch: Sketch, model: nn.Module, inputs: Callable[[int], Any], job: Job, tp: bool = True) -> ShardableParts:
    """Find the parts of a job's model that tp and ep can shard. `model` may have fake tensors; `tp`: also search tensor-parallel shards.

    Routing depends on values, so mixtures are searched in a model with real tensors, if it is small enough.
    """
    norms = tuple(name for name, m in model.named_modules() if isinstance(m, BatchNormBase))
    slices, why = Slices(), ""
    two = Plan(tp=2, sequence_parallel=False)
    for given, most in (
        (
            (lambda n: take_first_tokens(inputs(n), PROBE_TOKENS), compute_trace_budget(Plan())),
            (inputs, MIN_TRACE_BYTES),
        )
        if tp
        else ()
    ):
        try:
            slices = find_plan_slices(sketch, model, given, run_model, job, two, most=most)
            break
        except PlaitError as error:
            why = error.problems[0].what if error.codes[0] == "P034" else ""
            break
        except Exception:  # raised by the model on few tokens: retry with full rows
            continue
    found = ShardableParts(slices, wiring.list_parameter_slices(model, slices, 2), norms=norms, tp_failure=why)
    if sum(p.numel() * p.element_size() for p in model.parameters()) > MOST_REAL_BYTES:
        return found
    try:
        return replace(found, mixtures=tuple(experts.find_mixtures(make_model(job), inputs, run_model)[0]))
    except PlaitError:
        return found
