"""Stacked experts to which all tokens of a group come, by an all-gather (`token_dispatcher=allgather`).

Every rank sees the tokens of all ranks of the group and what each has chosen. It runs its experts on every choice, of which those of other
ranks' experts count zero, and a reduce-scatter adds up the results of all ranks into each rank's own tokens. How large all of this is
follows from how many tokens the ranks have, which their hosts know. So no host waits for a device, whatever the router chose.

Each row has one choice with a weight of one, as on the way of `StackedExperts`, and the weights are applied after: a module that is given
several choices may write one over another where two of them are of the same expert.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from plait.losses.global_batch import BatchPeers
from plait.parallel.expert.dispatch import ExpertPlacement
from plait.parallel.expert.layers import roles, spelled
from plait.tensors.collectives import gathered, linear, rows_of_ranks, sum_part
from plait.tensors.modules import own_forward
from plait.tensors.rows import Rows


class GatheredExperts:
    """The forward of a module with stacked experts, of which this rank has `way.mine`."""

    def __init__(self, module: nn.Module, way: ExpertPlacement, sharers: BatchPeers):
        self.own, self.way, self.sharers = own_forward(module), way, sharers
        self.names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names, args)) | kwargs
        name, index, weight = roles(given)
        count = 0 if self.sharers.idle else len(given[name])
        rows, mine = rows_of_ranks(count, self.way.group, given[name].device), self.way.mine
        hidden, weights = (linear(given[n][:count], self._all, self._sum, rows) for n in (name, weight))
        chosen = self._all(given[index][:count], rows)
        local = chosen.reshape(-1) - mine.start
        here = (local >= 0) & (local < len(mine))
        order = torch.where(here, local, len(mine)).argsort(stable=True)
        here, expert = here[order].unsqueeze(1), local.clamp(0, len(mine) - 1)[order].unsqueeze(1)
        token, ones = order // chosen.shape[1], torch.ones(len(order), 1, dtype=weights.dtype, device=weights.device)
        whole = given | {name: hidden.index_select(0, token), index: expert, weight: ones}
        result = spelled(self.own, whole, len(args))
        factor = torch.where(here, weights.reshape(-1).index_select(0, order).unsqueeze(1), 0)
        result = (torch.where(here, result, 0) * factor).to(result.dtype)
        result = result.new_zeros(len(hidden), *result.shape[1:]).index_add(0, token, result)
        own = linear(result, self._sum, self._all, rows)
        places = torch.arange(count, device=own.device)
        return own.new_zeros(len(given[name]), *own.shape[1:]).index_add(0, places, own)

    def _all(self, x: Tensor, rows: Rows) -> Tensor:
        with self.sharers.ask():  # a dry run does not know how many the others have
            return gathered(x, 0, rows, self.way.group)

    def _sum(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's tokens of the sum over the ranks: the adjoint of `_all`."""
        with self.sharers.ask():
            return sum_part(x, 0, rows, self.way.group)
