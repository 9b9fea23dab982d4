"""Offload: keep optimizer state, or also parameters, in host memory.

What it does
    The optimizer reads and writes its state once per step. `offload=optimizer` keeps that state in host memory, with
    the copy of the parameters that the optimizer updates. Gradients are copied to the host, the host takes the
    optimizer step, and the new parameters are copied back. `offload=all` keeps the parameters on the host too. Those of
    a unit are copied to the device when the unit is gathered.

Picture
    device   F ─► B ─► gradients ┐                    ┌─► parameters ─► F …
    host                         └► optimizer step ───┘

Costs
    Memory: Adam's state is two values per parameter, or three with its copy of the parameters; they leave the device.
    Traffic: gradients to the host and parameters back, once per step (with `all`, parameters at every gather), over the
    bus. Compute: the host's optimizer step is many times slower than the device's; a fused optimizer helps. The host
    waits for the gradients once in each step.

Choose when
    The state does not fit, although it is sharded over all available devices.

Avoid when
    The state fits, or can be sharded over more devices. On CPU processes it saves nothing: the copies need more memory
    there.

How it stays exact
    The same optimizer takes the same step on the same values, on the host instead of the device.

Paper
    Ren et al. 2021, ZeRO-Offload (USENIX ATC).
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel
from plait.tensors.parameters import make_parameter_like

AXIS = None
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.offload != "none"


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    return ()


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(split: SplitModel) -> SplitModel:
    if split.plan.offload == "all":
        return split  # the shards and the optimizer are on the host (`parallel/fsdp/strategy.py`)
    pin = split.device.type == "cuda"
    masters = {
        name: make_parameter_like(parameter, _to_host(parameter.detach(), pin))
        for name, parameter in split.params.items()
    }

    way = _HostCopier(masters, split.device) if pin else _copy_to_cpu

    def copy_gradients() -> None:
        found = way({name: gradient for name in masters if (gradient := split.params[name].grad) is not None})
        for name, master in masters.items():
            master.grad = found.get(name)

    def copy_back() -> None:
        with torch.no_grad():
            for name, master in masters.items():
                split.params[name].copy_(master, non_blocking=True)
                master.grad = None

    def reload_masters() -> None:
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(split.params[name])

    split.hooks.state_loaded.append(reload_masters)
    split.hooks.masters_written.append(copy_back)
    split.hooks.before_update.append(copy_gradients)
    split.hooks.after_update.append(copy_back)
    return split.with_techniques(masters=masters)


def _copy_to_cpu(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.to("cpu", copy=True) for name, gradient in gradients.items()}


class _HostCopier:
    """Copies gradients of a GPU into pinned host memory on a separate stream, so that the host waits once."""

    def __init__(self, masters: dict[str, nn.Parameter], device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.places: dict[str, Tensor] = {}
        sizes = Counter[torch.dtype]()
        for master in masters.values():
            sizes[master.dtype] += master.numel()
        flats = {kind: torch.empty(size, dtype=kind, pin_memory=True) for kind, size in sizes.items()}
        for name, master in masters.items():
            sizes[master.dtype] -= master.numel()
            self.places[name] = flats[master.dtype].as_strided(master.shape, master.stride(), sizes[master.dtype])

    def __call__(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        found = {}
        with torch.cuda.stream(self.stream):
            for name, gradient in gradients.items():
                dense = gradient.layout is torch.strided
                found[name] = self.places[name].copy_(gradient, non_blocking=True) if dense else gradient.cpu()
        self.stream.synchronize()  # so the memory of the gradients can be freed
        return found


def _to_host(tensor: Tensor, pin: bool) -> Tensor:
    copied = tensor.to("cpu", copy=True)
    return copied.pin_memory() if pin else copied


def is_on_host(plan: Plan, category: str, updating: bool) -> bool:
    """Whether tensors of a memory category are on the host. `updating`: allocated by the optimizer's step."""
    if plan.offload == "none":
        return False
    there = ("optimizer", "average", "host copies", *(("parameters", "gradients") if plan.offload == "all" else ()))
    return category in there or (updating and category == "temporary")
