"""How many samples of a batch each share has: as many as its part of the whole says, in whole numbers.

Sizes are a function of the batch's size and the parts alone, so every rank knows those of all others. Where parts change while
training, they do so at a step that is known before any rank reads its samples (`Course`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Parts = tuple[int, ...]
"""What each share has, relative to the others; empty: all alike."""


def sizes(size: int, parts: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """`size` samples shared out as `parts` say, by largest remainder; the first shares win ties. Where there are enough, none has
    fewer than `least`, and where there are not, none is empty as long as that goes.

    >>> sizes(8, (3, 1)), sizes(7, (1, 1, 1)), sizes(7, (100, 1, 1), 2), sizes(2, (3, 2, 1))
    ((6, 2), (3, 2, 2), (3, 2, 2), (1, 1, 0))
    """
    count = len(parts)
    if size < count:
        favoured = set(sorted(range(count), key=lambda i: (-parts[i], i))[:size])
        return tuple(int(i in favoured) for i in range(count))
    least, held = min(least, size // count), dict[int, int]()
    while True:
        free = [i for i in range(count) if i not in held]
        rest, whole = size - sum(held.values()), sum(parts[i] for i in free)
        small = [i for i in free if rest * parts[i] < least * whole]
        if not small:
            break
        held |= dict.fromkeys(small, least)
    found = held | {i: rest * parts[i] // whole for i in free}
    left = size - sum(found.values())
    for i in sorted(free, key=lambda i: (-(rest * parts[i] % whole), i))[:left]:
        found[i] += 1
    return tuple(found[i] for i in range(count))


class Course:
    """The parts of every step: those before a step, and those from it on. Loader processes see a change too: it is in memory that
    they share. A change is for steps that nobody has begun to read (see `ahead`)."""

    def __init__(self, ranks: int):
        self.table: Tensor = torch.ones(2, ranks + 1, dtype=torch.int64).share_memory_()
        """Before and after a change: the step from which on, and the parts."""
        self.table[:, 0] = 0

    def at(self, step: int) -> Parts:
        """Those of step number `step`, counted from 0."""
        before, after = self.table.tolist()
        return tuple((after if step >= after[0] else before)[1:])

    @property
    def last(self) -> tuple[int, Parts]:
        """(the step of the last change, or of one to come, the parts from it on)."""
        step, *parts = self.table[1].tolist()
        return step, tuple(parts)

    def change(self, step: int, parts: Sequence[int]) -> None:
        """Other parts from `step` on. The change before it has come about."""
        self.table[0] = self.table[1]
        self.table[1] = torch.tensor([step, *parts])

    def rows(self) -> list[list[int]]:
        """For a checkpoint."""
        return self.table.tolist()

    def restore(self, rows: list[list[int]]) -> None:
        """From one."""
        self.table.copy_(torch.tensor(rows))


class InTurn(Course):
    """For proofs: from the second step on, one share after the other has three times what the others have."""

    def at(self, step: int) -> Parts:
        """The first step's are alike, as in a dry run."""
        count = self.table.shape[1] - 1
        return tuple(3 if step and i == (step - 1) % count else 1 for i in range(count))


def ahead(workers: int) -> int:
    """So many steps after those that are done, nobody has begun to read samples: loader processes fetch two steps each."""
    return 2 * workers + 2
