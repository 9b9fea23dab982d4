"""Counts the bytes that a rank sends in collectives of plait, of a hand-written plan, or of DTensor inside of an operator.

Operators of c10d are counted where torch dispatches them. A dispatch mode runs before the tensors' own classes. If the mode
passed a call to DTensor, DTensor would run it without the mode. The collectives of its operators (a partial norm that is
squared, the maximum and sum of `loss_parallel`) would then be missed. The mode therefore returns NotImplemented for calls on DTensors,
and counts the operators on plain tensors that DTensor calls.

Bytes are the minimum of a ring algorithm. For N ranks, an all-reduce sends 2 (N − 1) / N of each rank's input, and an all-gather
(N − 1) times a rank's part. Reduce-scatter and all-to-all send (N − 1) / N. (gloo's own reduce-scatter sends more.)
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.tensors.torch_private import TorchDispatchMode

SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
FREE = frozenset(("_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor"))
"""Operators that send no data, or data without a size."""
KINDS = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced"), ("sum", 0)),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), ("gather", 1)),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), ("gather", 0)),
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"), ("scatter", 1)),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), ("scatter", 0)),
    **dict.fromkeys(("alltoall_", "alltoall_base_"), ("swap", 1)),
    **dict.fromkeys(("all_to_all_single", "shard_dim_alltoall"), ("swap", 0)),
    "send": ("send", 0),
}  # fmt: skip
"""Operator -> (kind, index of the argument with a rank's input)."""


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank, one of `ranks` in every group, sends while the mode is active.

    `calls`, and (operator, bytes sent) of each in `messages`. Raises NotImplementedError at an unknown collective.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self.shares = {
            "sum": 2 * (ranks - 1) / ranks, "gather": ranks - 1, "scatter": (ranks - 1) / ranks, "swap": (ranks - 1) / ranks, "send": 1,
        }  # fmt: skip
        self.messages: list[tuple[str, float]] = []

    @property
    def calls(self) -> int:
        """The number of messages."""
        return len(self.messages)

    @property
    def bytes(self) -> float:
        """The total bytes of the messages."""
        return sum(size for _, size in self.messages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space in SPACES and name not in FREE:
            if name not in KINDS:
                raise NotImplementedError(f"{func} is a collective of which is not known what it sends")
            kind, place = KINDS[name]
            self.messages.append((name, self.shares[kind] * sum(t.nbytes for t in tensors(args[place]))))
        return func(*args, **(kwargs or {}))


def tensors(tree: Any) -> Iterable[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors(item)
