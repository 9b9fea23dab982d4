"""Compile: let `torch.compile` fuse the model's operations.

What it does
    The model's forward and backward become generated kernels. The module itself stays as it is, and so do parameter
    names, hooks and checkpoints. Dropout masks enter the graph as one opaque operator and stay equal to
    the uncompiled ones.

Costs
    Seconds to minutes before the first step, and again for each new shape of input (a short last batch, an uneven
    share). A C++ compiler must be installed on CPU.

Choose when
    Many small element-wise operations, many steps.

Avoid when
    Short runs, shapes that change all the time, models whose Python changes course in every step.

Paper
    Ansel et al. 2024, PyTorch 2 (ASPLOS).
"""

import shutil
from collections.abc import Iterable

import torch
from torch import nn

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.built import Built

AXIS = None
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.compile


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.processes == "one":
        why = "threads of one process would compile and run the same graph at the same time"
        fix = (f'--plan "dp={plan.dp} compile=true"', f'--plan "dp={plan.dp} processes=one"')
        yield Problem("P017", "compile=true does not work with processes=one", why=why, fix=fix)
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        what, why = "compile=true needs a C++ compiler, none was found", "looked for g++ and clang++ in PATH"
        yield Problem("H002", what, why=why, fix=("install g++",))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(built: Built) -> None:
    from plait.model.make import called
    from plait.model.transformers import without_cache
    from plait.randomness.keyed import drawn_in_composites

    if inside := drawn_in_composites(built.sketch.places, built.model):
        what = f"compile=true cannot key the random numbers drawn inside {', '.join(inside)}"
        why = "only dropout layers and torch.nn.functional.dropout* are traced; these draw inside another operator"
        raise PlaitError(Problem("P018", what, why=why, fix=("compile=false", "use nn.Dropout there")))
    compiled = torch.compile(called)  # a function of ours: torch.compile skips a root that is itself a torch module

    def run(model: nn.Module, inputs: object) -> object:
        with without_cache(model):
            return compiled(model, inputs)

    built.run = run
