"""Compile: let `torch.compile` fuse the operations of each unit.

What it does
    Some units consist of modules (a block of a transformer, a stage of a CNN). `compile=true` turns the forward and
    backward of each into generated kernels (regional compilation). Equal units use one compiled code, however many they
    are. Code between units runs uncompiled, and so does a unit that is a single layer of torch's (an embedding, a
    head). A model without such a unit is compiled as one graph. Modules stay what they are, and so do parameter names,
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
from plait.tensors.modules import call_class_forward
from plait.tensors.torch_private import hooks_of, let_compile

AXIS = None
EXACT = True
EACH = 4
"""How often the code of a class may be compiled for each module that has it: for shapes, for training and for evaluation. Where a graph of a
unit breaks, as at the borders of slices, its layers are compiled by themselves. Code given up between forward and its recomputation ends a run."""


def wanted(plan: Plan) -> bool:
    return plan.compile


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        what, why = "compile=true needs a C++ compiler, none was found", "looked for g++ and clang++ in PATH"
        yield Problem("H002", what, why=why, fix=("install g++",))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(split: SplitModel) -> SplitModel:
    names, left = _regions(split)
    compiled = CompiledUnits(names, left | _beside(split))
    alike = Counter(type(m).forward for m in split.module.modules())
    let_compile(EACH * max(len(names), *alike.values()))
    for name in names:
        call_class_forward(split.module.get_submodule(name), partial(_run, split, name, compiled))

    def finish(_: object) -> None:
        split.randomness.compiled(split.module, names)
        for name in names:
            _outside_graphs(split.module.get_submodule(name))

    split.hooks.optimizer_created.append(finish)
    return split.using(compiled=compiled)


def _regions(split: SplitModel) -> tuple[list[str], dict[str, str]]:
    """The modules that are compiled, each for itself; the units besides that consist of modules, and why they are not.
    P018 when none can be."""
    plan, model = split.plan, split.module
    found = module_units(split.whole_sketch, model)
    if not found and plan.devices == plan.shares and plan.ep == 1:
        return [""], {}
    left = {name: why for name in found if (why := _why_not(split, name))}
    if len(left) == len(found):
        what = "compile=true finds nothing to compile in this model under this plan"
        told = [f"{name} {why}" for name, why in left.items()]
        why = told[0] if told else "its units are single layers of torch's, and ranks exchange what lies between"
        raise PlaitError(Problem("P018", what, why=why, fix=("compile=false", "dp and fsdp alone")))
    mine = {unit.name for unit in split.sketch.units}
    return [name for name in found if name in mine and name not in left], left


def module_units(sketch: Sketch, model: nn.Module) -> list[str]:
    """The units that consist of modules, which can be compiled one by one."""
    return [unit.name for unit in sketch.units if not _single(model.get_submodule(unit.name))]


def _single(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers, an operator already."""
    kind = next(k for k in type(module).__mro__ if not k.__module__.startswith("plait."))
    return kind.__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _why_not(split: SplitModel, name: str) -> str:
    """Why a unit that consists of modules stays uncompiled."""
    sequence_plan, words = split.whole_sketch.sequence_plan, split.whole_sketch.slices.vocabulary
    if sequence_plan is not None and any(call.unit == name and call.poses for call in sequence_plan.calls):
        return "stays uncompiled: its code counts positions, so under cp it is given tensors that torch.compile cannot trace"
    if split.plan.tp > 1 and any(f"{word}.".startswith(f"{name}.") for word in words):
        return "stays uncompiled: the vocabulary is cut in it (tp), and what it returns is there in parts, which a graph cannot give"
    return ""


def _beside(split: SplitModel) -> dict[str, str]:
    """Layers inside of compiled units that run between graphs, and what the plan leaves out for graphs; and why."""
    plan = split.plan
    why = "stays uncompiled: how many rows travel to its experts depends on the data (ep)"
    beside = {mixture.name: why for mixture in split.whole_sketch.mixtures} if plan.ep > 1 else {}
    if plan.tp > 1 and plan.sequence_parallel:
        beside["sequence_parallel"] = (
            "has no effect: units would be given tensors that claim the shape of the whole sequence, which torch.compile cannot trace"
        )
    return beside


def _run(
    split: SplitModel, name: str, compiled: CompiledUnits, forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    with split.randomness.unit(name):
        return compiled.of(forward)(module, *args, **kwargs)


def _outside_graphs(unit: nn.Module) -> None:
    """Hooks of modules inside a unit run between its graphs: many of them exchange something, and each belongs to one unit."""
    for module in unit.modules():
        for hooks in hooks_of(module) if module is not unit else ():
            hooks.update({key: torch.compiler.disable(hook) for key, hook in hooks.items()})
