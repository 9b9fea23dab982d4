"""Matrix products in fp8 (`precision=fp8`): the linear layers of a model become torchao's.

A linear layer multiplies three times: inputs with weights, and in backward gradients with weights and with inputs. Each operand is divided
by a scale such that its largest number is the largest of fp8, rounded to fp8, and the product is multiplied by both scales. A scale is
that of a whole tensor (`fp8_recipe=tensorwise`) or of a row or column of it (`rowwise`). All else is as under bf16: between the products
numbers are in bf16, and weights, gradients of weights and the optimizer in fp32.

Layers keep their names, parameters and hooks; only their class changes. On a GPU the products run on its fp8 units, on a CPU they
are computed in fp32 on the same rounded numbers. fp8 units multiply in steps of 16: rows (samples times length, over which backward
sums) are filled up with zeros.
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

SIXTEEN = 16
"""Rows and columns of a weight are multiples of this, as fp8 units take them."""
ABLE = (8, 9)
"""The least compute capability of an NVIDIA GPU with fp8 units."""
PACKAGE = "torchao"


def missing() -> Iterable[Problem]:
    """H013 when torchao is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        why = "its linear layers compute the products"
        yield Problem("H013", "precision=fp8 needs the package torchao, which is not installed", why=why,
                      fix=("pip install torchao", "precision=bf16"))  # fmt: skip


def check_device(device: torch.device) -> None:
    """H014 when a GPU has no fp8 units."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    have = torch.cuda.get_device_capability(device)
    if have < ABLE:
        what = f"{torch.cuda.get_device_name(device)} has no units for precision=fp8"
        why = f"its compute capability is {have[0]}.{have[1]}, fp8 needs {ABLE[0]}.{ABLE[1]} (Ada, Hopper or newer)"
        raise PlaitError(Problem("H014", what, why=why, fix=("precision=bf16",)))


def chosen(model: nn.Module, slices: int = 1) -> tuple[str, ...]:
    """The linear layers that compute in fp8: those that its units fit, but the first and the last, which suffer most from rounding,
    and those that share their weight with an embedding. `slices`: of `tp`, each of which has to fit."""
    owners: dict[int, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        owners[id(p)] = owners.get(id(p), 0) + 1
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    fits = lambda m: not any(n % (SIXTEEN * slices) for n in m.weight.shape) and owners[id(m.weight)] == 1  # noqa: E731
    return tuple(name for name, m in linears[1:-1] if fits(m))


def layers_of(model: nn.Module, slices: int = 1) -> tuple[str, ...]:
    """The layers that `chosen` finds. P030 where there are none: the model would be trained in bf16."""
    found = chosen(model, slices)
    if not found:
        linears = sum(type(m) is nn.Linear for m in model.modules())
        sizes = f"multiples of {SIXTEEN * slices}" + f" (tp={slices} slices of {SIXTEEN})" * (slices > 1)
        why = (
            f"fp8 units multiply weights whose rows and columns are {sizes}, and none of the model's {linears} nn.Linear is one"
            " (the first, the last and those that share a weight stay in bf16)"
        )
        raise PlaitError(Problem("P030", "precision=fp8 has no effect on this model", why=why, fix=("precision=bf16",)))
    return found


def convert(model: nn.Module, names: Iterable[str], recipe: str, emulated: bool) -> None:
    """Have these layers of the model, as far as it has them, compute in fp8. `emulated`: without fp8 units."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear_utils import convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated, pad_inner_dim=True)
    layers, kind = dict(model.named_modules()), _kind()
    for layer in (layers[name] for name in names if name in layers):
        if isinstance(layer, nn.Linear):
            made = convert_to_float8_training(nn.Linear(SIXTEEN, SIXTEEN, device="meta"), config=config)
            layer.__dict__.update({k: v for k, v in vars(made).items() if k not in vars(layer)})
            given = type(layer)  # slices have put code of their own before a layer's
            layer.__class__ = kind if given is nn.Linear else type(given.__name__, (given, kind), {})


@cache
def _kind() -> type[nn.Linear]:
    """torchao's linear layer, in the format of autocast whatever the device, and for no rows at all."""
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
