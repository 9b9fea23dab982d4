"""Values that a module's attributes hold and a call may change in place, as they are at one moment, and put back.

Lists, dicts, sets and deques, random generators, and objects of the user's own classes, also inside of each other.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from plait.config.job import is_user_class

Value = Any
"""Of any type: what it is decides how it is kept."""
LISTS, TABLES = (list, deque), (dict, OrderedDict, Counter, defaultdict)
LEVELS = 10
"""How deep values are followed into each other."""
SMALL = 1 << 20
"""Bytes of the largest array that is kept: larger ones are data."""
STRUCTURE = frozenset(vars(nn.Module()))
"""Attributes of every module that are not its own values."""


class HeldValues:
    """What is inside of the containers, generators and objects among some modules' attributes. `libraries`: of objects of other libraries
    than torch too, such as a cache of keys and values; else of the user's classes only."""

    def __init__(self, modules: Iterable[object], libraries: bool = False):
        self._libraries = libraries
        self._content: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for module in modules:
            for name, value in vars(module).items():
                if name not in STRUCTURE:
                    self._add(value, 0)

    def _add(self, value: Value, level: int) -> None:
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen or level > LEVELS:
            return
        if kind in LISTS:
            content = list(value)
        elif kind in TABLES:
            content = dict(value)
        elif kind is set:
            content = set(value)
        elif kind is tuple:
            content = None
        else:
            content = _state(value, self._libraries)
            if content is None:
                return
        self._seen.add(id(value))
        self._content.append((value, content))
        inner = value if kind is tuple else content if kind in LISTS or kind is set else None
        if inner is None and type(content) is dict:
            inner = content.values()
        for each in inner or ():
            self._add(each, level + 1)

    def put_back(self) -> None:
        """Have them hold what they held."""
        for value, content in self._content:
            if content is None:
                continue
            if isinstance(value, (list, deque)):
                value.clear()
                value.extend(content)
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)
            elif isinstance(value, np.ndarray):
                np.copyto(value, content)
            elif isinstance(value, torch.Generator):
                value.set_state(content)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = content
            elif isinstance(value, np.random.RandomState):
                value.set_state(content)
            elif isinstance(value, random.Random):
                value.setstate(content)
            else:
                vars(value).clear()
                vars(value).update(content)


PLAIN = frozenset((int, float, bool, str, type(None), torch.Tensor, nn.Parameter))
"""Types of values that hold no others."""


def _state(value: Value, libraries: bool) -> Any:
    """What is inside of a generator or of an object of the user's class; None for what is followed no further."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable and value.nbytes <= SMALL else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if type(value) is random.Random:
        return value.getstate()
    followed = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)
    known = is_user_class(type(value)) or (libraries and type(value).__module__.partition(".")[0] not in ("torch", "plait"))
    return dict(vars(value)) if followed and known else None
