"""What a mixture of experts is, for the rest of plait: which parameters are whose, and what travels."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from plait.config.plan import Plan
from plait.tensors.parameters import like
from plait.tensors.rows import Rows, everything

Format = tuple[str, tuple[int, ...], torch.dtype]
"""(name, shape, dtype) of a parameter."""


@dataclass(frozen=True)
class MoELayer:
    """A layer whose experts can be shared out over ranks."""

    name: str
    """The module that is run in another way: the stacked experts themselves, or the layer with the list."""
    experts: int
    parameters: tuple[tuple[Format, ...], ...]
    """Its parameters: of each expert in a list; of stacked experts one tuple, each cut along dim 0."""
    modules: tuple[str, ...] = ()
    """Names of the experts in a list."""
    trained: frozenset[str] = frozenset()
    """Names of those parameters that are."""
    numbers: tuple[tuple[str, int], ...] = ()
    """Attributes of a stacked module that hold a number of experts (0: of this rank's) or of choices (1)."""
    rows: float = 0.0
    """Rows that a sample sends to experts: its tokens times the choices of each. Which experts, depends on the data."""
    calls: int = 1
    """How often a forward pass calls it."""
    width: tuple[int, int] = (0, 0)
    """Numbers of a row on its way to an expert, and back."""
    itemsize: int = 4
    """Bytes of a number."""
    coupled: bool = False
    """What it computes for a token depends on the others in the batch: experts that are full drop tokens."""

    @property
    def stacked(self) -> bool:
        """Whether parameters hold all experts, along dim 0."""
        return not self.modules

    @property
    def names(self) -> frozenset[str]:
        """Of all its experts' parameters."""
        return frozenset(name for rows in self.parameters for name, _, _ in rows)

    def mine(self, ranks: int, rank: int) -> range:
        """The experts of a rank."""
        ((first, length),) = Rows.even(self.experts, ranks).ranks[rank]
        return range(first, first + length)

    def held(self, mine: range) -> list[Format]:
        """The parameters of a rank with these experts, as large as they are there."""
        if self.stacked:
            return [(name, (len(mine), *shape[1:]), dtype) for name, shape, dtype in self.parameters[0]]
        return [row for number in mine for row in self.parameters[number]]

    def share(self, plan: Plan) -> int:
        """Bytes of the experts that ranks keep parts of, on the rank that has most: it is gathered as one."""
        rows = self.held(self.mine(plan.ep, 0)) if plan.expert_shards > 1 else []
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in rows)


def cut_stacked(module: nn.Module, mixture: MoELayer, mine: range) -> nn.Module:
    """The module with some of its experts only, in place."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach()[mine.start : mine.stop].clone()
        setattr(module, name, like(parameter, part, (((mine.start, len(mine)),), *everything(tuple(parameter.shape[1:])))))
    for name, one in mixture.numbers:
        setattr(module, name, one or len(mine))
    return module
