"""Gradients of copies summed as `compress` says, after the last backward of a step (see `parallel/compression/strategy.py`)."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.parallel.compression.compressor import Compressor
from plait.tensors.norm import total_norm
from plait.tensors.transfers import any_has, upload


class CompressedReducer:
    """Does what `Reducer` does, of parameters by name.

    All parameters are sent in every step, whoever used them, so that messages are the same in each. One more message tells which any
    rank used, and carries the row of the step: a parameter that none used has no gradient, and its residual stays; one that
    some used has those of the others too, with gradients of zeros.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup | None, compressor: Compressor):
        self.parameters, self.group, self.compressor = dict(parameters), group, compressor
        self.idle = False
        """Whatever this rank computes in this step is not counted: it used no parameter."""
        self.step_row: Tensor | None = None

    def before(self, last: bool) -> None:
        """Before a micro-batch's forward pass: nothing to prepare."""

    def after(self) -> None:
        """After a backward that does not end the step: gradients have added up in place."""

    def arm(self, step_row: Tensor | None) -> None:
        """The next backward is the last of the step. None: no row to sum with the gradients."""
        self.step_row = step_row

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm of the summed gradients, which every rank holds whole."""
        return total_norm(gradients)

    def settle(self) -> None:
        """Sum what the gradients are now, without a row of the step."""
        self.step_row = None
        if self.parameters:  # a stage may have none to train
            self.finish()

    def finish(self) -> Tensor:
        """Give every parameter used anywhere its compressed sum; the summed row of the step."""
        mine = {n: None if p.grad is None or self.idle else p.grad for n, p in self.parameters.items()}
        device = next(iter(self.parameters.values())).device if self.step_row is None else self.step_row.device
        row = torch.zeros(0, dtype=torch.float64, device=device) if self.step_row is None else self.step_row.double()
        flags = [gradient is not None for gradient in mine.values()]
        told = torch.cat([row, upload(flags, device)])
        work = dist.all_reduce(told, group=self.group, async_op=True)
        sums = self.compressor.sum(mine, self.group)
        if work is not None:
            work.wait()
        unused = [name for name, has in zip(mine, any_has(flags, told[len(row) :])) if not has]
        self.compressor.forget(unused)
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in unused else sums[name]
        return told[: len(row)]
