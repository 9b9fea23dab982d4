"""What a step of a model costs, apart from any machine and any plan: products of matrices, bytes moved, bytes kept.

A `Workload` is a sketch boiled down to what its time and its memory depend on: blocks in the order of the forward pass,
alike neighbours as one with a count. Figures are those of one sample. `planner/from_sketch.py` makes one from a sketch.
"""

from dataclasses import dataclass
from typing import Literal

Way = Literal["", "columns", "inner", "batch"]


@dataclass(frozen=True)
class PlannedProduct:
    """[rows, inner] @ [inner, columns] in the forward pass of one sample, `batch` of them at once, `times` in a row."""

    rows: float
    inner: float
    columns: float
    batch: float = 1.0
    times: float = 1.0
    cut: Way = ""
    """Which dim `tp` cuts."""
    weight: bool = True
    """The second matrix is a weight: its gradient is a product of its own that can wait."""
    fused: bool = False
    """Inside one kernel that keeps its intermediate values to itself, as flash attention does."""
    grows: Literal["rows", "batch", ""] = "rows"
    """What has more with more samples."""
    experts: float = 0.0
    """Its rows go to one of so many experts each; 0: it is none of an expert."""
    sequence: bool = True
    """Its rows are places of the sequence, which `cp` cuts."""

    @property
    def flops(self) -> float:
        """Of the forward pass of a sample."""
        return 2 * self.rows * self.inner * self.columns * self.batch * self.times


@dataclass(frozen=True)
class Block:
    """A unit, or `count` alike ones in a row. All figures of one of them, of one sample; sizes in elements."""

    name: str
    count: int = 1
    products: tuple[PlannedProduct, ...] = ()
    weights: float = 0.0
    """Without those of experts."""
    weights_cut: float = 0.0
    """Those of `weights` that tp shares out."""
    experts: float = 0.0
    """Weights of experts."""
    moved: float = 0.0
    """What pointwise operators read and write, forward."""
    moved_cut: float = 0.0
    """Those of `moved` between slices: tp shares them out, with or without stretches of the sequence."""
    scores: float = 0.0
    """Scores of attention that operators read and write, where no fused kernel keeps them to itself."""
    kept: float = 0.0
    """Kept for backward."""
    kept_cut: float = 0.0
    """Those of `kept` between slices."""
    kept_selective: float = 0.0
    """Those of `kept` that recompute=selective lets go."""
    given: float = 0.0
    """Its input: what full recomputation keeps."""
    out: float = 0.0
    """Its output."""
    kernels: float = 0.0
    """Operators it runs forward."""
    handovers: float = 0.0
    """Sums over tp in its forward pass, each of `out` elements; backward has as many."""
    keys: float = 0.0
    """Keys and values, which cp hands around."""
    routed: float = 0.0
    """Sent to experts, and back."""
    statistics: float = 0.0
    """Batch norms: dp and fsdp sum their statistics forward, and again backward."""


@dataclass(frozen=True)
class Workload:
    """A model's step. `frozen` is the share of its weights that is not trained."""

    name: str
    blocks: tuple[Block, ...]
    frozen: float = 0.0

    @property
    def weights(self) -> float:
        """All of them."""
        return sum((b.weights + b.experts) * b.count for b in self.blocks)

    @property
    def flops(self) -> float:
        """Of the forward pass of a sample."""
        return sum(p.flops * b.count for b in self.blocks for p in b.products)
