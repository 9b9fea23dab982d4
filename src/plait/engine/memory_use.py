"""What a rank's memory was used for, as numbers: beside the bill of its plan, as a dry run writes it. See `engine/memory.py`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MADE = "made in a step"
"""What is not there between two steps: gradients, activations, what is gathered, sent or temporary."""
BETWEEN = ("parameters", "host copies", "optimizer", "average", "outer", "residuals", "buffers", "batch")
"""Categories of a bill that are there between two steps. Gradients count with what a step makes, also where buckets keep them."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank. On processors the allocator and the device say nothing, and those fields are 0."""

    device: str
    """cpu, or cuda:0."""
    held: dict[str, int] = field(default_factory=dict)
    """What tensors of the device there are between two steps, by the categories of a bill; gradients where buckets keep them."""
    host: dict[str, int] = field(default_factory=dict)
    """The same of the host, where the device is another."""
    requested: int = 0
    """Tensors on the device at the fullest moment since the peaks were reset."""
    allocated: int = 0
    """The same in the allocator's blocks, whose sizes are rounded."""
    reserved: int = 0
    """What the allocator had taken of the device at the most."""
    retries: int = 0
    """How often it gave back all that it kept, to find room."""
    beside: int = 0
    """What the device has beyond it now: CUDA's context, NCCL's buffers, other processes."""
    total: int = 0
    """The device's memory."""
    resident: int = 0
    """The process's part of the host's memory, and the most it has been."""
    resident_peak: int = 0

    @property
    def made(self) -> int:
        """Of the fullest moment, what is not there between two steps."""
        return max(0, self.allocated - sum(n for name, n in self.held.items() if name != "gradients"))

    @property
    def fragmented(self) -> int:
        """What the allocator kept beside the tensors of the fullest moment: blocks that were free but fit nothing, and rounding."""
        return max(0, self.reserved - self.requested)

    @property
    def needed(self) -> int:
        """The most that the process had of the device, with what is beside its allocator."""
        return self.reserved + self.beside

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with what follows from the fields."""
        return asdict(self) | {"made": self.made, "fragmented": self.fragmented, "needed": self.needed}

    @staticmethod
    def of(row: Mapping[str, Any]) -> "MemoryUse":
        return MemoryUse(**{f.name: row[f.name] for f in fields(MemoryUse) if f.name in row})

    def line(self) -> str:
        """In one line, for the end of a run."""
        if not self.total:
            return f"{size(self.resident_peak)} of the host's memory at most"
        again = f", {self.retries} times it had to free its cache" if self.retries else ""
        return (
            f"{size(self.needed)} of {size(self.total)} at most: tensors {size(self.requested)}, kept by the allocator beside them"
            f" {size(self.fragmented)}{again}; context, NCCL and others {size(self.beside)}"
        )

    def table(self, bill: Mapping[str, int] | None = None) -> list[str]:
        """By category, beside a bill where there is one: bytes by category of a device at the fullest moment of a step."""
        told, billed = self.by_category(), by_part(bill) if bill is not None else {}
        names = [*dict.fromkeys((*told, *billed))]
        lines = [f"  {'':<28}{'measured':>12}" + f"{'bill':>12}" * bool(billed)]
        rows = [(name, told.get(name, 0), billed.get(name, 0)) for name in names]
        if self.total:
            rows.append(("tensors together", self.allocated, sum(billed.values())))
        for name, here, said in rows:
            lines.append(f"  {name:<28}{size(here):>12}" + f"{size(said):>12}" * bool(billed))
        for name, n in self._of_device():
            lines.append(f"  {name:<28}{size(n):>12}")
        return lines

    def by_category(self) -> dict[str, int]:
        """What is held between two steps, and the rest of the fullest moment as one."""
        held = {name: n for name, n in self.held.items() if n and name != "gradients"}
        return held | ({MADE: self.made} if self.total else {})

    def _of_device(self) -> list[tuple[str, int]]:
        host = [(f"{name}, on the host", n) for name, n in self.host.items() if n]
        if not self.total:
            return [*host, ("resident now", self.resident), ("resident at most", self.resident_peak)]
        return [
            *host, ("rounded up to blocks", max(0, self.allocated - self.requested)), ("reserved by the allocator", self.reserved),
            ("fragmented of it", self.fragmented), ("context, NCCL, others", self.beside), ("the device has", self.total),
        ]  # fmt: skip


def by_part(bill: Mapping[str, int]) -> dict[str, int]:
    """A bill in the categories that can be measured: what is there between steps, each, and the rest as one."""
    found = {name: bill[name] for name in BETWEEN if bill.get(name)}
    return found | {MADE: sum(n for name, n in bill.items() if name not in BETWEEN)}


def grown(use: MemoryUse, bill: Mapping[str, int], more: int = 0) -> tuple[str, int, int] | None:
    """(category, measured, billed) of what is furthest above its bill; `more`: what was asked for and not there. None: nothing is."""
    told, billed = use.by_category(), by_part(bill)
    told[MADE] = told.get(MADE, 0) + more
    above = [(name, n, billed.get(name, 0)) for name, n in told.items() if n > billed.get(name, 0)]
    return max(above, key=lambda row: row[1] - row[2], default=None)


def size(n: float) -> str:
    """1.50 GiB, 12.0 MiB, 3.5 KiB."""
    scale, unit, digits = next(
        s for s in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)) if abs(n) >= s[0] or s[0] == 2**10
    )
    return f"{n / scale:.{digits}f} {unit}"


def fullest(rows: Mapping[int, Mapping[str, Any]], when: str = "end") -> tuple[int, MemoryUse] | None:
    """(rank, use) of the rank that needed most, of what ranks have written (`RunDirectory.memories`)."""
    found = ((rank, MemoryUse.of(row[when])) for rank, row in rows.items() if when in row)
    return max(found, key=lambda pair: pair[1].needed or pair[1].resident_peak, default=None)
