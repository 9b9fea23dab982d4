"""The ledger of collectives: every call a rank made, in order, with its operator, shapes and dtype.

Ranks that call different collectives, or the same ones in another order, hang or compute garbage; a plan that moves
more bytes than its price says is slower than promised. Both are seen by comparing ledgers. Watching costs time at
every operator, so only `verify` and tests do it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plait.losses.global_batch import CURRENT
from plait.tensors.torch_private import TorchDispatchMode, tree_leaves

BY_DATA = ("alltoall_base_",)
"""Operators whose sizes depend on the data: their calls are counted, their bytes only expected."""


@dataclass
class Ledger:
    """Rows ``op shape,shape dtype`` in the order of the calls, and per operator (calls, bytes given)."""

    rows: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    asked: "Counter[tuple[str, str]]" = field(default_factory=Counter)
    """Of those that the job itself asked for, which are not in the two above: by (operator, "calls" or "bytes")."""

    def watch(self) -> "_Watch":
        return _Watch(self)


def _same(name: str) -> str:
    """What the operator of a compiled graph is called outside of one."""
    compiled = {"all_gather_into_tensor": "allgather_", "all_reduce": "allreduce_"}
    return next((usual for start, usual in compiled.items() if name.startswith(start)), "")


def given(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that a rank gives to a collective (or a message is received into)."""
    tree = args[1] if name in ("allgather_", "_allgather_base_") else args[0]
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class _Watch(TorchDispatchMode):
    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled model stays compiled while it is watched."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            self._note(name.partition(".")[0], args)
        elif namespace == "_c10d_functional" and (same := _same(name)):
            self._note(same, (*args[:1], *args[:1]))
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = given(name, args)
        sharers = CURRENT.get()
        if sharers is not None and sharers.asking:  # by the job itself, which no price knows
            self.ledger.rows.append(f"{name} for the job")
            self.ledger.asked += Counter({(name, "calls"): 1, (name, "bytes"): sum(t.nbytes for t in tensors)})
            return
        if name in BY_DATA:
            self.ledger.rows.append(f"{name} {tensors[0].dtype}")
            self.ledger.calls[name] += 1
            return
        shapes = ",".join("x".join(map(str, t.shape)) or "scalar" for t in tensors)
        self.ledger.rows.append(f"{name} {shapes} {tensors[0].dtype if tensors else ''}")
        self.ledger.calls[name] += 1
        self.ledger.bytes[name] += sum(t.nbytes for t in tensors)
