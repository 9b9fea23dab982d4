"""Build a rank from a job and a plan: the model with its strategies applied, and its optimizer."""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.checkpoint import optimizer_state
from plait.config import conflicts
from plait.config.errors import FAILED, PlaitError, Problem, summarize_error
from plait.config.job import Job, find_user_line
from plait.config.keys import DATA_AXES
from plait.config.plan import Plan
from plait.engine.model_analysis import make_global_sketch, make_rank_setup, move_to_device
from plait.launch.devices import configure_allocator, explain_missing_device, find_rank_device, resolve_kind
from plait.launch.place import Place
from plait.losses.global_batch import BatchPeers
from plait.model import optimizers
from plait.model.build_model import BuiltModel, make_optimizer, make_rank_model
from plait.model.sketch import Sketch
from plait.parallel import gradient_hooks, tensor_owners, weight_average
from plait.parallel.apply_order import INSTALLING, ORDER, PARTITIONING, make_shard_plan
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.mesh import Mesh, to_expert_axes
from plait.parallel.rank_model import RankModel, SplitModel
from plait.parallel.rank_setup import RankSetup
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import Randomness
from plait.tensors.collectives import compare_across_ranks, is_direct_exchange

MAX_FULL_FRACTION = 0.25
"""Fraction of device memory up to which a full model is moved there before it is sharded."""


def list_inexact_reasons(plan: Plan, sketch: Sketch, model: nn.Module, device: torch.device) -> list[str]:
    """List the reasons why this plan cannot match one device exactly, one sentence each, for the full model."""
    found = [line for s in ORDER if s.is_enabled(plan) for line in s.inexact_reasons(plan, sketch)]
    if sketch.coupled_in_eval:
        found.append(f"{sketch.coupled_in_eval} in eval mode, so metrics depend on how many samples a rank evaluates at once")
    found += [f"random numbers in {n} come from an operator plait cannot key" for n in sketch.unkeyed]
    found += [f"random numbers in {n} have a shape that does not grow with the batch" for n in sketch.uneven_draws]
    found += [f"dropout inside {n} runs over a packed sequence, which plait cannot key by sample" for n in sketch.packed_rnns]
    if plan.tp > 1 and sketch.unkeyed:
        found.append(f"those of {', '.join(sketch.unkeyed)} are the same on each of the {plan.tp} tp ranks")
    return [*found, *(_find_cudnn_dropout(sketch, model) if device.type == "cuda" else ())]


def _find_cudnn_dropout(sketch: Sketch, model: nn.Module) -> list[str]:
    """List recurrent layers whose dropout on a GPU uses cuDNN's internal state, which cannot be read or set."""
    layers = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 and n not in sketch.unkeyed
    ]
    return [f"dropout between the layers of {n} is drawn by cuDNN, which plait cannot key" for n in layers]


def check_plan(job: Job, plan: Plan, device: str = "cpu") -> None:
    """Reject a plan that cannot work, with all problems at once, before any process starts."""
    check_schedule(job)
    problems = [*conflicts.find_conflicts(job, plan), *conflicts.find_ineffective_keys(plan)]
    problems += [problem for s in ORDER if s.is_enabled(plan) for problem in s.validate(plan, job.batch, device)]
    if problems:
        raise PlaitError(problems)


def check_schedule(job: Job) -> None:
    """Raise J004 if the job's schedule is not a function from samples seen to a factor."""
    if job.schedule is None:
        return
    fix = ("schedule=lambda samples: min(1.0, samples / 640)    a factor on the learning rate",)
    try:
        value = job.schedule(0)
        float(value)
    except Exception as error:  # it is the user's code
        what = f"Job.schedule(0) raised {summarize_error(error)}"
        why = "plait calls it with the number of samples seen, and multiplies the learning rates by its result"
        raise PlaitError(Problem("J004", what, why=why, where=find_user_line(error), fix=fix)) from error


def pick_device(requested: str, place: Place) -> torch.device:
    """Return this rank's device: `auto`, `cpu` or `cuda`. H001 if CUDA is requested and not visible, H003 if there are too few devices."""
    if resolve_kind(requested) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", find_rank_device(place))
    configure_allocator()
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        if (missing := explain_missing_device(device.index, error)) is not None:
            raise missing from error
        raise
    torch.autograd.set_multithreading_enabled(
        False
    )  # backward runs in this thread: a separate one would not have the context
    return device


def build_rank_model(
    job: Job, plan: Plan, place: Place, device: torch.device, cast: torch.dtype | None = None, *,
    made: BuiltModel | None = None, sketch: Sketch | None = None,
) -> RankModel:  # fmt: skip
    """Build one rank. `cast` changes the dtype of all floating-point parameters and inputs (verify uses float64).

    `made`: the model, if it exists already; `sketch`: the result of `make_global_sketch`, if another process made it.
    """
    place.beat(-1, "build")
    check_plan(job, plan, device.type)
    group = place.connect(device, single_messages=plan.pp > 1)
    mesh = Mesh(plan, place.rank, group)

    # The full model, and its analysis.
    made = _make_model(job, plan, place.rank, device, cast, group) if made is None else made
    setup = make_rank_setup(job, plan, place, device, cast, made=made)
    sketch = make_global_sketch(setup, made) if sketch is None else sketch

    # The shard table, and the process groups.
    table = make_shard_plan(job, plan, sketch, is_direct_exchange(device))
    mesh.connect_all(table.list_late_groups())

    # The strategies: first those that shard the model, then those that modify the shard.
    split = _make_unsplit_model(setup, mesh, table, sketch)
    for strategy in (s for s in PARTITIONING if s.is_enabled(plan)):
        split = strategy.apply(split)
    if made.on_host:
        move_to_device(split.module, device)
    for strategy in (s for s in INSTALLING if s.is_enabled(plan)):
        split = strategy.apply(split)
    if sketch.needs_whole_tensors:
        split = tensor_owners.install_owners(split)
    split = weight_average.install_average(split)
    if split.techniques.replicas is None:  # replicas have their own generators, one per thread
        split.randomness.install(split.module, sketch.drawn)

    # The optimizer and the gradient reduction.
    rank_model = _add_optimizer(split)
    gradient_hooks.install_hooks(rank_model)
    for created in (*rank_model.hooks.optimizer_created, optimizer_state.watch_wrapper_tensors):
        created(rank_model.optimizer)
    place.set_timeouts(device, going=False)
    return rank_model


def sketch_without_ranks(job: Job, plan: Plan, device: torch.device, cast: torch.dtype | None = None) -> Sketch:
    """Make the sketch of the full model in a process that is not a rank. The model is made as on rank 0.

    The sketch can be pickled: it omits parameter attributes, which may be arbitrary objects and which each rank has itself.
    """
    made = _make_model(job, plan, 0, device, cast, None)
    return replace(make_global_sketch(make_rank_setup(job, plan, Place(0, plan.world), device, cast, made=made), made), attributes={})


def _make_model(
    job: Job, plan: Plan, rank: int, device: torch.device, cast: torch.dtype | None, group: ProcessGroup | None
) -> BuiltModel:
    share = fsdp.make_shard_slicer(plan, rank) if fsdp.is_enabled(plan) and not plan.across else None
    return make_rank_model(job, device, cast, group, share, _get_full_model_limit(plan, device))


def _make_unsplit_model(setup: RankSetup, mesh: Mesh, table: ShardPlan, sketch: Sketch) -> SplitModel:
    """Make the model of a rank before the first strategy."""
    plan, model = setup.plan, setup.model
    peers = BatchPeers([*mesh.ranks(*DATA_AXES)] if mesh.world_group is not None else None, plan.microbatches)
    fused = plan.cp > 1 and bool(sketch.unkeyed)  # attention with dropout in a GPU kernel: cp generates the random numbers
    randomness = Randomness(setup.job.seed, sketch.places, sketch.host_random or fused)
    return SplitModel(setup, mesh, table, sketch, sketch, model, dict(model.named_parameters()), peers, randomness)


def _add_optimizer(split: SplitModel) -> RankModel:
    """Make the job's optimizer for the parameters that this rank updates, and the gradient reducers."""
    everything = split.get_optimizer_params()
    optimizer, names = make_optimizer(split.job, everything)
    if split.global_sketch.steps_per_tensor:
        optimizers.step_per_tensor(optimizer)
    optimizers.fuse_update(optimizer, split.device)
    for name in everything.keys() - split.params.keys():
        optimizer.state.pop(everything[name], None)
    return RankModel(
        **vars(split), optimizer=optimizer, optimizer_names=names, hyperparameters=optimizer_state.list_hyperparameters(optimizer),
        reducers=_make_reducers(split),
    )  # fmt: skip


def _make_reducers(split: SplitModel) -> dict[str, GradientReducer]:
    """Make the gradient reducers by phase name; "" in a job without phases."""
    names, used = [name for name, _, _ in split.global_sketch.parameters], split.techniques
    trained = {phase.name: [n for n in names if phase.has(n)] for phase in split.job.phases or ()} or {"": names}
    make = partial(GradientReducer, split.shard_plan, split.mesh, split.params, shards=used.shards)
    return {phase: make(some, sums=used.sums.get(phase, used.shards)) for phase, some in trained.items()}


def _get_full_model_limit(plan: Plan, device: torch.device) -> float:
    """Return the bytes of a full model that may be placed on the device before it is split into stages, slices or experts."""
    if device.type != "cuda" or not plan.across:
        return math.inf
    return torch.cuda.mem_get_info(device)[1] * MAX_FULL_FRACTION


def broadcast_text(text: str, rank: int, group: ProcessGroup | None, device: torch.device) -> str:
    """Broadcast rank 0's text to all ranks, as bytes (an object collective would unpickle received data)."""
    if group is None:
        return text
    data = torch.tensor(list(text.encode()) if rank == 0 else [], dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, 0, group=group)
    if rank != 0:
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0, group=group)
    return bytes(data.tolist()).decode()


def check_replicas(rank_model: RankModel, step: int) -> None:
    """Raise C006 if replicas of a tensor are not bitwise equal. Waits for the device once."""
    named = [(name, part.tensor) for name, part in rank_model.get_parts().items() if name in rank_model.params]
    if rank_model.techniques.average is not None:
        named += rank_model.techniques.average.tensors.items()
    names, apart, experts = list[str](), list[Tensor](), rank_model.list_expert_params()
    replicas = rank_model.plan.replica_axes
    for axes, shared in ((replicas, False), (to_expert_axes(replicas), True)):
        group = rank_model.mesh.group_or_none(*axes)
        mine = [(name, t) for name, t in named if (name in experts) is shared]
        if group is not None and mine:
            more, row = compare_across_ranks(mine, group, rank_model.device)
            names, apart = [*names, *more], [*apart, row]
    wrong = [name for name, differs in zip(names, torch.cat(apart).tolist()) if differs] if apart else []
    if wrong:
        what = f"replicas of {wrong[0]} have diverged by step {step}"
        why, fix = f"{len(wrong)} tensors differ between ranks", ("change weights only through the optimizer",)
        raise PlaitError(Problem("C006", what, why=why, fix=fix), FAILED)


def check_loss(loss: object) -> None:
    """Raise J010 if the job's loss is not a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        why, fix = f"it returned {shape}", ("return the mean over the samples",)
        raise PlaitError(Problem("J010", "the job's loss is not a scalar tensor", why=why, fix=fix))
