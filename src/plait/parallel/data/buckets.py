"""Gradients reduced over ranks: in buckets during the last backward of a step (see `parallel/data/strategy.py`), or compressed after
it (see `parallel/compression/strategy.py`)."""

import math
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.parallel.compression.compressor import Compressor
from plait.tensors.collectives import is_direct_exchange
from plait.tensors.transfers import any_rank_has, upload_row


class BucketBytes(NamedTuple):
    """Bytes of gradients per all-reduce: of the first bucket, which backward fills first, and of all others."""

    first: int
    other: int


CPU_BUCKETS = BucketBytes(8 << 20, 8 << 20)
"""docs/log.md has the measurements."""
DEVICE_BUCKETS = BucketBytes(1 << 20, 25 << 20)
"""The sizes of torch's DistributedDataParallel: a small first bucket, so that links are busy soon, then larger ones."""


def get_bucket_bytes(device: torch.device) -> BucketBytes:
    """Return the bucket sizes for a device. A bucket is full once it has this size; the last tensor may exceed it."""
    return CPU_BUCKETS if is_direct_exchange(device) else DEVICE_BUCKETS


Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and format of a parameter."""


def fill_buckets(specs: list[Spec], separate: Container[int] = (), size: BucketBytes = CPU_BUCKETS) -> list[list[int]]:
    """Return the indices of parameters per bucket: in reverse order (as backward finishes them), one dtype per bucket.

    Buckets have `size` bytes; each dtype has its own first bucket.

    The `separate` parameters have buckets of their own. A parameter that several ranks of `tp` have in full is reduced by each of
    them with its own replicas. The results are bitwise equal only if the buckets are equal: a sum over three or more ranks is
    computed in an order that depends on the place in the bucket. So slices that are larger on some ranks must not be in the same
    bucket.
    """
    buckets: list[list[int]] = []
    room: dict[tuple[torch.dtype, bool], int] = {}
    open_bucket: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i in reversed(range(len(specs))):
        shape, dtype = specs[i]
        kind = dtype, i in separate
        if room.get(kind, 0) <= 0:
            room[kind] = size.other if kind in open_bucket else size.first
            open_bucket[kind] = []
            buckets.append(open_bucket[kind])
        open_bucket[kind].append(i)
        room[kind] -= math.prod(shape) * dtype.itemsize
    return buckets


def view_as_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """View a flat tensor in the shape and memory order of a parameter, the order in which autograd accumulates gradients."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


class _Bucket:
    """Gradients of some parameters in one flat tensor, one flag per parameter (whether this rank used it), and a tail."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.waiting = len(parameters)
        self.work: dist.Work | None = None
        self.views = list[Tensor]()
        self.allocate(0)

    def allocate(self, tail: int) -> None:
        """Allocate the flat tensor with a tail of `tail` elements. Gradients in the old tensor are moved."""
        parameters, total, old = self.parameters, sum(p.numel() for p in self.parameters), self.views
        like = parameters[0]
        self.flat = torch.zeros(total + len(parameters) + tail, dtype=like.dtype, device=like.device)
        self.flags = self.flat[total : total + len(parameters)]
        self.tail = self.flat[total + len(parameters) :]
        pieces = self.flat[:total].split([p.numel() for p in parameters])
        self.views = [view_as_parameter(piece, p) for piece, p in zip(pieces, parameters)]
        for before, view, parameter in zip(old, self.views, parameters):
            if parameter.grad is before:
                parameter.grad = view.copy_(before)


class BucketSums:
    """Reduces the gradients of all ranks of `group` during the backward after `arm`, with a row of step statistics.

    The row is sent in the tail of the last bucket. A collective of its own would cost as much as the gradients of a small model.
    A bucket of 16-bit parameters cannot store it; then it is sent separately.
    """

    is_rounding = False

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup | None, separate: Container[int] = ()):
        self.group, self.idle = group, False
        specs = [(tuple(p.shape), p.dtype) for p in parameters]
        order = fill_buckets(specs, separate, get_bucket_bytes(parameters[0].device)) if parameters else []
        self.buckets = [_Bucket([parameters[i] for i in b]) for b in order]
        self.armed = False
        """Whether buckets are sent when they are full."""
        self.next_bucket = 0
        self.step_row: Tensor | None = None
        self.row_work: dist.Work | None = None
        """The all-reduce of the row, if no bucket contains it."""
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._make_fill_hook(bucket, i))

    def _make_fill_hook(self, bucket: _Bucket, i: int) -> Callable[[Tensor], None]:
        def on_filled(parameter: Tensor) -> None:
            self._copy_gradient(bucket, i)
            if self.armed:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._launch(complete=False)

        return on_filled

    def _copy_gradient(self, bucket: _Bucket, i: int) -> None:
        """Copy the gradient of a parameter into its bucket."""
        parameter, view = bucket.parameters[i], bucket.views[i]
        if parameter.grad is not view and parameter.grad is not None:
            parameter.grad = view.copy_(parameter.grad)

    def begin(self, last: bool, idle: bool) -> None:
        """Start a micro-batch. `idle`: this rank's results of this step do not count, as if it used no parameter."""
        self.idle = idle

    def arm(self, step_row: Tensor | None) -> None:
        """Let each bucket's all-reduce start as soon as the bucket is full."""
        self.armed, self.next_bucket, self.row_work, self.step_row = True, 0, None, step_row
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
        if step_row is None:
            return
        last = self.buckets[-1]
        if last.flat.dtype not in (torch.float32, torch.float64):
            self.row_work = dist.all_reduce(step_row, group=self.group, async_op=True)
            return
        if last.tail.numel() != len(step_row):  # the first step, or the job logs a new name
            last.allocate(len(step_row))
        last.tail.copy_(step_row)

    def _launch(self, complete: bool) -> None:
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if bucket.waiting and not complete:
                return
            self._flag(bucket)
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self.next_bucket += 1

    def _flag(self, bucket: _Bucket) -> None:
        bucket.flags.fill_(0.0 if self.idle else 1.0)
        if bucket.waiting == 0:
            return
        for i, parameter in enumerate(bucket.parameters):
            self._copy_gradient(bucket, i)  # in a pipeline, the last backward ends before any reduction starts
            if parameter.grad is None:  # unused on this rank; other ranks may have used it
                bucket.views[i].zero_()
                bucket.flags[i].fill_(0.0)

    def finish(self) -> Tensor | None:
        """Start the remaining buckets, wait for all, and assign a gradient to every parameter that a rank used. Return the summed row."""
        self.armed = False
        self._launch(complete=True)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
        self._assign_gradients([bucket for bucket in self.buckets if bucket.waiting or self.idle])
        self.idle = False
        if self.row_work is not None:
            self.row_work.wait()
            return self.step_row
        return None if self.step_row is None else self.buckets[-1].tail.double()

    def _assign_gradients(self, buckets: list[_Bucket]) -> None:
        """Assign the gradients of parameters that this rank did not use but others did.

        The flags are on the device. The host waits for them once, in a step in which a rank has parameters without a gradient.
        """
        missing = [(b, i, p) for b in buckets for i, p in enumerate(b.parameters) if p.grad is None or self.idle]
        used = torch.stack([b.flags[i].abs().double() for b, i, _ in missing]).tolist() if missing else []
        for (bucket, i, parameter), times in zip(missing, used):
            parameter.grad = bucket.views[i] if times > 0 else None

    def list_buffers(self) -> list[Tensor]:
        return [bucket.flat for bucket in self.buckets]


class CompressedSums:
    """Reduces gradients like `BucketSums`, by name and compressed. `codec`: compresses and sums them.

    All parameters are sent in every step, so all messages have fixed sizes. One more message has the row of the step, and a flag
    per parameter for whether any rank used it. An unused parameter gets no gradient and keeps its residual. A parameter that some
    ranks used includes the residuals of the other ranks, whose gradients are zero.
    """

    is_rounding = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup | None, codec: Compressor):
        self.parameters, self.group, self.codec = dict(parameters), group, codec
        self.idle = False
        self.step_row: Tensor | None = None

    def begin(self, last: bool, idle: bool) -> None:
        """Start a micro-batch. `idle`: this rank's results of this step do not count, as if it used no parameter."""
        self.idle = idle

    def arm(self, step_row: Tensor | None) -> None:
        """Store the row; gradients are sent in `finish`, when all are there."""
        self.step_row = step_row

    def finish(self) -> Tensor | None:
        """Assign its compressed sum to every parameter that a rank used. Return the summed row of the step."""
        if not self.parameters:  # a stage may have no trained parameters
            return None
        mine = {n: None if p.grad is None or self.idle else p.grad for n, p in self.parameters.items()}
        device = next(iter(self.parameters.values())).device if self.step_row is None else self.step_row.device
        row = torch.zeros(0, dtype=torch.float64, device=device) if self.step_row is None else self.step_row.double()
        flags = [gradient is not None for gradient in mine.values()]
        told = torch.cat([row, upload_row(flags, device)])
        work = dist.all_reduce(told, group=self.group, async_op=True)
        sums = self.codec.sum(mine, self.group)
        if work is not None:
            work.wait()
        unused = [name for name, has in zip(mine, any_rank_has(flags, told[len(row) :])) if not has]
        self.codec.discard(unused)
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in unused else sums[name]
        self.idle = False
        return None if self.step_row is None else told[: len(row)]

    def list_buffers(self) -> list[Tensor]:
        """Return nothing: only the codec keeps tensors."""
        return []
