"""The check that a unit may run on a stretch of the sequence, before it does: in float64, on one device, with no others.

A unit that computes every position alone, but for its attention, gives on a stretch that stretch of what it gives on the
whole. So each unit runs once on a whole (short) sequence, as the model's own code feeds it; its attentions' keys and
values are kept. Then it runs on each rank's stretch, with its attention answered from those, and the outputs are
compared. Attention written out by hand, convolutions over positions, norms over the sequence: all of these show as a
difference. A unit that counts positions or makes a bias of them is run once more with its rows posing as the whole
sequence (`Stretch`): then its code counts all. One in which positions meet otherwise is opened up (`parallel/context/opened_unit.py`). A unit
without attention that fails at that too runs on the whole sequence; one with attention is refused.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, in_a_line
from plait.model.trace import Call as Run
from plait.model.trace import trace_run
from plait.parallel.context.attention import (
    AttentionCall,
    ShardedAttention,
    WholeAttention,
    check_heads,
    plainly,
)
from plait.parallel.context.opened_unit import NEAR, TRIED, Layout, Running, counting, leave_out, opened
from plait.parallel.context.sequences import (
    Arguments,
    SequenceLayout,
    SequencePlan,
    UnitPlan,
    refused,
    short,
    too_short,
)
from plait.parallel.context.unit_in_rows import (
    copied,
    each,
    lengths_of,
    on_rows,
    wide,
    widened,
)
from plait.tensors.modules import evaluating
from plait.tensors.opaque_code import UNEVEN, CodeLine, OtherNumbers, elsewhere, other_outcomes, uneven, unevenly
from plait.tensors.rows import Rows
from plait.tensors.torch_private import named_leaves, tree_map_only


def checked_units(
    model: nn.Module,
    inputs: object,
    call: Run,
    sequence_plan: SequencePlan,
    *,
    layout: Layout,
    ranks: int,
    heads: bool,
) -> SequencePlan:
    """The course with every call that can run on stretches marked so. P040 when one with attention cannot.

    `inputs`: one sample. `heads`: attention shares out heads.
    """
    try:
        taken = _taken(model, short(sequence_plan, inputs, ranks), call, sequence_plan)
    except Exception:  # it may need its own length
        taken = _taken(model, inputs, call, sequence_plan)
    calls = []
    for made, given in zip(sequence_plan.calls, taken):
        if not made.stretched:
            calls.append(made)
            continue
        unit = model.get_submodule(made.unit)
        found, why = _tried(unit, made, given, layout=layout, ranks=ranks, heads=heads)
        if why:
            found = opened(unit, found, given, layout, ranks) or replace(found, stretched=False)
        if made.sees and not found.stretched:
            raise refused(f"unit {made.unit} cannot run on a stretch of the sequence", why)
        calls.append(found)
    sequence_plan = replace(sequence_plan, calls=tuple(calls))
    return replace(
        sequence_plan, draws={at: n for at, n in sequence_plan.draws.items() if sequence_plan.on(at[0]) is not None}
    )


def _taken(model: nn.Module, inputs: object, call: Run, sequence_plan: SequencePlan) -> list[Any]:
    """What the units are given in a run of the model."""
    found: list[Any] = []
    names = dict.fromkeys(c.unit for c in sequence_plan.calls)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on = len(found) < len(sequence_plan.calls) and sequence_plan.calls[len(found)].stretched
        found.append(tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)) if on else None)

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(hook.remove)
        trace_run(model, inputs, call, False)
    if len(found) != len(sequence_plan.calls):
        raise refused("the model calls other units on one sample, or when it does not train", "its course varies")
    return found


@dataclass(frozen=True)
class _WholeRun:
    """A unit's run on whole sequences: what it returned, its attentions, and its operations."""

    returned: list[tuple[str, Any]]
    attention: WholeAttention
    flops: int


def _whole_run(
    unit: nn.Module, made: UnitPlan, sequences: dict[int, SequenceLayout], running: Running, given: Arguments, *, shared: int
) -> _WholeRun:
    """P040 where `shared` ranks cannot share out the heads of an attention."""
    whole, (args, kwargs) = WholeAttention([]), copied(given)

    def plain(asked: AttentionCall, *_: SequenceLayout) -> Tensor:
        check_heads(asked.q.shape[1], shared)
        running.attends()
        whole.note(asked)
        return plainly(asked)

    with running, ShardedAttention(sequences, made.attends, plain), counting() as counted:
        returned = named_leaves(unit(*args, **kwargs))[0]
    return _WholeRun(returned, whole, counted.get_total_flops())


def _tried(
    module: nn.Module, made: UnitPlan, given: Arguments, *, layout: Layout, ranks: int, heads: bool
) -> tuple[UnitPlan, str]:
    """The call, perhaps with some arguments left whole, and why it cannot run on a stretch, if it cannot."""
    unit, (args, kwargs) = widened(module), tree_map_only(Tensor, wide, given)
    running = Running(unit)
    with torch.no_grad():
        lengths = lengths_of(made, (args, kwargs))
        if not lengths:
            return made, "it is given nothing of the sequence when it does not train"
        if min(lengths.values()) < 2 * ranks:
            raise too_short(min(lengths.values()), ranks)
        cuts = {n: layout(t, ranks) for n, t in lengths.items()}
        held = [{n: SequenceLayout(c, r) for n, c in cuts.items()} for r in range(ranks)]
        sequences = {n: SequenceLayout(Rows.of([t]), 0) for n, t in lengths.items()}
        run = partial(_whole_run, unit, made, sequences, running, shared=ranks if heads else 1)
        try:
            with OtherNumbers() as numbers:
                usual = run((args, kwargs))
        except PlaitError:
            raise
        except Exception as error:
            return made, f"it cannot run again on what it was given: {in_a_line(error)}"
        made = replace(made, flops=usual.flops)
        reasons = []
        for left, poses in _choices(made, given):
            call = replace(made, left=left, poses=poses)
            while True:
                with running, counting() as counted:
                    reason = _differs(unit, (args, kwargs), call, held, usual)
                if numbers.read and not reason:
                    reason = _differs_with_other_numbers(unit, (args, kwargs), call, held, run, read=numbers.read)
                if not reason:
                    part = counted.get_total_flops() / ranks / made.flops if made.flops else 1.0
                    return replace(call, part=part), ""
                reasons.append(reason)
                if not poses or len(call.alone) == TRIED or not (name := running.stopped()):
                    break
                call = replace(call, alone=(*call.alone, name))
                leave_out(unit.get_submodule(name))
    return made, reasons[0]


def _choices(made: UnitPlan, given: Arguments) -> list[tuple[frozenset[str], bool]]:
    """(arguments to leave whole, whether the others pose as whole), the likeliest first: none, then masks. Posing comes last.

    What poses has features in its last dim; where the sequence is in the last one, it is a mask.
    """
    leaves = {path: leaf for path, leaf in named_leaves(given)[0] if isinstance(leaf, Tensor)}
    paths = [path for path in leaves if path in made.given]
    found = [frozenset(some) for n in range(min(len(paths), TRIED + 1)) for some in combinations(paths, n)]
    found = found if len(paths) <= 2 * TRIED else found[: 1 + len(paths)]
    masks = frozenset(path for path in paths if made.given[path][0] == leaves[path].dim() - 1 > 0)
    return [*((left, False) for left in found), (masks, True)]


def _differs_with_other_numbers(
    unit: nn.Module,
    given: Arguments,
    call: UnitPlan,
    ranks: list[dict[int, SequenceLayout]],
    run: Callable[[Arguments], _WholeRun],
    *,
    read: Iterable[CodeLine],
) -> str:
    """`_differs`, where the unit's code reads other numbers from tensors. `read`: the lines at which it reads any."""
    for lines, seen in other_outcomes(lambda: run(given), read):
        with OtherNumbers(lines):
            if reason := _differs(unit, given, call, ranks, seen):
                return reason + elsewhere(lines)

    def sized(path: str, leaf: object) -> object:
        positions = path in call.given and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return uneven(leaf, call.given[path][0], factors) if positions else leaf

    for factors in UNEVEN:
        other = each(sized, given)
        if reason := _differs(unit, other, call, ranks, run(other)):
            return reason + unevenly(factors)
    return ""


def _differs(
    unit: nn.Module,
    given: Arguments,
    call: UnitPlan,
    ranks: list[dict[int, SequenceLayout]],
    seen: _WholeRun,
) -> str:
    """How the unit's outputs on stretches are not the stretches of its output, or nothing."""
    whole = seen.attention
    for held in ranks:
        try:
            output = on_rows(unit, given, call, held, whole)
        except PlaitError:
            raise
        except Exception as error:
            sizes = " and ".join(f"{mine.size} of {mine.cut.length}" for mine in held.values())
            return f"on {sizes} positions: {in_a_line(error)}"
        if whole.worst > NEAR:
            what = "its queries, keys or values on a stretch are not those of the whole"
            return f"{what}: they differ by {whole.worst:.0e}"
        try:
            off = next((off for off in output.differences(seen.returned) if off > NEAR), 0.0)
        except ValueError as error:
            return str(error)
        if off:
            used = "its attention is not torch's function" if not whole.calls else "it mixes positions otherwise"
            return f"its output on a stretch differs from that of the whole by {off:.0e}: {used}"
    return ""
