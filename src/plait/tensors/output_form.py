"""The structure of what a unit call returns: shapes as lines in the number of samples, and what is no tensor as it is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.tensors.torch_private import leaves, tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class Slot:
    """A tensor of a call's output: its shape with no sample and what each sample adds, its format, whether gradients flow."""

    base: tuple[float, ...]
    each: tuple[float, ...]
    dtype: torch.dtype
    grad: bool

    def shape(self, samples: int) -> tuple[int, ...]:
        """Its shape in a batch of so many samples."""
        return tuple(round(b + e * samples) for b, e in zip(self.base, self.each))


@dataclass(frozen=True)
class Template:
    """A call's output: its tree, and a `Slot` or the constant itself for every leaf."""

    spec: Any
    leaves: tuple[Any, ...]
    varies: bool = False
    """Something in it that is no tensor depends on the number of samples."""

    def make(self, samples: int, tensor: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Any:
        """The tree, with tensors made by `tensor(shape, dtype)`."""
        return self.fill(tensor(slot.shape(samples), slot.dtype) for slot in self.slots)

    def fill(self, tensors: Iterator[Tensor]) -> Any:
        """The tree with these tensors in its slots."""
        found = iter(tensors)
        return tree_unflatten([next(found) if isinstance(leaf, Slot) else leaf for leaf in self.leaves], self.spec)

    @property
    def slots(self) -> list[Slot]:
        """Its tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Slot)]


PLAIN = (int, float, str)
"""What stages compare of outputs besides tensors."""
NOTHING = Template(None, ())
"""Of a call whose output is not known."""


def taken(output: Any) -> tuple[Any, tuple[Any, ...]]:
    """(tree, leaves) of an output, tensors by (shape, dtype, requires_grad)."""
    leaves(output)  # makes trees of dataclasses
    found, spec = tree_flatten(output)
    rows = [(tuple(t.shape), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t for t in found]
    return spec, tuple(rows)


def template(
    small: tuple[Any, tuple[Any, ...]], large: tuple[Any, tuple[Any, ...]] | None, sizes: tuple[int, int]
) -> Template:
    """From what a call returned in batches of two sizes."""
    rows = []
    varies = large is not None and len(large[1]) != len(small[1])
    others = large[1] if large is not None and not varies else small[1]
    for one, other in zip(small[1], others):
        if not (isinstance(one, tuple) and len(one) == 3 and isinstance(one[1], torch.dtype)):
            rows.append(one)
            varies |= isinstance(one, (int, float)) and one != other
            continue
        each = tuple((b - a) / (sizes[1] - sizes[0]) for a, b in zip(one[0], other[0]))
        rows.append(Slot(tuple(a - e * sizes[0] for a, e in zip(one[0], each)), each, one[1], one[2]))
    return Template(small[0], tuple(rows), varies)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The leaves of a call's arguments; without a walk through trees where they are tensors alone, as they mostly are."""
    return args if not kwargs and all(isinstance(a, Tensor) for a in args) else tree_leaves((args, kwargs))


def tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, in the order of its template's slots."""
    return [t for t in leaves(output) if isinstance(t, Tensor)]


def known(output: Any, expected: Template, samples: int, unit: str) -> None:
    """P025 when an output that other stages wait for has another form than the sketch says."""
    found = [(tuple(t.shape), t.dtype) for t in tensors(output)]
    wanted = [(slot.shape(samples), slot.dtype) for slot in expected.slots]
    constants = [(a, b) for a, b in zip(leaves(output), expected.leaves) if isinstance(a, PLAIN)]
    changed = next((f"{a}, in the sketch {b}" for a, b in constants if a != b), None)
    if found == wanted and changed is not None:
        what = f"unit {unit} returns a number or a word that changes: {changed}"
        why = "only tensors travel between stages"
        raise PlaitError(Problem("P025", what, why=why, fix=("return a tensor", "pp=1")))
    if found != wanted:
        what = f"unit {unit} returns {_told(found)}, the other stages wait for {_told(wanted)}"
        why = "shapes and formats are those of the first sample, shapes linear in the number of samples"
        raise PlaitError(Problem("P025", what, why=why, fix=("pad samples to one length",)))


def _told(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors) or "no tensor"
