"""Whether an optimizer does to what a rank has of the parameters what it does to all of them: found by trying it.

SGD, Adam and their kin update every element by its own gradient and state, so a rank can update its part alone.
Adafactor shares statistics between rows and columns, LAMB scales by a tensor's norm, Muon orthogonalises a matrix; others
clip by the norm of all gradients: on a part they would silently do something else.
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

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch import one_device
from plait.model.mutations import FollowedWrites, OutsideWrites
from plait.model.optimizers import CombinedOptimizer, evaluation_mode, has_modes, step_singly
from plait.model.parameter_groups import optimizer_of
from plait.model.sketch import Sketch
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import host_kept
from plait.tensors.float64 import Wide
from plait.tensors.parameters import ParameterAttributes, with_attributes
from plait.tensors.rows import everything
from plait.tensors.trees import flat

DIM, MANY, FEW = 160, 2, 4
"""Of each number of dims, `MANY` tensors are tried with dims up to `DIM` (some optimizers act on large dims only), the
others with dims up to `FEW`: their place in the list may matter."""
LARGE = 1 << 22
"""Numbers in tensors that are tried as large as they are, when an optimizer cannot be made for small ones."""


@dataclass(frozen=True)
class TrialCourse:
    """Steps that are tried, from the start."""

    steps: int
    size: float
    """Of the gradients."""
    in_eval_mode: bool = False
    """The weights that are compared are those of the optimizer's eval mode, if it has one."""


COURSES = (TrialCourse(12, 1.0), TrialCourse(3, 1e-5, in_eval_mode=True), TrialCourse(3, 1e5, in_eval_mode=True))
"""An optimizer may clip, or act from some step on."""

BY_ELEMENT = frozenset((
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
))  # fmt: skip
"""torch's element-wise optimizers: each element is updated by its own gradient and state. They need no trial; a test runs it."""
TORCH = str(Path(torch.__file__).parent)
"""The folder of torch's own code."""

DECLARED = "whole_tensors"
"""Attribute of an optimizer's class: True says that it updates each tensor by its own gradient and state, and needs all of it."""

Lot = int | str
"""What each of two ranks has of a tensor: half of it along a dim, `WHOLE`, or one of them has it `ALONE`."""
WHOLE, ALONE = "whole", "alone"
Shapes = Mapping[str, tuple[int, ...]]
Attributes = Mapping[str, ParameterAttributes]
Make = Callable[[list[nn.Parameter]], Any]
"""Stand-ins of the job's trained parameters, in their order -> its optimizer."""


@dataclass(frozen=True)
class OptimizerNeeds:
    """What the job's optimizer needs under a plan."""

    whole: bool = False
    """Whole tensors, where a rank has parts of them."""
    singly: bool = False
    """A step for each tensor: it stacks them."""


def needs(job: Job, table: ShardPlan, sketch: Sketch) -> OptimizerNeeds:
    """What the job's optimizer needs to do on a plan's ranks what it does on one device.

    P022 when it cannot update what a rank has, and whole tensors would not help or cannot be had. P031, P066 of the functions below.
    """
    plan, kind, looks = table.plan, kind_of(job, sketch), False
    if refused := without_eval_mode(kind, plan) or without_whole_weights(kind, plan):
        raise PlaitError(refused)
    for axis in axes_of(plan):
        found = tried(job, sketch, lots_of(table, axis), kind)
        if found and not (found.whole_helps and can_be_whole(plan, axis)):
            raise PlaitError(problem(found, axis, plan))
        looks = looks or found is not None
    return OptimizerNeeds(looks, kind.singly)


@dataclass(frozen=True)
class OptimizerMismatch:
    """An optimizer that does something else with what ranks have of the parameters than with all of them."""

    optimizer: str
    """Name of its class."""
    why: str
    whole_helps: bool = False
    """It does the same where one rank updates whole tensors for those that hold their parts."""


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of the job's optimizer, whatever the plan."""

    declared: str = ""
    """Name of the class that says that it needs whole tensors."""
    singly: bool = False
    """It stacks tensors, and updates each as if it were alone."""
    with_modes: str = ""
    """Name of the class of an optimizer that has a train and an eval mode."""
    with_follower: str = ""
    """Name of the class of an optimizer whose step, or a hook of it, writes weights into tensors outside of it."""


def kind_of(job: Job, sketch: Sketch) -> OptimizerKind:
    """What the job's optimizer says of itself, and whether it stacks tensors."""
    shapes = trained(sketch)
    every: dict[str, Lot] = dict.fromkeys(shapes, ALONE)
    if _by_element(_maker(job, shapes, sketch.attributes), small([*shapes.values()]), [*every.values()]):
        return OptimizerKind()
    stacks = _stacks(job, shapes, sketch.attributes)
    singly = stacks and not differs(job, shapes, every, sketch.attributes, singly=True)
    try:
        made = optimizer_of(job, _stand_ins(shapes, sketch.attributes))
    except PlaitError:
        raise
    except Exception:  # it may choose parameters by their sizes
        return OptimizerKind(singly=singly)
    follows = _follows(job, shapes, sketch.attributes)
    name = type(made).__name__
    declares = all(getattr(one, DECLARED, False) for one in getattr(made, "optimizers", [made]))
    modes = isinstance(made, torch.optim.Optimizer) and has_modes(made)
    return OptimizerKind(name if declares else "", singly, name if modes else "", name if follows else "")


def _follows(job: Job, shapes: Shapes, attributes: Attributes) -> bool:
    """Whether a step writes weights, or what is made from them, into tensors that the optimizer did not make."""
    with FollowedWrites() as watch:
        try:
            parameters = _stand_ins(shapes, attributes)
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            watch.mark(*parameters.values(), *(p.grad for p in parameters.values()))
            with _as_written():
                optimizer_of(job, parameters).step()
        except PlaitError:
            raise
        except Exception:  # what it wrote until then is known
            return watch.follows
    return watch.follows


def _stacks(job: Job, shapes: Shapes, attributes: Attributes) -> bool:
    """Whether the optimizer makes steps where all tensors have gradients, and raises where every other one has none."""
    every = slice(None)
    for given in (every, slice(0, None, 2), slice(1, None, 2)):
        try:
            with OutsideWrites(), _as_written():
                parameters = _stand_ins(shapes, attributes)
                for parameter in list(parameters.values())[given]:
                    parameter.grad = torch.ones_like(parameter)
                optimizer_of(job, parameters).step()
        except PlaitError:
            raise
        except Exception:
            return given is not every
    return False


def _stand_ins(shapes: Shapes, attributes: Attributes) -> Mapping[str, Any]:
    values = (torch.linspace(-1, 1, torch.Size(s).numel(), dtype=torch.float64).view(s) for s in small([*shapes.values()]))
    return with_attributes(dict(zip(shapes, map(nn.Parameter, values))), attributes)


@contextmanager
def _as_written() -> Iterator[None]:
    """Steps of the optimizer's own code: in float64 whatever it casts to, and not compiled, which would take longer than the trial."""
    with one_device.naming("the job's optimizer"), torch.compiler.set_stance("force_eager"), Wide():
        yield


def tried(job: Job, sketch: Sketch, lots: Mapping[str, Lot], kind: OptimizerKind) -> OptimizerMismatch | None:
    """Whether the job's optimizer does something else with what ranks have, and whether whole tensors would help it."""
    if kind.declared:
        parts = any(isinstance(lot, int) for lot in lots.values())
        return OptimizerMismatch(kind.declared, f"its class says {DECLARED} = True", whole_helps=True) if parts else None
    if (found := differs(job, trained(sketch), lots, sketch.attributes, singly=kind.singly)) is None:
        return None
    alone: dict[str, Lot] = dict.fromkeys(lots, ALONE)
    return replace(found, whole_helps=differs(job, trained(sketch), alone, sketch.attributes, singly=kind.singly) is None)


def can_be_whole(plan: Plan, axis: str) -> bool:
    """Whether tensors that an axis cuts can be updated whole, by one of the ranks that hold their parts."""
    return axis in ("fsdp", "tp") and plan.ep == 1 and plan.offload == "none"


def without_eval_mode(kind: OptimizerKind, plan: Plan) -> Problem | None:
    """P066 of an optimizer with two modes, if a plan has no one sequence of weights that it could evaluate."""
    if not kind.with_modes or plan.replica_groups == 1:
        return None
    key = "outer_sync=async" if plan.outer_sync == "async" else f"replica_groups={plan.replica_groups}"
    what = f"the eval mode of {kind.with_modes} does not work with {key}"
    why = "its eval() changes the weights of one replica group, and what is evaluated and saved are the weights of all groups"
    fix = (f'--plan "dp={plan.devices}"', "torch.optim.AdamW")
    return Problem("P066", what, why=why, fix=fix)


def without_whole_weights(kind: OptimizerKind, plan: Plan) -> Problem | None:
    """P031 of an optimizer that writes weights into tensors outside of it, if ranks have parts of the weights, or weights of their own."""
    keys = plan.weight_sharding
    if not kind.with_follower or not keys:
        return None
    what = f"a step of {kind.with_follower} writes weights into a tensor outside of the optimizer, which does not work with {keys[0]}"
    why = "the tensor is of whole weights, and a rank updates a part of them"
    fix = (f'--plan "dp={plan.devices}"', "keep the tensor in optimizer.state[parameter], made of that parameter", "plait.EMA in Job.ema")
    return Problem("P031", what, why=why, fix=fix)


def problem(found: OptimizerMismatch, axis: str, plan: Plan) -> Problem:
    """P022 of an axis."""
    needs = plan.word(axis)
    if axis == "fsdp" and plan.fsdp == 1:
        needs = plan.word("shard_over_cp" if plan.shard_over_cp else "offload")
    parts = "some of the parameters without the others" if axis == "pp" else "parts of parameters"
    why = f"it was tried on all parameters and on what a rank has of them: {found.why}"
    fix = (f'--plan "dp={plan.devices}"', "torch.optim.AdamW")
    return Problem("P022", f"{found.optimizer} cannot update {parts}, which {needs} needs", why=why, fix=fix)


def trained(sketch: Sketch) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that are trained, by name."""
    return {name: shape for name, shape, _ in sketch.parameters}


def axes_of(plan: Plan) -> list[str]:
    """The axes of a plan along which ranks have parts of the parameters, or some of them."""
    used = {"fsdp": plan.is_sharded, "tp": plan.tp > 1, "ep": plan.ep > 1, "pp": plan.pp > 1}
    return [axis for axis in used if used[axis]]


def lots_of(table: ShardPlan, axis: str) -> dict[str, Lot]:
    """What ranks have of the parameters along an axis that shares them out; those that are not named are whole."""
    trained = [spec for spec in table.specs.values() if spec.trainable]
    if axis == "pp":
        return {spec.name: ALONE for spec in trained}
    axes = {"fsdp": ("fsdp", "efsdp")}.get(axis, (axis,))
    lots: dict[str, Lot] = {spec.name: ALONE for spec in trained if any(home in axes for home, _ in spec.homes)}
    for spec in trained:
        left = everything(spec.shape)
        for split in spec.splits:
            if {*axes} & {*split.axes} and (dim := split.dim_in(left)) is not None:
                lots[spec.name] = dim
            left = split.of(left, 0)
    return lots


@host_kept()
def differs(
    job: Job, shapes: Shapes, lots: Mapping[str, Lot], attributes: Attributes | None = None, *, singly: bool = False
) -> OptimizerMismatch | None:
    """Whether the job's optimizer does something else where ranks have `lots` of parameters of these shapes and attributes, without a word
    on whole tensors. `singly`: ranks make a step for each tensor."""
    held = [lots.get(name, WHOLE) for name in shapes]
    if all(lot == WHOLE for lot in held):
        return None
    failed: OptimizerMismatch | None = None
    make = _maker(job, shapes, attributes or {})
    alone = (lambda parameters: _made_single(make(parameters))) if singly else make
    for tried in (small(list(shapes.values())), list(shapes.values())):
        if failed and sum(torch.Size(s).numel() for s in tried) > LARGE:
            break
        if _by_element(make, tried, held):
            return None
        try:
            found = (_compared(make, alone, tried, held, course) for course in COURSES)
            return next((one for one in found if one is not None), None)
        except _Unmade as error:  # it may choose parameters by their sizes
            failed = error.mismatch
    return None if ALONE in held else failed


def _maker(job: Job, shapes: Shapes, attributes: Attributes) -> Make:
    return lambda parameters: optimizer_of(job, with_attributes(dict(zip(shapes, parameters)), attributes))


def _by_element(make: Make, shapes: Sequence[tuple[int, ...]], held: list[Lot]) -> bool:
    """Whether it is made of `BY_ELEMENT`, as they are in torch, with the same options for parts of tensors as for all of them."""
    values = _drawn(shapes, torch.Generator().manual_seed(0))
    halves = [[_part(v, lot, rank) for v, lot in zip(values, held)] for rank in range(2)]
    try:
        with OutsideWrites():
            whole, *parts = (_options(make, each) for each in (values, *halves))
    except Exception:  # the trial says why
        return False
    return whole is not None and all(each == whole for each in parts)


def _options(make: Make, values: list[Tensor]) -> list[tuple[int, type, dict[str, object]]] | None:
    """(place of a parameter in `values`, its optimizer's class and options), in the optimizer's order. None if only a trial can tell."""
    parameters = [nn.Parameter(v) for v in values]
    place = {id(p): k for k, p in enumerate(parameters)}
    made = make(parameters)
    inner = made.optimizers if type(made) is CombinedOptimizer else [made]
    if _all_have_hooks() or _changed(made) or not all(type(one) in BY_ELEMENT and not _changed(one) and _of_torch(one) for one in inner):
        return None
    groups = [(type(one), group) for one in inner for group in one.param_groups]
    rows = [(place[id(p)], kind, {**group, "params": None}) for kind, group in groups for p in group["params"]]
    return None if any(True for _ in flat(rows)) else rows  # a tensor as learning rate may be anything's


def _all_have_hooks() -> bool:
    """Whether there are hooks of every optimizer's steps. torch has no list of them: a handle knows its table."""
    handles = [register(lambda *_: None) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
    tables = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return any(tables)


def _changed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this one has hooks, a state, or a `step` of its own."""
    own = vars(optimizer)
    return "step" in own or any(value for name, value in own.items() if name != "defaults" and isinstance(value, Mapping))


def _of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the `step` of its class is torch's code, and so is what wraps it."""
    foreign = lambda code: not inspect.getfile(code).startswith(TORCH)  # noqa: E731
    return not foreign(inspect.unwrap(type(optimizer).step, stop=foreign))


class _Unmade(Exception):
    """The optimizer failed on whole tensors."""

    def __init__(self, mismatch: OptimizerMismatch):
        super().__init__(mismatch.why)
        self.mismatch = mismatch


def _made_single(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    step_singly(optimizer)
    return optimizer


def _compared(
    make: Make, of_rank: Make, shapes: Sequence[tuple[int, ...]], held: list[Lot], course: TrialCourse
) -> OptimizerMismatch | None:
    """The optimizer as the job makes it on all tensors, against the optimizer `of_rank` on what each of two ranks has of them."""
    generator, size = torch.Generator().manual_seed(0), course.size
    values = _drawn(shapes, generator)
    noise = [[size * t for t in _drawn(shapes, generator)] for _ in range(3)]
    rows = [noise[k % 3] for k in range(course.steps)]
    raised = lambda error: f"it raised {in_a_line(error)}"  # noqa: E731
    try:
        whole = _updated(make, values, rows, course)
    except PlaitError:
        raise
    except Exception as error:  # an optimizer may raise anything
        raise _Unmade(OptimizerMismatch(_kind(make, values), raised(error))) from error
    alone = [k for k, lot in enumerate(held) if lot == ALONE]
    owner = {k: int(2 * i >= len(alone)) for i, k in enumerate(alone)}
    try:
        ranks = [_on_rank(of_rank, values, rows, course, held=held, owner=owner, rank=rank) for rank in range(2)]
    except Exception as error:  # the real one would have to run on parts as well
        return OptimizerMismatch(_kind(make, values), raised(error))
    for k, (expected, before) in enumerate(zip(whole, values)):
        lot = held[k] if before.dim() or held[k] == ALONE else WHOLE
        found = torch.cat([mine[k] for mine in ranks], lot) if isinstance(lot, int) else ranks[owner.get(k, 0)][k]
        moved = float((expected - before).abs().max()) if before.numel() else 0.0
        if moved and not float((found - expected).abs().max()) <= 1e-9 * moved + 1e-14 * float(before.abs().max()):
            where = "when others are elsewhere" if lot in (WHOLE, ALONE) else "in two parts"
            why = f"a tensor of shape {list(before.shape)} is updated differently {where}"
            return OptimizerMismatch(_kind(make, values), why)
    return None


def _on_rank(
    make: Make, values: list[Tensor], rows: list[list[Tensor]], course: TrialCourse, *, held: list[Lot],
    owner: dict[int, int], rank: int,
) -> list[Tensor]:
    """The tensors of one of two ranks after its steps. `held`: what ranks have; `owner`: who has what one has alone."""
    mine = lambda t, k: _part(t, held[k], rank)  # noqa: E731
    here = lambda t, k: None if owner.get(k, rank) != rank else mine(t, k)  # noqa: E731
    gradients = [[here(g, k) for k, g in enumerate(row)] for row in rows]
    return _updated(make, [mine(v, k) for k, v in enumerate(values)], gradients, course)


def _kind(make: Make, values: list[Tensor]) -> str:
    try:
        return type(make([nn.Parameter(v) for v in values])).__name__
    except Exception:  # what it needs it will say when it is made for the real parameters
        return "the job's optimizer"


def small(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes like these, small enough to be tried."""
    tried = Counter[int]()
    found = []
    for shape in shapes:
        tried[len(shape)] += 1
        limit = DIM if tried[len(shape)] <= MANY else FEW
        found.append(tuple(min(d, limit if i < 2 else FEW) for i, d in enumerate(shape)))
    return found


def _drawn(shapes: Sequence[tuple[int, ...]], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _part(tensor: Tensor, lot: Lot, rank: int) -> Tensor:
    """What one of two ranks has of a tensor, if it has any of it."""
    if not isinstance(lot, int):
        return tensor
    if not tensor.dim():
        return tensor.clone()
    middle = (tensor.shape[lot] + 1) // 2
    return tensor.narrow(lot, *((0, middle) if rank == 0 else (middle, tensor.shape[lot] - middle))).clone()


def _updated(
    make: Make, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], course: TrialCourse
) -> list[Tensor]:
    with OutsideWrites():
        parameters: list[Any] = [nn.Parameter(v.clone()) for v in values]
        optimizer = make(parameters)
        for row in gradients:
            for parameter, gradient in zip(parameters, row):
                parameter.grad = None if gradient is None else gradient.clone()
            with _as_written():
                optimizer.step()
        with evaluation_mode(optimizer) if course.in_eval_mode else nullcontext():
            return [p.detach().clone() for p in parameters]
