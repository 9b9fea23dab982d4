"""Both sides of a proof: the rows that one device noted, and for each those of the ranks, placed in the whole and compared."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.config.plan import Plan
from plait.proof.notes import SHARE, UnitNotes
from plait.proof.probes import TOLERANCE, apart, size_of


@dataclass(frozen=True)
class Wrong:
    """One row that is not the reference's: of which rank and micro-batch, by how much, and both."""

    rank: int
    micro: int
    size: float
    expected: Tensor
    actual: Tensor


@dataclass
class Sides:
    """Both sides' notes, and what the ranks told."""

    one: UnitNotes
    ranks: list[UnitNotes]
    told: list[dict[str, Any]]
    expected: dict[str, Any]
    plan: Plan
    index: dict[tuple[str, ...], list[tuple[int, int, str]]] = field(default_factory=dict)
    """(step, what, name, call, leaf) -> (rank, micro-batch, key) of each row of a rank."""

    @staticmethod
    def load(folder: Path, told: list[dict[str, Any]], expected: dict[str, Any], plan: Plan) -> "Sides":
        """As `verify` left them in its folder."""
        ranks = [UnitNotes.load(folder / f"noted-{rank}.safetensors") for rank in range(len(told))]
        sides = Sides(UnitNotes.load(folder / "noted.safetensors"), ranks, told, expected, plan)
        for rank, notes in enumerate(ranks):
            for known in notes.rows:
                *what, micro = known.split("|")
                if micro:
                    sides.index.setdefault(tuple(what), []).append((rank, int(micro), known))
        return sides

    def places(self, step: int, what: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """What the reference noted in a step, in order: (what, name, call, leaf); `what`: of these kinds only."""
        found = (tuple(known.split("|")) for known in self.one.rows)
        return [row[1:5] for row in found if row[0] == str(step) and (not what or row[1] in what)]

    def of(self, step: int, *where: str) -> list[tuple[int, int, str]]:
        """The ranks' rows of one place: (rank, micro-batch, key)."""
        return self.index.get((str(step), *where), [])

    def wrong(self, step: int, where: tuple[str, ...], what: str = "", floor: float = 0.0) -> list[Wrong]:
        """The ranks' rows that are not the reference's, of one place; of what the ranks noted as `what`, if given."""
        known = "|".join((str(step), *where, "0"))
        row, about = self.one.rows[known], self.one.about[known]
        scale = size_of(row, floor)
        found, partial = [], dict[tuple[int, int, int], list[Wrong]]()
        for rank, micro, mine in self.of(step, what or where[0], *where[1:]):
            notes = self.ranks[rank]
            expected, split = _placed(row, about, notes.about[mine])
            actual = notes.rows[mine]
            if expected is None or expected.shape != actual.shape:
                continue
            one = Wrong(rank, micro, apart(expected, actual, scale), expected, actual)
            at, cut = self.plan.at(rank), notes.about[mine][3]
            if split and (cut != SHARE or where[0] != "back"):
                partial.setdefault((self.plan.share(rank), micro, at["cp"]), []).append(one)
            elif where[0] == "back" and self.plan.cp > 1 and cut == -1:
                partial.setdefault((self.plan.share(rank), micro, at["tp"]), []).append(one)
            elif not one.size <= TOLERANCE:
                found.append(one)
        for rows in partial.values():  # shares of a sum, or parts of vectors
            total = torch.stack([one.actual for one in rows]).sum(0)
            size = apart(rows[0].expected, total, scale)
            if not size <= TOLERANCE and any(not one.size <= TOLERANCE for one in rows):
                found += [replace(one, size=size) for one in rows]
        return found


def _placed(row: Tensor, one: list[Any], mine: list[Any]) -> tuple[Tensor | None, bool]:
    """The rows of the reference that a rank's should be, None where that cannot be told; and whether they are shares."""
    (_, batch, whole, *_), (first, count, shape, cut, ranges) = one, mine
    if len(whole) != len(shape):
        return None, False
    differ = [d for d, (a, b) in enumerate(zip(whole, shape)) if a != b]
    if len(differ) > 1:
        return None, False
    for dim in differ:  # that of the samples
        if whole[dim] * count != shape[dim] * batch or whole[dim] % batch or 0 < dim == len(whole) - 1:
            return None, False
        each = whole[dim] // batch
        if (first + count) * each > whole[dim]:  # a rank has samples that the whole has not
            return None, False
        row = row.narrow(dim, first * each, count * each)
    if cut < 0:
        return row, cut == SHARE
    if cut == len(whole) - 1:
        return row, True
    if max(start + length for start, length in ranges) > row.shape[cut]:
        return None, False
    return torch.cat([row.narrow(cut, start, length) for start, length in ranges], cut), False
