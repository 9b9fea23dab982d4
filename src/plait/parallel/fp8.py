"""Matrix products in fp8 (`precision=fp8`), by the linear layers of torchao.

A linear layer has three products: inputs with weights, and in backward gradients with weights and with inputs. Each operand is
divided by a scale that maps its largest value to the largest fp8 value, and rounded to fp8. The product is multiplied by both
scales. A scale belongs to a full tensor (`fp8_recipe=tensorwise`), or to a row or column of it (`rowwise`). All else is as under
bf16: values between the products are in bf16; weights, their gradients and the optimizer are in fp32.

Layers keep their names, parameters and hooks; only their class changes. On a GPU the products run on its fp8 units. On a CPU they
are computed in fp32 on the same rounded values. fp8 units multiply in steps of 16. Rows (samples times length, over which
backward sums) are padded with zeros.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.errors import PlaitError, Problem

FP8_MULTIPLE = 16
"""Rows and columns of a weight are multiples of this on fp8 units."""
MIN_CAPABILITY = (8, 9)
"""The least compute capability of an NVIDIA GPU with fp8 units."""
PACKAGE = "torchao"


def check_package() -> Iterable[Problem]:
    """Yield H013 if torchao is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        why = "its linear layers compute the products"
        yield Problem("H013", "precision=fp8 needs the package torchao, which is not installed", why=why,
                      fix=("pip install torchao", "precision=bf16"))  # fmt: skip


def check_device(device: torch.device) -> None:
    """Raise H014 if a GPU has no fp8 units."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    have = torch.cuda.get_device_capability(device)
    if have < MIN_CAPABILITY:
        what = f"{torch.cuda.get_device_name(device)} has no units for precision=fp8"
        why = f"its compute capability is {have[0]}.{have[1]}, fp8 needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ada, Hopper or newer)"
        raise PlaitError(Problem("H014", what, why=why, fix=("precision=bf16",)))


def choose_layers(model: nn.Module, slices: int = 1) -> tuple[str, ...]:
    """Choose the linear layers that compute in fp8.

    Their sizes fit the fp8 units. The first and the last layer are excluded, because they suffer most from rounding. Layers that
    share their weight with an embedding are excluded too. `slices`: the tensor-parallel size; each slice must fit.
    """
    owners: dict[int, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        owners[id(p)] = owners.get(id(p), 0) + 1
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    fits = lambda m: not any(n % (FP8_MULTIPLE * slices) for n in m.weight.shape) and owners[id(m.weight)] == 1  # noqa: E731
    return tuple(name for name, m in linears[1:-1] if fits(m))


def require_layers(model: nn.Module, slices: int = 1) -> tuple[str, ...]:
    """Choose the linear layers that compute in fp8. Raises P030 if there are none: the model would be trained in bf16."""
    found = choose_layers(model, slices)
    if not found:
        linears = sum(type(m) is nn.Linear for m in model.modules())
        sizes = f"multiples of {FP8_MULTIPLE * slices}" + f" (tp={slices} slices of {FP8_MULTIPLE})" * (slices > 1)
        why = (
            f"rows and columns of an fp8 weight must be {sizes}, and none of the model's {linears} nn.Linear layers has such a weight"
            " (the first, the last and those that share a weight stay in bf16)"
        )
        raise PlaitError(Problem("P030", "precision=fp8 has no effect on this model", why=why, fix=("precision=bf16",)))
    return found


def convert_layers(model: nn.Module, names: Iterable[str], recipe: str, emulated: bool) -> None:
    """Convert those of the named layers that the model has to fp8. `emulated`: without fp8 units."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear_utils import convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated, pad_inner_dim=True)
    layers, kind = dict(model.named_modules()), _make_class()
    for layer in (layers[name] for name in names if name in layers):
        if isinstance(layer, nn.Linear):
            made = convert_to_float8_training(nn.Linear(FP8_MULTIPLE, FP8_MULTIPLE, device="meta"), config=config)
            layer.__dict__.update({k: v for k, v in vars(made).items() if k not in vars(layer)})
            given = type(layer)  # tensor parallelism has subclassed the layer
            layer.__class__ = kind if given is nn.Linear else type(given.__name__, (given, kind), {})


@cache
def _make_class() -> type[nn.Linear]:
    """Make a subclass of torchao's linear layer that uses the format of autocast on every device, and accepts inputs without rows."""
    from torchao.float8.float8_linear import Float8Linear

    class Fp8Linear(Float8Linear):
        def forward(self, input: Tensor) -> Any:
            kind = input.device.type
            if torch.is_autocast_enabled(kind):
                input = input.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):
                if input.numel():
                    return super().forward(input)
                bias = self.bias if self.bias is None else self.bias.to(input.dtype)
                return F.linear(input, self.weight.to(input.dtype), bias)

    return Fp8Linear
