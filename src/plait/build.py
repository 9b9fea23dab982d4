"""From a job and a plan to what a rank trains with: the model with its strategies applied, and its optimizer."""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait import data as data_module
from plait.errors import PlaitError, Problem
from plait.job import Job
from plait.launch.devices import kind_of
from plait.launch.place import Place
from plait.parts import Part, whole
from plait.plan import Plan
from plait.randomness import Randomness
from plait.sharded import Shards
from plait.sketch import Sketch, sketch
from plait.strategies import ORDER
from plait.torchseam import tree_map_only


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(*inputs)` for a tuple, `model(**inputs)` for a dict, else `model(inputs)`."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@dataclass
class Built:
    """One rank's model and optimizer under a plan. Strategies fill in what they bring."""

    job: Job
    plan: Plan
    place: Place
    device: torch.device
    group: Any
    model: nn.Module
    data: Any
    sketch: Sketch
    cast: torch.dtype | None = None
    randomness: Any = None
    optimizer: Any = None
    names: dict[int, str] | None = None
    own: dict[str, nn.Parameter] = field(default_factory=dict)
    """This rank's part of every parameter, by the model's name; tied ones once."""
    reducer: Any = None
    """What sums gradients over the ranks: `reducer.Reducer`, `sharded.Shards`, or None."""
    copies: Any = None
    """The group of ranks that hold copies of this rank's parts."""
    masters: dict[str, nn.Parameter] | None = None
    """What the optimizer updates when it is not `own`: copies in host memory."""
    prepared: list[Callable[[torch.optim.Optimizer], None]] = field(default_factory=list)
    """Called with the optimizer once it is made."""
    replicas: Any = None
    run: Any = call
    """(model, inputs) -> outputs."""
    scaler: Any = None
    precision: torch.dtype | None = None
    lockstep: str = ""
    """Every rank must run every micro-batch, also an empty one, because the forward pass communicates: `empty` without
    a sample (layers that count samples), `sample` with one that weighs nothing."""

    def parts(self) -> dict[str, Part]:
        """This rank's part of every parameter and buffer, tied ones once, by the model's names."""
        if isinstance(self.reducer, Shards):
            return self.reducer.parts()
        return {name: whole(t.detach()) for name, t in (*self.own.items(), *self.model.named_buffers())}

    def refresh(self) -> None:
        """The parts were written from outside (a checkpoint was loaded): forget what was computed from them."""
        if isinstance(self.reducer, Shards):
            self.reducer.reshard()
        for name, master in (self.masters or {}).items():
            with torch.no_grad():
                master.copy_(self.own[name])

    @property
    def inexact(self) -> list[str]:
        """What cannot equal one device under this plan, by nature."""
        found = [line for s in ORDER if s.wanted(self.plan) for line in s.inexact(self.plan, self.sketch)]
        found += [f"random numbers in {name} come from an operator plait cannot key" for name in self.sketch.unkeyed]
        return found


def check_plan(job: Job, plan: Plan, device: str = "cpu") -> None:
    """Refuse what cannot work, all of it at once, before any process starts."""
    problems = [problem for s in ORDER if s.wanted(plan) for problem in s.refuse(plan, job.batch, device)]
    if problems:
        raise PlaitError(problems)


def pick_device(wanted: str, place: Place) -> torch.device:
    """This rank's device: `auto`, `cpu` or `cuda`. H001 when CUDA is asked for and none is visible."""
    if kind_of(wanted) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def make_model(job: Job) -> nn.Module:
    """The job's model with the initial weights its constructor draws on one device, on every rank alike."""
    random.seed(job.seed)
    np.random.seed(job.seed & 0xFFFFFFFF)
    torch.manual_seed(job.seed)
    model = job.model()
    if not isinstance(model, nn.Module):
        raise PlaitError(Problem("J006", f"the job's model is a {type(model).__name__}, not a torch.nn.Module"))
    _supported(model)
    if hasattr(job.loss, "attach"):
        job.loss.attach(model)
    return in_training(model)


def build(job: Job, plan: Plan, place: Place, device: torch.device, cast: torch.dtype | None = None) -> Built:
    """Build one rank. `cast` changes the dtype of all floating parameters and inputs (verify uses float64)."""
    place.beat(-1, "build")
    check_plan(job, plan, device.type)
    group = place.connect(device)
    model = make_model(job).to(device=device, dtype=cast)
    samples = data_module.checked(job.data(), "Job(data=…)")
    if group is not None and dist.get_world_size(group) > 1:
        _same_everywhere(model, group)
    example = samples if data_module.is_map(samples) else job.data()  # reading an iterable moves it
    sketched = sketch(model, lambda n: move(data_module.first_samples(example, n)[0], device, cast), call)
    built = Built(job, plan, place, device, group, model, samples, sketched, cast, own=dict(model.named_parameters()))
    for strategy in ORDER:
        if strategy.wanted(plan):
            strategy.apply(built)
    if built.replicas is None:  # replicas bring their own, one per thread
        built.randomness = Randomness(model, job.seed, sketched.places, sketched.host_random)
    built.optimizer, built.names = make_optimizer(job, built.masters or built.own)
    for prepare in built.prepared:
        prepare(built.optimizer)
    return built


def in_training(model: nn.Module) -> nn.Module:
    """The model in training mode, by its own `train()`; parts that the job itself put in eval mode stay there."""
    frozen = [m for m in model.modules() if not m.training] if model.training else []
    model.train()
    for module in frozen:
        module.training = False
    return model


def _supported(model: nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        fix = ("run one batch through it in the job's model function",)
        raise PlaitError(
            Problem(
                "J006", f"{lazy[0]} has no shape yet", why="a lazy module takes its shape from the first batch", fix=fix
            )
        )
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        why, fix = (
            "their sum over ranks, norm and clipping are not defined here",
            ("sparse=False    (the result is the same)",),
        )
        raise PlaitError(
            Problem("J012", f"{sparse[0]} makes sparse gradients, which plait does not sum", why=why, fix=fix)
        )


def make_optimizer(job: Job, own: dict[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """The job's optimizer of these parameters, and the name of each by id."""
    names = {id(p): name for name, p in own.items()}
    optimizer = job.optimizer([p for p in own.values() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlaitError(
            Problem("J006", f"the job's optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        )
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} needs a closure, which plait does not give"
        why = "it evaluates the loss several times in one step; a step here is one forward and backward of the batch"
        raise PlaitError(Problem("J013", what, why=why, fix=("an optimizer whose step() takes no closure",)))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer, names


def move(tree: Any, device: torch.device, cast: torch.dtype | None) -> Any:
    """The tensors of a tree on the device, floating ones in `cast` when it is given."""

    if device.type == "cpu" and cast is None:
        return tree

    def one(t: Tensor) -> Tensor:
        return t.to(device, cast if cast is not None and t.is_floating_point() else t.dtype, non_blocking=True)

    return tree_map_only(Tensor, one, tree)


def digests(named: list[tuple[str, Tensor]]) -> Tensor:
    """One 64-bit digest per tensor, sensitive to order: int64 of shape [len(named)]."""
    rows = [_digest(t.detach()) for _, t in named]
    return torch.stack(rows) if rows else torch.zeros(0, dtype=torch.int64)


def _digest(t: Tensor) -> Tensor:
    raw = t.contiguous().reshape(-1).view(torch.uint8).cpu()
    raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)]).view(torch.int64)
    odd = torch.arange(1, raw.numel() + 1) * 2 + 1  # wraps around: arithmetic modulo 2^64
    return ((raw ^ (raw >> 29)) * odd).sum()


def differing(named: list[tuple[str, Tensor]], group: Any) -> list[str]:
    """Names of tensors that are not bit-equal on all ranks of the group."""
    mine = digests(named)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [name for i, (name, _) in enumerate(named) if any(int(row[i]) != int(mine[i]) for row in everyone)]


def _same_everywhere(model: nn.Module, group: Any) -> None:
    wrong = differing(list(model.named_parameters()) + list(model.named_buffers()), group)
    if wrong:
        raise PlaitError(
            Problem("J008", f"the job's model has different initial weights on different ranks: {', '.join(wrong[:3])}",
                    why=f"{len(wrong)} tensors differ, although Python's, numpy's and torch's generators start from seed on every rank",
                    fix=("draw initial weights from these generators only: not from time, os.urandom or the order of a set",))
        )  # fmt: skip


def broadcast_text(text: str, rank: int, group: Any, device: torch.device) -> str:
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


def check_loss(loss: Any) -> None:
    """J010 when what the job's loss returned is not a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise PlaitError(
            Problem(
                "J010",
                "the job's loss is not a scalar tensor",
                why=f"it returned {shape}",
                fix=("return the mean over the samples",),
            )
        )
