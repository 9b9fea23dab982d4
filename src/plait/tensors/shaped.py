"""A tensor with the shape of a whole of which this rank holds a part: what asks for shape and format alone is answered by it."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from plait.tensors.torch_private import WrapperTensor, plainly

FORMAT = frozenset(("dtype", "device", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu"))
"""Attributes that the part answers for the whole."""
SHAPE = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "get_device",
    "element_size", "__hash__",
))  # fmt: skip
"""Attributes and methods that need no numbers."""


class Shaped(WrapperTensor):
    """Something with the shape of the whole."""

    described = ""
    """What an error calls it."""
    _part: Tensor

    @classmethod
    def around(cls, local: Tensor, shape: list[int], **attributes: object) -> Self:
        """What has that shape, of which this rank has `local`."""
        made = WrapperTensor.made(cls, local, shape)
        if local.requires_grad:
            with plainly():
                made.register_hook(cls.lost)
        vars(made).update(attributes, _part=local)
        return made

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's part. TypeError where autograd follows this tensor and not the part, as what a Function of the user's own returned."""
        if torch.is_grad_enabled() and not self._part.requires_grad:
            with plainly():
                made_by = self.grad_fn
            if made_by is not None:
                self.lost(self)
        return self._part

    @local.setter
    def local(self, part: Tensor) -> None:
        self._part = part

    @classmethod
    def lost(cls, gradient: Tensor) -> None:
        """A gradient came by a way that no function of torch's saw: through a torch.autograd.Function of the user's own."""
        raise TypeError(f"a torch.autograd.Function was given {cls.described}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if name in FORMAT:
            return func(args[0].local)
        if name in SHAPE:
            with plainly():
                return func(*args, **(kwargs or {}))
        return cls.computed(func, args, kwargs or {})

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def lengthened(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of `x` with a dim of that length."""
    return [length if d == dim else n for d, n in enumerate(x.shape)]
