"""Offload: keep in host memory what the device does not need at the moment.

What it does
    The optimizer reads and writes its state once per step and is done with it. `optimizer` keeps that state, and the
    copy of the parameters it updates, in host memory: gradients travel there, the step is taken on the host, and new
    parameters travel back. `all` keeps the parameters there too: a unit's are copied to the device when it is gathered.

Picture
    device   F ─► B ─► gradients ┐                    ┌─► parameters ─► F …
    host                         └► optimizer step ───┘

Costs
    Memory: Adam's state is two numbers per parameter, with its copy of the parameters three; they leave the device.
    Traffic: gradients out and parameters in, once per step (`all`: parameters in at every gather), over the bus.
    Compute: the host's optimizer step is many times slower than the device's; a fused optimizer helps.

Choose when
    The state does not fit though it is sharded over all the devices there are.

Avoid when
    It fits, or more devices can share it. On CPU processes there is nothing to save: the copies cost memory there.

How it stays exact
    The same optimizer takes the same step on the same numbers, elsewhere.

Paper
    Ren et al. 2021, ZeRO-Offload (USENIX ATC).
"""

from collections.abc import Iterable

import torch
from torch import nn

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.built import Built

AXIS = None
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.offload != "none"


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.offload == "all" and plan.fsdp == 1 and plan.dp > 1:
        what = f"offload=all does not work with copies alone (dp={plan.dp})"
        why = "it copies the parameters of one unit at a time to the device, which is fsdp's work"
        yield Problem("P021", what, why=why, fix=(f'--plan "fsdp={plan.dp} offload=all"', "offload=optimizer"))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(built: Built) -> None:
    if built.plan.offload == "all":
        return  # the shards live on the host (`parallel/fsdp/strategy.py`), and the optimizer where they live
    pin = built.device.type == "cuda"
    masters = built.masters = {
        name: nn.Parameter(_host(parameter.detach(), pin), parameter.requires_grad)
        for name, parameter in built.own.items()
    }

    def out(*_: object) -> None:
        for name, master in masters.items():
            gradient = built.own[name].grad
            master.grad = None if gradient is None else gradient.to("cpu", copy=True)

    def back(*_: object) -> None:
        with torch.no_grad():
            for name, master in masters.items():
                built.own[name].copy_(master, non_blocking=True)
                master.grad = None

    def again() -> None:
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(built.own[name])

    built.reloaded.append(again)
    built.prepared.append(lambda optimizer: optimizer.register_step_pre_hook(out))
    built.prepared.append(lambda optimizer: optimizer.register_step_post_hook(back))


def _host(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    copied = tensor.to("cpu", copy=True)
    return copied.pin_memory() if pin else copied


def on_host(plan: Plan, category: str, updating: bool) -> bool:
    """Whether tensors of a category of memory lie on the host. `updating`: made by the optimizer's step."""
    if plan.offload == "none":
        return False
    there = ("optimizer", "average", "host copies", *(("parameters", "gradients") if plan.offload == "all" else ()))
    return category in there or (updating and category == "temporary")
