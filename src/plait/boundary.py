"""What crosses the boundary between two stages: the messages of one micro-batch, as they are sent and as they are priced."""

from collections.abc import Sequence
from math import prod

import torch

from plait.templates import Slot

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and number format of a message."""


def there(slots: Sequence[Slot], samples: int) -> list[Form]:
    """The messages with activations: one for each tensor."""
    return [(slot.shape(samples), slot.dtype) for slot in slots]


def back(slots: Sequence[Slot], samples: int) -> list[Form]:
    """The messages with their gradients: first which of them there are, then each, zeros where there is none."""
    found = [(slot.shape(samples), slot.dtype) for slot in slots if slot.grad]
    return [((len(found),), torch.bool), *found] if found else []


def size(forms: Sequence[Form]) -> int:
    """Bytes of messages."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in forms)
