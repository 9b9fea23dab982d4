"""Run one rank of many without its peers and without values, for a dry run.

The process group is torch's fake one, of any size. Sent messages have no effect, and receive buffers keep their contents. Tensors are fake: they
have shapes and no values. Integer tensors from the data, and results computed from them, are real, because code reads them. Reads of missing values
return a stand-in: 0 for floating point (a loss, a norm, a sum over ranks), 1 for an integer, and True for a boolean (a gradient to
receive). Writing fake values into a real tensor leaves it unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.engine.traffic import Traffic
from plait.planner.dryrun.optimizer_step import RecordedReads, is_scalar_read
from plait.tensors.fake import PartlyFakeMode, match_real_memory
from plait.tensors.module_state import replace_parameters
from plait.tensors.parameters import make_parameter_like
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    init_fake_world,
    item_op,
    keep_fake_shards,
    own_buffers,
    schema,
    tree_leaves,
)
from plait.tensors.trees import flatten_tensors


class FakeRankMode(PartlyFakeMode):
    """Makes new tensors fake except integers and float64 (with `real`, none); reading a value of a fake tensor returns a stand-in."""

    def __init__(self, fakes: FakeTensorMode, real: bool = False):
        super().__init__(fakes)
        self.real = real
        self.traffic: Traffic | None = None
        """The record of messages."""
        self.optimizer_reads: RecordedReads | None = None
        """Recorded reads of the optimizer, during its step."""
        self.placeholder = torch.zeros(1)

    def should_fake(self, made: Tensor) -> bool:
        """Statistics exchanged between ranks are float64 and are read, so they stay real."""
        return not self.real and (super().should_fake(made) or made.dtype in (torch.float32, torch.float16, torch.bfloat16))

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.optimizer_reads is not None and is_scalar_read(func):
            number = self.optimizer_reads.answer_read(func, args)
            if _has_fake(args):
                return number
        if func is item_op and isinstance(args[0], FakeTensor):
            return make_stand_in(args[0].dtype)
        if func.namespace == "c10d":
            return self._record_message(func, args, kwargs or {})
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        written = _list_written(func)
        if written and not _has_fake(args[k] for k in written) and _has_fake((args, tuple((kwargs or {}).values()))):
            return args[0] if schema(func).returns else None
        return match_real_memory(func, args, kwargs or {}, super().__torch_dispatch__(func, types, args, kwargs))

    def _record_message(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = func.name().partition("::")[2].partition(".")[0]
        if self.traffic is not None:
            self.traffic.add_message(op, args)
        plain = op in ("send", "recv_", "allreduce_")  # only the completion handle of these is used
        result = func([self.placeholder] if plain else args[0], *args[1:], **kwargs)
        _fill_received(op, args)
        return (args[0], *result[1:]) if op == "allreduce_" else result


def _fill_received(op: str, args: tuple[Any, ...]) -> None:
    """Fill real receive buffers with data this rank sent, if its peers send equal messages; otherwise with stand-ins."""
    into = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
    if op == "recv_":
        for t in into:
            t.fill_(make_stand_in(t.dtype))
    elif op in ("allgather_", "_allgather_base_", "alltoall_base_"):
        sent = next(t for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        for t in into:
            into, own = t.view(-1), sent.reshape(-1)
            for at in range(0, len(into), max(1, len(own))) if len(own) else ():
                into[at : at + len(own)].copy_(own[: len(into) - at])


def make_stand_in(dtype: torch.dtype) -> Any:
    """Return the stand-in for a missing value."""
    return 0.0 if dtype.is_floating_point else dtype is torch.bool or 1


@cache
def _list_written(func: OpOverload) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes."""
    return tuple(k for k, a in enumerate(schema(func).arguments) if a.is_write and not a.kwarg_only)


def _has_fake(values: Iterable[Any]) -> bool:
    """Whether any of the values is a fake tensor."""
    return any(isinstance(t, FakeTensor) for t in flatten_tensors([*values]))


@contextmanager
def fake_process_group(rank: int, world: int) -> Iterator[None]:
    """Join a fake process group of `world` ranks."""
    init_fake_world(rank, world)
    try:
        with keep_fake_shards():
            yield
    finally:
        dist.destroy_process_group()


def fake_model_tensors(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """Replace every floating-point tensor of a model by a fake one. Integers stay real, because code may read them."""

    def to_fake(t: Tensor) -> Tensor:
        return t.detach() if isinstance(t, FakeTensor) else fakes.from_tensor(t.detach())

    replace_parameters(model, {id(p): make_parameter_like(p, to_fake(p)) for p in model.parameters()})
    for module in model.modules():
        buffers = own_buffers(module)
        buffers.update({n: to_fake(b) if b is not None and b.is_floating_point() else b for n, b in buffers.items()})
    return model
