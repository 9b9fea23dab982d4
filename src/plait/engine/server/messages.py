"""The kinds of messages between groups and servers, and what their eight numbers mean.

group → server     HELLO group fence · ASK fence · PUSH ticket fence · PART ticket fence · VALUES errand fence
server → group     WELCOME fence · DEAL ticket clock epoch start size first count version · EVALUATE errand fence
                   WEIGHTS ticket version · HAVE ticket · FENCED fence · END
lead → follower    SEND group fence ticket errand · APPLY version samples · FORGET ticket · SNAP errand · DROP errand
                   SAVE step epoch start samples wait · END
"""

import struct
from collections.abc import Iterable, Sequence

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


def of_takes(loss: float, takes: Sequence[tuple[int, float]]) -> bytes:
    """What an update takes, tickets and weights, and its loss, as bytes."""
    return _LOSS.pack(loss) + b"".join(_USED.pack(ticket, weight) for ticket, weight in takes)


def to_takes(data: bytes | bytearray) -> tuple[float, list[tuple[int, float]]]:
    """The loss and what is taken, of such bytes."""
    (loss,) = _LOSS.unpack(data[: _LOSS.size])
    return loss, [(ticket, weight) for ticket, weight in _USED.iter_unpack(data[_LOSS.size :])]
