"""A gradient's sum over ranks, explained by what the ranks gave: which were left out, doubled, scaled, or changed on the way.

A rank's gradient after the sum should be the sum of what its peers' micro-batches gave. Where it is not, it is tried whether
it is the sum over fewer axes, a multiple of it, or the sum with one contribution counted otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.proof.notes import key
from plait.proof.probes import TOLERANCE, apart, size_of
from plait.proof.sides import Sides

EXPLAINED = 1e-7
"""A relative difference that an explanation may leave."""

MOST = 8
"""Contributions to a sum that are told apart by the 16 numbers kept of each."""


@dataclass(frozen=True)
class Told:
    """An explanation: `reduction` over ranks or `accumulation` over micro-batches, and what it is."""

    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    micros: tuple[int, ...]
    size: float
    how: str


@dataclass
class Sum:
    """One parameter's gradient in one step: of each rank what it has, and what it and its peers gave, by (rank, micro-batch)."""

    sides: Sides
    step: int
    name: str
    scale: float
    has: dict[int, Tensor]
    gave: dict[int, dict[tuple[int, int], Tensor]]
    """Of each rank that has a part of the sum: the contributions to that part."""
    local: float = 0.0
    """By how much the contributions miss the reference."""

    @staticmethod
    def of(sides: Sides, step: int, name: str, floor: float) -> "Sum | None":
        """None where contributions were not seen."""
        expected = sides.one.rows[key(step, "sum", name)]
        scale = size_of(expected, floor)
        known = key(step, "sum", name)
        has = {r: notes.rows[known] for r, notes in enumerate(sides.ranks) if known in notes.rows}
        rows: dict[int, list[tuple[int, Tensor]]] = {}
        for rank, micro, mine in sides.index.get((str(step), "gave", name, "0", "0"), []):
            rows.setdefault(rank, []).append((micro, sides.ranks[rank].rows[mine]))
        if not has or not rows:
            return None
        one = Sum(sides, step, name, scale, has, {})
        for rank in has:
            part = one.part(rank)
            given = ((peer, micro, row) for peer in rows if one.peers(rank, peer) for micro, row in rows[peer])
            one.gave[rank] = {(peer, micro): row[part] for peer, micro, row in given if part < len(row)}
        parts: dict[str, Tensor] = {}
        for rank, gave in one.gave.items():
            if gave:
                parts.setdefault(one.held(rank), one.total(rank))
        if len(parts) == len({one.held(rank) for rank in has}):
            total = torch.stack(list(parts.values())).sum(0)
            one.local = apart(total, expected, scale)
        return one

    def held(self, rank: int) -> str:
        """Which part of the parameter a rank has after the sum."""
        return str(self.sides.told[rank]["parts"][self.name][1])

    def part(self, rank: int) -> int:
        """Which of the shards it is."""
        return self.sides.told[rank]["shard"].get(self.name, 0)

    def peers(self, rank: int, other: int) -> bool:
        """Whether what one rank gives belongs to another's sum."""
        if rank == other:
            return True
        a, b = self.sides.plan.at(rank), self.sides.plan.at(other)
        at, told = self.sides.plan.at, self.sides.told
        shared = [ranks for names, ranks in told[rank]["partial"] if self.name in names]
        near = {(at(r)["tp"], at(r)["pp"]) for ranks in shared for r in ranks} | {(a["tp"], a["pp"])}
        return told[rank]["given"].get(self.name) == told[other]["given"].get(self.name) and (b["tp"], b["pp"]) in near

    @property
    def wrong(self) -> list[int]:
        """The ranks whose sum is not that of the contributions."""
        return [r for r, given in self.gave.items() if given and self.off(r) > TOLERANCE]

    def off(self, rank: int) -> float:
        """By how much a rank's sum misses its contributions."""
        return apart(self.has[rank], self.total(rank), self.scale)

    def total(self, rank: int) -> Tensor:
        """What a rank's sum should be."""
        return torch.stack(list(self.gave[rank].values())).sum(0)

    def of_one_rank(self) -> tuple[str, tuple[int, ...]]:
        """How contributions would have to count so that they made the reference's gradient, where one rank's alone would do."""
        expected = self.sides.one.rows[key(self.step, "sum", self.name)]
        ranks = {r for r, given in self.gave.items() if given}
        if len({self.held(r) for r in ranks}) != 1:
            return "", ()
        found = one_counts_otherwise(self.gave[min(ranks)], expected, self.scale)
        if found is None or found[1] == 0:
            return "", ()
        (rank, _), weight = found
        return f"rank {rank} computes {1 / weight:.6g} times its share", (rank,)


def one_counts_otherwise(
    given: dict[tuple[int, int], Tensor], has: Tensor, scale: float
) -> tuple[tuple[int, tuple[int, ...]], float] | None:
    """((rank, micro-batches), how often they count) that explains a sum, if the others count once."""
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
        miss = apart(has - total, more * one, scale)
        if miss <= EXPLAINED * max(1.0, abs(more)) * 0.1 and (best is None or miss < best[0] * 0.1):
            best = miss, (rank, micros), round(1 + more, 9) + 0.0
    return None if best is None else (best[1], best[2])


def _each_otherwise(given: dict[tuple[int, int], Tensor], has: Tensor, scale: float) -> dict[tuple[int, int], float]:
    """How often each contribution counts in a sum, where that can be told; else nothing."""
    rows = torch.stack(list(given.values()))
    if not 1 < len(rows) <= MOST or int(torch.linalg.matrix_rank(rows, rtol=1e-6)) < len(rows):
        return {}
    times = torch.linalg.lstsq(rows.T, has[:, None]).solution[:, 0]
    miss = float((times @ rows - has).abs().max()) / scale
    return dict(zip(given, times.tolist())) if miss <= EXPLAINED * 0.1 else {}


def explained(one: Sum) -> Told:
    """What became of a sum that is wrong."""
    wrong, plan = one.wrong, one.sides.plan
    rank, size = wrong[0], max(one.off(r) for r in wrong)
    ranks = tuple(wrong) if len(wrong) < len(one.gave) else ()
    axes, total = _axes(one, rank), one.total(rank)
    given, has = one.gave[rank], one.has[rank]
    for missing in _subsets(axes):
        near = [row for (peer, _), row in given.items() if all(plan.at(peer)[a] == plan.at(rank)[a] for a in missing)]
        if near and apart(has, torch.stack(near).sum(0), one.scale) <= TOLERANCE:
            return Told("reduction", missing, ranks, (), size, "each rank goes on with its own share of the sum")
    squares = float((total * total).sum())
    factor = float((total * has).sum()) / squares if squares else 0.0
    if squares and apart(has, factor * total, one.scale) <= EXPLAINED * 0.1 * max(1.0, abs(factor)):
        how = "the sum is zero" if abs(factor) < 1e-9 else f"the sum is {factor:.7g} times what it should be"
        return Told("reduction", axes, ranks, (), size, how)
    if told := _counted(one, rank, ranks, size):
        return told
    before = one.sides.ranks[rank].rows.get(key(one.step - 1, "sum", one.name)) if one.step else None
    if before is not None and before.shape == has.shape and apart(has, before, one.scale) <= TOLERANCE:
        return Told("reduction", axes, ranks, (), size, "it is the sum of the step before")
    how = "it is no sum of what the ranks gave: changed, or put in another order, on its way"
    if size < 1e-2:
        how = f"it is off by {size:.1e}, as if numbers were rounded or changed on their way"
    return Told("reduction", axes, ranks, (), size, how)


def _counted(one: Sum, rank: int, ranks: tuple[int, ...], size: float) -> Told | None:
    """Contributions of a rank's sum that count more or less than once: one of them, a rank's, or a micro-batch's on all."""
    given, has, axes = one.gave[rank], one.has[rank], _axes(one, rank)
    all_ = {m for _, m in given}
    last = [row for (_, m), row in given.items() if m == max(all_)]
    if len(all_) > 1 and apart(has, torch.stack(last).sum(0), one.scale) <= TOLERANCE:
        return Told("accumulation", (), ranks, (), size, f"only micro-batch {max(all_)} is left")
    if found := one_counts_otherwise(given, has, one.scale):
        (peer, micros), times = found
        many = len({m for r, m in given if r == peer}) > len(micros)
        what = f"micro-batch {', '.join(map(str, micros))} of rank {peer}" if many else f"what rank {peer} gives"
        how = f"{what} counts {times:.6g} times"
        if many:
            return Told("accumulation", (), (peer,), micros, size, how)
        return Told("reduction", _between(one, rank, peer, axes), ranks, (), size, how)
    told = _each_otherwise(given, has, one.scale)
    if not told:
        return None
    micros = tuple(sorted({m for (_, m), times in told.items() if abs(times - 1) > 1e-6}))
    many = len(all_) > len(micros)
    micro = lambda m: f", micro-batch {m}," if len(all_) > 1 else ""  # noqa: E731
    how = f"it counts {', '.join(f'rank {r}{micro(m)} {times:.4g} times' for (r, m), times in told.items())}"
    return Told("accumulation" if many else "reduction", () if many else axes, ranks, micros if many else (), size, how)


def _axes(one: Sum, rank: int) -> tuple[str, ...]:
    """The axes that a rank's sum goes over."""
    at = one.sides.plan.at
    having = (peer for peer, told in enumerate(one.sides.told) if one.name in told["given"])
    peers = [peer for peer in having if one.peers(rank, peer)]
    return tuple(axis for axis in at(rank) if any(at(peer)[axis] != at(rank)[axis] for peer in peers))


def _between(one: Sum, rank: int, peer: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes on which another rank's contribution comes."""
    at = one.sides.plan.at
    return tuple(axis for axis in axes if at(rank)[axis] != at(peer)[axis]) or axes


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Non-empty subsets, small ones first."""
    found = [tuple(a for i, a in enumerate(axes) if bits >> i & 1) for bits in range(1, 2 ** len(axes))]
    return sorted(found, key=len)
