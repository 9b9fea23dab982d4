"""Memory use of a rank by category, compared with the plan's memory estimate from a dry run. See `engine/memory.py`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

STEP_CATEGORY = "made in a step"
"""Memory that is in use only within a step: gradients, activations, gathered, sent or temporary tensors."""
PERSISTENT = ("parameters", "host copies", "optimizer", "average", "outer", "residuals", "buffers", "batch")
"""Categories of the estimate that remain between steps. Gradients count as step memory, even if buckets keep them."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank in bytes. On CPUs the allocator and device fields are 0."""

    device: str
    """cpu, or cuda:0."""
    held: dict[str, int] = field(default_factory=dict)
    """Device tensors between two steps, by category of the estimate; gradients if buckets keep them."""
    host: dict[str, int] = field(default_factory=dict)
    """The same for host memory, if the device is another."""
    requested: int = 0
    """Peak bytes of device tensors since the last reset."""
    allocated: int = 0
    """The same in the allocator's blocks, whose sizes are rounded."""
    reserved: int = 0
    """Peak bytes that the allocator reserved on the device."""
    retries: int = 0
    """How often the allocator freed its cache to find memory."""
    beside: int = 0
    """Device memory in use outside the allocator: CUDA's context, NCCL's buffers, other processes."""
    total: int = 0
    """The device's memory."""
    resident: int = 0
    """The process's resident host memory, now and at its peak."""
    resident_peak: int = 0

    @property
    def made(self) -> int:
        """Bytes at the peak that are freed between steps."""
        return max(0, self.allocated - sum(n for name, n in self.held.items() if name != "gradients"))

    @property
    def fragmented(self) -> int:
        """Bytes that the allocator reserved beyond the tensors at the peak: free blocks too small to use, and rounding."""
        return max(0, self.reserved - self.requested)

    @property
    def needed(self) -> int:
        """Peak device memory of the process, including memory outside its allocator."""
        return self.reserved + self.beside

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, including the derived ones."""
        return asdict(self) | {"made": self.made, "fragmented": self.fragmented, "needed": self.needed}

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> "MemoryUse":
        return MemoryUse(**{f.name: row[f.name] for f in fields(MemoryUse) if f.name in row})

    def summarize(self) -> str:
        """Format a one-line summary for the end of a run."""
        if not self.total:
            return f"{format_bytes(self.resident_peak)} of host memory at peak"
        again = f", the allocator freed its cache {self.retries} times" if self.retries else ""
        return (
            f"{format_bytes(self.needed)} of {format_bytes(self.total)} at most: "
            f"tensors {format_bytes(self.requested)}, free but reserved by the allocator"
            f" {format_bytes(self.fragmented)}{again}; context, NCCL and others {format_bytes(self.beside)}"
        )

    def format_table(self, bill: Mapping[str, int] | None = None) -> list[str]:
        """Format a table by category, next to an estimate if given: bytes by category of a device at the peak of a step."""
        told, billed = self.group_by_category(), group_bill(bill) if bill is not None else {}
        names = [*dict.fromkeys((*told, *billed))]
        lines = [f"  {'':<28}{'measured':>12}" + f"{'bill':>12}" * bool(billed)]
        rows = [(name, told.get(name, 0), billed.get(name, 0)) for name in names]
        if self.total:
            rows.append(("tensors together", self.allocated, sum(billed.values())))
        for name, here, said in rows:
            lines.append(f"  {name:<28}{format_bytes(here):>12}" + f"{format_bytes(said):>12}" * bool(billed))
        for name, n in self._list_device_rows():
            lines.append(f"  {name:<28}{format_bytes(n):>12}")
        return lines

    def group_by_category(self) -> dict[str, int]:
        """Return the bytes that remain between steps by category, and the rest of the peak as one category."""
        held = {name: n for name, n in self.held.items() if n and name != "gradients"}
        return held | ({STEP_CATEGORY: self.made} if self.total else {})

    def _list_device_rows(self) -> list[tuple[str, int]]:
        host = [(f"{name}, on the host", n) for name, n in self.host.items() if n]
        if not self.total:
            return [*host, ("resident now", self.resident), ("resident at most", self.resident_peak)]
        return [
            *host, ("rounded up to blocks", max(0, self.allocated - self.requested)), ("reserved by the allocator", self.reserved),
            ("fragmented of it", self.fragmented), ("context, NCCL, others", self.beside), ("the device has", self.total),
        ]  # fmt: skip


def group_bill(bill: Mapping[str, int]) -> dict[str, int]:
    """Group an estimate into measurable categories: each one that remains between steps, and the rest as one."""
    found = {name: bill[name] for name in PERSISTENT if bill.get(name)}
    return found | {STEP_CATEGORY: sum(n for name, n in bill.items() if name not in PERSISTENT)}


def find_largest_excess(use: MemoryUse, bill: Mapping[str, int], more: int = 0) -> tuple[str, int, int] | None:
    """Return (category, measured, estimated) of the category that most exceeds its estimate; None if none does.

    `more`: bytes that an allocation requested without success.
    """
    told, billed = use.group_by_category(), group_bill(bill)
    told[STEP_CATEGORY] = told.get(STEP_CATEGORY, 0) + more
    above = [(name, n, billed.get(name, 0)) for name, n in told.items() if n > billed.get(name, 0)]
    return max(above, key=lambda row: row[1] - row[2], default=None)


def format_bytes(n: float) -> str:
    """Format bytes: 1.50 GiB, 12.0 MiB, 3.5 KiB."""
    scale, unit, digits = next(
        s for s in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)) if abs(n) >= s[0] or s[0] == 2**10
    )
    return f"{n / scale:.{digits}f} {unit}"


def find_fullest(rows: Mapping[int, Mapping[str, Any]], when: str = "end") -> tuple[int, MemoryUse] | None:
    """Return (rank, use) of the rank that needed most, among rows written by ranks (`RunDirectory.read_memories`)."""
    found = ((rank, MemoryUse.from_row(row[when])) for rank, row in rows.items() if when in row)
    return max(found, key=lambda pair: pair[1].needed or pair[1].resident_peak, default=None)
