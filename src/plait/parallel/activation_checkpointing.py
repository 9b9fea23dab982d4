"""Activation checkpointing (activation_checkpointing): discard activations in forward, and recompute them in backward.

What it does
    Backward needs the intermediate results of forward. `full` stores only the inputs of each unit, and runs the unit's
    forward again when its backward starts. `selective` stores the outputs of expensive operators (matrix products,
    convolutions, attention), and recomputes cheap ones (norms, activations, dropout, casts).

Picture
    none        F1 F2 F3          B3 B2 B1        all activations live until their backward
    full        F1 F2 F3       F3 B3 F2 B2 F1 B1  one unit's activations at a time
    selective   F1 F2 F3       ·B3   ·B2   ·B1    · only the cheap part again

Costs
    Memory: `full` stores a unit's inputs instead of all that autograd saves; `selective` stores the outputs of the
    expensive operators. Compute: `full` adds one forward pass, a third of the step; `selective` adds a few percent.
    Traffic: none, because the backward of a sharded unit gathers its parameters anyway.

Choose when
    Activations do not fit: long sequences, large micro-batches, deep models. Try `selective` first.

Avoid when
    They fit.

How it stays exact
    The second forward must repeat the first. Random numbers are keyed by place, so dropout draws the same masks. The
    number format is restored. Buffers that a forward pass changes (running statistics) are saved and restored, so the
    second forward does not change them again.

Paper
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Korthikanti et al. 2022, Reducing Activation
    Recomputation in Large Transformer Models, for the selective choice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel
from plait.randomness.keyed import HostState, RepeatableForward, get_host_state, restore_host_state
from plait.tensors import opaque_code
from plait.tensors.float64 import Float64Mode
from plait.tensors.module_state import (
    SavedAttributes,
    SavedContents,
    restore_attributes,
    restore_module_state,
    save_attributes,
)
from plait.tensors.opaque_code import keep_saved_tensors
from plait.tensors.torch_private import TorchDispatchMode, alias, own_buffers, tree_flatten, tree_unflatten, version

AXIS = None
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.activation_checkpointing != "none"


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    return ()


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def choose_units(sketch: Sketch) -> list[str]:
    """List the units whose saved activations are larger than their inputs. Units that change their inputs or any weights are left
    out: a second run would compute something else."""
    worth = {c.unit for c in sketch.calls if c.saved.for_batch(1) > c.fresh.for_batch(1)}
    worth -= {c.unit for c in sketch.calls if c.writes or c.back is not None}
    writers = {module for by in (*sketch.rewritten.values(), *sketch.outside_writes.values()) for module in by}
    worth -= {unit for unit in worth for module in writers if f"{module}.".startswith(f"{unit}.")}
    return [u.name for u in sketch.units if u.name in worth]


def apply(split: SplitModel) -> SplitModel:
    _check_draws(split)
    for name in choose_units(split.sketch):
        module, selective = split.module.get_submodule(name), split.plan.activation_checkpointing == "selective"
        module.forward = CheckpointedForward(module, name, split.sketch, selective=selective, wide=split.setup.cast is torch.float64)
    return split


def _check_draws(split: SplitModel) -> None:
    """Raise P092 if the forward pass computes derivatives and a recomputed unit draws random numbers: that recomputation would draw others."""
    units, owners = choose_units(split.global_sketch), {place.split("#")[0] for place in split.global_sketch.places}
    draws = [unit for unit in units if any(f"{owner}.".startswith(f"{unit}.") for owner in owners)]
    if draws and split.global_sketch.differentiates:
        what = f"activation_checkpointing={split.plan.activation_checkpointing} does not work with random numbers in {draws[0]}"
        why = "the forward pass computes derivatives, and its recomputation would draw other random numbers"
        raise PlaitError(Problem("P092", what, why=why, fix=("leave out activation_checkpointing", "remove dropout from this unit")))


class CheckpointedForward(RepeatableForward):
    """A unit's forward under an activation checkpoint. Hooks on the unit run outside of the checkpoint."""

    def __init__(self, module: nn.Module, name: str, sketch: Sketch, *, selective: bool, wide: bool):
        super().__init__(module)
        self.host_random, self.wide = sketch.host_random, wide
        inside = {f"{name}.{path}" if path else name: m for path, m in module.named_modules()}
        counting = [buffer.rpartition(".") for buffer in sketch.changed_buffers]
        self.counting = [(own_buffers(inside[owner]), key) for owner, _, key in counting if owner in inside]
        self.contexts: dict[str, Any] = {"context_fn": _make_contexts} if selective else {}
        self.plain_modules = [inner for _, inner in opaque_code.iter_unscripted(module)]
        """The unit's modules except those compiled by torch.jit, whose state cannot be replaced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward: checkpointed if gradients are enabled, else directly."""
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        state, runs = get_host_state() if self.host_random else None, 0
        attributes, given = save_attributes(self.plain_modules), SimpleNamespace(args=args, kwargs=kwargs)
        passed = SavedContents([given], libraries=True)
        counting = [
            (buffers, name, None if (b := buffers[name]) is None else b.clone()) for buffers, name in self.counting
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            with keep_saved_tensors(), ExitStack() as again:
                if runs > 1:
                    again.enter_context(_restore_arguments(given, passed))
                    again.enter_context(self._restore_state(state, attributes, counting))
                return self.run(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **self.contexts, **kwargs)

    @contextmanager
    def _restore_state(
        self,
        state: HostState | None,
        attributes: SavedAttributes,
        counting: list[tuple[dict[str, Tensor | None], str, Tensor | None]],
    ) -> Iterator[None]:
        """Set the generators of Python and numpy, attributes and buffers to their state before the first pass. Restore them on exit."""
        now = get_host_state()
        with restore_module_state(self.plain_modules, hooks=False):
            for buffers, name, value in counting:
                buffers[name] = None if value is None else value.clone()
            restore_attributes(attributes)
            try:
                if state is not None:
                    restore_host_state(HostState(state.python, state.numpy, torch.get_rng_state()))
                with Float64Mode() if self.wide else nullcontext():  # torch's engine exits all modes around backward
                    yield
            finally:
                if state is not None:
                    restore_host_state(HostState(now.python, now.numpy, torch.get_rng_state()))


@contextmanager
def _restore_arguments(given: SimpleNamespace, before: SavedContents) -> Iterator[None]:
    """Set lists, dicts and objects among the unit's arguments to their contents `before` the first pass. Restore them on exit."""
    now = SavedContents([given], libraries=True)
    before.restore_contents()
    try:
        yield
    finally:
        now.restore_contents()


SavedOutputs = dict[tuple[Any, int], tuple[list[tuple[Any, int]], Any]]
"""(operator, index of its call) -> its outputs with their versions, and their tree structure."""


def _make_contexts() -> tuple["_SelectiveMode", "_SelectiveMode"]:
    """Make the contexts of a forward pass and of its recomputation; both use the same saved outputs."""
    kept: SavedOutputs = {}
    return _SelectiveMode(kept, again=False), _SelectiveMode(kept, again=True)


class _SelectiveMode(TorchDispatchMode):
    """Saves the outputs of expensive operators, and returns them in the same order when the unit runs again.

    An output that was changed in place since then is computed again, because its inputs are there. torch's own contexts raise in
    this case, and also if the second run has other operators than the first.
    """

    def __init__(self, kept: SavedOutputs, again: bool):
        super().__init__()
        self.kept, self.again, self.calls = kept, again, Counter[Any]()

    def __enter__(self) -> "_SelectiveMode":
        self.calls.clear()  # entered several times by a model that differentiates in its forward pass
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.utils.flop_counter import flop_registry  # imports triton

        if func.overloadpacket not in flop_registry and "attention" not in func.overloadpacket.__name__:
            return func(*args, **(kwargs or {}))
        self.calls[func] += 1
        place = (func, self.calls[func])
        found = self.kept.pop(place, None) if self.again else None
        if found is not None and all(_get_version(t) == number for t, number in found[0]):
            return tree_unflatten([t for t, _ in found[0]], found[1])
        out = func(*args, **(kwargs or {}))
        if not self.again:
            leaves, spec = tree_flatten(out)
            held = [alias(t) if isinstance(t, Tensor) else t for t in leaves]
            self.kept[place] = [(t, _get_version(t)) for t in held], spec
        return out


def _get_version(leaf: object) -> int:
    return version(leaf) if isinstance(leaf, Tensor) else 0
