"""Where the sequence is in a model: found by running it on two lengths.

The model runs on fake tensors with a batch, and with the same batch one position shorter. Every dim of what a unit is
given or returns, and of every random tensor, that became one shorter is a dim of the sequence. The input itself is
shortened wherever it has the length; which length that is, nobody says: those that occur in the input are tried, and it
is the one with which attention becomes shorter.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.errors import FAILED, PlaitError, Problem
from plait.sketch import Sketch
from plait.templates import NOTHING, Slot
from plait.torchseam import leaves, named_leaves, tree_map_only, tree_unflatten
from plait.unitcalls import UnitCall
from plait.watching import Call as Run
from plait.watching import watch
from plait.windows import differing

SAMPLES = 3
"""Of the batch in the runs."""
Shapes = dict[str, tuple[int, ...]]
"""Of tensors, by their path in the arguments or in the output."""


@dataclass
class Seen:
    """A call of a unit in one run."""

    unit: str
    given: Shapes
    returned: Shapes = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    """Of the queries of each attention inside."""


@dataclass(frozen=True)
class Call:
    """How a call of a unit runs: on a rank's stretch, or on the whole sequence."""

    unit: str
    stretched: bool
    given: dict[str, int]
    """Arguments that are cut, and the dim: all that have one dim of the sequence, but for those in `left`."""
    returned: dict[str, int]
    attends: bool
    left: frozenset[str] = frozenset()
    """Arguments that stay whole though they have such a dim: a mask over keys."""


@dataclass(frozen=True)
class Talk:
    """Something that ranks tell each other in a forward pass: `kind` attention, gather, fetch (see `Held`) or rows."""

    kind: str
    unit: str
    """In which it is; empty for code between units."""
    each: tuple[int, ...]
    """Elements of a row of a sample. Of an attention: queries, keys, values, output."""
    heads: tuple[int, int]
    """Of queries, of keys."""
    dtype: torch.dtype
    grad: bool
    twice: bool
    """The model itself computes this again in backward."""


@dataclass(frozen=True)
class Course:
    """The calls of a forward pass, in order."""

    calls: tuple[Call, ...]
    draws: frozenset[tuple[str, int]]
    """(place, dim) of the sequence in random tensors that are drawn on stretches."""
    length: int
    """Of the sequence in the input that was tried."""
    talks: tuple[Talk, ...] = ()
    asked: tuple[tuple[str, int, int], ...] = ()
    """By the loss: an operator, and its bytes in batches of `SAMPLES` - 1 and of `SAMPLES`; of a short sequence."""

    def on(self, place: str) -> bool:
        """Whether a module, or a place where numbers are drawn, lies in a unit that runs on stretches."""
        module = place.split("#")[0] + "."
        return any(call.stretched and module.startswith(f"{call.unit}.") for call in self.calls)


def find(model: nn.Module, inputs: Any, call: Run, sketch: Sketch) -> Course:
    """The course of `model` on `inputs`, a batch of `SAMPLES`. P040 when there is none."""
    if sketch.unmeasured or not sketch.calls:
        raise refused("the model's units cannot be measured", sketch.unmeasured or "it has none")
    names = list(dict.fromkeys(c.unit for c in sketch.calls))
    failed, why = "", "no input has a dim of the length of the queries of scaled_dot_product_attention"
    for length in _lengths(inputs):
        try:
            whole, drawn = record(model, inputs, call, names, not sketch.by_values)
            less, fewer = record(model, shortened(inputs, length, length - 1), call, names, not sketch.by_values)
        except PlaitError:
            raise
        except Exception as error:  # it cannot be shortened there
            failed = failed or f"with {length - 1} instead of {length}: {type(error).__name__}: {str(error)[:200]}"
            continue
        pairs = list(zip(whole, less))
        if any(a - b == 1 for one, other in pairs for a, b in zip(one.lengths, other.lengths)):
            if [w.unit for w in whole] != [s.unit for s in less]:
                raise refused("the model calls other units for a shorter sequence", "its course depends on the length")
            return _course(pairs, differing(drawn, fewer), length, {c.unit for c in sketch.calls if c.leaks})
    if not any(seen.lengths for seen in record(model, inputs, call, names, not sketch.by_values)[0]):
        why = "it does not call torch.nn.functional.scaled_dot_product_attention (attention written out sees its rows only)"
    raise refused("where the model has its sequence is not found", failed or why)


def refused(what: str, why: str) -> PlaitError:
    """P040."""
    return PlaitError(Problem("P040", what, why=why, fix=("cp=1",)), FAILED)


def shortened(inputs: Any, length: int, to: int) -> Any:
    """The inputs with `to` positions instead of `length`."""

    def one(t: Tensor) -> Tensor:
        for dim, size in enumerate(t.shape):
            t = t.narrow(dim, 0, to) if size == length and (dim or size != SAMPLES) else t
        return t

    return tree_map_only(Tensor, one, inputs)


def short(course: Course, ranks: int) -> int:
    """A length that is as good as any for a look at the model: unlike stretches for all ranks."""
    return min(course.length, 4 * ranks + 1)


def as_held(sketch: Sketch, size: int) -> Sketch:
    """The sketch with what calls return as a rank has it: of units on stretches, `size` rows of the sequence."""
    return replace(sketch, calls=tuple(_held(c, made, size) for c, made in zip(sketch.calls, sketch.course.calls)))


def _held(call: UnitCall, made: Call, size: int) -> UnitCall:
    form = call.template
    if not made.stretched or form is NOTHING:
        return call
    paths = [path for path, _ in named_leaves(tree_unflatten([object() for _ in form.leaves], form.spec))[0]]
    slots = []
    for path, slot in zip(paths, form.leaves):
        dim = made.returned.get(path) if isinstance(slot, Slot) else None
        if dim is not None:
            slot = replace(slot, base=(*slot.base[:dim], size, *slot.base[dim + 1 :]))
        slots.append(slot)
    return replace(call, template=replace(form, leaves=tuple(slots)))


def _lengths(inputs: Any) -> list[int]:
    """Sizes in the inputs that may be the sequence's, the most frequent first, then the largest."""
    sizes = Counter(n for t in leaves(inputs) if isinstance(t, Tensor) for n in t.shape[1:] if n > 1)
    return sorted(sizes, key=lambda n: (-sizes[n], -n))


class _Attention(TorchFunctionMode):
    """Notes the number of queries of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Seen | None = None
        self.between = False
        """There was one in code between units."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.between |= self.running is None and func in (
            F.scaled_dot_product_attention,
            F.multi_head_attention_forward,
        )
        if self.running is not None and func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            self.running.lengths.append(query.shape[-2])
        elif self.running is not None and func is F.multi_head_attention_forward:  # of nn.MultiheadAttention
            self.running.lengths.append((args[0] if args else kwargs["query"]).shape[0])
        return func(*args, **kwargs)


def record(model: nn.Module, inputs: Any, call: Run, names: Iterable[str], fake: bool) -> tuple[list[Seen], Shapes]:
    """What the units were given and returned in one run, and what was drawn."""
    found: list[Seen] = []
    attention = _Attention()
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                attention.running = Seen(name, _shapes((args, kwargs)))
                found.append(attention.running)

            def leave(_: nn.Module, args: Any, output: Any) -> None:
                attention.running, found[-1].returned = None, _shapes(output)

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        with attention:
            watched = watch(model, inputs, call, fake)
    if attention.between:
        raise PlaitError(Problem("P040", "attention is in code between units, which sees whole sequences",
                                 why=f"units are {', '.join(dict.fromkeys(s.unit for s in found))}"[:200],
                                 fix=('Job(units=("blocks.*",)) names the blocks that hold it', "cp=1")))  # fmt: skip
    return found, {place: tuple(shape) for place, shape in watched.drawn.items()}


def _shapes(tree: Any) -> Shapes:
    return {path: tuple(t.shape) for path, t in named_leaves(tree)[0] if isinstance(t, Tensor)}


def _course(
    pairs: list[tuple[Seen, Seen]], drawn: frozenset[tuple[str, int]], length: int, leaking: set[str]
) -> Course:
    first = next(i for i, (a, b) in enumerate(pairs) if any(m - n == 1 for m, n in zip(a.lengths, b.lengths)))
    calls = []
    for i, (seen, less) in enumerate(pairs):
        given, returned = _dims(seen.given, less.given), _dims(seen.returned, less.returned)
        attends = any(m != n for m, n in zip(seen.lengths, less.lengths))
        clear = given is not None and returned is not None and bool(given) and i >= first and seen.unit not in leaking
        if attends and not clear:
            why = "other code gets what it computes by another way than through what it returns (hooks that collect it)"
            why = why if seen.unit in leaking else _unclear(seen, less)
            raise refused(f"unit {seen.unit} cannot run on a stretch of the sequence", why)
        calls.append(Call(seen.unit, clear, given or {}, returned or {}, attends))
    return Course(tuple(calls), drawn, length)


def _dims(whole: Shapes, less: Shapes) -> dict[str, int] | None:
    """The dims of the sequence of tensors that have exactly one; None when a tensor changed in another way."""
    found = {}
    for path, shape in whole.items():
        other = less.get(path, ())
        moved = [d for d, (m, n) in enumerate(zip(shape, other)) if m != n]
        if len(shape) != len(other) or any(shape[d] - other[d] != 1 for d in moved):
            return None
        if len(moved) == 1:
            found[path] = moved[0]
    return found


def _unclear(seen: Seen, less: Seen) -> str:
    for whole, other in ((seen.given, less.given), (seen.returned, less.returned)):
        for path, shape in whole.items():
            if _dims({path: shape}, {path: other.get(path, ())}) is None:
                return f"one position less changes {path} from {list(shape)} to {list(other.get(path, ()))}"
    return "nothing that it is given has a dim of the sequence"


def still(model: nn.Module) -> ExitStack:
    """The model in eval mode, until the stack is closed."""
    stack = ExitStack()
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
    model.eval()
    return stack


def seeds(model: nn.Module) -> None:
    """Give parameters that are constant some noise: what they multiply would not be seen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).mul_(0.1).to(p.device, p.dtype))
