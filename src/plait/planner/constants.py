"""All constants that the planner fitted to measurements. Values from data sheets are in `machines/`.

They were fitted jointly to all published runs in `bench/data`. Constants of collectives are in `plait.config.hardware.FITTED`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fitted:
    """Seconds, and fractions of data-sheet rates."""

    top: float = 0.848
    """Fraction of its best matmul rate that a device sustains in training."""
    plain: float = 0.9
    """Fraction of the fp32 peak without tensor cores that matmuls reach."""
    windows32: float = 0.5
    """Fraction of the matmul rate that fp32 convolutions reach."""
    windows: float = 0.4
    """The same with tensor cores."""
    windows_tuned: float = 0.606
    """The same with tensor cores and channels-last layout, as in the vendor's frameworks."""
    ramp: float = 2.14e-05
    """Seconds of startup and drain of every matmul."""
    waves: float = 0.268
    """Waves of tiles lost per matmul, because its last wave does not fill the device."""
    fused: float = 0.446
    """Fraction of an A100's peak that FlashAttention-2 reaches, forward and backward, with many keys and only the unmasked scores counted (arXiv
    2307.08691)."""
    portable: float = 0.75
    """Exponent of the peak ratio by which FlashAttention-2 loses efficiency on devices faster than an A100."""
    earlier: float = 0.7
    """Rate of older kernels (FlashAttention-1, Triton of 2023) relative to FlashAttention-2."""
    tuned: float = 0.38
    """Fraction of the peak that kernels tuned for a newer device reach (FlashAttention-3, cuDNN, Transformer Engine)."""
    stream: float = 0.736
    """Fraction of the memory bandwidth that pointwise operators reach."""
    moved: float = 0.8
    """Elements moved by unfused pointwise operators, relative to the counted elements."""
    joined: float = 0.7
    """Factor on `moved` for fused pointwise operators (compiled or hand-written)."""
    scores: float = 0.413
    """Elements moved for attention scores without a fused kernel, relative to the scores: caches hold a part of them."""
    cast: float = 1.0
    """Elements moved per element cast to 8 bits for a matmul, by unfused operators of torch."""
    narrow: float = 1.66
    """The same by compiled or vendor kernels, which fuse the cast with other work."""
    back: float = 2.07
    """Elements moved by pointwise operators in backward, relative to forward."""
    host: float = 2.5e-05
    """Host seconds to launch one operator. A compiled model has half as many operators."""
    sums: float = 1.2
    """Exposed fraction of tensor-parallel collectives."""
    tiled: float = 0.0565
    """Exposed fraction of tensor-parallel collectives that overlap tile by tile with their matmuls."""
    apart: float = 4.95e-05
    """Seconds of overhead of the matmul of each expert."""
    overlap: float = 0.712
    """Fraction of compute time that can hide messages of dp and fsdp."""
    contention: float = 0.35
    """Compute slowdown per second of hidden messages, which use multiprocessors and memory bandwidth."""
    fixed: float = 0.02
    """Unexplained seconds per step: data, logging, synchronization."""
    slack: float = 1.1
    """Bytes reserved by the allocator per allocated byte."""


FITTED = Fitted()
ON_CORES = replace(FITTED, plain=0.8, fused=0.55, stream=0.824, moved=0.715, scores=0.864, back=1.65)
"""Constants for ranks on CPU cores, fitted together with `formulas.CoreCosts` on two idle cores. `plain` is for unmeasured cores."""
