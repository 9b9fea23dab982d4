"""Mixtures of experts: the parameters of each expert, and the rows sent to them."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from plait.config.plan import Plan
from plait.tensors.parameters import make_parameter_like
from plait.tensors.rows import Rows, full_ranges

ParameterFormat = tuple[str, tuple[int, ...], torch.dtype]
"""(name, shape, dtype) of a parameter."""


@dataclass(frozen=True)
class MoELayer:
    """A layer whose experts can be sharded over ranks."""

    name: str
    """The module that ep replaces: the stacked experts, or the layer with the list of experts."""
    experts: int
    parameters: tuple[tuple[ParameterFormat, ...], ...]
    """Parameters of each expert in a list; for stacked experts one tuple, each sharded along dim 0."""
    modules: tuple[str, ...] = ()
    """Names of the experts in a list."""
    trained: frozenset[str] = frozenset()
    """Names of the trained parameters among them."""
    count_attributes: tuple[tuple[str, int], ...] = ()
    """Attributes of a stacked module that hold the number of experts (0: of this rank) or of choices (1)."""
    rows: float = 0.0
    """Rows that a sample sends to experts: its tokens times the choices of each. The data decides which experts."""
    calls: int = 1
    """Calls per forward pass."""
    width: tuple[int, int] = (0, 0)
    """Elements of a row on its way to an expert, and back."""
    itemsize: int = 4
    """Bytes per element."""
    coupled: bool = False
    """The output for a token depends on other tokens of the batch, because full experts drop tokens."""

    @property
    def is_stacked(self) -> bool:
        """Whether each parameter has all experts, along dim 0."""
        return not self.modules

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters of its experts."""
        return frozenset(name for rows in self.parameters for name, _, _ in rows)

    def get_rank_experts(self, ranks: int, rank: int) -> range:
        ((first, length),) = Rows.make_even(self.experts, ranks).ranks[rank]
        return range(first, first + length)

    def list_rank_parameters(self, own: range) -> list[ParameterFormat]:
        """Return the parameters of a rank with these experts, in their local shapes."""
        if self.is_stacked:
            return [(name, (len(own), *shape[1:]), dtype) for name, shape, dtype in self.parameters[0]]
        return [row for number in own for row in self.parameters[number]]

    def count_gathered_bytes(self, plan: Plan) -> int:
        """Return the bytes of sharded experts on the rank with most of them; they are gathered at once."""
        rows = self.list_rank_parameters(self.get_rank_experts(plan.ep, 0)) if plan.expert_shards > 1 else []
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in rows)


def shard_stacked(module: nn.Module, mixture: MoELayer, own: range) -> nn.Module:
    """Keep only the given experts of a stacked module, in place."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach()[own.start : own.stop].clone()
        setattr(module, name, make_parameter_like(parameter, part, (((own.start, len(own)),), *full_ranges(tuple(parameter.shape[1:])))))
    for name, one in mixture.count_attributes:
        setattr(module, name, one or len(own))
    return module
