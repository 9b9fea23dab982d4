"""What crosses the boundary between two stages: the messages of one micro-batch."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from plait.tensors.output_form import Slot

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and number format of a message."""


def there(slots: Sequence[Slot], samples: int) -> list[Form]:
    """The messages with activations: one for each tensor."""
    return [(slot.shape(samples), slot.dtype) for slot in slots]


def back(slots: Sequence[Slot], samples: int) -> list[Form]:
    """The messages with their gradients, as `packed` makes them: one for each number format."""
    sizes: dict[torch.dtype, int] = {}
    for slot in slots:
        if slot.grad:
            sizes[slot.dtype] = sizes.get(slot.dtype, 0) + prod(slot.shape(samples)) + 1
    return [((n,), dtype) for dtype, n in sizes.items()]


def packed(values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of values, those of a number format as one message: each flat, and behind it 0, or zeros and 1 where there
    is none, since no gradient and one of zeros are not the same to an optimizer. (A dry run on real tensors receives zeros.)"""
    parts: dict[torch.dtype, list[Tensor]] = {}
    for value, gradient in zip(values, gradients):
        found = value.new_zeros(value.numel()) if gradient is None else gradient.reshape(-1)
        parts.setdefault(value.dtype, []).extend((found, value.new_full((1,), float(gradient is None))))
    return [torch.cat(found) for found in parts.values()]


def unpacked(messages: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of values again: views of the messages."""
    rest = {message.dtype: message for message in messages}
    found: list[Tensor | None] = []
    for value in values:
        own, none, rest[value.dtype] = rest[value.dtype].tensor_split((value.numel(), value.numel() + 1))
        found.append(own.view(value.shape) if bool(none == 0) else None)
    return found


def size(forms: Sequence[Form]) -> int:
    """Bytes of messages."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in forms)
