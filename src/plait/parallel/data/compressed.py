"""Gradients of copies summed as `compress` says, after the last backward of a step (see `parallel/compression/strategy.py`)."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.parallel.compression.compressor import Compressor
from plait.tensors.transfers import any_has, upload


class CompressedSums:
    """Does what `BucketSums` does, of parameters by name. `codec`: what sums them in fewer bytes.

    All parameters are sent in every step, whoever used them, so that messages are the same in each. One more message tells which any
    rank used, and carries the row of the step: a parameter that none used has no gradient, and its residual stays; one that
    some used has those of the others too, with gradients of zeros.
    """

    rounds = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup | None, codec: Compressor):
        self.parameters, self.group, self.codec = dict(parameters), group, codec
        self.idle = False
        self.step_row: Tensor | None = None

    def begin(self, last: bool, idle: bool) -> None:
        """`idle`: whatever this rank computes in this step is not counted: it used no parameter."""
        self.idle = idle

    def ready(self, step_row: Tensor | None) -> None:
        """Nothing is sent before all of it is there."""
        self.step_row = step_row

    def finish(self) -> Tensor | None:
        """Give every parameter used anywhere its compressed sum; the summed row of the step."""
        if not self.parameters:  # a stage may have none to train
            return None
        mine = {n: None if p.grad is None or self.idle else p.grad for n, p in self.parameters.items()}
        device = next(iter(self.parameters.values())).device if self.step_row is None else self.step_row.device
        row = torch.zeros(0, dtype=torch.float64, device=device) if self.step_row is None else self.step_row.double()
        flags = [gradient is not None for gradient in mine.values()]
        told = torch.cat([row, upload(flags, device)])
        work = dist.all_reduce(told, group=self.group, async_op=True)
        sums = self.codec.sum(mine, self.group)
        if work is not None:
            work.wait()
        unused = [name for name, has in zip(mine, any_has(flags, told[len(row) :])) if not has]
        self.codec.forget(unused)
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in unused else sums[name]
        self.idle = False
        return None if self.step_row is None else told[: len(row)]

    def held(self) -> list[Tensor]:
        """Nothing but what the codec keeps."""
        return []
