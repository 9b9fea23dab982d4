"""Sums of gradients over ranks, bucket by bucket: inside the last backward of a step (see `parallel/data/strategy.py`), or after it if they
are compressed (see `parallel/compression/strategy.py`).
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.parallel.compression.compressor import Compressor
from plait.tensors.collectives import directly
from plait.tensors.transfers import any_has, upload


class BucketBytes(NamedTuple):
    """Bytes of gradients per all-reduce: of the first bucket, which backward fills first, and of each after it."""

    first: int
    other: int


ON_CPU = BucketBytes(8 << 20, 8 << 20)
"""docs/log.md has the measurements behind it."""
ON_DEVICES = BucketBytes(1 << 20, 25 << 20)
"""As torch's DistributedDataParallel: a small one, so that links are busy soon, and then few, which fill them."""


def bucket_bytes(device: torch.device) -> BucketBytes:
    """Bytes of gradients that ranks on such devices sum at once. A bucket is full once it has as many; the last tensor may be larger."""
    return ON_CPU if directly(device) else ON_DEVICES


Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and format of a parameter."""


def fill(specs: list[Spec], apart: Container[int] = (), size: BucketBytes = ON_CPU) -> list[list[int]]:
    """Indices of parameters per bucket: in reverse order (as backward finishes them), one dtype per bucket.

    Buckets have `size` bytes, and of each dtype there is a first one.

    Those `apart` have buckets of their own. A parameter that several ranks of `tp` hold whole is summed by each of them
    with its own copies; the sums are the same bits only if the buckets are alike, since a sum over three ranks and more
    is made in an order that depends on the place in the bucket. So slices that are larger on some ranks must not lie in it.
    """
    buckets: list[list[int]] = []
    room: dict[tuple[torch.dtype, bool], int] = {}
    open_bucket: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i in reversed(range(len(specs))):
        shape, dtype = specs[i]
        kind = dtype, i in apart
        if room.get(kind, 0) <= 0:
            room[kind] = size.other if kind in open_bucket else size.first
            open_bucket[kind] = []
            buckets.append(open_bucket[kind])
        open_bucket[kind].append(i)
        room[kind] -= math.prod(shape) * dtype.itemsize
    return buckets


def laid(flat: Tensor, parameter: Tensor) -> Tensor:
    """A row of numbers in the shape of a parameter, and in memory in its order: autograd adds gradients up in it."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


class _Bucket:
    """Gradients of some parameters in one flat tensor, one flag per parameter (did this rank use it?), and a tail."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.waiting = len(parameters)
        self.work: dist.Work | None = None
        self.views = list[Tensor]()
        self.lay(0)

    def lay(self, tail: int) -> None:
        """Make the flat tensor, with a tail of so many elements. Gradients that lie in the old one are moved."""
        parameters, total, old = self.parameters, sum(p.numel() for p in self.parameters), self.views
        like = parameters[0]
        self.flat = torch.zeros(total + len(parameters) + tail, dtype=like.dtype, device=like.device)
        self.flags = self.flat[total : total + len(parameters)]
        self.tail = self.flat[total + len(parameters) :]
        pieces = self.flat[:total].split([p.numel() for p in parameters])
        self.views = [laid(piece, p) for piece, p in zip(pieces, parameters)]
        for before, view, parameter in zip(old, self.views, parameters):
            if parameter.grad is before:
                parameter.grad = view.copy_(before)


class BucketSums:
    """Sums the gradients of all ranks of `group` inside the backward that follows `ready`, and a row of numbers with them.

    The row (the "step_row") travels in the tail of the last bucket: a collective of its own would cost as much as a small
    model's gradients. A bucket of 16-bit parameters cannot hold it; there it goes alone.
    """

    rounds = False

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup | None, apart: Container[int] = ()):
        self.group, self.idle = group, False
        specs = [(tuple(p.shape), p.dtype) for p in parameters]
        order = fill(specs, apart, bucket_bytes(parameters[0].device)) if parameters else []
        self.buckets = [_Bucket([parameters[i] for i in b]) for b in order]
        self.armed = False
        """Buckets are sent as they are filled."""
        self.next = 0
        self.step_row: Tensor | None = None
        self.alone: dist.Work | None = None
        """The sum of the row, where no bucket holds it."""
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._filling(bucket, i))

    def _filling(self, bucket: _Bucket, i: int) -> Callable[[Tensor], None]:
        def filled(parameter: Tensor) -> None:
            self._take(bucket, i)
            if self.armed:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._launch(complete=False)

        return filled

    def _take(self, bucket: _Bucket, i: int) -> None:
        """Have the gradient of a parameter in its bucket."""
        parameter, view = bucket.parameters[i], bucket.views[i]
        if parameter.grad is not view and parameter.grad is not None:
            parameter.grad = view.copy_(parameter.grad)

    def begin(self, last: bool, idle: bool) -> None:
        """`idle`: whatever this rank computes in this step is not counted: it used no parameter."""
        self.idle = idle

    def ready(self, step_row: Tensor | None) -> None:
        """Start each bucket's sum as soon as it is full."""
        self.armed, self.next, self.alone, self.step_row = True, 0, None, step_row
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
        if step_row is None:
            return
        last = self.buckets[-1]
        if last.flat.dtype not in (torch.float32, torch.float64):
            self.alone = dist.all_reduce(step_row, group=self.group, async_op=True)
            return
        if last.tail.numel() != len(step_row):  # the first step, or the job records something new
            last.lay(len(step_row))
        last.tail.copy_(step_row)

    def _launch(self, complete: bool) -> None:
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if bucket.waiting and not complete:
                return
            self._flag(bucket)
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self.next += 1

    def _flag(self, bucket: _Bucket) -> None:
        bucket.flags.fill_(0.0 if self.idle else 1.0)
        if bucket.waiting == 0:
            return
        for i, parameter in enumerate(bucket.parameters):
            self._take(bucket, i)  # in a pipeline the last backward is over before any sum begins
            if parameter.grad is None:  # unused here; others may have used it
                bucket.views[i].zero_()
                bucket.flags[i].fill_(0.0)

    def finish(self) -> Tensor | None:
        """Start what is left, wait for all sums, give every parameter used anywhere its gradient; the summed row of the step."""
        self.armed = False
        self._launch(complete=True)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
        self._give([bucket for bucket in self.buckets if bucket.waiting or self.idle])
        self.idle = False
        if self.alone is not None:
            self.alone.wait()
            return self.step_row
        return None if self.step_row is None else self.buckets[-1].tail.double()

    def _give(self, buckets: list[_Bucket]) -> None:
        """What this rank did not use has the gradient of those who did. Whether anybody did is on the device: the host waits for it,
        once, in a step in which a rank has parameters without a gradient."""
        missing = [(b, i, p) for b in buckets for i, p in enumerate(b.parameters) if p.grad is None or self.idle]
        used = torch.stack([b.flags[i].abs().double() for b, i, _ in missing]).tolist() if missing else []
        for (bucket, i, parameter), times in zip(missing, used):
            parameter.grad = bucket.views[i] if times > 0 else None

    def held(self) -> list[Tensor]:
        return [bucket.flat for bucket in self.buckets]


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
