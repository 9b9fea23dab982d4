"""Modules inside a unit that look at no other position: they run on this rank's rows of the sequence as they are.

A unit whose code counts positions runs with its rows posing as the whole sequence (`SequenceShard`), and so does all that is in
it. A mixture of experts cannot: which rows go to an expert is a question of numbers. Where a module stops because it needs
all rows, and no attention is called in it, it is left out: it is given plain rows, and what it returns poses again.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from plait.parallel.context.sequence_shard import SequenceShard
from plait.tensors.modules import own_forward
from plait.tensors.torch_private import leaves, tree_map


def leave_out(module: nn.Module) -> None:
    """From now on this module runs on plain rows."""
    module.forward = partial(_plainly, own_forward(module))  # pyrefly: ignore[bad-assignment]


def _plainly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, SequenceShard)]
    if not known:
        return forward(*args, **kwargs)
    x = max(known, key=lambda t: t.local.dim())

    def whole(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceShard):
            return leaf
        return x.like(leaf) if leaf.shape[: x.cut + 1] == x.local.shape[: x.cut + 1] else leaf

    args, kwargs = tree_map(lambda leaf: leaf.local if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return tree_map(whole, forward(*args, **kwargs))


class Running(ExitStack):
    """Which modules of a unit run, while it is entered."""

    def __init__(self, unit: nn.Module):
        super().__init__()
        self.unit, self.now = unit, list[str]()
        self.attending: set[str] = set()
        """In which attention was called."""

    def __enter__(self) -> "Running":
        self.now.clear()
        for name, module in self.unit.named_modules():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.now.append(name))
            after = module.register_forward_hook(self._left)
            self.callback(before.remove)
            self.callback(after.remove)
        return self

    def _left(self, *_: Any) -> None:
        self.now.pop()

    def attends(self) -> None:
        """Attention is called now."""
        self.attending.update(self.now)

    def stopped(self) -> str:
        """After an exception: the outermost module it passed through in which no attention is called; or nothing."""
        return next((name for name in self.now if name and name not in self.attending), "")
