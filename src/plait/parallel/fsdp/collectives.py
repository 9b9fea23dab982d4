"""How parts of parameters are gathered and gradients are summed into parts: the messages of a sharded model.

FSDP2 decides when a group of parameters is gathered and when its gradients are reduced. What is here decides how: on
CPU processes gloo's own reduce-scatter is an all-reduce in disguise and is waited for at once, so parts are exchanged
directly, by sends and receives, and waited for when somebody needs them, while backward goes on. docs/decisions/0006 has the measurements.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.tensors.torch_private import FsdpAllGather, FsdpReduceScatter, storage_key

TAGS = 2**14
"""Messages that carry gradients have tags above this, those that carry parameters below."""


SUM_PARTS = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The library's reduce-scatter, under the name that the installed torch does not warn of."""


class Gather(FsdpAllGather):
    """Every rank sends its part to every other. `async_op` returns at once; the last part to arrive ends the wait."""

    def __init__(self) -> None:
        self.tag = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer that all parts are gathered into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        size, rank = group.size(), group.rank()
        self.tag = self.tag % 2**14 + 1  # two gathers may be under way between the same ranks
        parts, works = output_tensor.chunk(size), []
        for k in range(1, size):
            to, source = (rank + k) % size, (rank - k) % size
            works.append(dist.isend(input_tensor, group=group, group_dst=to, tag=self.tag))
            works.append(dist.irecv(parts[source], group=group, group_src=source, tag=self.tag))
        if storage_key(output_tensor) != storage_key(input_tensor):
            parts[rank].copy_(input_tensor)
        return _All(works, (output_tensor, input_tensor)) if async_op else _All(works, ()).wait()


class _All(dist.Work):
    """Several works as one; holds what they read and write."""

    def __init__(self, works: list[Any], held: tuple[Tensor, ...]):
        super().__init__()
        self.works, self.held = works, held

    def wait(self, *timeout: Any) -> None:  # type: ignore[override]
        for work in self.works:
            work.wait()
        self.works, self.held = [], ()


class Scatter(FsdpReduceScatter):
    """Gradients summed into parts. The sum is made later: at the next group's turn, or in `finish`.

    `output_tensor` is a view of what becomes a parameter's `.grad`; nobody reads it before `finish` returns.
    """

    def __init__(self, copies: Any):
        self.copies = copies
        """The group of ranks that hold copies of this rank's parts, or None."""
        self.others: dict[str, Any] = {}
        """The same of parts that lie on other ranks than the rest, by the name of their group."""
        self.last, self.tag = True, 0
        self.open: tuple[_All, Tensor, Tensor, list[Tensor], Any] | None = None
        self.sums: list[tuple[Any, Tensor]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Buffers of FSDP2's own: what is sent, and this rank's part of the sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.settle()
        size, rank = group.size(), group.rank()
        self.tag = self.tag % 2**14 + 1
        parts, works, into = input_tensor.chunk(size), [], [output_tensor]
        into += [torch.empty_like(output_tensor) for _ in range(size - 2)]  # the first part arrives where the sum stays
        for k, received in enumerate(into, 1):
            to, source = (rank + k) % size, (rank - k) % size
            works.append(dist.isend(parts[to], group=group, group_dst=to, tag=TAGS + self.tag))
            works.append(dist.irecv(received, group=group, group_src=source, tag=TAGS + self.tag))
        self.open = (_All(works, (input_tensor,)), parts[rank], output_tensor, into[1:], self.of(group))

    def of(self, group: Any) -> Any:
        """The ranks with copies of parts that lie on this group's."""
        return self.others.get(group.group_name, self.copies)

    def settle(self) -> None:
        """Make the sum that is open, and start adding up the copies' sums of it."""
        if self.open is None:
            return
        work, mine, output, others, copies = self.open
        work.wait()
        for part in (mine, *others):
            output += part
        self.open = None
        if copies is not None and self.last:
            self.sums.append((dist.all_reduce(output, group=copies, async_op=True), output))

    def finish(self) -> None:
        """Every sum is made."""
        self.settle()
        for work, _ in self.sums:
            work.wait()
        self.sums = []


class DeviceScatter(Scatter):
    """The same on a device with streams, where the library's own collectives overlap by themselves."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        SUM_PARTS(output_tensor, input_tensor, group=group)
        if self.of(group) is not None and self.last:
            dist.all_reduce(output_tensor, group=self.of(group))

    def settle(self) -> None:
        """Nothing is open: work is ordered by the stream."""
