"""Making what a job describes: its model with the weights it has on one device, and its optimizer.

In a process with a process group torch's `SyncBatchNorm` raises on a CPU, and elsewhere sums over all ranks, whatever they
hold. A rank's model has it without communication, as torch itself computes it in a single process, and `parallel/data/batch_norm.py`
then gathers its statistics as those of any batch norm.
"""

import inspect
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.launch import one_device
from plait.model import pretrained
from plait.model.deferred_init import defer
from plait.model.parameter_groups import optimizer_of
from plait.randomness.keyed import host_kept
from plait.tensors.collectives import differing, digest
from plait.tensors.fake import emptied_on
from plait.tensors.modules import convert, exchange_tensors, format_in
from plait.tensors.torch_private import FakeTensorMode


class LocalSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that does not communicate: the forward of torch's other batch norms."""

    def forward(self, input: Tensor) -> Tensor:
        return super(nn.SyncBatchNorm, self).forward(input)


def make_local(model: nn.Module) -> None:
    """Let no SyncBatchNorm of the model communicate, also of a subclass that calls torch's forward. Names, parameters and
    buffers stay. J054 for one with a process group of its own."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm) or isinstance(module, LocalSyncBatchNorm):
            continue
        if module.process_group is not None:
            what = f"{name or 'the model'} is a SyncBatchNorm with a process group of its own"
            why = "its statistics are of some of the samples of a batch; which, depends on the ranks and not on the job"
            fix = ("nn.SyncBatchNorm.convert_sync_batchnorm(model)    without process_group: statistics of the batch",)
            raise PlaitError(Problem("J054", what, why=why, fix=fix))
        kind = type(module)
        local = LocalSyncBatchNorm if kind is nn.SyncBatchNorm else type(kind.__name__, (kind, LocalSyncBatchNorm), {})
        module.__class__ = local


CPU = torch.device("cpu")
WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")
"""Where torch defines modules that sum gradients over ranks, or gather parameters."""


@dataclass(frozen=True)
class BuiltModel:
    """A rank's model. Of a model too large to hold, large parameters are on the meta device, and `shares` has this
    rank's parts of them; `fake` is what a sketch can run."""

    model: nn.Module
    fake: nn.Module
    shares: dict[str, Tensor] = field(default_factory=dict)
    on_host: bool = False
    """A GPU has no room for it before it is cut: it is in the host's memory, and `fake` is as on the GPU."""


def make(
    job: Job, device: torch.device, cast: torch.dtype | None, group: ProcessGroup | None,
    share: Callable[[Tensor], Tensor] | None, room: float = math.inf,
) -> BuiltModel:  # fmt: skip
    """The job's model on this rank, in `cast` if given. With `share`, a large model is never held: see `model/deferred_init.py`.

    `room`: bytes; a larger model stays in the host's memory. J008 when its weights are not the same on all ranks of the group.
    """
    deferred = defer(lambda: make_model(job), share, digest) if share is not None else None
    model = deferred.model if deferred else make_model(job)
    if group is not None and dist.get_world_size(group) > 1:
        _same_everywhere(model, deferred.digests if deferred else {}, group, device)
    if deferred is None and sum(t.nbytes for t in (*model.parameters(), *model.buffers())) > room:
        with suppress(Exception):  # a model that cannot be copied
            fake = emptied_on(convert(model, CPU, cast), FakeTensorMode(allow_non_fake_inputs=True), device)
            return BuiltModel(model, fake, on_host=True)
    convert(model, device, cast)
    if deferred is None:
        return BuiltModel(model, model)
    one = lambda t: t.detach().to(device, format_in(t, cast))  # noqa: E731
    exchange_tensors(deferred.fake, one)
    return BuiltModel(model, deferred.fake, {name: one(part) for name, part in deferred.shares.items()})


def make_model(job: Job) -> nn.Module:
    """The job's model with the initial weights its constructor draws on one device, on every rank alike."""
    model = _drawn(job)
    _supported(model)
    make_local(model)
    pretrained.in_doubles()
    if hasattr(job.loss, "attach"):
        job.loss.attach(model)
    return in_training(model)


@host_kept()
def plain_model(job: Job) -> nn.Module:
    """The job's model as its constructor leaves it, with nothing of training about it."""
    return _drawn(job)


def _drawn(job: Job) -> nn.Module:
    random.seed(job.seed)
    np.random.seed(job.seed & 0xFFFFFFFF)
    torch.manual_seed(job.seed)
    one_device.hide()
    with one_device.naming("the job's model"):
        model = job.model()
    if not isinstance(model, nn.Module):
        fix = ("return a module from it: model=lambda: MyModel(…)",)
        what = f"the job's model is a {type(model).__name__}, not a torch.nn.Module"
        raise PlaitError(Problem("J006", what, fix=fix))
    return model


def in_training(model: nn.Module) -> nn.Module:
    """The model in training mode, by its own `train()`; parts that the job itself put in eval mode stay there."""
    frozen = [m for m in model.modules() if not m.training] if model.training else []
    model.train()
    for module in frozen:
        module.training = False
    return model


def _supported(model: nn.Module) -> None:
    _on_one_device(model)
    for name, module in model.named_modules():
        if any(base.__module__.startswith(WRAPPERS) for base in type(module).__mro__):
            what = f"{name or 'the model'} is wrapped in {type(module).__name__}, which communicates by itself"
            raise one_device.communicates(what)
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        why = "a lazy module takes its shape from the first batch"
        fix = ("run one batch through it in the job's model function",)
        raise PlaitError(Problem("J006", f"{lazy[0]} has no shape yet", why=why, fix=fix))
    sparse = [
        name for name, module in model.named_modules() if getattr(module, "sparse", False) is True and _trained(module)
    ]
    if sparse:
        raise sparse_gradients_error(sparse[0])
    own_kind = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if _of_own_kind(p)]
    if own_kind:
        kind = type(dict((*model.named_parameters(), *model.named_buffers()))[own_kind[0]].data)
        what = f"{own_kind[0]} is a {kind.__module__}.{kind.__name__}, a tensor that has its numbers elsewhere"
        why = f"it can be neither cut, nor saved, nor compared as plain numbers; {len(own_kind)} tensors are such"
        fix = (
            "keep quantised weights as plain integer parameters (requires_grad=False) or buffers, with their scales beside",
        )
        raise PlaitError(Problem("K023", what, why=why, fix=fix))


def sparse_gradients_error(where: str) -> PlaitError:
    """J012: a module or a function produces sparse gradients. `where`: its name, the subject of the message."""
    why = "their sum over ranks, norm and clipping are not defined here"
    fix = (
        "sparse=False    the same result under SGD without momentum and weight decay",
        "sparse=False, torch.optim.Adam for SparseAdam    changes the result: Adam also moves rows without a gradient",
    )
    return PlaitError(Problem("J012", f"{where} makes sparse gradients, which plait does not sum", why=why, fix=fix))


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _on_one_device(model: nn.Module) -> None:
    """J043 for a model that somebody has spread over devices."""
    named = (
        (n, t.device)
        for n, t in (*model.named_parameters(), *model.named_buffers())
        if t.device.type not in ("cpu", "meta")
    )
    found = {device: name for name, device in reversed([*named])}
    places = {
        str(place): f"{name or 'the model'} on {place}" for name, place in getattr(model, "hf_device_map", {}).items()
    }
    spread = (
        [f"{name} on {device}" for device, name in found.items()]
        if len(found) > 1
        else [*places.values()] * (len(places) > 1)
    )
    if spread:
        what = f"the job's model is spread over {len(spread)} devices, and a rank drives one"
        fix = (
            "build it without device_map and without .to(device)    plait moves it",
            '--plan "pp=2 microbatches=4", "tp=2" or "fsdp=2"    splits a model that one device cannot hold',
        )
        raise PlaitError(Problem("J043", what, why="; ".join(spread[:4]), fix=fix))


def _of_own_kind(tensor: Tensor) -> bool:
    """Whether it is a tensor of a quantisation library, which wraps others or keeps a state in attributes."""
    return hasattr(tensor, "__tensor_flatten__") or type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def make_optimizer(job: Job, own: dict[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """The job's optimizer of these parameters, and the name of each by id.

    Parameters that other ranks hold are among them, as placeholders that never get a gradient: how the job groups its
    parameters may depend on their number and order.
    """
    names = {id(p): name for name, p in own.items()}
    optimizer = optimizer_of(job, own)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"the job's optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        fix = ("return one: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",)
        raise PlaitError(Problem("J006", what, fix=fix))
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} needs a closure, which plait does not give"
        why = "it evaluates the loss several times in one step; a step here is one forward and backward of the batch"
        raise PlaitError(Problem("J013", what, why=why, fix=("an optimizer whose step() takes no closure",)))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer, names


def _same_everywhere(
    model: nn.Module, digests: dict[str, Tensor], group: ProcessGroup | None, device: torch.device
) -> None:
    named = dict([*model.named_parameters(), *model.named_buffers()]) | digests
    wrong = differing(list(named.items()), group, device)
    if wrong:
        what = f"the job's model has different initial weights on different ranks: {', '.join(wrong[:3])}"
        why = f"{len(wrong)} tensors differ, although Python's, numpy's and torch's generators start from seed on every rank"
        fix = ("draw initial weights from these generators only: not from time, os.urandom or the order of a set",)
        raise PlaitError(Problem("J008", what, why=why, fix=fix))


def call(model: nn.Module, inputs: object) -> Any:
    """The model's outputs. It runs as in training: it keeps nothing for generation."""
    with pretrained.without_cache(model):
        return called(model, inputs)


def called(model: nn.Module, inputs: object) -> Any:
    """`model(*inputs)` for a tuple, `model(**inputs)` for a dict, else `model(inputs)`."""
    with one_device.naming("the job's model"):
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def judged(job: Job, targets: object) -> Callable[[Any], Any]:
    """Makes the loss of the model's output for these targets."""
    return lambda outputs: job.loss(outputs, targets)
