"""The ledger: a row for each gradient that the server used or dropped, from which the run can be made again in one process.

A version is a state of the server's weights; the run begins with version 0, and update number k makes version k + 1 of version k.
The *staleness* of a gradient is how many versions were made between the weights it was computed at and the update that uses
it: version_made − 1 − version_read. At 0 it is what one device would compute.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LedgerRow:
    """One gradient, used or dropped."""

    seq: int
    """Number of the row."""
    group: int
    fence: int
    """Of the group when the portion was dealt: who is declared dead and comes back has a higher one."""
    clock: int
    epoch: int
    first: int
    """Of its samples in the clock's batch."""
    ids: tuple[int, ...]
    version_read: int
    version_made: int
    """By the update that uses it; −1 when it was dropped."""
    weight: float
    """What it counts in that update, as a share of all that the update takes (of the clock's samples under nesterov)."""
    dropped: str = ""
    """Why, when it was."""

    @property
    def staleness(self) -> int:
        return self.version_made - 1 - self.version_read

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "dropped" or value}


@dataclass(frozen=True)
class Death:
    """A group was declared dead after `seq` rows: nothing it computed under this fence, or an earlier one, is used any more."""

    seq: int
    group: int
    fence: int


def problems(
    rows: Sequence[LedgerRow], deaths: Iterable[Death], staleness: int, expected: Iterable[tuple[int, int]] | None = None,
    shards: Sequence[Sequence[int]] = (),
) -> list[str]:  # fmt: skip
    """What does not hold of a ledger, a sentence each.

    `expected`: (clock, place in its batch) of every sample that was to be seen. `shards`: the numbers of the rows that each
    server applied, in its order.
    """
    found = [*_numbers(rows), *_versions(rows, staleness), *_fenced(rows, deaths)]
    seen = Counter((row.clock, row.first + k) for row in rows for k in range(len(row.ids)))
    found += [f"sample {place} of clock {clock} counts {n} times" for (clock, place), n in seen.items() if n > 1]
    if expected is not None:
        wanted = set(expected)
        found += [f"sample {place} of clock {clock} was lost" for clock, place in sorted(wanted - seen.keys())]
        found += [f"sample {place} of clock {clock} was not dealt" for clock, place in sorted(seen.keys() - wanted)]
    used = [row.seq for row in rows if not row.dropped]
    for number, applied in enumerate(shards):
        if list(applied) != used:
            found.append(
                f"server {number} applied {len(applied)} gradients in another order than the ledger's {len(used)}"
            )
    return found


def _numbers(rows: Sequence[LedgerRow]) -> list[str]:
    wrong = next((i for i, row in enumerate(rows) if row.seq != rows[0].seq + i), None)
    return [] if wrong is None else [f"row {rows[wrong].seq} stands where row {rows[0].seq + wrong} belongs"]


def _versions(rows: Sequence[LedgerRow], staleness: int) -> list[str]:
    found, last = list[str](), None
    for row in rows:
        if row.dropped:
            continue
        if last is not None and row.version_made not in (last, last + 1):
            found.append(f"version {row.version_made} was made after version {last}")
        last = row.version_made
        if not 0 <= row.staleness <= staleness:
            found.append(
                f"row {row.seq} of group {row.group} read version {row.version_read} for version {row.version_made}: "
                f"staleness {row.staleness}, at most {staleness}"
            )
    return found


def _fenced(rows: Sequence[LedgerRow], deaths: Iterable[Death]) -> list[str]:
    return [
        f"row {row.seq} is of group {row.group} under fence {row.fence}, declared dead after {death.seq} rows"
        for death in deaths
        for row in rows
        if row.group == death.group and row.fence <= death.fence and row.seq >= death.seq and not row.dropped
    ]
