"""Diagnosis of a gradient's wrong sum over ranks: contributions that are missing, doubled, scaled or corrupted.

After the reduction, a rank's gradient should be the sum of its peers' micro-batch gradients. If it is not, these explanations are tried: a
sum over fewer axes, a multiple of the sum, and a sum in which one contribution has another weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.proof.activation_recorder import make_row_key
from plait.proof.probes import TOLERANCE, measure_scale, relative_max_diff
from plait.proof.trace_pair import TracePair

EXPLAINED_TOLERANCE = 1e-7
"""Relative difference that may remain after an explanation."""

MAX_CONTRIBUTIONS = 8
"""Largest number of contributions that the 16 recorded values can distinguish."""


@dataclass(frozen=True)
class SumDiagnosis:
    """An explanation. `kind`: `reduction` over ranks or `accumulation` over micro-batches."""

    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    micros: tuple[int, ...]
    size: float
    how: str


@dataclass
class GradientSum:
    """The gradient of one parameter in one step: the value on each rank, and its own and its peers' contributions by (rank, micro-batch)."""

    sides: TracePair
    step: int
    name: str
    scale: float
    actual: dict[int, Tensor]
    contributions: dict[int, dict[tuple[int, int], Tensor]]
    """For each rank with a part of the sum: the contributions to that part."""
    local: float = 0.0
    """Relative difference between the contributions and the reference."""

    @staticmethod
    def from_traces(sides: TracePair, step: int, name: str, floor: float) -> "GradientSum | None":
        """None if no contributions were recorded."""
        expected = sides.reference.rows[make_row_key(step, "sum", name)]
        scale = measure_scale(expected, floor)
        known = make_row_key(step, "sum", name)
        has = {r: notes.rows[known] for r, notes in enumerate(sides.ranks) if known in notes.rows}
        rows: dict[int, list[tuple[int, Tensor]]] = {}
        for rank, micro, mine in sides.index.get((str(step), "gave", name, "0", "0"), []):
            rows.setdefault(rank, []).append((micro, sides.ranks[rank].rows[mine]))
        if not has or not rows:
            return None
        one = GradientSum(sides, step, name, scale, has, {})
        for rank in has:
            part = one.get_shard_index(rank)
            given = ((peer, micro, row) for peer in rows if one.is_peer(rank, peer) for micro, row in rows[peer])
            one.contributions[rank] = {(peer, micro): row[part] for peer, micro, row in given if part < len(row)}
        parts: dict[str, Tensor] = {}
        for rank, gave in one.contributions.items():
            if gave:
                parts.setdefault(one.get_part_key(rank), one.sum_contributions(rank))
        if len(parts) == len({one.get_part_key(rank) for rank in has}):
            total = torch.stack(list(parts.values())).sum(0)
            one.local = relative_max_diff(total, expected, scale)
        return one

    def get_part_key(self, rank: int) -> str:
        """Key of the parameter's part that a rank has after the sum."""
        return str(self.sides.rank_facts[rank]["parts"][self.name][1])

    def get_shard_index(self, rank: int) -> int:
        """Number of the rank's shard."""
        return self.sides.rank_facts[rank]["shard"].get(self.name, 0)

    def is_peer(self, rank: int, other: int) -> bool:
        """True if the gradient of rank `other` belongs to the sum of `rank`."""
        if rank == other:
            return True
        a, b = self.sides.plan.at(rank), self.sides.plan.at(other)
        at, told = self.sides.plan.at, self.sides.rank_facts
        shared = [ranks for names, ranks in told[rank]["partial"] if self.name in names]
        near = {(at(r)["tp"], at(r)["pp"]) for ranks in shared for r in ranks} | {(a["tp"], a["pp"])}
        return told[rank]["given"].get(self.name) == told[other]["given"].get(self.name) and (b["tp"], b["pp"]) in near

    @property
    def wrong_ranks(self) -> list[int]:
        """Ranks whose sum differs from the sum of the contributions."""
        return [r for r, given in self.contributions.items() if given and self.measure_error(r) > TOLERANCE]

    def measure_error(self, rank: int) -> float:
        """Relative difference between a rank's sum and its contributions."""
        return relative_max_diff(self.actual[rank], self.sum_contributions(rank), self.scale)

    def sum_contributions(self, rank: int) -> Tensor:
        """The correct sum of a rank."""
        return torch.stack(list(self.contributions[rank].values())).sum(0)

    def explain_single_rank(self) -> tuple[str, tuple[int, ...]]:
        """Find a weight of one rank's contributions that explains the reference's gradient. Returns (sentence, ranks)."""
        expected = self.sides.reference.rows[make_row_key(self.step, "sum", self.name)]
        ranks = {r for r, given in self.contributions.items() if given}
        if len({self.get_part_key(r) for r in ranks}) != 1:
            return "", ()
        found = find_miscounted(self.contributions[min(ranks)], expected, self.scale)
        if found is None or found[1] == 0:
            return "", ()
        (rank, _), weight = found
        return f"rank {rank} computes {1 / weight:.6g} times its contribution", (rank,)


def find_miscounted(
    given: dict[tuple[int, int], Tensor], has: Tensor, scale: float
) -> tuple[tuple[int, tuple[int, ...]], float] | None:
    """((rank, micro-batches), weight) that explains a sum if all other contributions have weight one."""
    total = torch.stack(list(given.values())).sum(0)
    groups: list[tuple[int, tuple[int, ...]]] = [(r, (m,)) for r, m in given]
    for rank in sorted({r for r, _ in given}):
        micros = tuple(sorted(m for r, m in given if r == rank))
        groups += [(rank, micros)] if len(micros) > 1 else []
        groups += [(rank, micros[:-1])] if len(micros) > 2 else []
    best = None
    for rank, micros in groups:
        one = torch.stack([given[rank, m] for m in micros]).sum(0)
        squares = float((one * one).sum())
        if squares <= (TOLERANCE * scale) ** 2:
            continue
        more = float(((has - total) * one).sum()) / squares
        miss = relative_max_diff(has - total, more * one, scale)
        if miss <= EXPLAINED_TOLERANCE * max(1.0, abs(more)) * 0.1 and (best is None or miss < best[0] * 0.1):
            best = miss, (rank, micros), round(1 + more, 9) + 0.0
    return None if best is None else (best[1], best[2])


def _solve_counts(given: dict[tuple[int, int], Tensor], has: Tensor, scale: float) -> dict[tuple[int, int], float]:
    """Weight of each contribution in a sum; empty if it is not determined."""
    rows = torch.stack(list(given.values()))
    if not 1 < len(rows) <= MAX_CONTRIBUTIONS or int(torch.linalg.matrix_rank(rows, rtol=1e-6)) < len(rows):
        return {}
    times = torch.linalg.lstsq(rows.T, has[:, None]).solution[:, 0]
    miss = float((times @ rows - has).abs().max()) / scale
    return dict(zip(given, times.tolist())) if miss <= EXPLAINED_TOLERANCE * 0.1 else {}


def diagnose_sum(one: GradientSum) -> SumDiagnosis:
    """Explain a wrong sum."""
    wrong, plan = one.wrong_ranks, one.sides.plan
    rank, size = wrong[0], max(one.measure_error(r) for r in wrong)
    ranks = tuple(wrong) if len(wrong) < len(one.contributions) else ()
    axes, total = _find_sum_axes(one, rank), one.sum_contributions(rank)
    given, has = one.contributions[rank], one.actual[rank]
    for missing in _list_subsets(axes):
        near = [row for (peer, _), row in given.items() if all(plan.at(peer)[a] == plan.at(rank)[a] for a in missing)]
        if near and relative_max_diff(has, torch.stack(near).sum(0), one.scale) <= TOLERANCE:
            return SumDiagnosis("reduction", missing, ranks, (), size, "each rank uses its own part of the sum")
    squares = float((total * total).sum())
    factor = float((total * has).sum()) / squares if squares else 0.0
    if squares and relative_max_diff(has, factor * total, one.scale) <= EXPLAINED_TOLERANCE * 0.1 * max(1.0, abs(factor)):
        how = "the sum is zero" if abs(factor) < 1e-9 else f"the sum is {factor:.7g} times the right value"
        return SumDiagnosis("reduction", axes, ranks, (), size, how)
    if told := _diagnose_counts(one, rank, ranks, size):
        return told
    before = one.sides.ranks[rank].rows.get(make_row_key(one.step - 1, "sum", one.name)) if one.step else None
    if before is not None and before.shape == has.shape and relative_max_diff(has, before, one.scale) <= TOLERANCE:
        return SumDiagnosis("reduction", axes, ranks, (), size, "it is the sum of the previous step")
    how = "it is not a sum of the ranks' contributions: they were changed or reordered in transfer"
    if size < 1e-2:
        how = f"it is off by {size:.1e}, as if values were rounded or changed in transfer"
    return SumDiagnosis("reduction", axes, ranks, (), size, how)


def _diagnose_counts(one: GradientSum, rank: int, ranks: tuple[int, ...], size: float) -> SumDiagnosis | None:
    """Find contributions with a wrong weight in a rank's sum: a single one, those of a rank, or those of a micro-batch on all ranks."""
    given, has, axes = one.contributions[rank], one.actual[rank], _find_sum_axes(one, rank)
    all_ = {m for _, m in given}
    last = [row for (_, m), row in given.items() if m == max(all_)]
    if len(all_) > 1 and relative_max_diff(has, torch.stack(last).sum(0), one.scale) <= TOLERANCE:
        return SumDiagnosis("accumulation", (), ranks, (), size, f"only micro-batch {max(all_)} is left")
    if found := find_miscounted(given, has, one.scale):
        (peer, micros), times = found
        many = len({m for r, m in given if r == peer}) > len(micros)
        what = f"micro-batch {', '.join(map(str, micros))} of rank {peer}" if many else f"the contribution of rank {peer}"
        how = f"{what} counts {times:.6g} times"
        if many:
            return SumDiagnosis("accumulation", (), (peer,), micros, size, how)
        return SumDiagnosis("reduction", _find_peer_axes(one, rank, peer, axes), ranks, (), size, how)
    told = _solve_counts(given, has, one.scale)
    if not told:
        return None
    micros = tuple(sorted({m for (_, m), times in told.items() if abs(times - 1) > 1e-6}))
    many = len(all_) > len(micros)
    micro = lambda m: f", micro-batch {m}," if len(all_) > 1 else ""  # noqa: E731
    how = f"it counts {', '.join(f'rank {r}{micro(m)} {times:.4g} times' for (r, m), times in told.items())}"
    return SumDiagnosis("accumulation" if many else "reduction", () if many else axes, ranks, micros if many else (), size, how)


def _find_sum_axes(one: GradientSum, rank: int) -> tuple[str, ...]:
    """Axes over which a rank's sum extends."""
    at = one.sides.plan.at
    having = (peer for peer, told in enumerate(one.sides.rank_facts) if one.name in told["given"])
    peers = [peer for peer in having if one.is_peer(rank, peer)]
    return tuple(axis for axis in at(rank) if any(at(peer)[axis] != at(rank)[axis] for peer in peers))


def _find_peer_axes(one: GradientSum, rank: int, peer: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes on which another rank's contribution arrives."""
    at = one.sides.plan.at
    return tuple(axis for axis in axes if at(rank)[axis] != at(peer)[axis]) or axes


def _list_subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Non-empty subsets, small ones first."""
    found = [tuple(a for i, a in enumerate(axes) if bits >> i & 1) for bits in range(1, 2 ** len(axes))]
    return sorted(found, key=len)
