"""A unit in which positions meet otherwise than in torch's attention: opened up, so that only what must meet is gathered.

Attention written out, a convolution, a recurrence or a norm over positions: the unit's own code does it, and on a rank's rows
alone it would be wrong. So modules of the unit that compute every position by itself run on this rank's rows as they are, and
the code around them runs with its rows posing as the whole sequence (`SequenceShard`): what is done to every position alone is done
to these rows, and whatever needs others gathers them. Of attention written out that is its keys and values, so a rank computes
the scores of its own queries only, under masks and biases that its code makes for the whole sequence. A module whose code
cannot be given such a tensor (compiled by `torch.jit`, a `torch.autograd.Function`) runs on the whole sequence, on every rank.

That this is right is checked as everything is, in float64 and on one device, before training. The unit runs once with all
rows posing, and what it gathers is noted. Then it runs on each rank's rows, is told what was noted, and must ask for rows of
exactly that, and give its rows of the output.

Where a unit's rows pose as the whole sequence, those of all modules in it do. A mixture of experts cannot: which rows go to an expert
depends on numbers. Where a module stops because it needs all rows, and no attention is called in it, it is left out (`left_out`): it
is given plain rows, and what it returns poses again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.model.sketch import Sketch
from plait.parallel.context.attention import Answer, AttentionCall, ShardedAttention, WholeAttention, apart, plainly
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.sequences import Arguments, At, SequenceLayout, SequencePlan, UnitPlan, refused
from plait.parallel.context.unit_in_rows import (
    copied,
    cut_arguments,
    lengths_of,
    on_rows,
    posed,
    wide,
    widened,
)
from plait.tensors.modules import own_forward
from plait.tensors.rows import AndAll, Rows, dense
from plait.tensors.torch_private import BatchNormBase, leaves, named_leaves, tree_map, tree_map_only
from plait.tensors.trees import nodes_behind


def leave_out(module: nn.Module) -> None:
    """From now on this module runs on plain rows."""
    module.forward = partial(_plainly, own_forward(module))  # pyrefly: ignore[bad-assignment]


def _plainly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, SequenceShard)]
    if not known:
        return forward(*args, **kwargs)
    x = max(known, key=lambda t: t.local.dim())

    def whole(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceShard):
            return leaf
        return x.like(leaf) if leaf.shape[: x.cut + 1] == x.local.shape[: x.cut + 1] else leaf

    args, kwargs = tree_map(lambda leaf: leaf.local if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return tree_map(whole, forward(*args, **kwargs))


class Running(ExitStack):
    """Which modules of a unit run, while it is entered."""

    def __init__(self, unit: nn.Module):
        super().__init__()
        self.unit, self.now = unit, list[str]()
        self.attending: set[str] = set()
        """In which attention was called."""

    def __enter__(self) -> "Running":
        self.now.clear()
        for name, module in self.unit.named_modules():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.now.append(name))
            after = module.register_forward_hook(self._left)
            self.callback(before.remove)
            self.callback(after.remove)
        return self

    def _left(self, *_: Any) -> None:
        self.now.pop()

    def attends(self) -> None:
        self.attending.update(self.now)

    def stopped(self) -> str:
        """After an exception: the outermost module it passed through in which no attention is called; or nothing."""
        return next((name for name in self.now if name and name not in self.attending), "")


NEAR = 1e-6
"""A model may compute in float32 whatever it is given."""
TRIED = 3
"""At most so many arguments are left whole for a try, and twice as many tries made of modules on whole sequences."""
LEAST = 0.01
"""Of a model's products, that cp must spare a rank to be of use."""
Layout = Callable[[int, int], Rows]
"""(length, ranks) -> who holds which rows."""


def on_wholes(module: nn.Module) -> None:
    """From now on this module is given whole sequences; what it returns is held in rows again."""
    module.forward = partial(_wholly, own_forward(module))  # pyrefly: ignore[bad-assignment]


def _wholly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, SequenceShard)]
    if not known:
        return forward(*args, **kwargs)
    x = max(known, key=lambda t: t.dim())
    args, kwargs = tree_map(lambda leaf: leaf.whole() if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return tree_map(x.held_again, forward(*args, **kwargs))


@dataclass
class Gathered:
    """What a unit gathers, in order, in a run with all rows."""

    notes: list[Tensor] = field(default_factory=list)
    number: int = 0
    worst: float = 0.0
    """How far what a rank asks the rest of is from its rows of that."""


@dataclass(frozen=True)
class All(SequenceLayout):
    """All rows of a sequence: notes what is gathered."""

    gathered: Gathered

    def gather(self, local: Tensor, dim: int) -> Tensor:
        self.gathered.notes.append(local.clone())
        return local


@dataclass(frozen=True)
class Some(SequenceLayout):
    """A rank's rows of a sequence: what the others would tell it was noted."""

    gathered: Gathered

    def gather(self, local: Tensor, dim: int) -> Tensor:
        gathered, shape = self.gathered, list(local.shape)
        shape[dim] = self.cut.length
        if gathered.number < len(gathered.notes):
            whole = gathered.notes[gathered.number]
            gathered.number += 1
            if list(whole.shape) == shape:
                gathered.worst = max(gathered.worst, apart(local, self.take(whole, dim)))
                return whole.clone()
            gathered.worst = torch.inf
        raise RuntimeError("on some rows its code needs other rows than on all")


def opened(module: nn.Module, made: UnitPlan, given: Arguments, layout: Layout, ranks: int) -> UnitPlan | None:
    """The call of a unit, opened up; None when that is not possible. `given`: to the unit, of one sample."""
    unit, given = widened(module), tree_map_only(Tensor, wide, given)
    tensors = {path: leaf for path, leaf in named_leaves(given)[0] if isinstance(leaf, Tensor)}
    masks = frozenset(
        path for path, (dim, _) in made.given.items() if path in tensors and dim == tensors[path].dim() - 1 > 0
    )
    with torch.no_grad():
        cuts = {n: layout(t, ranks) for n, t in lengths_of(made, given).items()}
        try:
            trial = _Trial(unit, given, replace(made, left=masks, poses=True, opened=True), cuts)
        except Exception:  # it cannot run again on what it was given
            return None
        trial.leave_out()
        for _ in range(2 * TRIED):
            with trial.running:
                stopped = trial.stopped()
            if stopped is None:
                with trial.running:
                    stopped = trial.lost()
                if not stopped:
                    returned = trial.call.returned | trial.besides
                    return replace(trial.call, flops=trial.flops, part=trial.part, returned=returned)
            if not any(stopped):
                return None
            trial.call = replace(trial.call, together=(*trial.call.together, stopped[-1]))
            on_wholes(unit.get_submodule(stopped[-1]))
    return None


class _Trial:
    """Runs of a unit: on the whole, and on the rows of each rank."""

    def __init__(self, unit: nn.Module, given: Arguments, call: UnitPlan, cuts: Mapping[int, Rows]):
        self.unit, self.given, self.call, self.cuts, self.running = unit, given, call, cuts, Running(unit)
        self.ranks = len(next(iter(cuts.values())).ranks)
        self.whole, self.part = WholeAttention([]), 1.0
        self.besides = dict[str, At]()
        """What the unit returns in rows beside what the sketch saw: weights of attention, which have the sequence twice."""
        inner = {name: m for name, m in unit.named_modules() if name}
        with _calls_of(inner) as self.inner, self._sees(self._held(None), self._noted), counting() as counted:
            args, kwargs = copied(given)
            self.expected = named_leaves(unit(*args, **kwargs))[0]
        self.flops = counted.get_total_flops()

    def _noted(self, asked: AttentionCall, *_: SequenceLayout) -> Tensor:
        self.whole.note(asked)
        return plainly(asked)

    def _held(self, rank: int | None, gathered: Gathered | None = None) -> dict[int, SequenceLayout]:
        """The rows of a rank; None: all."""
        if rank is None:
            return {n: All(AndAll.beside(c), len(c.ranks), gathered or Gathered()) for n, c in self.cuts.items()}
        return {n: Some(c, rank, gathered or Gathered()) for n, c in self.cuts.items()}

    def _sees(self, held: Mapping[int, SequenceLayout], answer: Answer) -> ShardedAttention:
        return ShardedAttention(held, self.call.attends, answer)

    def leave_out(self) -> None:
        """Modules that compute every position alone run on rows as they are: the outermost that do."""
        found = list[str]()
        for name, seen in self.inner.items():
            if not any(name.startswith(f"{other}.") for other in found):
                module = self.unit.get_submodule(name)
                if any(_alone(module, one, self.cuts) for one in seen[:1]) and len(seen) == 1:
                    found.append(name)
        self.inner.clear()
        for name in found:
            leave_out(self.unit.get_submodule(name))
        norms = [name for name, module in self.unit.named_modules() if name and isinstance(module, BatchNormBase)]
        norms = [name for name in norms if not any(f"{name}.".startswith(f"{other}.") for other in found)]
        for name in norms:  # where samples are apart, another function takes their statistics
            on_wholes(self.unit.get_submodule(name))
        self.call = replace(self.call, alone=tuple(found), together=tuple(norms))

    def stopped(self) -> list[str] | None:
        """None when the unit on rows gives its rows of the output; else the modules in which its code stops, if it stops."""
        gathered, parts = Gathered(), list[int]()
        try:
            self._run(self._held(None, gathered), gathered)
            for rank in range(self.ranks):
                parts.append(self._run(self._held(rank, gathered), gathered))
        except Exception:
            return self._stopped()
        self.part = sum(parts) / self.ranks / self.flops if self.flops else 1.0
        return None if gathered.worst <= NEAR else []

    def lost(self) -> list[str]:
        """The innermost module in which gradients are lost: a torch.autograd.Function is given rows that pose as the whole."""
        found = list[str]()

        def hook(name: str, output: object) -> None:
            made = [t.local if isinstance(t, SequenceShard) else t for t in leaves(output) if isinstance(t, Tensor)]
            behind = nodes_behind(t.grad_fn for t in made)
            if not found and any(isinstance(getattr(node, "variable", None), SequenceShard) for node in behind):
                found.append(name)

        hooks = [
            module.register_forward_hook(lambda _, args, output, name=name: hook(name, output))
            for name, module in self.unit.named_modules()
            if name not in self.call.together
        ]
        held, self.whole.number = self._held(None), 0
        args, kwargs = cut_arguments(copied(self.given), self.call, held)
        try:
            with torch.enable_grad(), self._sees(held, self.whole.answer):
                args, kwargs = tree_map_only(Tensor, _learned, (args, kwargs))
                posed(self.unit, args, kwargs, self.call, held, {})
        except Exception:  # some stop at such a tensor
            return self._stopped()
        finally:
            for handle in hooks:
                handle.remove()
        return found

    def _stopped(self) -> list[str]:
        """After an exception: the modules that it passed through, the innermost last, that may run on wholes yet."""
        return [name for name in self.running.now if name not in self.call.together]

    def _run(self, held: Mapping[int, SequenceLayout], gathered: Gathered) -> int:
        """The floating-point operations of a run on some rows. Raises when its output is not these rows of the whole's."""
        gathered.number = 0
        with counting() as counted:
            output = on_rows(self.unit, self.given, self.call, held, self.whole)
        gathered.worst = max(gathered.worst, self.whole.worst, *output.differences(self.expected))
        numbers = {id(layout): number for number, layout in held.items()}
        self.besides = {path: (dim, numbers[id(layout)]) for path, (dim, layout) in output.besides.items()}
        return counted.get_total_flops()


def counting() -> Any:
    """torch's counter of the floating-point operations of products, silent."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    return FlopCounterMode(display=False)


class SeenCall(NamedTuple):
    """A call of a module: what it is given and what it returns."""

    given: Arguments
    output: object


Seen = dict[str, list[SeenCall]]
"""The calls of modules, by name."""


@contextmanager
def _calls_of(modules: Mapping[str, nn.Module]) -> Iterator[Seen]:
    """Notes what modules are given and return meanwhile, outer modules before inner ones."""
    found: Seen = {name: [] for name in modules}

    def hook(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        found[name].append(SeenCall((args, kwargs), tree_map_only(Tensor, torch.clone, output)))

    hooks = [
        module.register_forward_hook(lambda _, args, kwargs, output, name=name: hook(name, args, kwargs, output), with_kwargs=True)
        for name, module in modules.items()
    ]  # fmt: skip
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def _alone(module: nn.Module, seen: SeenCall, cuts: Mapping[int, Rows]) -> bool:
    """Whether a module gives on some rows what it gave for them: its arguments' first dim of a sequence's length is cut."""
    given, output = seen.given, seen.output
    for cut in cuts.values():
        for rank in {0, len(cut.ranks) - 1}:
            args, kwargs = tree_map_only(Tensor, partial(_first, cut, rank), copied(given))
            mine = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            whole = [leaf for leaf in leaves(given) if isinstance(leaf, Tensor)]
            if len(mine) != len(whole) or all(a.shape == b.shape for a, b in zip(mine, whole)):
                break
            try:
                found = leaves(module(*args, **kwargs))
            except Exception:
                return False
            expected = leaves(tree_map_only(Tensor, partial(_first, cut, rank), output))
            tensors = [(a, b) for a, b in zip(found, expected) if isinstance(b, Tensor)]
            if not tensors or any(not isinstance(a, Tensor) or apart(a, b) > NEAR for a, b in tensors):
                return False
        else:
            return True
    return False


def _learned(t: Tensor) -> Tensor:
    """As what comes from other units: with a gradient, and written in place."""
    return t.requires_grad_().clone() if t.is_floating_point() else t


def _first(cut: Rows, rank: int, t: Tensor) -> Tensor:
    """The rows of the first dim, the last excepted, that is as long as the sequence."""
    dim = next((d for d, n in enumerate(t.shape[:-1]) if n == cut.length), None)
    return t if dim is None else dense(cut.take(t, dim, rank))


def worth(sequence_plan: SequencePlan, sketch: Sketch) -> None:
    """P040 when every rank would compute about all that one device computes."""
    flops = [call.flops.of(1) for call in sketch.calls]
    spared = sum(n * (1 - made.part) for n, made in zip(flops, sequence_plan.calls) if made.stretched)
    if not any(made.stretched for made in sequence_plan.calls) or spared < LEAST * sum(flops):
        units = dict.fromkeys(made.unit for made in sequence_plan.calls if not made.stretched or made.opened)
        why = f"positions meet in all that {', '.join(units)[:200]} compute: every rank would compute all of it, on the whole sequence"
        raise refused("cp would spare no rank any work", why)
