"""A round: one start of a run's ranks, up to their end or to the loss of one (torch elastic's word). Which machine has which ranks, on which
devices, under which plan; the same record on one machine and on many."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """Round `number` of a run. Ranks are numbered machine by machine, in the order of the machines' numbers."""

    number: int
    plan: str
    devices: dict[int, tuple[int, ...]]
    """The devices that the ranks of each machine use, by their numbers there."""

    @property
    def world(self) -> int:
        """Ranks of the round."""
        return sum(map(len, self.devices.values()))

    def ranks_of(self, machine: int) -> range:
        """The ranks of a machine; none if it does not take part."""
        start = sum(len(there) for k, there in self.devices.items() if k < machine)
        return range(start, start + len(self.devices.get(machine, ())))

    def machine_of(self, rank: int) -> int:
        return next(k for k in self.devices if rank in self.ranks_of(k))

    def device_of(self, rank: int) -> int:
        """The number of a rank's device, on its machine."""
        machine = self.machine_of(rank)
        return self.devices[machine][rank - self.ranks_of(machine).start]

    def neighbours_of(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """A rank of the next machine, and the ranks of the one before whose neighbour this one is."""
        return self._next(rank), tuple(other for other in range(self.world) if self._next(other) == rank)

    def kept_by(self, machine: int) -> int:
        """Ranks of this machine and of the one before."""
        machines = sorted(self.devices)
        return len(self.devices[machine]) + len(self.devices[machines[machines.index(machine) - 1]])

    def _next(self, rank: int) -> int:
        machines = sorted(self.devices)
        mine = self.machine_of(rank)
        there = self.ranks_of(machines[(machines.index(mine) + 1) % len(machines)])
        return there[(rank - self.ranks_of(mine).start) % len(there)]

    def first(self, world: int) -> dict[int, tuple[int, ...]]:
        """The devices of the first `world` ranks."""
        kept = {k: tuple(d for d, rank in zip(there, self.ranks_of(k)) if rank < world) for k, there in self.devices.items()}
        return {k: there for k, there in kept.items() if there}
