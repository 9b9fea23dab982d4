"""Precision: compute in fewer bits, keep weights and sums in 32.

What it does
    bf16 and fp16 run the forward pass under autocast: matrix products and convolutions in 16 bits, reductions, norms
    and losses in 32. Weights (the master weights), gradients, their sum over ranks and the optimizer state stay in
    fp32.

    fp16 has 5 exponent bits, so small gradients would underflow to zero. The loss is therefore multiplied by a *loss
    scale* before backward, and the gradients are divided by it after. If they overflow, all ranks skip the step and
    halve the scale. It doubles after 2,000 steps without overflow. If gradients overflow at a scale of 1, or the loss
    is not finite, the scale is not the cause, and `--on-nan` decides.

    fp8 is bf16 with the matrix products of linear layers in 8 bits, by torchao (`parallel/fp8.py`).

    tf32 keeps every value in fp32. A GPU rounds the inputs of matrix products and convolutions to a mantissa of 10
    bits. On other devices, tf32 is fp32. fp32 leaves torch's settings as they are: matrix products in full fp32 unless
    the job has called `torch.set_float32_matmul_precision`, and cuDNN's convolutions in tf32.

Costs
    Memory: activations halve; weights, gradients and optimizer state do not. Compute: matrix products are faster on
    devices with 16-bit units. On a CPU, fp16 is far slower than fp32. tf32 saves no memory. Its products are half as
    fast as bf16's, and several times as fast as fp32's.

Choose when
    bf16: nearly always, on hardware that has it. fp16: on accelerators without bf16. tf32: if 16 bits are too few, on
    NVIDIA GPUs from Ampere on. fp8: for large linear layers, compiled, on GPUs with fp8 units. The fp8 recipe `rowwise`
    loses less precision to a few large values, and `tensorwise` is faster.

Avoid when
    Results must equal those of fp32. These formats round differently, so they are not exact. `plait verify` proves the
    logic in float64, and also compares a step in this format with one device in the same format (`proof/plan_formats.py`).

How it stays equal on all ranks
    The ranks decide about an overflow by the *global* gradient norm, after the sum over ranks. An infinity on one rank
    is an infinity on every rank, so all ranks skip the step or none does.

Paper
    Micikevicius et al. 2018, Mixed Precision Training (ICLR).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel import fp8
from plait.parallel.loss_scale import LossScale
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import is_shardable
from plait.tensors.float64 import Float64Mode
from plait.tensors.torch_private import tree_map_only

AXIS = None
EXACT = False
SPLITTING_KEYS = ("microbatches", "dp", "fsdp", "cp", "tp")
"""Keys that reduce the rows, or the slices, that are multiplied at once."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def is_enabled(plan: Plan) -> bool:
    return plan.precision != "fp32"


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    yield from fp8.check_package() if plan.precision == "fp8" else ()


def inexact_reasons(plan: Plan, sketch: Sketch | None = None) -> Iterable[str]:
    if plan.precision == "fp8" and (apart := [key for key in SPLITTING_KEYS if getattr(plan, key) > 1]):
        yield f"fp8 scales depend on the values of one matmul, and {' and '.join(apart)} split these values differently"
    yield f"{plan.precision} rounds differently from fp32; the proof covers the logic in float64, and one step against one device in {plan.precision}"


def apply(split: SplitModel) -> SplitModel:
    if split.plan.precision == "fp8" and split.setup.cast is None:
        fp8.check_device(split.device)
        fp8.convert_layers(split.module, split.setup.fp8_layers, split.plan.fp8_recipe, split.device.type == "cpu")
    if split.plan.precision == "tf32" and split.setup.cast is None:
        split.hooks.close.append(enable_tf32())
    return split.with_techniques(loss_scale=LossScale(split.device)) if split.plan.precision == "fp16" else split


def enable_tf32() -> Callable[[], None]:
    """Allow TF32 for fp32 matmuls and convolutions on GPUs of this process. Return a function that restores torch's
    settings."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True

    def restore() -> None:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]

    return restore


@contextmanager
def use_matmul_precision(plan: Plan) -> Iterator[None]:
    """Multiply fp32 tensors as the plan defines, in forward and backward, inside this context."""
    put_back = enable_tf32() if plan.precision == "tf32" else None
    try:
        yield
    finally:
        if put_back is not None:
            put_back()


def make_fp32_plan(plan: Plan) -> Plan:
    """Return the same plan in fp32, for the proof in float64."""
    return replace(plan, precision="fp32", fp8_recipe=Plan.fp8_recipe)


def describe_precision(plan: Plan) -> str:
    """Return the number format as text, with the fp8 recipe if there is one."""
    return f"fp8 {plan.fp8_recipe}" if plan.precision == "fp8" else plan.precision


def find_autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the 16-bit dtype of the forward pass, or None."""
    return _DTYPES.get(plan.precision)


def make_autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the autocast context of the forward pass and the loss."""
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def make_forward_context(plan: Plan, cast: torch.dtype | None, device: str) -> AbstractContextManager[Any]:
    """Return the context of the forward pass and the loss. Under `cast=float64` (`verify`), nothing is cast to fewer
    bits."""
    if cast is torch.float64:
        return Float64Mode()
    return make_autocast(device, find_autocast_dtype(plan))


def make_trace_context(
    plan: Plan, cast: torch.dtype | None, device: str, model: torch.nn.Module
) -> AbstractContextManager[Any]:
    """Like `make_forward_context`, for a model that is not sharded yet. Under `fsdp` and `offload=all` it casts weights
    to 16 bits, as gathered weights are, so that outputs of units have their final dtype."""
    stack = ExitStack()
    stack.enter_context(make_forward_context(plan, cast, device))
    half = find_autocast_dtype(plan) if cast is None and plan.is_sharded else None
    if half is not None:
        stack.enter_context(_LowPrecisionWeights(model, half))
    return stack


class _LowPrecisionWeights(TorchFunctionMode):
    """Casts a model's weights for every torch function."""

    def __init__(self, model: torch.nn.Module, half: torch.dtype):
        super().__init__()
        self.half = half
        self.weights = {id(p) for p in model.parameters() if is_shardable(p.shape) and p.is_floating_point()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self._cast_weight, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cast_weight(self, t: Tensor) -> Tensor:
        return t.to(self.half) if id(t) in self.weights else t
