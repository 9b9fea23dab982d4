"""Units, what calls them, and what a call costs: the values that a sketch is made of. `model/sketch.py` measures them."""

from dataclasses import dataclass, field

from plait.model.operations import Product
from plait.tensors.trees import NOTHING, Template


@dataclass(frozen=True)
class Figure:
    """A quantity of one unit call in a batch of n samples: fixed + each * n."""

    fixed: float
    each: float

    def of(self, samples: float) -> float:
        """The quantity in a batch of so many samples."""
        return self.fixed + self.each * samples


ZERO = Figure(0.0, 0.0)


@dataclass(frozen=True)
class Unit:
    """A submodule that is not cut further: the grain of sharding, recompute, stages and timing."""

    name: str
    kind: str
    """The module's class."""
    parameters: tuple[str, ...]
    """Names of its parameters (as `named_parameters` of the whole model has them)."""
    weights: int
    """Bytes of its parameters."""
    closed: bool
    """Its parameters are used inside its own calls only: not tied to another unit's, not touched by code around it."""
    repeated: bool
    """One of several sisters of the same class: a block."""
    experts: int = 0
    """Bytes of experts in it that are not among its parameters any more, since ranks share them out and keep parts of
    them: on the rank that has most."""


@dataclass(frozen=True)
class OperationCounts:
    """What a forward consists of, of one sample: `model/operations.py`."""

    products: tuple[Product, ...] = ()
    wide: float = 0.0
    """Elements that operators move whose result is as large as what the unit returns."""
    inner: float = 0.0
    """The same of all others: what lies between the unit's maps."""
    operators: float = 0.0
    keys: float = 0.0
    """Elements of keys and values."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit, in the order of the forward pass. Figures are those of the forward pass."""

    unit: str
    needs: tuple[int, ...]
    """Earlier calls whose outputs its inputs depend on, through the model's own code between units."""
    flops: Figure
    inputs: Figure
    """Bytes of the tensors it is given."""
    output: Figure
    """Bytes of the tensors it returns."""
    saved: Figure
    """Bytes that autograd keeps for its backward, parameters and what was kept before it not counted."""
    work: OperationCounts = field(default_factory=OperationCounts, compare=False)
    """What its forward consists of."""
    backward: bool = True
    """Backward computes a gradient of its output: the call or an earlier one has trained parameters, and the output is not detached."""
    writes: bool = False
    """It changes a tensor that it is given, in place."""
    back: int | str | None = None
    """Which of its arguments (by place or name), an object that it changed, it returns."""
    leaks: tuple[int, ...] = ()
    """Later calls (-1: numbers of Python in code between units, -2: the loss, -3: either, and it is known what they do with it)
    that depend on what it computed by another way than through its output."""
    aside: tuple[int, ...] = ()
    """The same of all that get hold of such a thing (-2: the model's output), whatever they do with it."""
    given: int = 0
    """How many tensors it is given: another number is another course of the model's code."""
    template: Template = NOTHING
    """The structure of what it returns."""
