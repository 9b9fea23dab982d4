"""Running one rank of many without the others and without numbers: what a dry run's process pretends.

The process group is torch's fake one, of any size: what is sent arrives nowhere, and what is received stays as it is.
Tensors are fake: they have shapes and no numbers. Whole numbers that come from the data are real, and so is what is
computed of them, because code looks at them. Code also looks at a few numbers that are not there: it is told that a
floating-point number is 0 (a loss, a norm, a sum that other ranks have part in), a whole number 1, and a truth value
true (there is a gradient to receive). A real tensor into which something without numbers is written stays as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.engine.traffic import Traffic
from plait.planner.dryrun.optimizer_step import Numbers, reads
from plait.tensors.fake import PartlyFake, sized
from plait.tensors.modules import put_parameters
from plait.tensors.parameters import like
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    fake_world,
    own_buffers,
    parts_as_they_are,
    scalar_of,
    schema,
    tree_leaves,
)
from plait.tensors.trees import flat


class Pretending(PartlyFake):
    """New tensors are fake but for whole numbers and float64 (or all are `real`); a fake one's number is a stand-in."""

    def __init__(self, fakes: FakeTensorMode, real: bool = False):
        super().__init__(fakes)
        self.real = real
        self.traffic: Traffic | None = None
        """What is told of messages."""
        self.numbers: Numbers | None = None
        """What the step of an optimizer reads, while it goes on."""
        self.nothing = torch.zeros(1)

    def hides(self, made: Tensor) -> bool:
        """The rows of numbers that ranks tell each other are float64, and those are looked at."""
        return not self.real and (super().hides(made) or made.dtype in (torch.float32, torch.float16, torch.bfloat16))

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.numbers is not None and reads(func):
            number = self.numbers.told(func, args)
            if _hollow(args):
                return number
        if func is scalar_of and isinstance(args[0], FakeTensor):
            return stand_in(args[0].dtype)
        if func.namespace == "c10d":
            return self._message(func, args, kwargs or {})
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        written = _written(func)
        if written and not _hollow(args[k] for k in written) and _hollow((args, tuple((kwargs or {}).values()))):
            return args[0] if schema(func).returns else None
        return sized(func, args, kwargs or {}, super().__torch_dispatch__(func, types, args, kwargs))

    def _message(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = func.name().partition("::")[2].partition(".")[0]
        if self.traffic is not None:
            self.traffic.note(op, args)
        plain = op in ("send", "recv_", "allreduce_")  # of these only what says that it is done is looked at
        result = func([self.nothing] if plain else args[0], *args[1:], **kwargs)
        _arrived(op, args)
        return (args[0], *result[1:]) if op == "allreduce_" else result


def _arrived(op: str, args: tuple[Any, ...]) -> None:
    """What real tensors have received: what this rank sent, where others send the like, else stand-ins."""
    into = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
    if op == "recv_":
        for t in into:
            t.fill_(stand_in(t.dtype))
    elif op in ("allgather_", "_allgather_base_", "alltoall_base_"):
        sent = next(t for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        for t in into:
            into, own = t.view(-1), sent.reshape(-1)
            for at in range(0, len(into), max(1, len(own))) if len(own) else ():
                into[at : at + len(own)].copy_(own[: len(into) - at])


def stand_in(dtype: torch.dtype) -> Any:
    """What a number that is not there is taken to be."""
    return 0.0 if dtype.is_floating_point else dtype is torch.bool or 1


@cache
def _written(func: OpOverload) -> tuple[int, ...]:
    """Places of the arguments that an operator writes."""
    return tuple(k for k, a in enumerate(schema(func).arguments) if a.is_write and not a.kwarg_only)


def _hollow(values: Iterable[Any]) -> bool:
    """Whether there is a tensor without numbers among them."""
    return any(isinstance(t, FakeTensor) for t in flat([*values]))


@contextmanager
def process_group(rank: int, world: int) -> Iterator[None]:
    """This process is one of a world of processes that are not there."""
    fake_world(rank, world)
    try:
        with parts_as_they_are():
            yield
    finally:
        dist.destroy_process_group()


def faked(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """The model with every floating-point tensor a fake one. Whole numbers stay: code may look at them."""

    def one(t: Tensor) -> Tensor:
        return t.detach() if isinstance(t, FakeTensor) else fakes.from_tensor(t.detach())

    put_parameters(model, {id(p): like(p, one(p)) for p in model.parameters()})
    for module in model.modules():
        buffers = own_buffers(module)
        buffers.update({n: one(b) if b is not None and b.is_floating_point() else b for n, b in buffers.items()})
    return model
