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
from plait.randomness.keyed import HostState, RepeatableForward, host_state, restore_host
from plait.tensors import opaque_code
from plait.tensors.float64 import Wide
from plait.tensors.modules import Attributes, HeldValues, attributes_of, put_back, state_kept
from plait.tensors.opaque_code import keeping
from plait.tensors.torch_private import TorchDispatchMode, alias, own_buffers, tree_flatten, tree_unflatten, version

AXIS = None
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.activation_checkpointing != "none"


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    return ()


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def marked(sketch: Sketch) -> list[str]:
    """Units worth recomputing: they keep more than their inputs. One that changes its inputs would run on others; one
    that changes weights would do it twice."""
    worth = {c.unit for c in sketch.calls if c.saved.of(1) > c.fresh.of(1)}
    worth -= {c.unit for c in sketch.calls if c.writes or c.back is not None}
    writers = {module for by in (*sketch.rewritten.values(), *sketch.followed.values()) for module in by}
    worth -= {unit for unit in worth for module in writers if f"{module}.".startswith(f"{unit}.")}
    return [u.name for u in sketch.units if u.name in worth]


def apply(split: SplitModel) -> SplitModel:
    _check_draws(split)
    for name in marked(split.sketch):
        module, selective = split.module.get_submodule(name), split.plan.activation_checkpointing == "selective"
        module.forward = Recomputed(module, name, split.sketch, selective=selective, wide=split.setup.cast is torch.float64)
    return split


def _check_draws(split: SplitModel) -> None:
    """P092 when a derivative that the forward pass asks for would have a unit that draws computed again, inside of that pass."""
    units, owners = marked(split.whole_sketch), {place.split("#")[0] for place in split.whole_sketch.places}
    draws = [unit for unit in units if any(f"{owner}.".startswith(f"{unit}.") for owner in owners)]
    if draws and split.whole_sketch.differentiates:
        what = f"activation_checkpointing={split.plan.activation_checkpointing} does not work with random numbers in {draws[0]}"
        why = "the forward pass asks for derivatives, and what is computed again for them there would draw others"
        raise PlaitError(Problem("P092", what, why=why, fix=("leave out activation_checkpointing", "no dropout in it")))


class Recomputed(RepeatableForward):
    """A unit's forward under an activation checkpoint. Hooks on the unit stay outside of it."""

    def __init__(self, module: nn.Module, name: str, sketch: Sketch, *, selective: bool, wide: bool):
        super().__init__(module)
        self.host_random, self.wide = sketch.host_random, wide
        inside = {f"{name}.{path}" if path else name: m for path, m in module.named_modules()}
        counting = [buffer.rpartition(".") for buffer in sketch.counting]
        self.counting = [(own_buffers(inside[owner]), key) for owner, _, key in counting if owner in inside]
        self.contexts: dict[str, Any] = {"context_fn": _selective} if selective else {}
        self.plain = [inner for _, inner in opaque_code.plain(module)]
        """Its modules without those that torch.jit has compiled, whose state cannot be replaced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        state, runs = host_state() if self.host_random else None, 0
        attributes, given = attributes_of(self.plain), SimpleNamespace(args=args, kwargs=kwargs)
        passed = HeldValues([given], libraries=True)
        counting = [
            (buffers, name, None if (b := buffers[name]) is None else b.clone()) for buffers, name in self.counting
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            with keeping(), ExitStack() as again:
                if runs > 1:
                    again.enter_context(_as_passed(given, passed))
                    again.enter_context(self._second(state, attributes, counting))
                return self.run(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **self.contexts, **kwargs)

    @contextmanager
    def _second(
        self,
        state: HostState | None,
        attributes: Attributes,
        counting: list[tuple[dict[str, Tensor | None], str, Tensor | None]],
    ) -> Iterator[None]:
        """Python's and numpy's generators, attributes and buffers as they were before the first pass; put back after."""
        now = host_state()
        with state_kept(self.plain, hooks=False):
            for buffers, name, value in counting:
                buffers[name] = None if value is None else value.clone()
            put_back(attributes)
            try:
                if state is not None:
                    restore_host(HostState(state.python, state.numpy, torch.get_rng_state()))
                with Wide() if self.wide else nullcontext():  # torch's engine leaves the modes around backward
                    yield
            finally:
                if state is not None:
                    restore_host(HostState(now.python, now.numpy, torch.get_rng_state()))


@contextmanager
def _as_passed(given: SimpleNamespace, before: HeldValues) -> Iterator[None]:
    """Lists, dicts and objects among the arguments of a unit hold what they held `before` its first pass; after, what they hold now."""
    now = HeldValues([given], libraries=True)
    before.put_back()
    try:
        yield
    finally:
        now.put_back()


Kept = dict[tuple[Any, int], tuple[list[tuple[Any, int]], Any]]
"""(operator, which call of it) -> its outputs with their versions, and their structure."""


def _selective() -> tuple["_Keeping", "_Keeping"]:
    """The contexts of a forward pass and of its recomputation, which share what was kept."""
    kept: Kept = {}
    return _Keeping(kept, again=False), _Keeping(kept, again=True)


class _Keeping(TorchDispatchMode):
    """Keeps the outputs of dear operators, and gives them back in the same order when the unit runs again.

    One that was changed in place since is computed again: what it was made from is there. (torch's own contexts raise
    there, and wherever the second run is not operator by operator the first.)
    """

    def __init__(self, kept: Kept, again: bool):
        super().__init__()
        self.kept, self.again, self.calls = kept, again, Counter[Any]()

    def __enter__(self) -> "_Keeping":
        self.calls.clear()  # a model that differentiates in its forward pass comes here several times
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.utils.flop_counter import flop_registry  # imports triton

        if func.overloadpacket not in flop_registry and "attention" not in func.overloadpacket.__name__:
            return func(*args, **(kwargs or {}))
        self.calls[func] += 1
        place = (func, self.calls[func])
        found = self.kept.pop(place, None) if self.again else None
        if found is not None and all(_writes(t) == number for t, number in found[0]):
            return tree_unflatten([t for t, _ in found[0]], found[1])
        out = func(*args, **(kwargs or {}))
        if not self.again:
            leaves, spec = tree_flatten(out)
            held = [alias(t) if isinstance(t, Tensor) else t for t in leaves]
            self.kept[place] = [(t, _writes(t)) for t in held], spec
        return out


def _writes(leaf: object) -> int:
    return version(leaf) if isinstance(leaf, Tensor) else 0
