"""Embeddings and heads cut by rows of the vocabulary.

An embedding's rank looks up the tokens whose rows it has and gives zeros for the others; the sum over the ranks is the
whole. It is made at once, or when it is asked for (`parallel/tensor/sequence/lazy.py`). A head's rank computes
the logits of its rows; they stand for the whole in a `ShardedTensor`, which knows how to take a cross-entropy without ever
gathering them. Rows need not divide by the ranks.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from plait.model.slices import ParameterSlice, Slices
from plait.tensors.collectives import enter, total
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ShardedTensor


def cuts(model: nn.Module, slices: Slices, ranks: int) -> tuple[ParameterSlice, ...]:
    """How every parameter is cut, those of embeddings and heads too; tied ones once, by the model's first name."""
    named, tables = {id(p): n for n, p in model.named_parameters()}, {}
    for name in slices.vocabulary:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            key = named[id(parameter)]
            tables[key] = ParameterSlice(key, 0, Rows.chunks(parameter.shape[0], ranks).ranks)
    return (*(c for group in slices.groups for c in group.cuts), *tables.values())


def apart_from_heads(model: nn.Module, slices: Slices) -> tuple[str, ...]:
    """The embeddings that have no weight in common with a head."""
    modules = {name: model.get_submodule(name) for name in slices.vocabulary}
    heads = {id(p) for m in modules.values() if not isinstance(m, nn.Embedding) for p in m.parameters()}
    return tuple(name for name, m in modules.items() if not any(id(p) in heads for p in m.parameters()))


def heads(model: nn.Module, slices: Slices) -> tuple[str, ...]:
    """Those that multiply what they are given. (One that the loss takes over does not.)"""
    tables = [(name, model.get_submodule(name)) for name in slices.vocabulary]
    return tuple(name for name, m in tables if isinstance(m, nn.Linear) and "forward" not in vars(m))


def held(model: nn.Module, names: Iterable[str], own: Mapping[str, nn.Parameter]) -> list[str]:
    """Those whose parameters are all among a rank's `own`, not another stage's."""
    mine = {id(p) for p in own.values()}
    return [name for name in names if all(id(p) in mine for p in model.get_submodule(name).parameters())]


def wire(module: nn.Module, length: int, group: ProcessGroup, owed: bool = False) -> None:
    """Let an embedding or a head of `length` rows work on this rank's. `owed`: an embedding's sum is made elsewhere."""
    kind = _Embedding if isinstance(module, nn.Embedding) else _Head
    module.__class__ = type(module.__class__.__name__, (kind, module.__class__), {})
    module.__dict__["_rows"] = Rows.chunks(length, group.size())
    module.__dict__["_ranks"] = group
    module.__dict__["_owed"] = owed


class _Embedding(nn.Embedding):
    _rows: Rows
    _ranks: ProcessGroup
    _owed: bool

    def forward(self, input: Tensor) -> Tensor:
        """The sum over the ranks, or this rank's share of it."""
        first, count = self._rows.ranks[self._ranks.rank()][0]
        if count:
            here = (input >= first) & (input < first + count)
            padding = self.padding_idx
            padding = padding - first if padding is not None and first <= padding < first + count else None
            share = F.embedding(torch.where(here, input - first, 0), self.weight, padding)
            share = share * here.unsqueeze(-1).to(share.dtype)
        else:
            share = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum() * 0
        return share if self._owed else total(share, self._ranks)


class _Head(nn.Linear):
    _rows: Rows
    _ranks: ProcessGroup

    def forward(self, input: Tensor) -> ShardedTensor:
        if not self.__dict__.get("_gathered"):  # by `parallel/tensor/sequence/runtime.py`, from stretches
            input = enter(input, self._ranks)
        logits = F.linear(input, self.weight, self.bias)
        return ShardedTensor(logits, logits.dim() - 1, self._rows, self._ranks)
