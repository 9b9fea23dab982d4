"""What a step of a model costs, apart from any machine and plan: its workload, made from the sketch of the model.

A `Workload` has what time and memory depend on: products of matrices, bytes moved and bytes kept, of blocks in the order of
the forward pass; equal neighbours are one block with a count. Figures are those of one sample.

What tp cuts is found for two ranks (`parallel/tensor/find/finder.py`) and taken for every number of them: whether a number
divides the heads is asked when a plan is chosen. Values between slices are told from others by their size: an operator whose
result is as large as what the unit returns works on the unit's own width.
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
from plait.model.experts import MoELayer
from plait.model.fake_model import HOLDS
from plait.model.make import call, make_model
from plait.model.operations import MatrixProduct, OperationCounts, Product, Unit, UnitCall
from plait.model.sketch import Sketch
from plait.model.slices import ParameterSlice, Slices
from plait.parallel.expert import find as experts
from plait.parallel.order import shard_plan
from plait.parallel.spec import ParamSpec, ShardPlan
from plait.parallel.tensor import wiring
from plait.parallel.tensor.choose import room_to_follow, slices_of
from plait.parallel.tensor.find.finder import FOLLOWED
from plait.tensors.torch_private import BatchNormBase
from plait.tensors.trees import first_words

Way = Literal["", "columns", "inner", "batch"]


@dataclass(frozen=True)
class PlannedProduct(MatrixProduct):
    """One of a workload, and what a plan may cut of it."""

    cut: Way = ""
    """Which dim `tp` cuts."""
    weight: bool = True
    """The second matrix is a weight: its gradient is a product of its own that can wait."""
    experts: float = 0.0
    """Its rows go to one of so many experts each; 0: it is none of an expert."""
    sequence: bool = True
    """Its rows are places of the sequence, which `cp` cuts."""
    head: float = 0.0
    """Columns of one attention head, if it is a weight that `tp` slices by columns: where heads are fewer than ranks, several have the same."""

    def columns_of(self, tp: int) -> float:
        """Columns of a rank, where they are what `tp` slices."""
        return max(self.columns / tp, min(self.columns, self.head))


@dataclass(frozen=True)
class Block:
    """A unit, or `count` alike ones in a row. All figures of one of them, of one sample; sizes in elements."""

    name: str
    count: int = 1
    products: tuple[PlannedProduct, ...] = ()
    weights: float = 0.0
    """Without those of experts."""
    weights_cut: float = 0.0
    """Those of `weights` that tp shares out."""
    experts: float = 0.0
    """Weights of experts."""
    moved: float = 0.0
    """What pointwise operators read and write, forward."""
    moved_cut: float = 0.0
    """Those of `moved` between slices: tp shares them out, with or without stretches of the sequence."""
    scores: float = 0.0
    """Scores of attention that operators read and write, where no fused kernel keeps them to itself."""
    kept: float = 0.0
    """Kept for backward."""
    kept_cut: float = 0.0
    """Those of `kept` between slices."""
    kept_selective: float = 0.0
    """Those of `kept` that activation_checkpointing=selective lets go."""
    given: float = 0.0
    """Its input, with a part of what other blocks are given too, such as a mask: what full recomputation keeps."""
    out: float = 0.0
    """Its output."""
    kernels: float = 0.0
    """Operators it runs forward."""
    handovers: float = 0.0
    """Sums over tp in its forward pass, each of `out` elements; backward has as many."""
    keys: float = 0.0
    """Keys and values, which cp hands around."""
    routed: float = 0.0
    """Sent to experts, and back."""
    statistics: float = 0.0
    """Batch norms: dp and fsdp sum their statistics forward, and again backward."""


@dataclass(frozen=True)
class Workload:
    """A model's step. `frozen` is the share of its weights that is not trained."""

    name: str
    blocks: tuple[Block, ...]
    frozen: float = 0.0
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of what is trained and has two dims or more: all but the first are columns."""
    tensors: int = 0
    """How many are trained."""

    def low_rank(self, rank: int) -> float:
        """Part of the trained weights that two factors of so many columns for every matrix are, the others being whole."""
        sizes = sum(m * n for m, n in self.matrices)
        thin = sum(min(m * n, rank * (m + n)) for m, n in self.matrices)
        return 1 - (sizes - thin) / max(1.0, self.weights * (1 - self.frozen))

    @property
    def weights(self) -> float:
        return sum((b.weights + b.experts) * b.count for b in self.blocks)

    @property
    def flops(self) -> float:
        """Of the forward pass of a sample."""
        return sum(p.flops * b.count for b in self.blocks for p in b.products)


LOSS = (8.0, 1.0, 12.0)
"""Elements moved and kept for one of the model's output, and operators, of a loss such as a cross-entropy."""
WORDS = 2
"""Of a row, for finding what tp cuts: memory and time grow with them, and what is chosen is checked again when it is built."""


@dataclass(frozen=True)
class Cuts:
    """What tp and ep cut of a model."""

    slices: Slices = field(default_factory=Slices)
    parameters: tuple[ParameterSlice, ...] = ()
    """Every parameter that tp cuts, as for two ranks."""
    mixtures: tuple[MoELayer, ...] = ()
    norms: tuple[str, ...] = ()
    """Modules whose statistics are those of the whole batch."""
    unfollowed: str = ""
    """Why nobody knows what tp can slice."""

    @cached_property
    def ways(self) -> dict[str, Way]:
        """Which dim of a product tp cuts, by the name of its weight."""
        columns = [name for group in self.slices.groups for name in group.columns] + [*self.slices.vocabulary]
        found: dict[str, Way] = dict.fromkeys(_weights(columns), "columns")
        inner: dict[str, Way] = dict.fromkeys(_weights(group.row for group in self.slices.groups), "inner")
        return found | inner

    @cached_property
    def names(self) -> frozenset[str]:
        """Parameters that tp cuts."""
        return frozenset(cut.parameter for cut in self.parameters)

    @cached_property
    def routed(self) -> dict[str, MoELayer]:
        """Parameters of experts."""
        return {name: mixture for mixture in self.mixtures for name in mixture.names}


def _weights(modules: Iterable[str]) -> list[str]:
    return [f"{name}.weight" if name else "weight" for name in modules]


def sharding(job: Job, sketch: Sketch, cuts: Cuts, ep: int = 2) -> ShardPlan:
    """The table (`parallel/spec.py`) of a plan with a few ranks along each axis that splits parameters inside a stage: which of them split
    which parameter is the same for every number of ranks. `ep=1`: experts are split as all parameters are."""
    return shard_plan(job, Plan(fsdp=2 * ep, tp=2, ep=ep), replace(sketch, cuts=cuts.parameters, mixtures=cuts.mixtures))


def workload_of(sketch: Sketch, table: ShardPlan, name: str = "", cuts: Cuts | None = None) -> Workload:
    """The workload of a sketch, of which `table` says what splits the parameters (`sharding`)."""
    cuts, specs = cuts or Cuts(), {name: spec for name, spec in table.specs.items() if not spec.buffer}
    itemsize = max((spec.dtype.itemsize for spec in specs.values()), default=4)
    units, left = {unit.name: unit for unit in sketch.units}, dict(specs)
    blocks = [_between(sketch, [left.pop(n) for n in sketch.rest if n in left], itemsize)]
    for one in sketch.calls:
        own = [left.pop(n) for n in units[one.unit].parameters if n in left]
        blocks.append(_block(units[one.unit], one, cuts, own, itemsize))
    blocks += _loss(sketch, itemsize)
    trained = sum(prod(shape) for _, shape, _ in sketch.parameters)
    frozen = 1 - trained / max(1, sum(prod(spec.shape) for spec in specs.values()))
    matrices = tuple((shape[0], prod(shape[1:])) for _, shape, _ in sketch.parameters if len(shape) > 1)
    return Workload(name, tuple(_runs(blocks)), frozen, matrices, len(sketch.parameters))


def _block(unit: Unit, call: UnitCall, cuts: Cuts, own: list[ParamSpec], itemsize: int) -> Block:
    """One call of a unit. `own`: its parameters, but those that are counted already; `itemsize`: bytes of an element."""
    ways, routed = cuts.ways, cuts.routed
    rows = [g.row for g in cuts.slices.groups if f"{g.row}.".startswith(f"{unit.name}.")]
    tables = [t for t in cuts.slices.vocabulary if f"{t}.".startswith(f"{unit.name}.")]
    mixed = {m.name: m for n, m in routed.items() if n in unit.parameters}.values()
    heads = [p.inner for p in call.work.products if not p.weight and p.batch > 1][:1] if rows else []
    products = tuple(_product(p, ways, routed, heads) for p in call.work.products)
    inner = call.work.inner if rows or tables else 0.0
    kept, out = call.saved.each / itemsize, call.output.each / itemsize
    share = inner / max(1.0, inner + call.work.wide)
    written = (p for p in call.work.products if not p.fused or p.columns <= p.inner)
    made = sum(p.rows * p.columns * p.batch * p.times for p in written)
    given = call.fresh.each / itemsize
    return Block(
        unit.name, 1, products, moved=call.work.wide + call.work.inner, moved_cut=inner,
        kept=kept, kept_cut=kept * share, kept_selective=max(0.0, kept - made - given), given=given, out=out,
        kernels=call.work.operators, handovers=float(len(rows) + len(tables)), keys=call.work.keys,
        routed=sum(m.rows * max(m.width) for m in mixed),
        statistics=float(sum(f"{name}.".startswith(f"{unit.name}.") for name in cuts.norms)), **_by_axes(own),
    )  # fmt: skip


def _by_axes(own: list[ParamSpec]) -> dict[str, float]:
    """Elements of these parameters by the axes that split them."""
    found = dict.fromkeys(("weights", "weights_cut", "experts"), 0.0)
    for spec in own:
        found["experts" if spec.expert else "weights"] += prod(spec.shape)
        found["weights_cut"] += prod(spec.shape) if not spec.expert and spec.is_split("tp") else 0
    return found


def _product(product: Product, ways: dict[str, Way], routed: dict[str, MoELayer], heads: Sequence[float]) -> PlannedProduct:
    """`heads`: the columns of a head, in a unit that `tp` slices and that has attention."""
    mixture = routed.get(product.weight)
    way = ways.get(product.weight, "")
    if not product.weight and heads:
        way = "batch"  # heads of attention lie between the maps that are cut
    more: dict[str, Any] = {
        "cut": "" if mixture else way, "weight": bool(product.weight), "experts": float(mixture.experts) if mixture else 0.0,
        "head": max(heads, default=0.0) if way == "columns" else 0.0,
    }  # fmt: skip
    return PlannedProduct(**vars(product) | more)


def _between(sketch: Sketch, own: list[ParamSpec], itemsize: int) -> Block:
    """The code between units, as one block: it runs on every stage, and is priced on the first. `own`: the parameters that it uses."""
    work: OperationCounts = sketch.work_between
    products = tuple(_product(p, {}, {}, ()) for p in work.products)
    return Block("between units", 1, products, moved=work.wide + work.inner, kept=sketch.saved_between.each / itemsize,
                 kernels=work.operators, **_by_axes(own))  # fmt: skip


def _loss(sketch: Sketch, itemsize: int) -> list[Block]:
    """The loss, which the sketch has not seen: an estimate by the size of the model's output."""
    if not sketch.needs:
        return []
    out = sum(sketch.calls[i].output.each for i in sketch.needs) / itemsize
    moved, kept, operators = LOSS
    return [Block("loss", moved=moved * out, kept=kept * out, given=out, out=1.0, kernels=operators)]


def _runs(blocks: Iterable[Block]) -> list[Block]:
    """Neighbours that cost the same as one block."""
    found: list[Block] = []
    for block in blocks:
        if found and replace(found[-1], name="", count=1) == replace(block, name="", count=1):
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(block)
    return found


def cuts_of(sketch: Sketch, model: nn.Module, inputs: Callable[[int], Any], job: Job, tp: bool = True) -> Cuts:
    """What tp and ep can cut of a job's model; `model` may be one of fake tensors. `tp`: a plan may slice layers.

    Where rows go depends on numbers, so mixtures are looked for in a model that is really built, if that is small enough.
    """
    norms = tuple(name for name, m in model.named_modules() if isinstance(m, BatchNormBase))
    slices, why = Slices(), ""
    two = Plan(tp=2, sequence_parallel=False)
    for given, most in ((lambda n: first_words(inputs(n), WORDS), room_to_follow(Plan())), (inputs, FOLLOWED)) if tp else ():
        try:
            slices = slices_of(sketch, model, given, call, job, two, most=most)
            break
        except PlaitError as error:
            why = error.problems[0].what if error.codes[0] == "P034" else ""
            break
        except Exception:  # the model's own, on so few words: then on whole rows
            continue
    found = Cuts(slices, wiring.vocabulary_cuts(model, slices, 2), norms=norms, unfollowed=why)
    if sum(p.numel() * p.element_size() for p in model.parameters()) > HOLDS:
        return found
    try:
        return replace(found, mixtures=tuple(experts.find(make_model(job), inputs, call)[0]))
    except PlaitError:
        return found
