"""The forward pass of a rank under context parallelism, unit by unit.

Code before the first attention runs on the full sequence, so positions, masks and embeddings need no change. From there on, a
unit gets this rank's rows of each tensor with a sequence dim. The code around the unit gets its output as a `SequenceShard`. A
unit that cannot run on a shard gets the full sequence. The loss gets full sequences again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem
from plait.losses.global_batch import SEQUENCE_GATHERER
from plait.parallel.context.attention import AttentionBackend, AttentionHook, ShardedAttention
from plait.parallel.context.row_run import ExtraOutputs, call_on_rows, expose_attention, map_named_leaves
from plait.parallel.context.sequence_shard import SequenceShard, gather_shard, to_loss_inputs
from plait.parallel.context.sequences import (
    Arguments,
    SequenceLayout,
    SequencePlan,
    UnitPlan,
    make_length_error,
    make_sequence_error,
)
from plait.parallel.context.unit_opening import use_full_sequences, use_plain_rows
from plait.tensors.fake import is_remote_fake
from plait.tensors.module_state import bind_forward
from plait.tensors.torch_private import checkpoint_frame, dataclass_leaves, leaves_with_paths, tree_map


class ContextParallelUnits:
    """The units of a model on one of `ranks` ranks."""

    make_layout: Callable[[int], SequenceLayout]
    """(length of a sequence) -> its layout on this rank."""
    backend: AttentionBackend
    """The backend through which attention gets the other ranks' rows."""
    attention_hook: AttentionHook | None = None
    """A wrapper of `ShardedAttention.attend`, if there is one."""

    def __init__(self, model: nn.Module, sequence_plan: SequencePlan, ranks: int):
        self.model, self.sequence_plan, self.ranks = model, sequence_plan, ranks
        self.unit = ""
        """Name of the running unit."""
        self.frame: object = None
        """The model's own checkpoint in which the unit was called."""
        self.layouts: dict[int, SequenceLayout] = {}
        """Sequence -> its layout on this rank."""
        self.call_counts: dict[str, int] = {}
        self.extra_outputs: ExtraOutputs = {}
        """The additional sharded outputs of the last unit."""
        self.full_values: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors that units passed on outside of their return values: id -> (tensor, its full sequence)."""
        self.running = False
        self.calls: dict[str, list[UnitPlan]] = {}
        for call in sequence_plan.calls:
            self.calls.setdefault(call.unit, []).append(call)

    def wrap(self) -> None:
        """Wrap the forward of units that run on shards, so that attention gets the other ranks' rows. Call it before checkpointing."""
        for name, calls in self.calls.items():
            on = [call for call in calls if call.is_split]
            pairs = {call.attends for call in on}
            if len(pairs) > 1:
                why = f"its attentions are over {' and over '.join(map(str, pairs))} (sequences of queries and keys)"
                raise make_sequence_error(f"unit {name} is called for several sequences", why)
            if len({repr(call) for call in on}) > 1 and any(call.has_full_shape for call in on):
                why = "its code reads lengths, and its arguments differ from call to call"
                raise make_sequence_error(f"unit {name} is called with different layouts", why)
            if on:
                module = self.model.get_submodule(name)
                expose_attention(module)
                for inner in on[0].row_modules:
                    use_plain_rows(module.get_submodule(inner))
                for inner in on[0].full_modules:
                    use_full_sequences(module.get_submodule(inner))
                module.forward = _ShardedForward(self, on[0], module)

    def install(self) -> list[Any]:
        """Install the hooks that shard the inputs of units. Call it after all other hooks, which must get plain tensors."""
        handles = [self.model.register_forward_pre_hook(self._begin, prepend=True)]
        handles.append(self.model.register_forward_hook(self._end, prepend=True, always_call=True))
        for name in self.calls:
            unit, module = _UnitHooks(self, name), self.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(unit.enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(unit.leave))
        return handles

    def _begin(self, *_: Any) -> None:
        self.layouts, self.call_counts, self.full_values, self.running = {}, {}, {}, True
        SEQUENCE_GATHERER.set(self.gather_full)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        self.running = False
        SEQUENCE_GATHERER.set(None)
        if not self.layouts or output is None:
            return output
        dataclass_leaves(output)  # registers dataclasses as trees
        return to_loss_inputs(tree_map(lambda leaf: self.full_values.get(id(leaf), (leaf, leaf))[1], output), self.ranks)

    def gather_full(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather values [samples · this rank's rows, …] that units passed on to full sequences."""
        if len(self.layouts) != 1 or len({t.shape for t in rows}) != 1:
            why = f"values of shapes {', '.join(str(list(t.shape)) for t in rows)} belong to {len(self.layouts)} sequences"
            raise make_sequence_error("tensors that units pass on outside of their return values cannot be gathered", why)
        (held,) = self.layouts.values()
        found = held.gather(torch.stack(tuple(rows), 1).unflatten(0, (-1, held.size)), 1).flatten(0, 1).unbind(1)
        self.full_values = {id(t): (t, whole) for t, whole in zip(rows, found)}
        return found

    def next_call(self, unit: str) -> UnitPlan:
        """Return the plan of a unit's next call. A recomputation by the model's own code uses the first call's plan again."""
        calls = self.calls[unit]
        if not self.running:
            return calls[0]
        turn = self.call_counts.get(unit, 0)
        self.call_counts[unit] = turn + 1
        if turn >= len(calls):
            what = f"unit {unit} is called {turn + 1} times, but {len(calls)} times in the measured forward pass"
            raise PlaitError(Problem("P043", what, why="the model's calls depend on its input", fix=("cp=1",)))
        return calls[turn]

    def assign_rows(self, call: UnitPlan, leaves: list[tuple[str, Any]]) -> dict[int, SequenceLayout]:
        """Assign the rows of this rank when the first unit on shards of a sequence gets its inputs.

        Sequences of one length have equal layouts, so that they can be added.
        """
        for path, t in leaves:
            dim, number = call.given.get(path, (0, None))
            if number is None or number in self.layouts:
                continue
            length = t.shape[dim]
            if length < 2 * self.ranks:
                raise make_length_error(length, self.ranks)
            alike = (held for held in self.layouts.values() if held.rows.length == length)
            self.layouts[number] = next(alike, None) or self.make_layout(length)
        return self.layouts


class _UnitHooks:
    """The hooks before and after a unit."""

    def __init__(self, parallel_units: ContextParallelUnits, name: str):
        self.parallel_units, self.name = parallel_units, name
        self.now: UnitPlan | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        call = self.now = self.parallel_units.next_call(self.name)
        flat, given = leaves_with_paths((args, kwargs))[0], None
        if call.is_split:
            held = self.parallel_units.assign_rows(call, flat)
            given = map_named_leaves(lambda path, leaf: _take_argument(path, leaf, call, held), (args, kwargs))
        elif any(isinstance(leaf, SequenceShard) for _, leaf in flat):
            given = tree_map(gather_shard, (args, kwargs))
        self.parallel_units.unit = self.name
        return given

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        call, self.now = self.now, None
        self.parallel_units.unit = ""
        if call is None or not call.is_split or not self.parallel_units.running:
            return output
        held, besides = self.parallel_units.layouts, self.parallel_units.extra_outputs
        self.parallel_units.extra_outputs = {}
        rows = {path: (dim, held[number]) for path, (dim, number) in call.returned.items() if number in held} | besides

        def to_shard(path: str, leaf: object) -> object:
            """Wrap an output in rows as a shard. A placeholder of another stage already has the full shape."""
            if path not in rows or not isinstance(leaf, Tensor) or is_remote_fake(leaf):
                return leaf
            return SequenceShard.of(leaf, *rows[path])

        return map_named_leaves(to_shard, output)


def _take_argument(path: str, leaf: object, call: UnitPlan, rows: dict[int, SequenceLayout]) -> object:
    """Convert an argument to the form that the unit runs on."""
    if not isinstance(leaf, Tensor):
        return leaf
    at = None if path in call.left else call.given.get(path)
    seen = path in call.given or path in call.left or path in call.fixed
    if not seen:  # absent in the measured forward pass: a mask that is made on demand
        like = [(d, i) for i, held in rows.items() for d, n in enumerate(leaf.shape) if n == held.rows.length]
        at = like[0] if len(like) == 1 and leaf.is_floating_point() else None
    held = None if at is None else rows.get(at[1])
    if isinstance(leaf, SequenceShard):
        if at is not None and at[0] - leaf.dim() == leaf.dim_from_end and leaf.sequence_layout == held:  # in backward, from a later pass
            return leaf.local
        leaf = leaf.gather_full()
    return leaf if at is None or held is None or leaf.shape[at[0]] != held.rows.length else held.take(leaf, at[0])


class _ShardedForward:
    """A unit's own forward with attention over the full sequences; also when it runs again in backward."""

    def __init__(self, parallel_units: ContextParallelUnits, call: UnitPlan, module: nn.Module):
        self.parallel_units, self.how, self.own = parallel_units, call, bind_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self.parallel_units.layouts
        if not held:
            return self.own(*args, **kwargs)
        self.parallel_units.frame = checkpoint_frame()
        besides = self.parallel_units.extra_outputs = {}
        units = self.parallel_units
        with ShardedAttention(held, self.how.attends, units.backend, units.attention_hook):
            return call_on_rows(self.own, args, kwargs, self.how, held, besides)
