"""Both sides of a proof: the recorded rows of one device, and for each the corresponding rows of the ranks, aligned and compared."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.config.plan import Plan
from plait.proof.activation_recorder import PARTIAL_SUM_DIM, RecordedRows
from plait.proof.probes import TOLERANCE, measure_scale, relative_max_diff


@dataclass(frozen=True)
class Mismatch:
    """One row of a rank and micro-batch that differs from the reference."""

    rank: int
    micro: int
    size: float
    expected: Tensor
    actual: Tensor


@dataclass
class TracePair:
    """The records of both sides, and the facts of the ranks."""

    reference: RecordedRows
    ranks: list[RecordedRows]
    rank_facts: list[dict[str, Any]]
    expected: dict[str, Any]
    plan: Plan
    index: dict[tuple[str, ...], list[tuple[int, int, str]]] = field(default_factory=dict)
    """(step, what, name, call, leaf) -> (rank, micro-batch, key) of each row of a rank."""

    @staticmethod
    def load(folder: Path, told: list[dict[str, Any]], expected: dict[str, Any], plan: Plan) -> "TracePair":
        """Read the files that `verify` wrote to its folder."""
        ranks = [RecordedRows.load(folder / f"noted-{rank}.safetensors") for rank in range(len(told))]
        sides = TracePair(RecordedRows.load(folder / "noted.safetensors"), ranks, told, expected, plan)
        for rank, notes in enumerate(ranks):
            for known in notes.rows:
                *what, micro = known.split("|")
                if micro:
                    sides.index.setdefault(tuple(what), []).append((rank, int(micro), known))
        return sides

    def list_places(self, step: int, what: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """Places recorded by the reference in a step, in order: (what, name, call, leaf). `what`: of these kinds only."""
        found = (tuple(known.split("|")) for known in self.reference.rows)
        return [row[1:5] for row in found if row[0] == str(step) and (not what or row[1] in what)]

    def get_rows(self, step: int, *where: str) -> list[tuple[int, int, str]]:
        """The ranks' rows of one place: (rank, micro-batch, key)."""
        return self.index.get((str(step), *where), [])

    def find_mismatches(self, step: int, where: tuple[str, ...], what: str = "", floor: float = 0.0) -> list[Mismatch]:
        """The ranks' rows of one place that differ from the reference. `what`: kind of the rows on the ranks, if it is another one."""
        known = "|".join((str(step), *where, "0"))
        row, about = self.reference.rows[known], self.reference.about[known]
        scale = measure_scale(row, floor)
        found, partial = [], dict[tuple[int, int, int], list[Mismatch]]()
        for rank, micro, mine in self.get_rows(step, what or where[0], *where[1:]):
            notes = self.ranks[rank]
            expected, split = _align_rows(row, about, notes.about[mine])
            actual = notes.rows[mine]
            if expected is None or expected.shape != actual.shape:
                continue
            one = Mismatch(rank, micro, relative_max_diff(expected, actual, scale), expected, actual)
            at, cut = self.plan.at(rank), notes.about[mine][3]
            if split and (cut != PARTIAL_SUM_DIM or where[0] != "back"):
                partial.setdefault((self.plan.dp_rank(rank), micro, at["cp"]), []).append(one)
            elif where[0] == "back" and self.plan.cp > 1 and cut == -1:
                partial.setdefault((self.plan.dp_rank(rank), micro, at["tp"]), []).append(one)
            elif not one.size <= TOLERANCE:
                found.append(one)
        for rows in partial.values():  # partial sums, or parts of vectors
            total = torch.stack([one.actual for one in rows]).sum(0)
            size = relative_max_diff(rows[0].expected, total, scale)
            if not size <= TOLERANCE and any(not one.size <= TOLERANCE for one in rows):
                found += [replace(one, size=size) for one in rows]
        return found


def _align_rows(row: Tensor, one: list[Any], mine: list[Any]) -> tuple[Tensor | None, bool]:
    """The rows of the reference that correspond to a rank's row, or None if unknown; and whether the rank's rows are partial sums."""
    (_, batch, whole, *_), (first, count, shape, cut, ranges) = one, mine
    if len(whole) != len(shape):
        return None, False
    differ = [d for d, (a, b) in enumerate(zip(whole, shape)) if a != b]
    if len(differ) > 1:
        return None, False
    for dim in differ:  # the dim of the samples
        if whole[dim] * count != shape[dim] * batch or whole[dim] % batch or 0 < dim == len(whole) - 1:
            return None, False
        each = whole[dim] // batch
        if (first + count) * each > whole[dim]:  # a rank has samples that the reference lacks
            return None, False
        row = row.narrow(dim, first * each, count * each)
    if cut < 0:
        return row, cut == PARTIAL_SUM_DIM
    if cut == len(whole) - 1:
        return row, True
    if max(start + length for start, length in ranges) > row.shape[cut]:
        return None, False
    return torch.cat([row.narrow(cut, start, length) for start, length in ranges], cut), False
