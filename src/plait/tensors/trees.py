"""Tensors inside lists, dicts and objects, and the form of a unit's output as a function of the number of samples.

torch's pytrees traverse tuples, lists, dicts and dataclasses. Other classes are registered here when a unit first returns an object that
consists of its attributes and items only: a state, a subclass of dict or list. `iter_backward_nodes` traverses autograd's graph.
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
    dataclass_leaves,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

MAX_DEPTH = 4
"""Maximum depth of the search for tensors in objects that are neither lists nor dicts, such as a state that a block returns."""


def register_classes(tree: object) -> None:
    """Register the class of every simple object in a tree with torch's pytrees."""
    kind = next((type(leaf) for leaf in dataclass_leaves(tree) if _is_simple(leaf)), None)
    if kind is not None:
        register_pytree_node(kind, _flatten, partial(_unflatten, kind))
        register_classes(tree)


def has_simple_object(tree: object) -> bool:
    """Return whether a tree contains a simple object, registered or not."""
    if isinstance(tree, (Tensor, str, int, float)) or tree is None:
        return False
    if dataclasses.is_dataclass(tree):
        return any(has_simple_object(getattr(tree, field.name, None)) for field in dataclasses.fields(tree))
    if type(tree) is dict or isinstance(tree, tuple) or type(tree) is list:
        return any(has_simple_object(value) for value in (tree.values() if isinstance(tree, dict) else tree))
    return _is_simple(tree)


def _is_simple(leaf: object) -> bool:
    """Return whether an object holds tensors in its attributes or items and can be reconstructed from them."""
    kind = type(leaf)
    if isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf) or kind.__module__ == "builtins":
        return False
    if kind.__new__ not in (object.__new__, dict.__new__, list.__new__):
        return False
    if any(vars(c).get("__slots__") for c in kind.__mro__):
        return False
    inside = _find_tensors(leaf, set())
    return bool(inside) and not any(isinstance(t, nn.Parameter) for t in inside)


def _find_tensors(value: object, met: set[int]) -> list[Tensor]:
    tensors = []
    for leaf in dataclass_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and id(leaf) not in met and not isinstance(leaf, (nn.Module, type)):
            met.add(id(leaf))
            tensors += [t for inner in _flatten(leaf)[0] for t in _find_tensors(inner, met)]
    return tensors


def _flatten(thing: object) -> tuple[list[Any], tuple[Any, ...]]:
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    items = list(dict.values(thing)) if isinstance(thing, dict) else list(thing) if isinstance(thing, list) else []
    keys = tuple(dict.keys(thing)) if isinstance(thing, dict) else len(items)
    return [*own.values(), *items], (tuple(own), keys)


def _unflatten(kind: type[object], values: Iterable[Any], context: tuple[Any, ...]) -> object:
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
    """Replace the attributes and items of an object by those of another of its class."""
    if isinstance(old, dict) and isinstance(new, dict):
        dict.clear(old)
        dict.update(old, new)
    elif isinstance(old, list) and isinstance(new, list):
        old[:] = new
    if hasattr(old, "__dict__"):
        vars(old).clear()
        vars(old).update(vars(new))


def flatten_tensors(tree: object) -> list[Tensor]:
    """Return the tensors among the arguments or results of a torch function or operator, in lists, tuples and dicts only."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple, dict)):
                found += flatten_tensors(item)
    return found


def iter_tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors in a module's arguments or results, also inside objects, each once."""
    found: dict[int, Tensor] = {}
    _walk(tree, MAX_DEPTH, found, set())
    return iter(found.values())


def iter_backward_nodes(starts: Iterable[Node | None], without: Container[Node] = ()) -> Iterator[Node]:
    """Yield the autograd nodes that a backward pass from `starts` visits, except `without`: each once, in a reproducible order."""
    met, ahead = set[Node](), [*starts]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in met and node not in without:
            met.add(node)
            yield node
            ahead += [behind for behind, _ in node.next_functions]


def _walk(item: object, depth: int, found: dict[int, Tensor], met: set[int]) -> None:
    """Add the tensors of `item` to `found`. Not a nested function, which would keep itself and the tensors alive until garbage collection."""
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
class TensorSlot:
    """A tensor of a call's output: its shape without samples and its growth per sample, dtype, and whether gradients flow."""

    base: tuple[float, ...]
    per_sample: tuple[float, ...]
    dtype: torch.dtype
    grad: bool
    order: tuple[int, ...] = ()
    """Its dims from the outermost in memory to the innermost (`memory_order`): code that calls `view` depends on it."""

    def shape_for(self, samples: int) -> tuple[int, ...]:
        """Return the shape in a batch of `samples` samples."""
        return tuple(round(b + e * samples) for b, e in zip(self.base, self.per_sample))

    def allocate(self, samples: int, device: torch.device) -> Tensor:
        """Return a tensor to receive into."""
        shape, order = self.shape_for(samples), self.order
        made = torch.empty([shape[d] for d in order] or shape, dtype=self.dtype, device=device)
        return made.permute([order.index(d) for d in range(len(order))]) if order else made

    def to_memory_order(self, t: Tensor) -> Tensor:
        """Return the tensor with its dims in their order in memory."""
        return t.permute(self.order) if self.order else t


@dataclass(frozen=True)
class Template:
    """A call's output: its tree, and a `TensorSlot` or a constant for every leaf."""

    spec: object
    """A `TreeSpec`; None if it is unknown."""
    leaves: tuple[Any, ...]
    varies: bool = False
    """A leaf other than a tensor depends on the number of samples."""

    def fill(self, tensors: Iterator[Tensor]) -> Any:
        """Return the tree with these tensors in its slots."""
        if not isinstance(self.spec, TreeSpec):
            raise ValueError("the output of this call is unknown")
        return tree_unflatten([next(tensors) if isinstance(leaf, TensorSlot) else leaf for leaf in self.leaves], self.spec)

    @property
    def slots(self) -> list[TensorSlot]:
        """The slots among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSlot)]


PLAIN_TYPES = (int, float, str)
"""Types that stages compare in outputs, in addition to tensors."""
EMPTY_TEMPLATE = Template(None, ())
"""Template of a call with an unknown output."""


class TensorForm(NamedTuple):
    """Form of a tensor in an output: shape, dtype, whether gradients flow, and `memory_order`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    order: tuple[int, ...] = ()


Form = tuple[TreeSpec | None, tuple[Any, ...]]
"""The tree of an output, and its leaves, with a `TensorForm` for each tensor."""


def capture_form(output: object) -> Form:
    dataclass_leaves(output)  # registers dataclasses
    flat_output, spec = tree_flatten(output)
    if any(isinstance(t, Tensor) and t.is_nested for t in flat_output):
        raise TypeError("a module returns a nested tensor, whose size in a batch cannot be predicted")
    form = lambda t: TensorForm(tuple(t.shape), t.dtype, t.requires_grad, memory_order(t))  # noqa: E731
    return spec, tuple(form(t) if isinstance(t, Tensor) else t for t in flat_output)


class ProbeSizes(NamedTuple):
    """Numbers of samples in two batches, from which other batches are extrapolated."""

    small: int
    large: int


def make_template(small: Form, large: Form | None, sizes: ProbeSizes) -> Template:
    """Return the template of a call's output, from its forms in batches of two sizes."""
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
        rows.append(TensorSlot(base, each, one.dtype, one.grad, one.order))
    return Template(small[0], tuple(rows), varies)


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the leaves of a call's arguments, with a fast path for plain tensors, the common case."""
    return args if not kwargs and all(isinstance(a, Tensor) for a in args) else tree_leaves((args, kwargs))


def list_slot_tensors(output: object) -> list[Tensor]:
    """Return the tensors of an output, in the order of its template's slots."""
    return [t for t in dataclass_leaves(output) if isinstance(t, Tensor)]


def check_output(output: object, expected: Template, samples: int, unit: str) -> None:
    """P025 if an output that other stages receive has another form than in the sketch."""
    actual = [(tuple(t.shape), t.dtype) for t in list_slot_tensors(output)]
    wanted = [(slot.shape_for(samples), slot.dtype) for slot in expected.slots]
    constants = [(a, b) for a, b in zip(dataclass_leaves(output), expected.leaves) if isinstance(a, PLAIN_TYPES)]
    changed = next((f"{a}, in the sketch {b}" for a, b in constants if a != b), None)
    if actual == wanted and changed is not None:
        what = f"unit {unit} returns a number or string that changes: {changed}"
        why = "stages exchange tensors only"
        raise PlaitError(Problem("P025", what, why=why, fix=("return a tensor", "pp=1")))
    if actual != wanted:
        what = f"unit {unit} returns {_describe_tensors(actual)}, the other stages wait for {_describe_tensors(wanted)}"
        why = "expected shapes and dtypes come from the first sample, with shapes linear in the number of samples"
        raise PlaitError(Problem("P025", what, why=why, fix=("pad samples to one length",)))


def _describe_tensors(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors) or "no tensor"


def take_first_tokens(example: object, length: int) -> Any:
    """Return the first `length` tokens of each row, if the inputs are rows of tokens. Their memory layout is that of a batch, for code that
    calls `view`."""
    first = lambda t: t[:, :length].contiguous() if t.dim() == 2 and not t.is_floating_point() else t  # noqa: E731
    return tree_map_only(Tensor, first, example)
