"""The check that a unit may run on a stretch of the sequence, before it does: in float64, on one device, with no others.

A unit that computes every position alone, but for its attention, gives on a stretch that stretch of what it gives on the
whole. So each unit runs once on a whole (short) sequence, as the model's own code feeds it; its attentions' keys and
values are kept. Then it runs on each rank's stretch, with its attention answered from those, and the outputs are
compared. Attention written out by hand, convolutions over positions, norms over the sequence: all of these show as a
difference. A unit that counts positions or makes a bias of them is run once more with its rows posing as the whole
sequence (`Stretch`): then its code counts all. A unit without attention that fails runs on the whole sequence; one
with attention is refused.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import multihead
from plait.alone import Running, leave_out
from plait.attending import Asked, Attending, Whole, apart, check_heads
from plait.course import At, Call, Course, refused, seeds, short, still, too_short
from plait.errors import PlaitError
from plait.ranges import Rows
from plait.stretch import Held, Stretch
from plait.torchseam import BatchNormBase, named_leaves, tree_map_only, tree_unflatten
from plait.watching import Call as Run
from plait.watching import watch

NEAR = 1e-6
"""A model may compute in float32 whatever it is given."""
TRIED = 3
"""At most so many arguments are left whole for a try."""
Layout = Callable[[int, int], Rows]
"""(length, ranks) -> who holds which rows."""


def proved(
    model: nn.Module, inputs: Any, call: Run, course: Course, layout: tuple[Layout, int], heads: bool = False
) -> Course:
    """The course with every call that can run on stretches marked so. P040 when one with attention cannot.

    `inputs`: one sample. `layout`: how the sequence is cut over how many ranks. `heads`: attention shares out heads.
    """
    cut, ranks = layout
    try:
        taken = _taken(model, short(course, inputs, ranks), call, course)
    except Exception:  # it may need its own length
        taken = _taken(model, inputs, call, course)
    calls = []
    for made, given in zip(course.calls, taken):
        if not made.stretched:
            calls.append(made)
            continue
        found, why = _tried(model.get_submodule(made.unit), made, given, (cut, ranks), heads)
        if found is None and made.sees:
            raise refused(f"unit {made.unit} cannot run on a stretch of the sequence", why)
        calls.append(found or replace(made, stretched=False))
    course = replace(course, calls=tuple(calls))
    return replace(course, draws={at: n for at, n in course.draws.items() if course.on(at[0]) is not None})


def _taken(model: nn.Module, inputs: Any, call: Run, course: Course) -> list[Any]:
    """What the units are given in a run of the model."""
    found: list[Any] = []
    names = dict.fromkeys(c.unit for c in course.calls)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        on = len(found) < len(course.calls) and course.calls[len(found)].stretched
        found.append(tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)) if on else None)

    with still(model) as stack:
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(hook.remove)
        watch(model, inputs, call, False)
    if len(found) != len(course.calls):
        raise refused("the model calls other units on one sample, or when it does not train", "its course varies")
    return found


def widened(module: nn.Module) -> nn.Module:
    """A copy in float64 that draws nothing, its attention visible. Batch norms go on taking statistics of what they are given."""
    made = copy.deepcopy(module).double().eval()
    for name, inner in module.named_modules():
        if isinstance(inner, BatchNormBase) and inner.training:
            made.get_submodule(name).train()
    seeds(made)
    show(made)
    return made


def show(module: nn.Module) -> None:
    """Let torch's own attention module call `scaled_dot_product_attention` where it can be seen."""
    for inner in module.modules():
        if isinstance(inner, nn.MultiheadAttention) and type(inner).forward is nn.MultiheadAttention.forward:
            inner.forward = partial(multihead.forward, inner)  # pyrefly: ignore


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """What is put in the place of modules' forwards inside is taken back."""
    before = [(module, module.__dict__.get("forward")) for module in model.modules()]
    try:
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _tried(
    module: nn.Module, made: Call, given: Any, layout: tuple[Layout, int], heads: bool
) -> tuple[Call | None, str]:
    """The call, perhaps with some arguments left whole, or why it cannot run on a stretch."""
    unit, (args, kwargs) = widened(module), tree_map_only(Tensor, _wide, given)
    whole, running = Whole([]), Running(unit)
    with torch.no_grad():
        lengths = _lengths(made, (args, kwargs))
        if min(lengths.values()) < 2 * layout[1]:
            raise too_short(min(lengths.values()), layout[1])
        cuts = {n: layout[0](t, layout[1]) for n, t in lengths.items()}
        ranks: list[Mapping[int, Held]] = [{n: Lone(c, None, r) for n, c in cuts.items()} for r in range(layout[1])]

        def plain(asked: Asked, *_: Held) -> Tensor:
            if heads:
                check_heads(asked.q.shape[1], layout[1])
            running.attends()
            whole.note(asked)
            grouped = asked.k.shape[1] != asked.q.shape[1]
            return F.scaled_dot_product_attention(
                asked.q, asked.k, asked.v, asked.mask, 0.0, asked.causal, scale=asked.scale, enable_gqa=grouped
            )

        sequences = {n: Held(Rows.of([t]), None, 0) for n, t in lengths.items()}
        with running, Attending(sequences, made.attends, plain):
            expected = named_leaves(unit(*_copied(args), **_copied(kwargs)))[0]
        reasons = []
        for left, poses in _choices(made, given):
            call = replace(made, left=left, poses=poses)
            while True:
                with running:
                    reason = _differs(unit, (args, kwargs), call, (expected, whole), ranks)
                if not reason:
                    return call, ""
                reasons.append(reason)
                if not poses or len(call.alone) == TRIED or not (name := running.stopped()):
                    break
                call = replace(call, alone=(*call.alone, name))
                leave_out(unit.get_submodule(name))
    return None, reasons[0]


def _choices(made: Call, given: Any) -> list[tuple[frozenset[str], bool]]:
    """(arguments to leave whole, whether the others pose as whole), the likeliest first: none, then masks. Posing comes last.

    What poses has features in its last dim; where the sequence is in the last one, it is a mask.
    """
    paths = [path for path, _ in named_leaves(given)[0] if path in made.given]
    found = [frozenset(some) for n in range(min(len(paths), TRIED + 1)) for some in combinations(paths, n)]
    found = found if len(paths) <= 2 * TRIED else found[: 1 + len(paths)]
    leaves = dict(named_leaves(given)[0])
    masks = frozenset(path for path in paths if made.given[path][0] == leaves[path].dim() - 1 > 0)
    return [*((left, False) for left in found), (masks, True)]


@dataclass(frozen=True)
class Lone(Held):
    """Rows of a rank that has no others to ask."""

    def gather(self, local: Tensor, dim: int) -> Tensor:
        raise RuntimeError("its code needs all rows of the sequence")

    fetch = gather


def posed(forward: Callable[..., Any], args: Any, kwargs: Any, call: Call, held: Mapping[int, Held]) -> Any:
    """What a unit returns, run on this rank's rows: as they are, or under the shape of the whole."""
    if not call.poses:
        return forward(*args, **kwargs)

    def whole(path: str, leaf: Any) -> Any:
        dim, number = (0, None) if path in call.left else call.given.get(path, (0, None))
        mine = None if number is None or not isinstance(leaf, Tensor) else held.get(number)
        return Stretch.of(leaf, dim, mine, True) if mine is not None and leaf.shape[dim] == mine.size else leaf

    def rows(path: str, leaf: Any) -> Any:
        at = call.returned.get(path)
        if isinstance(leaf, Stretch):
            return leaf.local if at is not None and at[0] == leaf.cut else leaf.whole()
        return _rows(leaf, at, held) if isinstance(leaf, Tensor) else leaf

    args, kwargs = _each(whole, (args, kwargs))
    return _each(rows, forward(*args, **kwargs))


def _each(make: Callable[[str, Any], Any], tree: Any) -> Any:
    flat, spec = named_leaves(tree)
    return tree_unflatten([make(path, leaf) for path, leaf in flat], spec)


def _differs(
    unit: nn.Module, given: Any, call: Call, known: tuple[list[tuple[str, Any]], Whole], ranks: list[Mapping[int, Held]]
) -> str:
    """How the unit's outputs on stretches are not the stretches of its output, or nothing."""
    expected, whole = known
    for held in ranks:
        whole.number, whole.worst = 0, 0.0
        args, kwargs = cut_arguments(_copied(given), call, held)
        try:
            with Attending(held, call.attends, whole.answer):
                found = named_leaves(posed(unit, args, kwargs, call, held))[0]
        except PlaitError:
            raise
        except Exception as error:
            sizes = " and ".join(f"{mine.size} of {mine.cut.length}" for mine in held.values())
            told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return f"on {sizes} positions: {told}"
        if whole.worst > NEAR:
            return (
                f"its queries, keys or values on a stretch are not those of the whole: they differ by {whole.worst:.0e}"
            )
        if [path for path, _ in found] != [path for path, _ in expected]:
            return "it returns something else"
        for (path, a), (_, b) in zip(found, expected):
            if isinstance(b, Tensor):
                b = _rows(b, call.returned.get(path), held)
                off = apart(a, b) if isinstance(a, Tensor) else 1.0
                if off > NEAR:
                    used = (
                        "its attention is not torch's function" if not whole.calls else "it mixes positions otherwise"
                    )
                    return f"its output on a stretch differs from that of the whole by {off:.0e}: {used}"
    return ""


def _rows(whole: Tensor, at: At | None, held: Mapping[int, Held]) -> Tensor:
    return whole if at is None or at[1] not in held else held[at[1]].take(whole, at[0])


def cut_arguments(given: Any, call: Call, held: Mapping[int, Held]) -> Any:
    """(args, kwargs) with this rank's rows of what is cut."""

    def one(path: str, leaf: Any) -> Any:
        at = None if path in call.left else call.given.get(path)
        return _rows(leaf, at, held) if isinstance(leaf, Tensor) else leaf

    return _each(one, given)


def _lengths(made: Call, given: Any) -> dict[int, int]:
    """Sequence -> its length, of all that a unit is given something of."""
    named = dict(named_leaves(given)[0])
    return {number: named[path].shape[dim] for path, (dim, number) in made.given.items() if path in named}


def _copied(tree: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, tree)


def _wide(t: Tensor) -> Tensor:
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t
