"""Checks by trial whether an optimizer updates a rank's parts of the parameters like the full parameters.

SGD, Adam and similar optimizers update every element by its own gradient and state, so a rank can update its part alone. Other
optimizers need more. Adafactor uses statistics of rows and columns, LAMB scales by a tensor's norm, and Muon orthogonalizes a
matrix. Some clip by the norm of all gradients. On a part, they would silently compute something else.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch import one_device
from plait.model.mutations import RestoredWrites, TrackedWrites
from plait.model.optimizers import CombinedOptimizer, evaluation_mode, has_modes, step_per_tensor
from plait.model.parameter_groups import build_optimizer
from plait.model.sketch import Sketch
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import preserve_host_state
from plait.tensors.float64 import Float64Mode
from plait.tensors.parameters import ParameterAttributes, apply_attributes
from plait.tensors.rows import full_ranges
from plait.tensors.trees import flatten_tensors

LARGE_DIM, LARGE_TENSORS, SMALL_DIM = 160, 2, 4
"""For each number of dims, `LARGE_TENSORS` tensors are tried with dims up to `LARGE_DIM`, because some optimizers act on large dims
only. The others have dims up to `SMALL_DIM`: they are tried because their place in the list may matter."""
MAX_FULL_ELEMENTS = 1 << 22
"""Elements of tensors that are tried in full size, if an optimizer cannot be made for small ones."""


@dataclass(frozen=True)
class TrialSteps:
    """The steps of a trial, from the first on."""

    steps: int
    size: float
    """Scale of the gradients."""
    in_eval_mode: bool = False
    """Compare the weights of the optimizer's eval mode, if it has one."""


OPTIMIZER_TRIALS = (TrialSteps(12, 1.0), TrialSteps(3, 1e-5, in_eval_mode=True), TrialSteps(3, 1e5, in_eval_mode=True))
"""An optimizer may clip, or change its behavior after some steps."""

ELEMENTWISE_OPTIMIZERS = frozenset((
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
))  # fmt: skip
"""torch's element-wise optimizers: each element is updated by its own gradient and state. They need no trial; a test runs it."""
TORCH_FOLDER = str(Path(torch.__file__).parent)
"""The folder of torch's own code."""

FULL_TENSORS_ATTRIBUTE = "whole_tensors"
"""Attribute of an optimizer's class. True: it updates each tensor by its own gradient and state, and needs the full tensor."""

TensorSplit = int | str
"""The parts of a tensor on two ranks: halves along a dim, `FULL` on both, or the tensor on `ONE_RANK`."""
FULL, ONE_RANK = "whole", "alone"
Shapes = Mapping[str, tuple[int, ...]]
Attributes = Mapping[str, ParameterAttributes]
MakeTrialOptimizer = Callable[[list[nn.Parameter]], Any]
"""(stand-ins of the job's trained parameters, in their order) -> the job's optimizer."""


@dataclass(frozen=True)
class OptimizerNeeds:
    """The requirements of the job's optimizer under a plan."""

    full_tensors: bool = False
    """It needs full tensors, where a rank has parts of them."""
    singly: bool = False
    """It needs a separate step for each tensor, because it stacks tensors."""


def check_optimizer(job: Job, table: ShardPlan, sketch: Sketch) -> OptimizerNeeds:
    """Return the requirements under which the job's optimizer computes the same on a plan's ranks as on one device.

    Raises P022 if it cannot update a rank's parts, and full tensors would not help or are not available. Also raises P031 and
    P066.
    """
    plan, kind, looks = table.plan, inspect_optimizer(job, sketch), False
    if refused := check_eval_mode(kind, plan) or check_full_weights(kind, plan):
        raise PlaitError(refused)
    for axis in list_sharded_axes(plan):
        found = try_optimizer(job, sketch, list_splits(table, axis), kind)
        if found and not (found.full_helps and can_update_full(plan, axis)):
            raise PlaitError(make_mismatch_problem(found, axis, plan))
        looks = looks or found is not None
    return OptimizerNeeds(looks, kind.singly)


@dataclass(frozen=True)
class OptimizerMismatch:
    """An optimizer that computes something else on a rank's parts than on the full parameters."""

    optimizer: str
    """Name of the optimizer's class."""
    why: str
    full_helps: bool = False
    """It computes the same if one rank updates full tensors for the ranks with their parts."""


@dataclass(frozen=True)
class OptimizerKind:
    """Properties of the job's optimizer that do not depend on the plan."""

    declared: str = ""
    """Name of the class that declares the need for full tensors."""
    singly: bool = False
    """It stacks tensors, but updates each independently."""
    with_modes: str = ""
    """Name of the class of an optimizer with a train and an eval mode."""
    with_follower: str = ""
    """Name of the class of an optimizer whose step, or a hook of it, writes weights into tensors outside of it."""


def inspect_optimizer(job: Job, sketch: Sketch) -> OptimizerKind:
    """Inspect the job's optimizer: its declarations, and whether it stacks tensors."""
    shapes = list_trained_shapes(sketch)
    every: dict[str, TensorSplit] = dict.fromkeys(shapes, ONE_RANK)
    if _is_elementwise(_make_factory(job, shapes, sketch.attributes), shrink_shapes([*shapes.values()]), [*every.values()]):
        return OptimizerKind()
    stacks = _is_stacking(job, shapes, sketch.attributes)
    singly = stacks and not find_mismatch(job, shapes, every, sketch.attributes, singly=True)
    try:
        made = build_optimizer(job, _make_stand_ins(shapes, sketch.attributes))
    except PlaitError:
        raise
    except Exception:  # it may select parameters by their sizes
        return OptimizerKind(singly=singly)
    follows = _has_follower(job, shapes, sketch.attributes)
    name = type(made).__name__
    declares = all(getattr(one, FULL_TENSORS_ATTRIBUTE, False) for one in getattr(made, "optimizers", [made]))
    modes = isinstance(made, torch.optim.Optimizer) and has_modes(made)
    return OptimizerKind(name if declares else "", singly, name if modes else "", name if follows else "")


def _has_follower(job: Job, shapes: Shapes, attributes: Attributes) -> bool:
    """Whether a step writes weights, or values derived from them, into tensors that the optimizer did not make."""
    with TrackedWrites() as watch:
        try:
            parameters = _make_stand_ins(shapes, attributes)
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            watch.mark_weights(*parameters.values(), *(p.grad for p in parameters.values()))
            with _run_uncompiled():
                build_optimizer(job, parameters).step()
        except PlaitError:
            raise
        except Exception:  # writes until then were recorded
            return watch.has_outside_write
    return watch.has_outside_write


def _is_stacking(job: Job, shapes: Shapes, attributes: Attributes) -> bool:
    """Whether the optimizer raises if every other tensor has no gradient, but not if all have one."""
    every = slice(None)
    for given in (every, slice(0, None, 2), slice(1, None, 2)):
        try:
            with RestoredWrites(), _run_uncompiled():
                parameters = _make_stand_ins(shapes, attributes)
                for parameter in list(parameters.values())[given]:
                    parameter.grad = torch.ones_like(parameter)
                build_optimizer(job, parameters).step()
        except PlaitError:
            raise
        except Exception:
            return given is not every
    return False


def _make_stand_ins(shapes: Shapes, attributes: Attributes) -> Mapping[str, Any]:
    values = (torch.linspace(-1, 1, torch.Size(s).numel(), dtype=torch.float64).view(s) for s in shrink_shapes([*shapes.values()]))
    return apply_attributes(dict(zip(shapes, map(nn.Parameter, values))), attributes)


@contextmanager
def _run_uncompiled() -> Iterator[None]:
    """Context for steps of the optimizer's own code: in float64 despite its casts, and uncompiled, since compilation would take
    longer than the trial."""
    with one_device.name_job_part("the job's optimizer"), torch.compiler.set_stance("force_eager"), Float64Mode():
        yield


def try_optimizer(job: Job, sketch: Sketch, lots: Mapping[str, TensorSplit], kind: OptimizerKind) -> OptimizerMismatch | None:
    """Try the job's optimizer on a rank's parts: None if it computes the same, else the mismatch, and whether full tensors avoid it."""
    if kind.declared:
        parts = any(isinstance(lot, int) for lot in lots.values())
        return OptimizerMismatch(kind.declared, f"its class declares {FULL_TENSORS_ATTRIBUTE} = True", full_helps=True) if parts else None
    if (found := find_mismatch(job, list_trained_shapes(sketch), lots, sketch.attributes, singly=kind.singly)) is None:
        return None
    alone: dict[str, TensorSplit] = dict.fromkeys(lots, ONE_RANK)
    return replace(found, full_helps=find_mismatch(job, list_trained_shapes(sketch), alone, sketch.attributes, singly=kind.singly) is None)


def can_update_full(plan: Plan, axis: str) -> bool:
    """Whether the tensors that an axis shards can be updated in full, by one of the ranks with their parts."""
    return axis in ("fsdp", "tp") and plan.ep == 1 and plan.offload == "none"


def check_eval_mode(kind: OptimizerKind, plan: Plan) -> Problem | None:
    """Return P066 for an optimizer with two modes, if a plan has no single sequence of weights to evaluate."""
    if not kind.with_modes or plan.replica_groups == 1:
        return None
    key = "outer_sync=async" if plan.outer_sync == "async" else f"replica_groups={plan.replica_groups}"
    what = f"the eval mode of {kind.with_modes} does not work with {key}"
    why = "its eval() changes the weights of one replica group, but evaluations and checkpoints use the weights of all groups"
    fix = (f'--plan "dp={plan.devices}"', "torch.optim.AdamW")
    return Problem("P066", what, why=why, fix=fix)


def check_full_weights(kind: OptimizerKind, plan: Plan) -> Problem | None:
    """Return P031 for an optimizer that writes weights into tensors outside of it, if ranks have parts or versions of the weights."""
    keys = plan.weight_sharding
    if not kind.with_follower or not keys:
        return None
    what = f"a step of {kind.with_follower} writes weights into a tensor outside of the optimizer, which does not work with {keys[0]}"
    why = "the tensor needs full weights, and a rank updates a part of them"
    fix = (f'--plan "dp={plan.devices}"', "keep the tensor in optimizer.state[parameter], made of that parameter", "plait.EMA in Job.ema")
    return Problem("P031", what, why=why, fix=fix)


def make_mismatch_problem(found: OptimizerMismatch, axis: str, plan: Plan) -> Problem:
    """Make the P022 problem of an axis."""
    needs = plan.word(axis)
    if axis == "fsdp" and plan.fsdp == 1:
        needs = plan.word("shard_over_cp" if plan.shard_over_cp else "offload")
    parts = "a subset of the parameters" if axis == "pp" else "parts of parameters"
    why = f"it was tried on all parameters and on the parts of a rank: {found.why}"
    fix = (f'--plan "dp={plan.devices}"', "torch.optim.AdamW")
    return Problem("P022", f"{found.optimizer} cannot update {parts}, which {needs} needs", why=why, fix=fix)


def list_trained_shapes(sketch: Sketch) -> dict[str, tuple[int, ...]]:
    """List the shapes of the trained parameters, by name."""
    return {name: shape for name, shape, _ in sketch.parameters}


def list_sharded_axes(plan: Plan) -> list[str]:
    """List the axes of a plan along which ranks have parts of the parameters, or some of them."""
    used = {"fsdp": plan.is_sharded, "tp": plan.tp > 1, "ep": plan.ep > 1, "pp": plan.pp > 1}
    return [axis for axis in used if used[axis]]


def list_splits(table: ShardPlan, axis: str) -> dict[str, TensorSplit]:
    """List how an axis splits the parameters over ranks. Parameters that are not listed are full on every rank."""
    trained = [spec for spec in table.specs.values() if spec.trainable]
    if axis == "pp":
        return {spec.name: ONE_RANK for spec in trained}
    axes = {"fsdp": ("fsdp", "efsdp")}.get(axis, (axis,))
    lots: dict[str, TensorSplit] = {spec.name: ONE_RANK for spec in trained if any(home in axes for home, _ in spec.placement)}
    for spec in trained:
        left = full_ranges(spec.shape)
        for split in spec.splits:
            if {*axes} & {*split.axes} and (dim := split.find_dim(left)) is not None:
                lots[spec.name] = dim
            left = split.split_ranges(left, 0)
    return lots


@preserve_host_state()
def find_mismatch(
    job: Job, shapes: Shapes, lots: Mapping[str, TensorSplit], attributes: Attributes | None = None, *, singly: bool = False
) -> OptimizerMismatch | None:
    """Try the job's optimizer on parameters of these shapes and attributes, split as in `lots`. None if it computes the same as on
    full parameters.

    Declarations of the class are ignored. `singly`: ranks take a separate step for each tensor.
    """
    held = [lots.get(name, FULL) for name in shapes]
    if all(lot == FULL for lot in held):
        return None
    failed: OptimizerMismatch | None = None
    make = _make_factory(job, shapes, attributes or {})
    alone = (lambda parameters: _wrap_singly(make(parameters))) if singly else make
    for tried in (shrink_shapes(list(shapes.values())), list(shapes.values())):
        if failed and sum(torch.Size(s).numel() for s in tried) > MAX_FULL_ELEMENTS:
            break
        if _is_elementwise(make, tried, held):
            return None
        try:
            found = (_compare_ranks(make, alone, tried, held, course) for course in OPTIMIZER_TRIALS)
            return next((one for one in found if one is not None), None)
        except _TrialFailed as error:  # it may select parameters by their sizes
            failed = error.mismatch
    return None if ONE_RANK in held else failed


def _make_factory(job: Job, shapes: Shapes, attributes: Attributes) -> MakeTrialOptimizer:
    return lambda parameters: build_optimizer(job, apply_attributes(dict(zip(shapes, parameters)), attributes))


def _is_elementwise(make: MakeTrialOptimizer, shapes: Sequence[tuple[int, ...]], held: list[TensorSplit]) -> bool:
    """Whether the optimizer consists of torch's element-wise optimizers, unchanged, with equal options for parts of tensors and full tensors."""
    values = _draw_tensors(shapes, torch.Generator().manual_seed(0))
    halves = [[_take_part(v, lot, rank) for v, lot in zip(values, held)] for rank in range(2)]
    try:
        with RestoredWrites():
            whole, *parts = (_list_options(make, each) for each in (values, *halves))
    except Exception:  # the trial reports the reason
        return False
    return whole is not None and all(each == whole for each in parts)


def _list_options(make: MakeTrialOptimizer, values: list[Tensor]) -> list[tuple[int, type, dict[str, object]]] | None:
    """List (index of a parameter in `values`, its optimizer's class and options), in the optimizer's order. None if a trial is needed."""
    parameters = [nn.Parameter(v) for v in values]
    place = {id(p): k for k, p in enumerate(parameters)}
    made = make(parameters)
    inner = made.optimizers if type(made) is CombinedOptimizer else [made]
    if (
        _has_global_hooks()
        or _is_changed(made)
        or not all(type(one) in ELEMENTWISE_OPTIMIZERS and not _is_changed(one) and _is_torch_step(one) for one in inner)
    ):
        return None
    groups = [(type(one), group) for one in inner for group in one.param_groups]
    rows = [(place[id(p)], kind, {**group, "params": None}) for kind, group in groups for p in group["params"]]
    return None if any(True for _ in flatten_tensors(rows)) else rows  # a tensor as learning rate may have any use


def _has_global_hooks() -> bool:
    """Whether hooks on the steps of all optimizers are registered. torch has no list of them, but a handle refers to its table."""
    handles = [register(lambda *_: None) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
    tables = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return any(tables)


def _is_changed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer has hooks, a state, or a `step` of its own."""
    own = vars(optimizer)
    return "step" in own or any(value for name, value in own.items() if name != "defaults" and isinstance(value, Mapping))


def _is_torch_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the `step` of its class is torch's code, including its wrappers."""
    foreign = lambda code: not inspect.getfile(code).startswith(TORCH_FOLDER)  # noqa: E731
    return not foreign(inspect.unwrap(type(optimizer).step, stop=foreign))


class _TrialFailed(Exception):
    """The optimizer failed on full tensors."""

    def __init__(self, mismatch: OptimizerMismatch):
        super().__init__(mismatch.why)
        self.mismatch = mismatch


def _wrap_singly(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    step_per_tensor(optimizer)
    return optimizer


def _compare_ranks(
    make: MakeTrialOptimizer, of_rank: MakeTrialOptimizer, shapes: Sequence[tuple[int, ...]], held: list[TensorSplit], course: TrialSteps
) -> OptimizerMismatch | None:
    """Compare the job's optimizer on all tensors with the optimizer `of_rank` on the parts of each of two ranks."""
    generator, size = torch.Generator().manual_seed(0), course.size
    values = _draw_tensors(shapes, generator)
    noise = [[size * t for t in _draw_tensors(shapes, generator)] for _ in range(3)]
    rows = [noise[k % 3] for k in range(course.steps)]
    raised = lambda error: f"it raised {summarize_error(error)}"  # noqa: E731
    try:
        whole = _run_steps(make, values, rows, course)
    except PlaitError:
        raise
    except Exception as error:  # an optimizer may raise anything
        raise _TrialFailed(OptimizerMismatch(_find_class_name(make, values), raised(error))) from error
    alone = [k for k, lot in enumerate(held) if lot == ONE_RANK]
    owner = {k: int(2 * i >= len(alone)) for i, k in enumerate(alone)}
    try:
        ranks = [_run_rank(of_rank, values, rows, course, held=held, owner=owner, rank=rank) for rank in range(2)]
    except Exception as error:  # the real optimizer would have to run on parts too
        return OptimizerMismatch(_find_class_name(make, values), raised(error))
    for k, (expected, before) in enumerate(zip(whole, values)):
        lot = held[k] if before.dim() or held[k] == ONE_RANK else FULL
        found = torch.cat([mine[k] for mine in ranks], lot) if isinstance(lot, int) else ranks[owner.get(k, 0)][k]
        moved = float((expected - before).abs().max()) if before.numel() else 0.0
        if moved and not float((found - expected).abs().max()) <= 1e-9 * moved + 1e-14 * float(before.abs().max()):
            where = "if other tensors are on another rank" if lot in (FULL, ONE_RANK) else "if it is split in two"
            why = f"a tensor of shape {list(before.shape)} is updated differently {where}"
            return OptimizerMismatch(_find_class_name(make, values), why)
    return None


def _run_rank(
    make: MakeTrialOptimizer, values: list[Tensor], rows: list[list[Tensor]], course: TrialSteps, *, held: list[TensorSplit],
    owner: dict[int, int], rank: int,
) -> list[Tensor]:
    """Return the tensors of one of two ranks after its steps. `held`: the split of each tensor; `owner`: the ranks of tensors on one rank."""
    mine = lambda t, k: _take_part(t, held[k], rank)  # noqa: E731
    here = lambda t, k: None if owner.get(k, rank) != rank else mine(t, k)  # noqa: E731
    gradients = [[here(g, k) for k, g in enumerate(row)] for row in rows]
    return _run_steps(make, [mine(v, k) for k, v in enumerate(values)], gradients, course)


def _find_class_name(make: MakeTrialOptimizer, values: list[Tensor]) -> str:
    try:
        return type(make([nn.Parameter(v) for v in values])).__name__
    except Exception:  # it will raise again for the real parameters
        return "the job's optimizer"


def shrink_shapes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shrink shapes for a trial."""
    tried = Counter[int]()
    found = []
    for shape in shapes:
        tried[len(shape)] += 1
        limit = LARGE_DIM if tried[len(shape)] <= LARGE_TENSORS else SMALL_DIM
        found.append(tuple(min(d, limit if i < 2 else SMALL_DIM) for i, d in enumerate(shape)))
    return found


def _draw_tensors(shapes: Sequence[tuple[int, ...]], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _take_part(tensor: Tensor, lot: TensorSplit, rank: int) -> Tensor:
    """Take the part of a tensor on one of two ranks."""
    if not isinstance(lot, int):
        return tensor
    if not tensor.dim():
        return tensor.clone()
    middle = (tensor.shape[lot] + 1) // 2
    return tensor.narrow(lot, *((0, middle) if rank == 0 else (middle, tensor.shape[lot] - middle))).clone()


def _run_steps(
    make: MakeTrialOptimizer, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], course: TrialSteps
) -> list[Tensor]:
    with RestoredWrites():
        parameters: list[Any] = [nn.Parameter(v.clone()) for v in values]
        optimizer = make(parameters)
        for row in gradients:
            for parameter, gradient in zip(parameters, row):
                parameter.grad = None if gradient is None else gradient.clone()
            with _run_uncompiled():
                optimizer.step()
        with evaluation_mode(optimizer) if course.in_eval_mode else nullcontext():
            return [p.detach().clone() for p in parameters]
