"""The constants that the planner fitted to measurements, all of them. What a data sheet states is in `machines/`.

They were fitted once, jointly, to the published runs in `bench/data` and its set of single-node layouts; none belongs to one
source, model or machine. Those of collectives are in `plait.config.network.FITTED`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """Seconds, and parts of what a data sheet promises."""

    top: float = 0.848
    """Part of its best matmul rate that a device sustains in training."""
    plain: float = 0.42
    """Part of the 32-bit peak, without tensor cores, that matmuls and convolutions reach."""
    ramp: float = 4.6e-05
    """Seconds that every matmul loses to filling and draining the device."""
    flash: float = 0.55
    """Part of the peak that a fused attention kernel tuned for its device reaches."""
    portable: float = 0.875
    """How a portable one falls behind on devices faster than the one it was written for (A100), as a power."""
    filled: float = 0.15
    """What every doubling of the keys beyond `KEYS` of `planner/formulas.py` takes off that power: long sequences fill a fast device."""
    tuned: float = 0.1
    """How one tuned for its device gains on faster devices, as a power: newer ones skip what a causal mask hides."""
    stream: float = 0.824
    """Part of the memory's bandwidth that pointwise operators reach."""
    moved: float = 0.715
    """What they really move, over the elements that are counted."""
    scores: float = 0.864
    """The same for the scores of attention without a fused kernel, which caches hold in part."""
    cast: float = 4.2
    """Elements moved to make an 8-bit input or output of a matmul, by portable kernels."""
    narrow: float = 0.9
    """The same by the vendor's kernels, which do it while they read or write something else."""
    back: float = 1.65
    """What pointwise operators move in backward, over forward."""
    host: float = 2.8e-05
    """Seconds in which the host launches one operator; a compiled model's operators are half as many."""
    sums: float = 0.95
    """Part of the collectives of tp that nothing hides."""
    tiled: float = 0.1
    """The same where they go tile by tile beside the matmuls that make or take them."""
    apart: float = 2e-05
    """Seconds that the matmul of each expert on a device loses of its own."""
    overlap: float = 0.216
    """Part of the time of computing in which messages of dp and fsdp go on at no cost."""
    fixed: float = 0.0045
    """Seconds of a step that nothing explains: data, logging, synchronising."""
    slack: float = 1.1
    """Memory reserved by the allocator, over what is allocated."""


FITTED = Fitted()
