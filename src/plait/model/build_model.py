"""Build a job's model with the initial weights it has on one device, and its optimizer.

If the process has a process group, torch's `SyncBatchNorm` raises on a CPU, and on other devices it sums over all ranks, whatever their samples.
A rank's model therefore contains it without communication, as torch computes it in a single process. `parallel/data/batch_norm.py` then reduces
its statistics like those of any batch norm.
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
from plait.model.deferred_init import build_deferred
from plait.model.parameter_groups import build_optimizer
from plait.randomness.keyed import preserve_host_state
from plait.tensors.collectives import digest_tensor, find_differing
from plait.tensors.fake import make_fake_copy_on
from plait.tensors.module_state import choose_dtype, convert_module, replace_tensors
from plait.tensors.torch_private import FakeTensorMode


class LocalSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm without communication, with the forward of torch's other batch norms."""

    def forward(self, input: Tensor) -> Tensor:
        return super(nn.SyncBatchNorm, self).forward(input)


def localize_batch_norms(model: nn.Module) -> None:
    """Remove communication from all SyncBatchNorms of a model, including subclasses that call torch's forward.

    Names, parameters and buffers stay. Raises J054 for one with its own process group.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm) or isinstance(module, LocalSyncBatchNorm):
            continue
        if module.process_group is not None:
            what = f"{name or 'the model'} is a SyncBatchNorm with a process group of its own"
            why = "its statistics depend on the ranks, because each group has other samples of the batch"
            fix = ("nn.SyncBatchNorm.convert_sync_batchnorm(model)    without process_group: statistics of the batch",)
            raise PlaitError(Problem("J054", what, why=why, fix=fix))
        kind = type(module)
        local = LocalSyncBatchNorm if kind is nn.SyncBatchNorm else type(kind.__name__, (kind, LocalSyncBatchNorm), {})
        module.__class__ = local


CPU = torch.device("cpu")
WRAPPER_MODULES = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")
"""Modules in which torch defines wrappers that reduce gradients or gather parameters."""


@dataclass(frozen=True)
class BuiltModel:
    """A rank's model. If it is too large for one device, its large parameters are on the meta device, and `shards` has this rank's shards.

    `fake` is a model that a sketch can run.
    """

    model: nn.Module
    fake: nn.Module
    shards: dict[str, Tensor] = field(default_factory=dict)
    on_host: bool = False
    """The GPU has no memory for the unsharded model: it is in host memory, and `fake` represents it on the GPU."""


def make_rank_model(
    job: Job, device: torch.device, cast: torch.dtype | None, group: ProcessGroup | None,
    take_shard: Callable[[Tensor], Tensor] | None, room: float = math.inf,
) -> BuiltModel:  # fmt: skip
    """Build the job's model on this rank, in `cast` if given. With `take_shard`, a large model is never complete in memory
    (`model/deferred_init.py`).

    A model of more than `room` bytes stays in host memory. Raises J008 if initial weights differ between the ranks of the group.
    """
    deferred = build_deferred(lambda: make_model(job), take_shard, digest_tensor) if take_shard is not None else None
    model = deferred.model if deferred else make_model(job)
    if group is not None and dist.get_world_size(group) > 1:
        _check_same_weights(model, deferred.digests if deferred else {}, group, device)
    if deferred is None and sum(t.nbytes for t in (*model.parameters(), *model.buffers())) > room:
        with suppress(Exception):  # a model that cannot be copied
            fake = make_fake_copy_on(convert_module(model, CPU, cast), FakeTensorMode(allow_non_fake_inputs=True), device)
            return BuiltModel(model, fake, on_host=True)
    convert_module(model, device, cast)
    if deferred is None:
        return BuiltModel(model, model)
    one = lambda t: t.detach().to(device, choose_dtype(t, cast))  # noqa: E731
    replace_tensors(deferred.fake, one)
    return BuiltModel(model, deferred.fake, {name: one(part) for name, part in deferred.shards.items()})


def make_model(job: Job) -> nn.Module:
    """Build the job's model with the same initial weights as on one device, on every rank."""
    model = _draw_model(job)
    _check_supported(model)
    localize_batch_norms(model)
    pretrained.enable_float64_experts()
    if hasattr(job.loss, "attach"):
        job.loss.attach(model)
    return set_training(model)


@preserve_host_state()
def make_plain_model(job: Job) -> nn.Module:
    """Build the job's model as returned by its constructor, without changes for training."""
    return _draw_model(job)


def _draw_model(job: Job) -> nn.Module:
    random.seed(job.seed)
    np.random.seed(job.seed & 0xFFFFFFFF)
    torch.manual_seed(job.seed)
    one_device.hide_process_group()
    with one_device.name_job_part("the job's model"):
        model = job.model()
    if not isinstance(model, nn.Module):
        fix = ("return a module from it: model=lambda: MyModel(…)",)
        what = f"the job's model is a {type(model).__name__}, not a torch.nn.Module"
        raise PlaitError(Problem("J006", what, fix=fix))
    return model


def set_training(model: nn.Module) -> nn.Module:
    """Set the model to training mode with its own `train()`; modules that the job put in eval mode stay in it."""
    frozen = [m for m in model.modules() if not m.training] if model.training else []
    model.train()
    for module in frozen:
        module.training = False
    return model


def _check_supported(model: nn.Module) -> None:
    _check_one_device(model)
    for name, module in model.named_modules():
        if any(base.__module__.startswith(WRAPPER_MODULES) for base in type(module).__mro__):
            what = f"{name or 'the model'} is wrapped in {type(module).__name__}, which communicates by itself"
            raise one_device.communication_error(what)
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        why = "a lazy module takes its shape from the first batch"
        fix = ("run one batch through it in the job's model function",)
        raise PlaitError(Problem("J006", f"{lazy[0]} has no shape yet", why=why, fix=fix))
    sparse = [
        name for name, module in model.named_modules() if getattr(module, "sparse", False) is True and _is_trained(module)
    ]
    if sparse:
        raise make_sparse_error(sparse[0])
    own_kind = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if _is_foreign_tensor(p)]
    if own_kind:
        kind = type(dict((*model.named_parameters(), *model.named_buffers()))[own_kind[0]].data)
        what = f"{own_kind[0]} is a {kind.__module__}.{kind.__name__}, which stores its values in other tensors or attributes"
        why = f"plait cannot shard, save or compare such tensors; the model has {len(own_kind)}"
        fix = (
            "keep quantized weights as plain integer parameters (requires_grad=False) or buffers, with separate scales",
        )
        raise PlaitError(Problem("K023", what, why=why, fix=fix))


def make_sparse_error(where: str) -> PlaitError:
    """Return the error J012 for sparse gradients. `where`: name of the module or function."""
    why = "plait does not define their reduction, norm and clipping"
    fix = (
        "sparse=False    the same result under SGD without momentum and weight decay",
        "sparse=False, torch.optim.Adam for SparseAdam    changes the result: Adam also moves rows without a gradient",
    )
    return PlaitError(Problem("J012", f"{where} has sparse gradients, which plait does not support", why=why, fix=fix))


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _check_one_device(model: nn.Module) -> None:
    """Raise J043 if the model is spread over several devices."""
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


def _is_foreign_tensor(tensor: Tensor) -> bool:
    """Whether the tensor belongs to a quantization library: it wraps other tensors, or keeps state in attributes."""
    return hasattr(tensor, "__tensor_flatten__") or type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def make_optimizer(job: Job, own: dict[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """Build the job's optimizer of these parameters, and the names of all parameters by id.

    Parameters of other ranks are included as placeholders that never get a gradient, because the job's parameter groups may depend on the number and
    order of parameters.
    """
    names = {id(p): name for name, p in own.items()}
    optimizer = build_optimizer(job, own)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"the job's optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        fix = ("return one: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",)
        raise PlaitError(Problem("J006", what, fix=fix))
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} needs a closure, which plait does not pass"
        why = "a closure evaluates the loss several times per step; plait runs one forward and backward of the batch"
        raise PlaitError(Problem("J013", what, why=why, fix=("an optimizer whose step() takes no closure",)))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer, names


def _check_same_weights(
    model: nn.Module, digests: dict[str, Tensor], group: ProcessGroup | None, device: torch.device
) -> None:
    named = dict([*model.named_parameters(), *model.named_buffers()]) | digests
    wrong = find_differing(list(named.items()), group, device)
    if wrong:
        what = f"the job's model has different initial weights on different ranks: {', '.join(wrong[:3])}"
        why = f"{len(wrong)} tensors differ, although Python's, numpy's and torch's generators start from seed on every rank"
        fix = ("draw initial weights from these generators only, not from time, os.urandom or the order of a set",)
        raise PlaitError(Problem("J008", what, why=why, fix=fix))


def run_model(model: nn.Module, inputs: object) -> Any:
    """Run the model as in training, without a generation cache."""
    with pretrained.disable_cache(model):
        return call_with_inputs(model, inputs)


def call_with_inputs(model: nn.Module, inputs: object) -> Any:
    """Call `model(*inputs)` for a tuple, `model(**inputs)` for a dict, and `model(inputs)` otherwise."""
    with one_device.name_job_part("the job's model"):
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def make_loss(job: Job, targets: object) -> Callable[[Any], Any]:
    """Return a function from the model's output to the loss for these targets."""
    return lambda outputs: job.loss(outputs, targets)
