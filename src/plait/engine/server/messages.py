"""The kinds of messages between groups and servers, and what their eight numbers mean.

group → server     HELLO group fence · ASK fence · PUSH ticket fence · PART ticket fence · VALUES errand fence
server → group     WELCOME fence · DEAL ticket clock epoch start size first count version · EVALUATE errand fence
                   WEIGHTS ticket version · HAVE ticket · FENCED fence · END
lead → follower    SEND group fence ticket errand · APPLY version samples · FORGET ticket · SNAP errand · DROP errand
                   SAVE step epoch start samples wait · END
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

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
    """Sample ids as bytes."""
    row = [*ids]
    return struct.pack(f"!{len(row)}q", *row)


def to_ids(data: bytes | bytearray) -> list[int]:
    """The ids of such bytes."""
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
        """As bytes."""
        return _LOSS.pack(self.loss) + b"".join(_USED.pack(each.ticket, each.weight) for each in self.used)

    @staticmethod
    def unpack(data: bytes | bytearray) -> "ServerUpdate":
        """The update of such bytes."""
        (loss,) = _LOSS.unpack(data[: _LOSS.size])
        return ServerUpdate(loss, tuple(UsedGradient(*pair) for pair in _USED.iter_unpack(data[_LOSS.size :])))
