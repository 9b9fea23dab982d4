"""What a job's code can reach: the objects that a function, or a data set, holds and names.

The search begins at one object and goes to the nearest first: closures, defaults, the globals and attributes that code names, the
attributes of instances and of the user's own classes, the variables of suspended generators, and what is in containers.
"""

import gc
import logging
import queue
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from plait.config.job import Job
from plait.config.library import is_library

LOOKED_AT = 20_000
"""Objects, at most."""
INSIDE = 256
"""Entries of a container that are followed."""
PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, types.ModuleType,
         logging.Logger, logging.Handler)  # fmt: skip
"""Objects that hold nothing to follow."""


@dataclass(frozen=True)
class Reached:
    """An object, and how the code comes to it, such as `dataset.reader.db`."""

    path: str
    value: object

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path.rpartition(".")[2]


def reachable(start: object) -> Iterator[Reached]:
    """All objects that `start` can reach, the nearest first, `start` itself included; plain values too."""
    ahead, met = deque([Reached("", start)]), dict[int, object]()  # kept alive: an id may be used again otherwise
    while ahead and len(met) < LOOKED_AT:
        here = ahead.popleft()
        plain = isinstance(here.value, PLAIN)
        if id(here.value) in met and not plain:
            continue
        yield here
        if not plain:
            met[id(here.value)] = here.value
            ours = _of_plait(here.value)
            inside = ((here.path if ours else here.path + name, inner) for name, inner in _inside(here.value))
            ahead.extend(Reached(path.lstrip("."), inner) for path, inner in inside)


def _of_plait(value: object) -> bool:
    """Whether a function, or an object's class, is plait's own: then its names are not the user's words, and no path has them."""
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return str(module).startswith("plait.")


def _inside(value: object) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with what is appended to its path."""
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from (("", inner) for inner in (value.func, *value.args))
        yield from ((f".{n}", inner) for n, inner in value.keywords.items())
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield f".{value.__name__}", value.gi_code
        yield from (() if frame is None else ((f".{n}", inner) for n, inner in frame.f_locals.items()))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in islice(list(value.items()), INSIDE))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(islice(list(value), INSIDE)))
    elif isinstance(value, queue.Queue):
        yield "", list(value.queue)
    elif isinstance(value, Job):
        yield from (("", value.data), ("", value.evaluate))
    elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        yield from (("", inner) for inner in gc.get_referents(value))
    elif isinstance(value, type):
        if not of_library(value.__module__):
            yield from ((f".{n}", inner) for n, inner in list(vars(value).items()))
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield "", value.fget if isinstance(value, property) else value.__func__
    else:
        yield from _of_instance(value)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    defaults, code = function.__defaults__ or (), function.__code__
    first = code.co_argcount - len(defaults)
    yield from ((f".{n}", inner) for n, inner in zip(code.co_varnames[first:], defaults))
    yield from ((f".{n}", inner) for n, inner in (function.__kwdefaults__ or {}).items())
    names = set() if of_library(function.__module__) else set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if not of_library(value.__name__):
                yield from ((f".{name}.{n}", vars(value)[n]) for n in names & vars(value).keys())
        else:
            yield f".{name}", value


def _names(code: types.CodeType) -> Iterable[str]:
    """Names that a function's code, and that of functions inside it, looks up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _of_instance(value: object) -> Iterator[tuple[str, Any]]:
    yield "", type(value)
    yield from ((f".{n}", inner) for n, inner in list(getattr(value, "__dict__", {}).items()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and isinstance(vars(kind).get(name), types.MemberDescriptorType):
                try:
                    yield f".{name}", getattr(value, name)
                except AttributeError:  # not set
                    continue


def of_library(module: str | None) -> bool:
    """Whether a module is not the user's own."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return (file is None and module != "__main__") or is_library(str(file or ""))
