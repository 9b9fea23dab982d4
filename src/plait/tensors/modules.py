"""A module's forward under another that stands in its place, and taken back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward as it is now, for another one that is put in its place.

    It is that of the class which the module has when it is called, since a strategy may change that; unless a forward
    was put on the module itself.
    """
    replaced = vars(module).get("forward")
    return partial(_of_its_class, module) if replaced is None else replaced


def _of_its_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


@contextmanager
def forwards_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What is put in the place of these modules' forwards inside is taken back."""
    before = [(vars(module), vars(module).get("forward")) for module in modules]
    try:
        yield
    finally:
        for attributes, forward in before:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward
