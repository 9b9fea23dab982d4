"""The constants that the planner fitted to measurements, all of them. What a data sheet states is in `machines/`.

They were fitted jointly to all published runs in `bench/data`. Those of collectives are in `plait.config.hardware.FITTED`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fitted:
    """Seconds, and parts of what a data sheet promises."""

    top: float = 0.848
    """Part of its best matmul rate that a device sustains in training."""
    plain: float = 0.9
    """Part of the 32-bit peak, without tensor cores, that matmuls reach."""
    windows32: float = 0.5
    """Part of a matmul's rate that convolutions reach in 32 bits,"""
    windows: float = 0.4
    """with tensor cores,"""
    windows_tuned: float = 0.606
    """and with channels last, as the vendor's frameworks lay them out."""
    ramp: float = 2.14e-05
    """Seconds that every matmul loses to starting and ending."""
    waves: float = 0.268
    """Waves of tiles that a matmul loses, since its last wave does not fill the device."""
    fused: float = 0.446
    """Part of the peak of an A100 that FlashAttention-2 reaches on what a mask leaves of many keys (arXiv 2307.08691), forward and backward."""
    portable: float = 0.75
    """How it falls behind on devices faster than that one, as a power of the ratio of their peaks."""
    earlier: float = 0.7
    """What the kernels before it reach of its pace: FlashAttention-1, Triton's of 2023."""
    tuned: float = 0.38
    """Part of the peak that kernels made for a newer device reach (FlashAttention-3, cuDNN, Transformer Engine)."""
    stream: float = 0.736
    """Part of the memory's bandwidth that pointwise operators reach."""
    moved: float = 0.8
    """What they really move, over the elements that are counted, one operator after the other;"""
    joined: float = 0.7
    """part of it where they are fused: compiled, or by hand."""
    scores: float = 0.413
    """The same for the scores of attention without a fused kernel, which caches hold in part."""
    cast: float = 1.0
    """Elements moved to make an 8-bit input or output of a matmul, by torch's operators one after the other."""
    narrow: float = 1.66
    """The same by compiled or the vendor's kernels, which do it while they read or write something else."""
    back: float = 2.07
    """What pointwise operators move in backward, over forward."""
    host: float = 2.5e-05
    """Seconds in which the host launches one operator; a compiled model's operators are half as many."""
    sums: float = 1.2
    """Part of the collectives of tp that nothing hides."""
    tiled: float = 0.0565
    """The same where they go tile by tile beside the matmuls that make or take them."""
    apart: float = 4.95e-05
    """Seconds that the matmul of each expert on a device loses of its own."""
    overlap: float = 0.712
    """Part of the time of computing in which messages of dp and fsdp go on at no cost."""
    contention: float = 0.35
    """Part of the time of hidden messages by which they slow computing down: they take multiprocessors and memory's bandwidth."""
    fixed: float = 0.02
    """Seconds of a step that nothing explains: data, logging, synchronising."""
    slack: float = 1.1
    """Memory reserved by the allocator, over what is allocated."""


FITTED = Fitted()
ON_CORES = replace(FITTED, plain=0.42, fused=0.55, stream=0.824, moved=0.715, scores=0.864, back=1.65)
"""Those of processes on cores, found together with `formulas.Cores` on two idle cores."""
