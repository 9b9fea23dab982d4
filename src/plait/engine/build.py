"""From a job and a plan to what a rank trains with: the model with its strategies applied, and its optimizer."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.checkpoint import optimizer_state
from plait.checkpoint.fingerprint import structure
from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.config.job import Job, user_line
from plait.config.keys import OTHER_SAMPLES, SAME_PARTS
from plait.config.plan import Plan
from plait.data import batch as data_module
from plait.data import ready, sampling
from plait.data.device_copies import DeviceCopies
from plait.engine import batch_dependence, try_metrics, turns
from plait.launch import allocator
from plait.launch.devices import kind_of, of_rank, unseen
from plait.launch.place import Place
from plait.losses import transformers
from plait.losses.global_batch import BatchPeers
from plait.model import fused_optimizer, single_steps
from plait.model.make import BuiltModel, call, judged, make, make_optimizer
from plait.model.outside_writes import OutsideWrites
from plait.model.sketch import Sketch, sketch
from plait.parallel import average, fp8, gradient_hooks, mutations, unmeasured, whole_tensors
from plait.parallel.built import Built
from plait.parallel.context import strategy as context
from plait.parallel.expert import find
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import optimizer_check
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.gradient_sums import CrossGroupSums
from plait.parallel.mesh import EXPERT_REPLICAS, Mesh
from plait.parallel.order import CUTTING, ORDER, shard_plan
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.precision import trained_format
from plait.parallel.tensor import choose
from plait.randomness.keyed import Randomness, host_kept
from plait.randomness.sub_block import SubBlocks, first_of
from plait.tensors import higher_order, scripted
from plait.tensors.collectives import differences, directly
from plait.tensors.float64 import proof_format
from plait.tensors.modules import format_in, loss_kept, state_kept
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.torch_private import fake_failures, own_buffers, tree_map_only

WHOLE = 0.25
"""The share of a device's memory up to which a model goes there whole before it is cut."""


def inexact(built: Built) -> list[str]:
    """What cannot equal one device under this plan, by nature: of the whole model, and what this rank's losses ask for."""
    found = [line for s in ORDER if s.wanted(built.plan) for line in s.inexact(built.plan, built.whole)]
    found += [*built.sharers.inexact, *built.unlike]
    if built.coupled_in_eval:
        found.append(f"{built.coupled_in_eval} in eval mode, so metrics depend on how many samples a rank evaluates at once")
    found += [f"random numbers in {n} come from an operator plait cannot key" for n in built.whole.unkeyed]
    found += [f"random numbers in {n} have a shape that does not grow with the batch" for n in built.whole.uneven]
    found += [f"dropout inside {n} runs over a packed sequence, which plait cannot key by sample" for n in built.whole.packed]
    if built.plan.tp > 1 and built.whole.unkeyed:
        found.append(
            f"those of {', '.join(built.whole.unkeyed)} are the same on each of the {built.plan.tp} slices of tp"
        )
    return [*found, *_drawn_by_cudnn(built)]


def _drawn_by_cudnn(built: Built) -> list[str]:
    """Recurrent layers on a GPU draw their dropout from a state that cuDNN keeps from call to call: nothing says where it stands."""
    if built.device.type != "cuda":
        return []
    layers = [
        (n, m)
        for n, m in built.model.named_modules()
        if isinstance(m, nn.RNNBase) and m.dropout > 0 and m.num_layers > 1
    ]
    fresh = [n for n, _ in layers if n not in built.whole.unkeyed]
    return [f"dropout between the layers of {n} is drawn by cuDNN, which plait cannot key" for n in fresh]


def check_plan(job: Job, plan: Plan, device: str = "cpu") -> None:
    """Refuse what cannot work, all of it at once, before any process starts."""
    check_schedule(job)
    problems = [*turns.refused(job, plan), *plan.idle(), *average.refuse(job, plan)]
    problems += [problem for s in ORDER if s.wanted(plan) for problem in s.refuse(plan, job.batch, device)]
    if problems:
        raise PlaitError(problems)


def check_schedule(job: Job) -> None:
    """J004 when the job's schedule is not a function from samples seen to a factor."""
    if job.schedule is None:
        return
    fix = ("schedule=lambda samples: min(1.0, samples / 640)    a factor on the learning rate",)
    try:
        value = job.schedule(0)
        float(value)
    except Exception as error:  # it is the user's code
        what = f"Job.schedule(0) raised {in_a_line(error)}"
        why = "plait calls it with the number of samples seen, and multiplies the learning rates by what it returns"
        raise PlaitError(Problem("J004", what, why=why, where=user_line(error), fix=fix)) from error


def pick_device(wanted: str, place: Place) -> torch.device:
    """This rank's device: `auto`, `cpu` or `cuda`. H001 when CUDA is asked for and none is visible, H003 when too few are."""
    if kind_of(wanted) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", of_rank(place))
    allocator.settle()
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        if (missing := unseen(device.index, error)) is not None:
            raise missing from error
        raise
    torch.autograd.set_multithreading_enabled(
        False
    )  # backward in this thread: one of its own would not know the context
    return device


def build(
    job: Job, plan: Plan, place: Place, device: torch.device, cast: torch.dtype | None = None, known: tuple[BuiltModel, Sketch] | None = None
) -> Built:  # fmt: skip
    """Build one rank. `cast` changes the dtype of all floating parameters and inputs (verify uses float64).

    `known`: a model that is made already, and what `analyse` told of one like it, which is the same on every rank.
    """
    place.beat(-1, "build")
    check_plan(job, plan, device.type)
    group = place.connect(device, single_messages=plan.pp > 1)
    share = fsdp.share(plan, place.rank) if fsdp.wanted(plan) and not plan.across else None
    made = make(job, device, cast, group, share, _room(plan, device)) if known is None else known[0]
    built = start_build(job, plan, place, (device, cast), made)
    built.mesh = Mesh(plan, place.rank, group)
    built.sharers = BatchPeers([*built.mesh.ranks(*OTHER_SAMPLES)] if group is not None else None, plan.microbatches)
    built.sketch = built.whole = analyse(built, made) if known is None else known[1]
    if known is None:
        with state_kept(made.model.modules()), OutsideWrites():
            ready = lambda pair: move(pair, built.model_device, cast)  # noqa: E731
            try_metrics.metrics(built, _on_host(made), ready)
            built.coupled_in_eval = batch_dependence.reason(built, _on_host(made), ready)
    model, sketched = built.model, built.whole
    built.table = shard_plan(job, plan, sketched, directly(device))
    built.mesh.connect_all(built.table.late_views())
    for strategy in ORDER:
        if strategy not in CUTTING:
            _settle(built)
        if strategy.wanted(plan):
            strategy.apply(built)
    if sketched.whole_update:
        whole_tensors.apply(built)
    average.apply(built)
    if plan.across:
        _sum_across(built, [name for name, _, _ in sketched.parameters])
    if built.replicas is None:  # replicas bring their own, one per thread
        fused = plan.cp > 1 and bool(sketched.unkeyed)  # attention that a GPU's kernel would draw in: cp draws for it
        built.randomness = Randomness(model, job.seed, sketched.places, sketched.host_random or fused)
        if built.rules:
            built.randomness.windows = SubBlocks(sketched.drawn, first_of(built.rules))
    _make_optimizer(built)
    place.wait(device, going=False)
    return built


def _make_optimizer(built: Built) -> None:
    """The job's optimizer, of what this rank updates, and what strategies do with it."""
    everything = {n: (built.masters or built.own).get(n, p) for n, p in built.model.named_parameters()}
    built.optimizer, built.names = make_optimizer(built.job, everything)
    if built.whole.single_steps:
        single_steps.step_singly(built.optimizer)
    fused_optimizer.choose(built.optimizer, built.device)
    for name in everything.keys() - built.own.keys():
        built.optimizer.state.pop(everything[name], None)
    gradient_hooks.apply(built, everything)
    built.initial = optimizer_state.hyperparameters(built.optimizer)
    for prepare in (*built.moments.optimizer_created, optimizer_state.watched):
        prepare(built.optimizer)


def _room(plan: Plan, device: torch.device) -> float:
    """Bytes of a model that the device takes whole before it is cut into stages, slices or experts."""
    if device.type != "cuda" or not plan.across:
        return math.inf
    return torch.cuda.mem_get_info(device)[1] * WHOLE


def _on_host(made: BuiltModel) -> BuiltModel:
    """The model as runs with its numbers take it, where it is in the host's memory still."""
    return BuiltModel(made.model, made.model) if made.on_host else made


def _settle(built: Built) -> None:
    """What is left of a model that was cut in the host's memory goes to the device."""
    if not built.on_host:
        return
    built.on_host = False
    for parameter in built.model.parameters():
        if parameter.device != built.device and not parameter.is_meta:
            parameter.data = parameter.detach().to(built.device)
    for module in built.model.modules():
        buffers = own_buffers(module)
        buffers.update({name: b if b is None or b.is_meta else b.to(built.device) for name, b in buffers.items()})


def _sum_across(built: Built, names: list[str]) -> None:
    """What sums the gradients of ranks that are not all alike; of each phase its own. `names`: of all trained parameters."""
    if not built.job.phases:
        built.reducer = CrossGroupSums(names, built.reducer, built)
        return
    for phase in built.job.phases:
        inner = built.by_phase.get(phase.name, built.reducer)
        built.by_phase[phase.name] = CrossGroupSums([n for n in names if phase.has(n)], inner, built)


def start_build(
    job: Job, plan: Plan, place: Place, how: tuple[torch.device, torch.dtype | None], made: BuiltModel
) -> Built:
    """A rank that has a model and knows nothing of it yet. `how`: device, and cast."""
    samples = sampling.data_of(job)
    example = sampling.example(job, samples)
    with host_kept():
        ready.check(job, samples, example[0])
    built = Built(job, plan, place, how[0], Mesh(plan, place.rank), made.model, samples, Sketch(()), cast=how[1])
    built.on_host = made.on_host
    pairs = lambda n: move(data_module.first_samples(example, n), built.model_device, how[1])  # noqa: E731
    once = call if plan.pp == 1 and built.cast is None else partial(_as_trained, built)
    built.inputs = DeviceCopies(how[0])
    built.own, built.shares = dict(made.model.named_parameters()), made.shares
    built.attributes = {n: ParameterAttributes.of(p) for n, p in built.own.items()}
    built.parameter_hooks = {n: hooks for n, p in built.own.items() if (hooks := ParameterHooks.taken(p))}
    built.trial_call, built.pairs = once, pairs
    built.structure, built.in_fp8 = (
        structure(made.model),
        fp8.layers_of(made.model, plan.tp) if plan.precision == "fp8" else (),
    )
    transformers.adapt(made.model)
    return built


def analyse(built: Built, made: BuiltModel, seen: Sketch | None = None) -> Sketch:
    """The sketch of the job's model (`seen`, when there is one), with what the plan's strategies need to know of all of it."""
    with higher_order.opaque(), loss_kept(built.job.loss, made.model):
        return _analyse(built, made, seen)


def _analyse(built: Built, made: BuiltModel, seen: Sketch | None) -> Sketch:
    job, plan, cast, once = built.job, built.plan, built.cast, built.trial_call
    inputs = lambda n: built.pairs(n)[0]  # noqa: E731
    found = _sketched(built, made) if seen is None else seen
    if problem := scripted.refused(plan, found.scripted, found.counting) or unmeasured.refused(plan, found):
        raise PlaitError(problem)
    found = built.sketch = with_open_head(found, job)
    if expert.wanted(plan):
        with OutsideWrites():
            found = replace(found, mixtures=expert.found(*find.find(made.model, inputs, once), plan))
    if plan.tp > 1:
        handed_on = StageLayout.of(plan, found, job.stages).handed_on if plan.pp > 1 else frozenset()
        wide = cast is torch.float64
        found = choose.sliced(found, _on_host(made), built.pairs, once, job, plan, wide=wide, handed_on=handed_on)
    built.sketch = found
    mutations.check(plan, found)
    gradient_hooks.check(plan, found, built.parameter_hooks)
    found = context.stretched(built) if context.wanted(plan) else found
    needs = optimizer_check.needs(job, shard_plan(job, plan, found), found)
    return replace(found, whole_update=needs.whole, single_steps=needs.singly)


def _sketched(built: Built, made: BuiltModel) -> Sketch:
    """The sketch of a model as it is on the device, which chooses what operators do inside. One that runs with its numbers only
    has to go there as a whole."""
    inputs = lambda n: built.pairs(n)[0]  # noqa: E731
    judge = lambda n: partial(_judged_as_trained, built, judged(built.job, built.pairs(n)[1]))  # noqa: E731
    if made.on_host:
        built.on_host = False  # the fake one is there
        with suppress(*fake_failures()):
            found = sketch(made.fake, inputs, built.trial_call, built.job.units, judge)
            if not found.by_values:
                built.on_host = True
                return found
        built.on_host = True
        _settle(built)
    return sketch(made.fake if not made.on_host else made.model, inputs, built.trial_call, built.job.units, judge)


def _judged_as_trained(built: Built, judge: Callable[[Any], Any], outputs: object) -> Any:
    """The loss of outputs in the number format of a proof, or in the job's own."""
    with proof_format(built.cast):
        return judge(outputs)


def _as_trained(built: Built, model: nn.Module, inputs: object) -> Any:
    """A call in the number format of training: stages wait for outputs in the format that they will have."""
    with trained_format(built.plan, built.cast, built.model_device.type, model):
        return call(model, inputs)


def move(tree: object, device: torch.device, cast: torch.dtype | None) -> Any:
    """The tensors of a tree on the device, floating ones in `cast` when it is given."""

    if device.type == "cpu" and cast is None:
        return tree

    def one(t: Tensor) -> Tensor:
        return t.to(device, format_in(t, cast), non_blocking=True)

    return tree_map_only(Tensor, one, tree)


def with_open_head(sketched: Sketch, job: Job) -> Sketch:
    """The sketch of a job whose loss multiplies by the weight of `head` itself: that unit is used outside its call."""
    head = getattr(job.loss, "head", None)
    if head is None:
        return sketched
    units = (replace(u, closed=u.closed and not f"{head}.".startswith(f"{u.name}.")) for u in sketched.units)
    return replace(sketched, units=tuple(units))


def broadcast_text(text: str, rank: int, group: ProcessGroup | None, device: torch.device) -> str:
    """Rank 0's text on every rank, sent as bytes (an object collective would unpickle what it receives)."""
    if group is None:
        return text
    data = torch.tensor(list(text.encode()) if rank == 0 else [], dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, 0, group=group)
    if rank != 0:
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0, group=group)
    return bytes(data.tolist()).decode()


def check_copies(built: Built, step: int) -> None:
    """C006 when ranks that hold copies of the same parts do not hold the same bits. A device is waited for once."""
    named = [(name, part.tensor) for name, part in built.parts().items() if name in built.own]
    if built.average is not None:
        named += built.average.tensors.items()
    names, apart, experts = list[str](), list[Tensor](), built.experts()
    for axes, shared in ((SAME_PARTS, False), (EXPERT_REPLICAS, True)):
        group = built.mesh.group_or_none(*axes)
        mine = [(name, t) for name, t in named if (name in experts) is shared]
        if group is not None and mine:
            more, row = differences(mine, group, built.device)
            names, apart = [*names, *more], [*apart, row]
    wrong = [name for name, differs in zip(names, torch.cat(apart).tolist()) if differs] if apart else []
    if wrong:
        what = f"copies of {wrong[0]} have drifted apart by step {step}"
        why, fix = f"{len(wrong)} tensors differ between ranks", ("change weights only through the optimizer",)
        raise PlaitError(Problem("C006", what, why=why, fix=fix), FAILED)


def check_loss(loss: object) -> None:
    """J010 when what the job's loss returned is not a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        why, fix = f"it returned {shape}", ("return the mean over the samples",)
        raise PlaitError(Problem("J010", "the job's loss is not a scalar tensor", why=why, fix=fix))
