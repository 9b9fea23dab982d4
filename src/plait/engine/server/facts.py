"""What a checkpoint of groups and servers says beside weights, optimizer state and position."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.manifest import MANIFEST, read_manifest
from plait.config.errors import PlaitError, Problem
from plait.engine.server.portions import Portion, as_row, of_row


@dataclass(frozen=True)
class ServerFacts:
    """Where the ledger was."""

    version: int
    rows: int = 0
    fence: int = 0
    digest: str = ""
    pending: tuple[Portion, ...] = ()
    """Portions of clocks that are begun, which were neither used nor dropped."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return vars(self) | {"pending": [as_row(portion) for portion in self.pending]}

    @staticmethod
    def of(path: Path | None, step: int) -> "ServerFacts":
        """Those of a checkpoint; of one that no server made, and without one: a run that begins at this step. K002."""
        said = read_manifest(path).job.get("server") if path is not None else None
        if said is None:
            return ServerFacts(step)
        try:
            pending = tuple(of_row(row) for row in said["pending"])
            numbers = [said["version"], said["rows"], said["fence"], *(n for p in pending for n in vars(p).values())]
            if not all(type(n) is int and n >= 0 for n in numbers) or not all(p.count and p.size for p in pending):
                raise ValueError("what it says of the server are no numbers")
            return ServerFacts(said["version"], said["rows"], said["fence"], str(said["digest"]), pending)
        except (TypeError, ValueError, KeyError) as error:
            what = f"{path}/{MANIFEST} is damaged"
            raise PlaitError(Problem("K002", what, why=f"what it says of the server: {error}")) from None


def left_out(path: Path) -> str:
    """A line on samples that a run without servers does not see when it goes on from this checkpoint; else an empty one."""
    count = sum(portion.count for portion in ServerFacts.of(path, 0).pending)
    return (
        f"note  {count} samples that were dealt and not used when {path.name} was saved are left out" if count else ""
    )
