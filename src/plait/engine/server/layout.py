"""Which tensors are on which server, and tensors as bytes on their way between a group and a server.

Servers share out the parameters, each the largest first to whoever has least, so that all hold about as many bytes. Buffers are
on every one: a group that runs needs them all, and they are small. What travels is the bytes of the tensors, one after the other
in an order that both sides know, behind a byte for each that says whether it is there: a parameter that no sample used has no gradient.

A message has a kind and eight numbers:

group → server     HELLO group fence · ASK fence · PUSH ticket fence · PART ticket fence · VALUES errand fence
server → group     WELCOME fence · DEAL ticket clock epoch start size first count version · EVALUATE errand fence
                   WEIGHTS ticket version · HAVE ticket · FENCED fence · END
lead → follower    SEND group fence ticket errand · APPLY version samples · FORGET ticket · SNAP errand · DROP errand
                   SAVE step epoch start samples wait · END
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def shared_out(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """The names that each server holds, in the model's order, balanced by bytes."""
    held, least = [set[str]() for _ in range(servers)], [0] * servers
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        server = min(range(servers), key=least.__getitem__)
        held[server].add(name)
        least[server] += sizes[name]
    return [[name for name in sizes if name in mine] for mine in held]


class Layout:
    """Tensors of known names, shapes and formats, and their bytes."""

    def __init__(self, named: Mapping[str, Tensor]):
        self.specs = {name: (t.shape, t.dtype, t.nbytes) for name, t in named.items()}
        self.bytes = len(self.specs) + sum(size for _, _, size in self.specs.values())
        """Of all of them, at most."""

    def pack(self, tensors: Mapping[str, Tensor | None]) -> list[bytes]:
        """The bytes of those that are there."""
        here = [(name, t) for name in self.specs if (t := tensors.get(name)) is not None]
        names = {name for name, _ in here}
        return [bytes(name in names for name in self.specs), *(_raw(t) for _, t in here)]

    def unpack(self, data: bytes | bytearray | memoryview) -> dict[str, Tensor]:
        """The tensors, which are copies. ValueError when the bytes are not of this layout."""
        flags, at, found = data[: len(self.specs)], len(self.specs), dict[str, Tensor]()
        if len(flags) < len(self.specs) or not set(flags) <= {0, 1}:
            raise ValueError(f"{len(data)} bytes are no tensors of this model")
        for flag, (name, (shape, dtype, size)) in zip(flags, self.specs.items()):
            if flag:
                part = bytearray(data[at : at + size])
                if len(part) != size:
                    raise ValueError(f"{name} ends after {len(part)} of {size} bytes")
                at += size
                found[name] = (
                    torch.frombuffer(part, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
                )
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are left over")
        return found


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weighted(parts: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The weighted sum of tensors by name; of each over those that have it."""
    total: dict[str, Tensor] = {}
    for weight, tensors in parts:
        for name, tensor in tensors.items():
            if name in total:
                total[name].add_(tensor, alpha=weight)
            else:
                total[name] = tensor * weight
    return total


HELLO, ASK, PUSH, PART, VALUES = 1, 2, 3, 4, 5
WELCOME, DEAL, EVALUATE, WEIGHTS, HAVE, FENCED, END = 11, 12, 13, 14, 15, 16, 17
SEND, APPLY, FORGET, SNAP, DROP, SAVE = 21, 22, 23, 24, 25, 26
FOLLOWER = -1
"""What a follower says its group is: −1 − its number."""

FIGURES = struct.Struct("!5d")
"""Of a push: weight of the portion, loss, tokens, seconds of waiting for samples, seconds computing."""
_USED = struct.Struct("!qd")
_LOSS = struct.Struct("!d")


def of_ids(ids: Iterable[int]) -> bytes:
    row = [*ids]
    return struct.pack(f"!{len(row)}q", *row)


def to_ids(data: bytes | bytearray) -> list[int]:
    return list(struct.unpack(f"!{len(data) // 8}q", data))


@dataclass(frozen=True)
class UsedGradient:
    """A gradient that an update uses, by the number of its ticket, and what it counts."""

    ticket: int
    weight: float


@dataclass(frozen=True)
class ServerUpdate:
    """An update: its loss, and the gradients that it uses, in their order."""

    loss: float
    used: tuple[UsedGradient, ...]

    def pack(self) -> bytes:
        return _LOSS.pack(self.loss) + b"".join(_USED.pack(each.ticket, each.weight) for each in self.used)

    @staticmethod
    def unpack(data: bytes | bytearray) -> "ServerUpdate":
        (loss,) = _LOSS.unpack(data[: _LOSS.size])
        return ServerUpdate(loss, tuple(UsedGradient(*pair) for pair in _USED.iter_unpack(data[_LOSS.size :])))
