"""From a job and a plan to what a rank trains with: the model with its strategies applied, and its optimizer."""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.checkpoint import optimizer_state
from plait.config import conflicts
from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.config.job import Job, user_line
from plait.config.keys import OTHER_SAMPLES
from plait.config.plan import Plan
from plait.engine.analyse import setup_of, to_device, whole_sketch
from plait.launch.devices import kind_of, of_rank, settle_allocator, unseen
from plait.launch.place import Place
from plait.losses.global_batch import BatchPeers
from plait.model import optimizers
from plait.model.make import BuiltModel, make, make_optimizer
from plait.model.sketch import Sketch
from plait.parallel import average, gradient_hooks, whole_tensors
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.mesh import Mesh, of_experts
from plait.parallel.order import CUTTING, INSTALLING, ORDER, shard_plan
from plait.parallel.rank_model import RankModel, SplitModel
from plait.parallel.rank_setup import RankSetup
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import Randomness
from plait.tensors.collectives import differences, directly

WHOLE = 0.25
"""The share of a device's memory up to which a model goes there whole before it is cut."""


def inexact(plan: Plan, sketch: Sketch, model: nn.Module, device: torch.device) -> list[str]:
    """What cannot equal one device under this plan, by nature: of the whole model, in a sentence each."""
    found = [line for s in ORDER if s.wanted(plan) for line in s.inexact(plan, sketch)]
    if sketch.coupled_in_eval:
        found.append(f"{sketch.coupled_in_eval} in eval mode, so metrics depend on how many samples a rank evaluates at once")
    found += [f"random numbers in {n} come from an operator plait cannot key" for n in sketch.unkeyed]
    found += [f"random numbers in {n} have a shape that does not grow with the batch" for n in sketch.uneven]
    found += [f"dropout inside {n} runs over a packed sequence, which plait cannot key by sample" for n in sketch.packed]
    if plan.tp > 1 and sketch.unkeyed:
        found.append(f"those of {', '.join(sketch.unkeyed)} are the same on each of the {plan.tp} slices of tp")
    return [*found, *(_drawn_by_cudnn(sketch, model) if device.type == "cuda" else ())]


def _drawn_by_cudnn(sketch: Sketch, model: nn.Module) -> list[str]:
    """Recurrent layers on a GPU draw their dropout from a state that cuDNN keeps from call to call: nothing says where it stands."""
    layers = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 and n not in sketch.unkeyed
    ]
    return [f"dropout between the layers of {n} is drawn by cuDNN, which plait cannot key" for n in layers]


def check_plan(job: Job, plan: Plan, device: str = "cpu") -> None:
    """Refuse what cannot work, all of it at once, before any process starts."""
    check_schedule(job)
    problems = [*conflicts.found(job, plan), *conflicts.without_effect(plan)]
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
    settle_allocator()
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
    job: Job, plan: Plan, place: Place, device: torch.device, cast: torch.dtype | None = None, *,
    made: BuiltModel | None = None, sketch: Sketch | None = None,
) -> RankModel:  # fmt: skip
    """Build one rank. `cast` changes the dtype of all floating parameters and inputs (verify uses float64).

    `made`: the model, if it exists already; `sketch`: the result of `whole_sketch`, if another process has made it.
    """
    place.beat(-1, "build")
    check_plan(job, plan, device.type)
    group = place.connect(device, single_messages=plan.pp > 1)
    mesh = Mesh(plan, place.rank, group)

    # The whole model, and what is to be known of it.
    made = _made(job, plan, place.rank, device, cast, group) if made is None else made
    setup = setup_of(job, plan, place, device, cast, made=made)
    sketch = whole_sketch(setup, made) if sketch is None else sketch

    # Which rank has which part of it, and the groups of ranks that communicate.
    table = shard_plan(job, plan, sketch, directly(device))
    mesh.connect_all(table.late_views())

    # The strategies: those that leave a rank with a part of the model, then those that work on the part.
    split = _uncut(setup, mesh, table, sketch)
    for strategy in (s for s in CUTTING if s.wanted(plan)):
        split = strategy.apply(split)
    if made.on_host:
        to_device(split.module, device)
    for strategy in (s for s in INSTALLING if s.wanted(plan)):
        split = strategy.apply(split)
    if sketch.whole_update:
        split = whole_tensors.apply(split)
    split = average.apply(split)
    if split.techniques.replicas is None:  # they bring their own random numbers, one for each thread
        split.randomness.install(split.module, sketch.drawn)

    # What trains it.
    rank_model = _with_optimizer(split)
    gradient_hooks.apply(rank_model)
    for created in (*rank_model.hooks.optimizer_created, optimizer_state.watched):
        created(rank_model.optimizer)
    place.wait(device, going=False)
    return rank_model


def sketch_without_ranks(job: Job, plan: Plan, device: torch.device, cast: torch.dtype | None = None) -> Sketch:
    """The sketch that every rank would make (`whole_sketch`), in a process that is no rank. It makes the model as the first rank does.

    The sketch can be pickled: it lacks the attributes of parameters, which may be anything, and which ranks have themselves.
    """
    made = _made(job, plan, 0, device, cast, None)
    return replace(whole_sketch(setup_of(job, plan, Place(0, plan.world), device, cast, made=made), made), attributes={})


def _made(
    job: Job, plan: Plan, rank: int, device: torch.device, cast: torch.dtype | None, group: ProcessGroup | None
) -> BuiltModel:
    share = fsdp.share(plan, rank) if fsdp.wanted(plan) and not plan.across else None
    return make(job, device, cast, group, share, _room(plan, device))


def _uncut(setup: RankSetup, mesh: Mesh, table: ShardPlan, sketch: Sketch) -> SplitModel:
    """A rank before the first strategy."""
    plan, model = setup.plan, setup.model
    peers = BatchPeers([*mesh.ranks(*OTHER_SAMPLES)] if mesh.everyone is not None else None, plan.microbatches)
    fused = plan.cp > 1 and bool(sketch.unkeyed)  # attention that a GPU's kernel would draw in: cp draws for it
    randomness = Randomness(setup.job.seed, sketch.places, sketch.host_random or fused)
    return SplitModel(setup, mesh, table, sketch, sketch, model, dict(model.named_parameters()), peers, randomness)


def _with_optimizer(split: SplitModel) -> RankModel:
    """The job's optimizer, of what this rank updates, and what sums the gradients."""
    everything = split.to_update()
    optimizer, names = make_optimizer(split.job, everything)
    if split.whole_sketch.single_steps:
        optimizers.step_singly(optimizer)
    optimizers.choose(optimizer, split.device)
    for name in everything.keys() - split.params.keys():
        optimizer.state.pop(everything[name], None)
    return RankModel(
        **vars(split), optimizer=optimizer, optimizer_names=names, hyperparameters=optimizer_state.hyperparameters(optimizer),
        reducers=_reducers(split),
    )  # fmt: skip


def _reducers(split: SplitModel) -> dict[str, GradientReducer]:
    """What sums gradients, by the name of the phase; "" in a job without phases."""
    names, used = [name for name, _, _ in split.whole_sketch.parameters], split.techniques
    trained = {phase.name: [n for n in names if phase.has(n)] for phase in split.job.phases or ()} or {"": names}
    make = partial(GradientReducer, split.table, split.mesh, split.params, shards=used.shards)
    return {phase: make(some, sums=used.sums.get(phase, used.shards)) for phase, some in trained.items()}


def _room(plan: Plan, device: torch.device) -> float:
    """Bytes of a model that the device takes whole before it is cut into stages, slices or experts."""
    if device.type != "cuda" or not plan.across:
        return math.inf
    return torch.cuda.mem_get_info(device)[1] * WHOLE


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


def check_copies(rank_model: RankModel, step: int) -> None:
    """C006 when ranks that hold copies of the same parts do not hold the same bits. A device is waited for once."""
    named = [(name, part.tensor) for name, part in rank_model.parts().items() if name in rank_model.params]
    if rank_model.techniques.average is not None:
        named += rank_model.techniques.average.tensors.items()
    names, apart, experts = list[str](), list[Tensor](), rank_model.experts()
    replicas = rank_model.plan.replica_axes
    for axes, shared in ((replicas, False), (of_experts(replicas), True)):
        group = rank_model.mesh.group_or_none(*axes)
        mine = [(name, t) for name, t in named if (name in experts) is shared]
        if group is not None and mine:
            more, row = differences(mine, group, rank_model.device)
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
