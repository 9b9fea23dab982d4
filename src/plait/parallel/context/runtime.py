"""The forward pass of a rank that computes a stretch of the sequence: who runs on what, unit by unit.

Code before the first attention runs on the whole sequence, so positions, masks and embeddings are what they are. From
there on a unit gets this rank's rows of whatever has a dim of the sequence, and what it returns is known to the code
around it as a `SequenceShard`. A unit that cannot run on a stretch gets the whole. What the loss gets is whole again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem
from plait.losses.global_batch import STRETCHES
from plait.parallel.context.attention import Answer, Asked, ShardedAttention
from plait.parallel.context.opened_unit import leave_out, on_wholes
from plait.parallel.context.sequence_shard import SequenceShard, for_loss, gathered
from plait.parallel.context.sequences import Arguments, SequenceLayout, SequencePlan, UnitPlan, refused, too_short
from plait.parallel.context.unit_in_rows import Besides, each, posed, show
from plait.tensors.fake import is_unknown
from plait.tensors.modules import own_forward
from plait.tensors.torch_private import checkpoint_frame, leaves, named_leaves, tree_map


class ContextParallelUnits:
    """The units of a model on one of `ranks` ranks."""

    hold: Callable[[int], SequenceLayout]
    """Which rows it has of a sequence of some length."""
    answer: Answer
    """How its attentions see the other ranks' rows."""
    asked: Asked | None = None
    """What calls `ShardedAttention.ask`, when it is not called as it is."""

    def __init__(self, model: nn.Module, sequence_plan: SequencePlan, ranks: int):
        self.model, self.sequence_plan, self.ranks = model, sequence_plan, ranks
        self.unit = ""
        """That runs now."""
        self.frame: object = None
        """The model's own checkpoint in which it was called."""
        self.held: dict[int, SequenceLayout] = {}
        """Which rows of each sequence."""
        self.turns: dict[str, int] = {}
        self.besides: Besides = {}
        """Of what the unit that ran last returned."""
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        """What units handed on past what they return: by its id, it and the whole."""
        self.running = False
        self.calls: dict[str, list[UnitPlan]] = {}
        for call in sequence_plan.calls:
            self.calls.setdefault(call.unit, []).append(call)

    def wrap(self) -> None:
        """Give units that run on stretches a forward whose attention sees the others. Before it is recomputed or so."""
        for name, calls in self.calls.items():
            on = [call for call in calls if call.stretched]
            pairs = {call.attends for call in on}
            if len(pairs) > 1:
                why = f"its attentions are over {' and over '.join(map(str, pairs))} (sequences of queries and keys)"
                raise refused(f"unit {name} is called for several sequences in turn", why)
            if len({repr(call) for call in on}) > 1 and any(call.poses for call in on):
                why = "its code looks at lengths, and its arguments differ from call to call"
                raise refused(f"unit {name} is called in several ways", why)
            if on:
                module = self.model.get_submodule(name)
                show(module)
                for inner in on[0].alone:
                    leave_out(module.get_submodule(inner))
                for inner in on[0].together:
                    on_wholes(module.get_submodule(inner))
                module.forward = _Inside(self, on[0], module)

    def install(self) -> list[Any]:
        """From now on units get what they run on. After all other hooks: these must see plain tensors."""
        handles = [self.model.register_forward_pre_hook(self._begin, prepend=True)]
        handles.append(self.model.register_forward_hook(self._end, prepend=True, always_call=True))
        for name in self.calls:
            unit, module = _Border(self, name), self.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(unit.enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(unit.leave))
        return handles

    def _begin(self, *_: Any) -> None:
        self.held, self.turns, self.known, self.running = {}, {}, {}, True
        STRETCHES.set(self.whole)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        self.running = False
        STRETCHES.set(None)
        if not self.held or output is None:
            return output
        leaves(output)  # makes trees of dataclasses
        return for_loss(tree_map(lambda leaf: self.known.get(id(leaf), (leaf, leaf))[1], output), self.ranks)

    def whole(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of values [samples · this rank's rows, …] that units handed on: of whole sequences."""
        if len(self.held) != 1 or len({t.shape for t in rows}) != 1:
            why = f"values of shapes {', '.join(str(list(t.shape)) for t in rows)} belong to {len(self.held)} sequences"
            raise refused("what units hand on past what they return cannot be put together", why)
        (held,) = self.held.values()
        found = held.gather(torch.stack(tuple(rows), 1).unflatten(0, (-1, held.size)), 1).flatten(0, 1).unbind(1)
        self.known = {id(t): (t, whole) for t, whole in zip(rows, found)}
        return found

    def call(self, unit: str) -> UnitPlan:
        """How the call of a unit that begins now runs. In a recomputation by the model's own code it is the first again."""
        calls = self.calls[unit]
        if not self.running:
            return calls[0]
        turn = self.turns.get(unit, 0)
        self.turns[unit] = turn + 1
        if turn >= len(calls):
            what = f"unit {unit} is called {turn + 1} times, in the sketch {len(calls)}"
            raise PlaitError(Problem("P043", what, why="the model's course depends on its input", fix=("cp=1",)))
        return calls[turn]

    def rows(self, call: UnitPlan, leaves: list[tuple[str, Any]]) -> dict[int, SequenceLayout]:
        """Which rows this rank holds: decided by the first unit on stretches of a sequence, from what it is given.

        Sequences of one length are cut alike, so that they can be added.
        """
        for path, t in leaves:
            dim, number = call.given.get(path, (0, None))
            if number is None or number in self.held:
                continue
            length = t.shape[dim]
            if length < 2 * self.ranks:
                raise too_short(length, self.ranks)
            alike = (held for held in self.held.values() if held.cut.length == length)
            self.held[number] = next(alike, None) or self.hold(length)
        return self.held


class _Border:
    """What stands before and after a unit."""

    def __init__(self, parallel_units: ContextParallelUnits, name: str):
        self.parallel_units, self.name = parallel_units, name
        self.now: UnitPlan | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        call = self.now = self.parallel_units.call(self.name)
        flat, given = named_leaves((args, kwargs))[0], None
        if call.stretched:
            held = self.parallel_units.rows(call, flat)
            given = each(lambda path, leaf: _mine(path, leaf, call, held), (args, kwargs))
        elif any(isinstance(leaf, SequenceShard) for _, leaf in flat):
            given = tree_map(gathered, (args, kwargs))
        self.parallel_units.unit = self.name
        return given

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        call, self.now = self.now, None
        self.parallel_units.unit = ""
        if call is None or not call.stretched or not self.parallel_units.running:
            return output
        held, besides = self.parallel_units.held, self.parallel_units.besides
        self.parallel_units.besides = {}
        rows = {path: (dim, held[number]) for path, (dim, number) in call.returned.items() if number in held} | besides

        def as_sequence(path: str, leaf: object) -> object:
            """What another stage has is an unknown, of the whole sequence."""
            if path not in rows or not isinstance(leaf, Tensor) or is_unknown(leaf):
                return leaf
            return SequenceShard.of(leaf, *rows[path])

        return each(as_sequence, output)


def _mine(path: str, leaf: object, call: UnitPlan, rows: dict[int, SequenceLayout]) -> object:
    """An argument as the unit gets it."""
    if not isinstance(leaf, Tensor):
        return leaf
    at = None if path in call.left else call.given.get(path)
    seen = path in call.given or path in call.left or path in call.fixed
    if not seen:  # was not there in the sketch: a mask that is made at need
        like = [(d, i) for i, held in rows.items() for d, n in enumerate(leaf.shape) if n == held.cut.length]
        at = like[0] if len(like) == 1 and leaf.is_floating_point() else None
    held = None if at is None else rows.get(at[1])
    if isinstance(leaf, SequenceShard):
        if at is not None and at[0] - leaf.dim() == leaf.along and leaf.held == held:  # in backward, of a later pass
            return leaf.local
        leaf = leaf.whole()
    return leaf if at is None or held is None or leaf.shape[at[0]] != held.cut.length else held.take(leaf, at[0])


class _Inside:
    """A unit's own forward, its attentions seeing all stretches; also when it runs again in backward."""

    def __init__(self, parallel_units: ContextParallelUnits, call: UnitPlan, module: nn.Module):
        self.parallel_units, self.how, self.own = parallel_units, call, own_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self.parallel_units.held
        if not held:
            return self.own(*args, **kwargs)
        self.parallel_units.frame = checkpoint_frame()
        besides = self.parallel_units.besides = {}
        units = self.parallel_units
        with ShardedAttention(held, self.how.attends, units.answer, units.asked):
            return posed(self.own, args, kwargs, self.how, held, besides)
