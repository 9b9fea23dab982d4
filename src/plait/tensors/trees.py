"""Objects that carry tensors between units: a state with attributes, a subclass of dict or list.

torch's trees see into tuples, lists, dicts and dataclasses. They learn a class here when a unit first returns one of its
objects that is no more than its attributes and items: made anew with them, it is the same.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from plait.tensors.torch_private import leaves, register_pytree_node

DEPTH = 4
"""How deep to look for tensors in objects that are neither lists nor dicts, such as a state a block returns."""


def learn(tree: Any) -> None:
    """Let torch's trees see into every simple object in a tree."""
    kind = next((type(leaf) for leaf in leaves(tree) if _simple(leaf)), None)
    if kind is not None:
        register_pytree_node(kind, _flatten, partial(_made, kind))
        learn(tree)


def carried(tree: Any) -> bool:
    """Whether there is a simple object in a tree, whether or not torch's trees know its class."""
    if isinstance(tree, (Tensor, str, int, float)) or tree is None:
        return False
    if dataclasses.is_dataclass(tree):
        return any(carried(getattr(tree, field.name, None)) for field in dataclasses.fields(tree))
    if type(tree) is dict or isinstance(tree, tuple) or type(tree) is list:
        return any(carried(value) for value in (tree.values() if isinstance(tree, dict) else tree))
    return _simple(tree)


def _simple(leaf: Any) -> bool:
    """Whether an object holds tensors in its attributes or items, and can be made anew from them."""
    kind = type(leaf)
    if isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf) or kind.__module__ == "builtins":
        return False
    if kind.__new__ not in (object.__new__, dict.__new__, list.__new__) or any(
        vars(c).get("__slots__") for c in kind.__mro__
    ):
        return False
    inside = [t for value in _flatten(leaf)[0] for t in _tensors(value, {id(leaf)})]
    return bool(inside) and not any(isinstance(t, nn.Parameter) for t in inside)


def _tensors(value: Any, met: set[int]) -> list[Tensor]:
    found = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and id(leaf) not in met and not isinstance(leaf, (nn.Module, type)):
            met.add(id(leaf))
            found += [t for inner in _flatten(leaf)[0] for t in _tensors(inner, met)]
    return found


def _flatten(thing: Any) -> tuple[list[Any], tuple[Any, ...]]:
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    items = list(dict.values(thing)) if isinstance(thing, dict) else list(thing) if isinstance(thing, list) else []
    keys = tuple(dict.keys(thing)) if isinstance(thing, dict) else len(items)
    return [*own.values(), *items], (tuple(own), keys)


def _made(kind: Any, values: Any, context: tuple[Any, ...]) -> Any:
    made, (names, keys), found = kind.__new__(kind), context, list(values)
    vars(made).update(zip(names, found)) if names else None
    items = found[len(names) :]
    if isinstance(made, dict):
        dict.update(made, zip(keys, items))
    elif isinstance(made, list):
        list.extend(made, items)
    return made


def refill(given: Any, new: Any) -> None:
    """Give an object the attributes and items of another of its class."""
    if isinstance(given, dict):
        dict.clear(given)
        dict.update(given, new)
    elif isinstance(given, list):
        given[:] = new
    if hasattr(given, "__dict__"):
        vars(given).clear()
        vars(given).update(vars(new))


def flat(tree: Any) -> Iterator[Tensor]:
    """The tensors among arguments of a torch function: lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from flat(item)
    elif isinstance(tree, dict):
        yield from flat(list(tree.values()))


def tensors_in(tree: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in what a module is given or returns, also inside objects; the same tensor comes once."""
    found: dict[int, Tensor] = {}
    _walk(tree, depth, found, set())
    return iter(found.values())


def _walk(item: Any, depth: int, found: dict[int, Tensor], met: set[int]) -> None:
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
