"""The digest that `verify` stores of a sample changes if the sample does, for samples of any kind."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from plait.proof.activation_recorder import digest_sample


class Pair(NamedTuple):
    values: Any
    mask: Any


@dataclass
class Graph:
    nodes: Any
    name: str


def numbers(x: float) -> Any:
    return torch.tensor([1.0, x, 3.0])


SAMPLES = {
    "tensors": lambda x: (numbers(x), torch.tensor(1)),
    "None and a tensor": lambda x: ({"x": numbers(x), "mask": None}, torch.tensor(1)),
    "a named tuple": lambda x: (Pair(numbers(x), None), None),
    "text": lambda x: (f"of {x}", 1),
    "bytes": lambda x: (f"of {x}".encode(), 1),
    "an array": lambda x: (np.array([1.0, x]), 1),
    "a list of texts": lambda x: (["a", f"{x}"], 1),
    "a dataclass": lambda x: (Graph(numbers(x), "g"), 1),
    "an object in an object": lambda x: (SimpleNamespace(graph=Graph(np.ones(2), str(x))), None),
    "complex": lambda x: (numbers(2.0) + 1j * numbers(x), 1),
    "a number": lambda x: (x, 1),
    "bools": lambda x: (torch.tensor([True, x > 2]), None),
    "ragged lists": lambda x: ([[1.0, 2.0], [x]], 1),
    "missing": lambda x: (torch.tensor([float("nan"), x]), 1),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_digest_changes_with_the_sample(name: str) -> None:
    make = SAMPLES[name]
    assert digest_sample(make(2.0)) == digest_sample(make(2.0)) != digest_sample(make(3.5))


def test_an_object_without_values_has_a_digest() -> None:
    assert digest_sample((object(), None, lambda: 0)) == digest_sample((object(), None, lambda: 0))
