"""Compile: let `torch.compile` fuse the operations of each unit.

What it does
    Some units consist of modules (a block of a transformer, a stage of a CNN). `compile=true` turns the forward and
    backward of each into generated kernels (regional compilation). Equal units use one compiled code, however many they
    are. Code between units runs uncompiled, and so does a unit that is a single layer of torch's (an embedding, a
    head). A model without such a unit is compiled as one graph. Modules stay unchanged, and so do parameter names,
    hooks and checkpoints.

    No message between ranks is part of a graph, except the statistics of batch normalization. If a unit sends or
    receives something, one graph ends there and another starts. This happens at the borders of slices (tp), at
    attention (cp), and at each mixture of experts (ep). Shards (fsdp) and stages (pp) send messages between units only.
    Masks of dropout layers enter a graph as one opaque operator, which gets its place from each unit. Other random
    numbers are drawn between graphs. So all random numbers equal those of the uncompiled model.

Picture
    dp, fsdp, pp   [ norm · q k v · attention · o · + · norm · MLP · + ]                          a block is one graph
    tp             [ norm ] q k v [ attention ] o Σ [ + · norm ] up [ activation ] down Σ [ + ]   Σ and maps between graphs
    cp             [ norm · q k v ] attention ⇄ [ o · + · norm · MLP · + ]

Costs
    Time: seconds to minutes before the first step, once for all equal units. Each other input shape (a short last
    batch, an uneven local batch) costs the same again. On a CPU, a C++ compiler must be installed. Under tp, units do
    not use sequence shards (`sequence_parallel`): every rank computes and keeps the activations between slices in full.
    Each call of a graph costs the host some time, so small units gain nothing.

Choose when
    The model has many small element-wise operations, and the run many steps.

Avoid when
    Runs are short, shapes change all the time, or the model's Python code takes other branches in every step.
    `compile=true` is rejected with `activation_checkpointing=selective` and with schedules that split the backward
    pass.

Paper
    Ansel et al. 2024, PyTorch 2 (ASPLOS); Liang et al. 2024, TorchTitan, for regional compilation.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import CompiledUnits, SplitModel
from plait.tensors.module_state import wrap_class_forward
from plait.tensors.torch_private import forward_hooks, set_recompile_limit

AXIS = None
EXACT = True
COMPILES_PER_MODULE = 4
"""Compilations allowed per module with the same class: for shapes, for training and for evaluation. If a graph breaks inside a unit,
as between tensor-parallel layers, its layers are compiled one by one. If torch gives up between forward and recomputation, the
run ends."""


def is_enabled(plan: Plan) -> bool:
    return plan.compile


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        what, why = "compile=true needs a C++ compiler, none was found", "g++ and clang++ are not in PATH"
        yield Problem("H002", what, why=why, fix=("install g++",))


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(split: SplitModel) -> SplitModel:
    names, left = _choose_regions(split)
    compiled = CompiledUnits(names, left | _explain_layers(split))
    alike = Counter(type(m).forward for m in split.module.modules())
    set_recompile_limit(COMPILES_PER_MODULE * max(len(names), *alike.values()))
    for name in names:
        wrap_class_forward(split.module.get_submodule(name), partial(_run_compiled, split, name, compiled))

    def finish(_: object) -> None:
        split.randomness.prepare_compiled(split.module, names)
        for name in names:
            _disable_inner_hooks(split.module.get_submodule(name))

    split.hooks.optimizer_created.append(finish)
    return split.with_techniques(compiled=compiled)


def _choose_regions(split: SplitModel) -> tuple[list[str], dict[str, str]]:
    """Choose the modules to compile separately. Also return the reason for each unit of modules that stays uncompiled.

    Raises P018 if no unit can be compiled.
    """
    plan, model = split.plan, split.module
    found = list_module_units(split.global_sketch, model)
    if not found and plan.devices == plan.shares and plan.ep == 1:
        return [""], {}
    left = {name: why for name in found if (why := _explain_uncompiled(split, name))}
    if len(left) == len(found):
        what = "compile=true finds nothing to compile in this model under this plan"
        told = [f"{name} {why}" for name, why in left.items()]
        why = told[0] if told else "its units are single layers of torch's, and ranks exchange activations between them"
        raise PlaitError(Problem("P018", what, why=why, fix=("compile=false", "use only dp and fsdp")))
    mine = {unit.name for unit in split.sketch.units}
    return [name for name in found if name in mine and name not in left], left


def list_module_units(sketch: Sketch, model: nn.Module) -> list[str]:
    """List the units that consist of modules, which can be compiled one by one."""
    return [unit.name for unit in sketch.units if not _is_torch_layer(model.get_submodule(unit.name))]


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers, which is a single operator already."""
    kind = next(k for k in type(module).__mro__ if not k.__module__.startswith("plait."))
    return kind.__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _explain_uncompiled(split: SplitModel, name: str) -> str:
    """Explain why a unit that consists of modules stays uncompiled; empty if it is compiled."""
    sequence_plan, words = split.global_sketch.sequence_plan, split.global_sketch.slices.vocabulary
    if sequence_plan is not None and any(call.unit == name and call.has_full_shape for call in sequence_plan.calls):
        return "stays uncompiled: its code counts positions, so under cp it gets tensors that torch.compile cannot trace"
    if split.plan.tp > 1 and any(f"{word}.".startswith(f"{name}.") for word in words):
        return "stays uncompiled: tp shards the vocabulary in it, and a graph cannot return the sharded output"
    return ""


def _explain_layers(split: SplitModel) -> dict[str, str]:
    """Name the layers inside compiled units that run between graphs, and the options that compilation disables, each with the reason."""
    plan = split.plan
    why = "stays uncompiled: the number of rows sent to its experts depends on the data (ep)"
    beside = {mixture.name: why for mixture in split.global_sketch.moe_layers} if plan.ep > 1 else {}
    if plan.tp > 1 and plan.sequence_parallel:
        beside["sequence_parallel"] = (
            "has no effect: units would get tensors with the shape of the full sequence, which torch.compile cannot trace"
        )
    return beside


def _run_compiled(
    split: SplitModel, name: str, compiled: CompiledUnits, forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    with split.randomness.unit_call(name):
        return compiled.compile_forward(forward)(module, *args, **kwargs)


def _disable_inner_hooks(unit: nn.Module) -> None:
    """Run the hooks of modules inside a unit between its graphs: many of them communicate, and each belongs to one unit."""
    for module in unit.modules():
        for hooks in forward_hooks(module) if module is not unit else ():
            hooks.update({key: torch.compiler.disable(hook) for key, hook in hooks.items()})
