"""Every private or unstable torch name plait rests on, in one place; each has a contract test.

When a torch release moves one of these, one test fails here and one file changes.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import register_dataclass, tree_leaves

__all__ = ["SEEDED", "FakeTensorMode", "checkpoint_frame", "fake_failures", "leaves", "mask_op"]


class _Seeded:
    """Membership test: does this operator draw from a generator?"""

    def __contains__(self, op: Any) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


SEEDED = _Seeded()


def fake_failures() -> tuple[type[BaseException], ...]:
    """What a model raises on fake tensors when it looks at values (``.item()``, ``if x.sum() > 0``)."""
    return (UnsupportedFakeTensorException, GuardOnDataDependentSymNode, RuntimeError, NotImplementedError, TypeError)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a model's output, also inside dataclasses, which torch's trees learn here when first met."""
    found = []
    for leaf in tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            return leaves(tree)
        found.append(leaf)
    return found


def checkpoint_frame() -> Any:
    """The innermost activation checkpoint (non-reentrant) whose function is running now, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook") else None


@torch.library.custom_op("plait::mask", mutates_args=())
def _mask(x: Tensor, where: Tensor, place: str, dim: int, p: float) -> Tensor:
    from plait.draws import draw_mask

    return draw_mask(x, where, place, None if dim == -2 else dim, p)


@_mask.register_fake
def _(x: Tensor, where: Tensor, place: str, dim: int, p: float) -> Tensor:
    return torch.empty_like(x)


def mask_op(x: Tensor, where: Tensor, place: str, dim: int | None, p: float) -> Tensor:
    """A dropout mask as one opaque operator, so that torch.compile keeps it whole. dim: -1 unknown, None no batch dim."""
    if not torch.compiler.is_compiling():
        from plait.draws import draw_mask

        return draw_mask(x, where, place, dim, p)
    return _mask(x, where, place, -2 if dim is None else dim, p)
