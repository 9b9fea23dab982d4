"""The check that a unit can run on a sequence shard: in float64, on one device, before training.

Suppose that a unit computes every position separately, except in its attention. Then its output on a shard is that shard of its
output on the full sequence. So each unit runs once on a full (short) sequence, with the inputs that the model's own code passes.
The keys and values of its attention are recorded. Then the unit runs on each rank's shard, with the recorded keys and values, and
the outputs are compared. Attention written out by hand, convolutions over positions and norms over the sequence all show as a
difference.

Some units count positions, or make a bias from them. They run once more with tensors of the full shape (`SequenceShard`), so
their code counts all positions. If positions interact in another way, the unit is opened (`parallel/context/unit_opening.py`). If
this fails too, a unit without attention runs on the full sequence, and a unit with attention is rejected.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, summarize_error
from plait.model.trace import RunModel as Run
from plait.model.trace import trace_run
from plait.parallel.context.attention import (
    AttentionCall,
    FullAttention,
    ShardedAttention,
    check_heads,
    compute_attention,
)
from plait.parallel.context.row_run import (
    clone_arguments,
    copy_float64,
    find_lengths,
    map_named_leaves,
    run_on_rows,
    to_float64,
)
from plait.parallel.context.sequences import (
    Arguments,
    SequenceLayout,
    SequencePlan,
    UnitPlan,
    make_length_error,
    make_sequence_error,
    shorten_for_check,
)
from plait.parallel.context.unit_opening import (
    MAX_TRIES,
    TOLERANCE,
    Layout,
    RunningModules,
    count_flops,
    open_unit,
    use_plain_rows,
)
from plait.tensors.module_state import use_eval_mode
from plait.tensors.opaque_code import (
    UNEVEN_FACTORS,
    AlteredReads,
    CodeLine,
    format_read_lines,
    format_uneven_rows,
    scale_unevenly,
    try_altered_reads,
)
from plait.tensors.rows import Rows
from plait.tensors.torch_private import leaves_with_paths, tree_map_only


def check_units(
    model: nn.Module,
    inputs: object,
    call: Run,
    sequence_plan: SequencePlan,
    *,
    layout: Layout,
    ranks: int,
    heads: bool,
) -> SequencePlan:
    """Return the plan with every call marked that can run on a sequence shard. `inputs`: one sample. `heads`: attention distributes heads.

    Raises P040 if a unit with attention cannot.
    """
    try:
        taken = _record_inputs(model, shorten_for_check(sequence_plan, inputs, ranks), call, sequence_plan)
    except Exception:  # it may need the original length
        taken = _record_inputs(model, inputs, call, sequence_plan)
    calls = []
    for made, given in zip(sequence_plan.calls, taken):
        if not made.is_split:
            calls.append(made)
            continue
        unit = model.get_submodule(made.unit)
        found, why = _try_on_shards(unit, made, given, layout=layout, ranks=ranks, heads=heads)
        if why:
            found = open_unit(unit, found, given, layout, ranks) or replace(found, is_split=False)
        if made.has_attention and not found.is_split:
            raise make_sequence_error(f"unit {made.unit} cannot run on a sequence shard", why)
        calls.append(found)
    sequence_plan = replace(sequence_plan, calls=tuple(calls))
    return replace(
        sequence_plan, draws={at: n for at, n in sequence_plan.draws.items() if sequence_plan.find_sequence(at[0]) is not None}
    )


def _record_inputs(model: nn.Module, inputs: object, call: Run, sequence_plan: SequencePlan) -> list[Any]:
    """Record the inputs of the units in a run of the model."""
    found: list[Any] = []
    names = dict.fromkeys(c.unit for c in sequence_plan.calls)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on = len(found) < len(sequence_plan.calls) and sequence_plan.calls[len(found)].is_split
        found.append(tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)) if on else None)

    with ExitStack() as stack:
        stack.enter_context(use_eval_mode(model))
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(hook.remove)
        trace_run(model, inputs, call, False)
    if len(found) != len(sequence_plan.calls):
        raise make_sequence_error("the model calls other units on one sample, or in eval mode", "its sequence of calls varies")
    return found


@dataclass(frozen=True)
class _FullRun:
    """A unit's run on full sequences: its outputs, its attention calls, and its operations."""

    returned: list[tuple[str, Any]]
    attention: FullAttention
    flops: int


def _run_full(
    unit: nn.Module, made: UnitPlan, sequences: dict[int, SequenceLayout], running: RunningModules, given: Arguments, *, shared: int
) -> _FullRun:
    """Run a unit on full sequences. Raises P042 if the heads of an attention are not divisible by `shared`."""
    whole, (args, kwargs) = FullAttention([]), clone_arguments(given)

    def attend_full(asked: AttentionCall, *_: SequenceLayout) -> Tensor:
        check_heads(asked.q.shape[1], shared)
        running.mark_attention()
        whole.record(asked)
        return compute_attention(asked)

    with running, ShardedAttention(sequences, made.attends, attend_full), count_flops() as counted:
        returned = leaves_with_paths(unit(*args, **kwargs))[0]
    return _FullRun(returned, whole, counted.get_total_flops())


def _try_on_shards(
    module: nn.Module, made: UnitPlan, given: Arguments, *, layout: Layout, ranks: int, heads: bool
) -> tuple[UnitPlan, str]:
    """Return the call, possibly with some arguments kept in full, and the reason if it cannot run on a shard."""
    unit, (args, kwargs) = copy_float64(module), tree_map_only(Tensor, to_float64, given)
    running = RunningModules(unit)
    with torch.no_grad():
        lengths = find_lengths(made, (args, kwargs))
        if not lengths:
            return made, "in eval mode it gets no input with the sequence"
        if min(lengths.values()) < 2 * ranks:
            raise make_length_error(min(lengths.values()), ranks)
        cuts = {n: layout(t, ranks) for n, t in lengths.items()}
        held = [{n: SequenceLayout(c, r) for n, c in cuts.items()} for r in range(ranks)]
        sequences = {n: SequenceLayout(Rows.from_sizes([t]), 0) for n, t in lengths.items()}
        run = partial(_run_full, unit, made, sequences, running, shared=ranks if heads else 1)
        try:
            with AlteredReads() as numbers:
                usual = run((args, kwargs))
        except PlaitError:
            raise
        except Exception as error:
            return made, f"it cannot run again on its recorded inputs: {summarize_error(error)}"
        made = replace(made, flops=usual.flops)
        reasons = []
        for left, poses in _list_choices(made, given):
            call = replace(made, left=left, has_full_shape=poses)
            while True:
                with running, count_flops() as counted:
                    reason = _compare_on_shards(unit, (args, kwargs), call, held, usual)
                if numbers.read and not reason:
                    reason = _compare_other_values(unit, (args, kwargs), call, held, run, read=numbers.read)
                if not reason:
                    part = counted.get_total_flops() / ranks / made.flops if made.flops else 1.0
                    return replace(call, part=part), ""
                reasons.append(reason)
                if not poses or len(call.row_modules) == MAX_TRIES or not (name := running.find_stop()):
                    break
                call = replace(call, row_modules=(*call.row_modules, name))
                use_plain_rows(unit.get_submodule(name))
    return made, reasons[0]


def _list_choices(made: UnitPlan, given: Arguments) -> list[tuple[frozenset[str], bool]]:
    """List (arguments to keep in full, whether the others get the full shape), the likeliest first: none, then masks. The full shape
    comes last.

    An argument with the full shape has features in its last dim. If the sequence is in the last dim, the argument is a mask.
    """
    leaves = {path: leaf for path, leaf in leaves_with_paths(given)[0] if isinstance(leaf, Tensor)}
    paths = [path for path in leaves if path in made.given]
    found = [frozenset(some) for n in range(min(len(paths), MAX_TRIES + 1)) for some in combinations(paths, n)]
    found = found if len(paths) <= 2 * MAX_TRIES else found[: 1 + len(paths)]
    masks = frozenset(path for path in paths if made.given[path][0] == leaves[path].dim() - 1 > 0)
    return [*((left, False) for left in found), (masks, True)]


def _compare_other_values(
    unit: nn.Module,
    given: Arguments,
    call: UnitPlan,
    ranks: list[dict[int, SequenceLayout]],
    run: Callable[[Arguments], _FullRun],
    *,
    read: Iterable[CodeLine],
) -> str:
    """Repeat the comparison with other values where the unit's code reads values of tensors. `read`: the lines that read them."""
    for lines, seen in try_altered_reads(lambda: run(given), read):
        with AlteredReads(lines):
            if reason := _compare_on_shards(unit, given, call, ranks, seen):
                return reason + format_read_lines(lines)

    def make_uneven(path: str, leaf: object) -> object:
        positions = path in call.given and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return scale_unevenly(leaf, call.given[path][0], factors) if positions else leaf

    for factors in UNEVEN_FACTORS:
        other = map_named_leaves(make_uneven, given)
        if reason := _compare_on_shards(unit, other, call, ranks, run(other)):
            return reason + format_uneven_rows(factors)
    return ""


def _compare_on_shards(
    unit: nn.Module,
    given: Arguments,
    call: UnitPlan,
    ranks: list[dict[int, SequenceLayout]],
    seen: _FullRun,
) -> str:
    """Describe the first difference between outputs on shards and shards of the full output; empty if there is none."""
    whole = seen.attention
    for held in ranks:
        try:
            output = run_on_rows(unit, given, call, held, whole)
        except PlaitError:
            raise
        except Exception as error:
            sizes = " and ".join(f"{mine.size} of {mine.rows.length}" for mine in held.values())
            return f"on {sizes} positions: {summarize_error(error)}"
        if whole.max_diff > TOLERANCE:
            what = "its queries, keys or values on a shard differ from those on the full sequence"
            return f"{what} by {whole.max_diff:.0e}"
        try:
            off = next((off for off in output.compute_diffs(seen.returned) if off > TOLERANCE), 0.0)
        except ValueError as error:
            return str(error)
        if off:
            used = "its attention is not torch's function" if not whole.calls else "it mixes positions outside of attention"
            return f"its output on a shard differs from that on the full sequence by {off:.0e}: {used}"
    return ""
