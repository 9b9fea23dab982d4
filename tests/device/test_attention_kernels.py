"""Ring attention by torch's kernels for CUDA, on simulated devices: it equals one device, and the kernels are used."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from device import attention_kernels
from device.test_shadow import Devices, library

NEAR = {"float64": 1e-12, "float64_by_operators": 1e-12, "float32": 2e-6, "bfloat16": 3e-2, "float16_by_cudnn": 4e-3}
MASKED = ("padded", "packed", "bias", "learned", "one_row")


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    found = Devices(library())
    yield found
    found.end()


def expected(how: str, case: str) -> list[str]:
    """Return the kernels that compute a case."""
    case = case.removesuffix(" zigzag")
    if case == "dropout" or how == "float64_by_operators":
        return []
    if how == "float32":  # a width of 6 values is no multiple of 16 bytes
        kernel = None if case == "narrow_values" else "efficient"
    elif case in MASKED or case == "narrow_values":
        kernel = None if how == "float64" or case == "narrow_values" else "efficient"
    else:
        kernel = "cudnn" if how.endswith("cudnn") else "flash"
    return [kernel, f"{kernel} backward"] if kernel else []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", NEAR)
@pytest.mark.parametrize("ranks", (2, 3))
def test_ring_attention_by_kernels_is_that_of_one_device(how: str, ranks: int, devices: Devices) -> None:
    for rank in devices.ranks(probe=f"ring_{how}", world=ranks):
        for case, (worst, kernels) in rank["value"].items():
            assert worst < NEAR[how], (case, worst)
            assert kernels == expected(how, case), (case, kernels)


def forms(found: Any) -> list[Any]:
    return [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in found]


@pytest.mark.parametrize("kind", ("flash", "efficient", "cudnn"))
def test_the_doubles_give_what_torch_says_it_gives(kind: str) -> None:
    """Compared with the schemas and the meta registrations of the real operators."""
    name = f"_scaled_dot_product_{kind}_attention"
    q, k = (torch.randn(2, 4, n, 16, dtype=torch.bfloat16) for n in (40, 24))
    more = {"flash": (0.0, False), "efficient": (None, True, 0.0, False), "cudnn": (None, True, 0.0, False)}[kind]
    found = attention_kernels.KERNELS[name](q, k, k, *more, scale=0.5)
    there = lambda t: t.to("meta") if isinstance(t, Tensor) else t  # noqa: E731
    real = getattr(torch.ops.aten, name)(*map(there, (q, k, k, *more)), scale=0.5)
    assert forms(found) == forms(real)
    grad, (out, lse) = torch.randn_like(q), found[:2]
    if kind == "flash":
        back = (grad, q, k, k, out, lse, None, None, 40, 24, 0.0, False, *found[6:8])
    elif kind == "efficient":
        back = (grad, q, k, k, None, out, lse, *found[2:4], 0.0, [True, True, True, False], False)
    else:
        back = (grad, q, k, k, out, lse, *found[6:8], None, None, None, 40, 24, 0.0, False)
    found = attention_kernels.KERNELS[f"{name}_backward"](*back, scale=0.5)
    real = getattr(torch.ops.aten, f"{name}_backward")(*map(there, back), scale=0.5)
    assert forms(found) == forms(real)


def test_the_doubles_keep_the_rules() -> None:
    q = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    flash = attention_kernels.KERNELS["_scaled_dot_product_flash_attention"]
    for given, words in (
        ((q.float(),) * 3, "takes no torch.float32"), ((q[..., :12],) * 3, "a multiple of 8"), ((q.mT,) * 3, "one after the other"),
        ((q[:, :, :3], q, q, 0.0, True), "as many queries as keys"),
    ):  # fmt: skip
        with pytest.raises(attention_kernels.Broken, match=words):
            flash(*given)
