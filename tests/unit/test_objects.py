"""Which objects torch's trees learn to traverse, and that their round trip is lossless."""

from typing import Any

import torch
from torch import nn

from plait.tensors.torch_private import tree_flatten, tree_map_only, tree_unflatten
from plait.tensors.trees import refill, register_classes


class Plain:
    def __init__(self, h: Any, note: Any = None):
        self.h, self.note = h, note


class Named(dict):
    """Has attributes in addition to its items."""


class Listed(list):
    """A list of another class."""


class Slotted:
    __slots__ = ("h",)


class Made:
    def __new__(cls, h: Any) -> "Made":
        return super().__new__(cls)

    def __init__(self, h: Any):
        self.h = h


class Weighted(Plain):
    """Contains a parameter, which is not exchanged."""


def test_an_object_in_an_object_comes_back_as_it_was() -> None:
    inner = Named(a=torch.ones(2), b=3)
    inner.depth, inner.more = 4, Listed([torch.zeros(1), "x"])
    tree = (Plain(inner, None), 5)
    register_classes(tree)
    found, spec = tree_flatten(tree)
    assert sum(isinstance(t, torch.Tensor) for t in found) == 2
    back, five = tree_unflatten(found, spec)
    assert type(back) is Plain and type(back.h) is Named and type(back.h.more) is Listed and five == 5
    assert back is not tree[0] and back.h["a"] is inner["a"] and back.h["b"] == 3 and back.h.depth == 4
    assert back.h.more[0] is inner.more[0] and back.h.more[1] == "x" and back.note is None


def test_other_objects_stay_leaves() -> None:
    slotted = Slotted()
    slotted.h = torch.ones(1)
    others = [slotted, Made(torch.ones(1)), Weighted(nn.Parameter(torch.ones(1))), nn.Linear(1, 1), object()]
    register_classes(others)
    assert [a is b for a, b in zip(tree_flatten(others)[0], others)] == [True] * len(others)


def test_an_object_is_changed_into_another() -> None:
    old, new = Named(a=1, b=2), Named(a=3)
    old.x, new.y = 1, 2
    refill(old, new)
    assert old == {"a": 3} and vars(old) == {"y": 2}
    rows = Listed([1])
    refill(rows, Listed([2, 3]))
    assert rows == [2, 3]
    tree = {"a": 1}
    refill(tree, tree_map_only(int, lambda n: n + 1, tree))
    assert tree == {"a": 2}
