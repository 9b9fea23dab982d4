"""How parts of parameters are gathered and gradients are summed into parts: the messages of a sharded model.

FSDP2 decides when a group of parameters is gathered and when its gradients are reduced. What is here decides how: on
CPU processes gloo's own reduce-scatter is an all-reduce in disguise and is waited for at once, so parts are exchanged
directly, by sends and receives, and waited for when somebody needs them, while backward goes on. docs/decisions/0006 has the measurements.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors.collectives import SUM_PARTS
from plait.tensors.torch_private import FsdpAllGather, FsdpReduceScatter, storage_key

TAGS = 2**14
"""Messages that carry gradients have tags above this, those that carry parameters below."""


class _NewBuffers:
    """FSDP2's own buffers are new tensors: what is sent and what is gathered, or this rank's part of the sum."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_NewBuffers, FsdpAllGather):
    """Every rank sends its part to every other. `async_op` returns at once; the last part to arrive ends the wait."""

    def __init__(self) -> None:
        self.tag = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size, rank = group.size(), group.rank()
        self.tag = self.tag % TAGS + 1  # two gathers may be under way between the same ranks
        parts = output_tensor.chunk(size)
        works = _exchanged([input_tensor] * size, dict(enumerate(parts)), group, self.tag)
        if storage_key(output_tensor) != storage_key(input_tensor):
            parts[rank].copy_(input_tensor)
        return _All(works, (output_tensor, input_tensor)) if async_op else _All(works, ()).wait()


def _exchanged(send: Sequence[Tensor], into: Mapping[int, Tensor], group: ProcessGroup, tag: int) -> list[dist.Work]:
    """Send a tensor to every other rank, by its number, and receive one of each; all that is to be waited for."""
    size, rank = group.size(), group.rank()
    works: list[dist.Work | None] = []
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        works.append(dist.isend(send[to], group=group, group_dst=to, tag=tag))
        works.append(dist.irecv(into[source], group=group, group_src=source, tag=tag))
    return [work for work in works if work is not None]


class _All(dist.Work):
    """Several works as one; holds what they read and write."""

    def __init__(self, works: list[dist.Work], held: tuple[Tensor, ...]):
        super().__init__()
        self.works, self.held = works, held

    def wait(self, *timeout: object) -> None:  # type: ignore[override]
        for work in self.works:
            work.wait()
        self.works, self.held = [], ()


class Scatter(_NewBuffers, FsdpReduceScatter):
    """Gradients summed into parts. The sum is made later: at the next group's turn, or in `finish`.

    `output_tensor` is a view of what becomes a parameter's `.grad`; nobody reads it before `finish` returns.
    """

    def __init__(self, copies: ProcessGroup | None):
        self.copies = copies
        """The group of ranks that hold copies of this rank's parts, or None."""
        self.others: dict[str, ProcessGroup | None] = {}
        """The same of parts that lie on other ranks than the rest, by the name of their group."""
        self.last, self.tag = True, 0
        self.open: tuple[_All, Tensor, list[Tensor], ProcessGroup | None] | None = None
        """(messages, what their sum goes to, what it is added up from besides, the group of copies)"""
        self.sums: list[dist.Work] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        self.settle()
        size, rank = group.size(), group.rank()
        self.tag = self.tag % TAGS + 1
        parts, into = input_tensor.chunk(size), [output_tensor]
        into += [torch.empty_like(output_tensor) for _ in range(size - 2)]  # the first part arrives where the sum stays
        received = {(rank - k) % size: part for k, part in enumerate(into, 1)}
        works = _All(_exchanged(parts, received, group, TAGS + self.tag), (input_tensor,))
        self.open = works, output_tensor, [parts[rank], *into[1:]], self.of(group)

    def of(self, group: ProcessGroup) -> ProcessGroup | None:
        """The ranks with copies of parts that lie on this group's."""
        return self.others.get(group.group_name, self.copies)

    def settle(self) -> None:
        """Make the sum that is open, and start adding up the copies' sums of it."""
        if self.open is None:
            return
        (works, output, parts, copies), self.open = self.open, None
        works.wait()
        for part in parts:
            output += part
        if copies is not None and self.last:
            work = dist.all_reduce(output, group=copies, async_op=True)
            assert work is not None
            self.sums.append(work)

    def finish(self) -> None:
        self.settle()
        for work in self.sums:
            work.wait()
        self.sums = []


class DeviceScatter(Scatter):
    """The same on a device with streams, where the library's own collectives overlap by themselves: parts are summed on one stream of
    FSDP2's, and over the copies of a part on another, beside the next group's parts."""

    def __init__(self, copies: ProcessGroup | None):
        super().__init__(copies)
        self.due: ProcessGroup | None = None
        """The copies over which the sum that was just asked for is to be made too."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        SUM_PARTS(output_tensor, input_tensor, group=group)
        self.due = self.of(group) if self.last else None

    def sum_over_copies(self, part: Tensor) -> None:
        """What FSDP2 calls after each sum of parts, on its stream for all-reduces."""
        copies, self.due = self.due, None
        if copies is None:
            return
        if part.is_cuda:  # it was made on the other stream, and may be given back before this one is through with it
            part.record_stream(torch.cuda.current_stream(part.device))
        dist.all_reduce(part, group=copies)

    def settle(self) -> None:
        """Nothing is open: work is ordered by the stream."""
