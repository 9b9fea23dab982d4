"""A copy of a module shares only what cannot be copied."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.tensors.fake import FakeTensorMode, make_fake_copy
from plait.tensors.parameters import copy_module


def twice(x: Tensor) -> Tensor:
    return x + x


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(twice)


class Holds(nn.Module):
    """Stores a value in an attribute, and a list of its own that steps change."""

    def __init__(self, value: object):
        super().__init__()
        self.layer, self.value, self.seen = nn.Linear(3, 3), value, [1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


VALUES: dict[str, Callable[[], Any]] = {
    "a scripted function": scripted, "a lock": threading.Lock, "a lock in a list": lambda: ["name", threading.Lock()],
    "a generator": lambda: (i for i in range(3)), "an open file": lambda: open("/dev/null"),  # noqa: SIM115
    "a module": lambda: torch,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_cannot_be_copied_is_shared(name: str) -> None:
    value = VALUES[name]()
    model = nn.Sequential(Holds(value), Holds(7))
    for made in (copy_module(model), make_fake_copy(model, FakeTensorMode(allow_non_fake_inputs=True))):
        shared: Any = made[0].value
        assert shared[1] is value[1] if isinstance(value, list) else shared is value
        assert made[0].seen == [1] and made[0].seen is not model[0].seen and made[1].value == 7
        assert made[0].layer.weight is not model[0].layer.weight and made[0].layer is not model[0].layer
    if name == "an open file":
        value.close()


def test_what_refuses_to_be_copied_and_is_a_module_is_told() -> None:
    class Refuses(nn.Module):
        def __deepcopy__(self, memo: object) -> "Refuses":
            raise ValueError("there is one of me")

    with pytest.raises(ValueError, match="there is one of me"):
        copy_module(nn.Sequential(Refuses()))
