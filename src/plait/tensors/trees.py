"""Tensors inside lists, dicts and objects, and the form of a unit's output: what it returns, by the number of samples.

torch's pytrees see into tuples, lists, dicts and dataclasses. Other classes are registered here when a unit first
returns an object of one that is no more than its attributes and items: a state, a subclass of dict or list.
And autograd's graph behind tensors (`nodes_behind`).
"""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from plait.config.errors import PlaitError, Problem
from plait.tensors.rows import memory_order
from plait.tensors.torch_private import (
    TreeSpec,
    leaves,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

DEPTH = 4
"""How deep to look for tensors in objects that are neither lists nor dicts, such as a state a block returns."""


def learn(tree: object) -> None:
    """Register the class of every simple object in a tree with torch's pytrees."""
    kind = next((type(leaf) for leaf in leaves(tree) if _simple(leaf)), None)
    if kind is not None:
        register_pytree_node(kind, _flatten, partial(_made, kind))
        learn(tree)


def carried(tree: object) -> bool:
    """Whether there is a simple object in a tree, whether or not its class is registered."""
    if isinstance(tree, (Tensor, str, int, float)) or tree is None:
        return False
    if dataclasses.is_dataclass(tree):
        return any(carried(getattr(tree, field.name, None)) for field in dataclasses.fields(tree))
    if type(tree) is dict or isinstance(tree, tuple) or type(tree) is list:
        return any(carried(value) for value in (tree.values() if isinstance(tree, dict) else tree))
    return _simple(tree)


def _simple(leaf: object) -> bool:
    """Whether an object holds tensors in its attributes or items, and can be made anew from them."""
    kind = type(leaf)
    if isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf) or kind.__module__ == "builtins":
        return False
    if kind.__new__ not in (object.__new__, dict.__new__, list.__new__):
        return False
    if any(vars(c).get("__slots__") for c in kind.__mro__):
        return False
    inside = _tensors(leaf, set())
    return bool(inside) and not any(isinstance(t, nn.Parameter) for t in inside)


def _tensors(value: object, met: set[int]) -> list[Tensor]:
    tensors = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and id(leaf) not in met and not isinstance(leaf, (nn.Module, type)):
            met.add(id(leaf))
            tensors += [t for inner in _flatten(leaf)[0] for t in _tensors(inner, met)]
    return tensors


def _flatten(thing: object) -> tuple[list[Any], tuple[Any, ...]]:
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    items = list(dict.values(thing)) if isinstance(thing, dict) else list(thing) if isinstance(thing, list) else []
    keys = tuple(dict.keys(thing)) if isinstance(thing, dict) else len(items)
    return [*own.values(), *items], (tuple(own), keys)


def _made(kind: type[object], values: Iterable[Any], context: tuple[Any, ...]) -> object:
    made, (names, keys), values = kind.__new__(kind), context, list(values)
    if names:
        vars(made).update(zip(names, values))
    items = values[len(names) :]
    if isinstance(made, dict):
        dict.update(made, zip(keys, items))
    elif isinstance(made, list):
        list.extend(made, items)
    return made


def refill(old: object, new: object) -> None:
    """Give an object the attributes and items of another of its class."""
    if isinstance(old, dict) and isinstance(new, dict):
        dict.clear(old)
        dict.update(old, new)
    elif isinstance(old, list) and isinstance(new, list):
        old[:] = new
    if hasattr(old, "__dict__"):
        vars(old).clear()
        vars(old).update(vars(new))


def flat(tree: object) -> list[Tensor]:
    """The tensors among the arguments or results of a torch function or operator: in lists, tuples and dicts only."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple, dict)):
                found += flat(item)
    return found


def tensors_in(tree: object) -> Iterator[Tensor]:
    """The tensors in what a module is given or returns, also inside objects; the same tensor comes once."""
    found: dict[int, Tensor] = {}
    _walk(tree, DEPTH, found, set())
    return iter(found.values())


def nodes_behind(starts: Iterable[Node | None], without: Container[Node] = ()) -> Iterator[Node]:
    """Nodes of autograd's graph that a backward pass from `starts` goes through: each once, in the same order in every run. It goes
    through none of `without`."""
    met, ahead = set[Node](), [*starts]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in met and node not in without:
            met.add(node)
            yield node
            ahead += [behind for behind, _ in node.next_functions]


def _walk(item: object, depth: int, found: dict[int, Tensor], met: set[int]) -> None:
    """Not a function inside the other: that would hold itself, and the tensors, until the next garbage collection."""
    if isinstance(item, Tensor):
        found[id(item)] = item
    elif id(item) in met or isinstance(item, (nn.Module, type, str, bytes, int, float)):
        return
    elif isinstance(item, (list, tuple, set, frozenset)):
        for inner in item:
            _walk(inner, depth, found, met)
    elif isinstance(item, Mapping):
        for inner in item.values():
            _walk(inner, depth, found, met)
        if type(item) is not dict and hasattr(item, "__dict__"):  # a subclass may have attributes too
            _walk(vars(item), depth, found, met | {id(item)})
    elif depth and (dataclasses.is_dataclass(item) or hasattr(item, "__dict__")) and not callable(item):
        met.add(id(item))
        for inner in vars(item).values():
            _walk(inner, depth - 1, found, met)


@dataclass(frozen=True)
class Slot:
    """A tensor of a call's output: its shape with no sample and what each sample adds, its format, whether gradients flow."""

    base: tuple[float, ...]
    each: tuple[float, ...]
    dtype: torch.dtype
    grad: bool
    order: tuple[int, ...] = ()
    """Its dims from the outermost in memory to the innermost (`memory_order`): code that calls `view` depends on it."""

    def shape(self, samples: int) -> tuple[int, ...]:
        """The shape in a batch of so many samples."""
        return tuple(round(b + e * samples) for b, e in zip(self.base, self.each))

    def empty(self, samples: int, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        shape, order = self.shape(samples), self.order
        made = torch.empty([shape[d] for d in order] or shape, dtype=self.dtype, device=device)
        return made.permute([order.index(d) for d in range(len(order))]) if order else made

    def as_sent(self, t: Tensor) -> Tensor:
        """A tensor of this shape with its dims in their order in memory."""
        return t.permute(self.order) if self.order else t


@dataclass(frozen=True)
class Template:
    """A call's output: its tree, and a `Slot` or the constant itself for every leaf."""

    spec: object
    """A `TreeSpec`; None if it is not known."""
    leaves: tuple[Any, ...]
    varies: bool = False
    """Something in it that is no tensor depends on the number of samples."""

    def fill(self, tensors: Iterator[Tensor]) -> Any:
        """The tree with these tensors in its slots."""
        if not isinstance(self.spec, TreeSpec):
            raise ValueError("what this call returns is not known")
        return tree_unflatten([next(tensors) if isinstance(leaf, Slot) else leaf for leaf in self.leaves], self.spec)

    @property
    def slots(self) -> list[Slot]:
        """The slots among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Slot)]


PLAIN = (int, float, str)
"""What stages compare of outputs besides tensors."""
NOTHING = Template(None, ())
"""Of a call whose output is not known."""


class TensorForm(NamedTuple):
    """What is noted of a tensor in an output: its shape, its number format, whether gradients flow, and `memory_order`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    order: tuple[int, ...] = ()


Form = tuple[TreeSpec | None, tuple[Any, ...]]
"""The tree of an output, and its leaves: of tensors their `TensorForm`."""


def taken(output: object) -> Form:
    leaves(output)  # makes trees of dataclasses
    flat_output, spec = tree_flatten(output)
    if any(isinstance(t, Tensor) and t.is_nested for t in flat_output):
        raise TypeError("a module returns a nested tensor, whose size in a batch is not known beforehand")
    form = lambda t: TensorForm(tuple(t.shape), t.dtype, t.requires_grad, memory_order(t))  # noqa: E731
    return spec, tuple(form(t) if isinstance(t, Tensor) else t for t in flat_output)


class ProbeSizes(NamedTuple):
    """Samples of two batches, from which what every other batch needs is read off."""

    small: int
    large: int


def template(small: Form, large: Form | None, sizes: ProbeSizes) -> Template:
    """The template of a call's output, from its forms in batches of two sizes."""
    rows = []
    varies = large is not None and len(large[1]) != len(small[1])
    others = large[1] if large is not None and not varies else small[1]
    for one, other in zip(small[1], others):
        if not isinstance(one, TensorForm):
            rows.append(one)
            varies |= isinstance(one, (int, float)) and one != other
            continue
        each = tuple((b - a) / (sizes.large - sizes.small) for a, b in zip(one.shape, other.shape))
        base = tuple(a - e * sizes.small for a, e in zip(one.shape, each))
        rows.append(Slot(base, each, one.dtype, one.grad, one.order))
    return Template(small[0], tuple(rows), varies)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The leaves of a call's arguments; without a walk through trees where they are tensors alone, as they mostly are."""
    return args if not kwargs and all(isinstance(a, Tensor) for a in args) else tree_leaves((args, kwargs))


def tensors(output: object) -> list[Tensor]:
    """The tensors of an output, in the order of its template's slots."""
    return [t for t in leaves(output) if isinstance(t, Tensor)]


def known(output: object, expected: Template, samples: int, unit: str) -> None:
    """P025 when an output that other stages wait for has another form than the sketch says."""
    actual = [(tuple(t.shape), t.dtype) for t in tensors(output)]
    wanted = [(slot.shape(samples), slot.dtype) for slot in expected.slots]
    constants = [(a, b) for a, b in zip(leaves(output), expected.leaves) if isinstance(a, PLAIN)]
    changed = next((f"{a}, in the sketch {b}" for a, b in constants if a != b), None)
    if actual == wanted and changed is not None:
        what = f"unit {unit} returns a number or a word that changes: {changed}"
        why = "only tensors travel between stages"
        raise PlaitError(Problem("P025", what, why=why, fix=("return a tensor", "pp=1")))
    if actual != wanted:
        what = f"unit {unit} returns {_told(actual)}, the other stages wait for {_told(wanted)}"
        why = "shapes and formats are those of the first sample, shapes linear in the number of samples"
        raise PlaitError(Problem("P025", what, why=why, fix=("pad samples to one length",)))


def _told(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors) or "no tensor"


def first_words(example: object, length: int) -> Any:
    """The first `length` words of each row, where the inputs are rows of words: what holds for them holds for more. They lie in memory
    as those of a batch do, for code that takes a view of them."""
    first = lambda t: t[:, :length].contiguous() if t.dim() == 2 and not t.is_floating_point() else t  # noqa: E731
    return tree_map_only(Tensor, first, example)
