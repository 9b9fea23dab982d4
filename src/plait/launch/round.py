"""A round: one start of a run's ranks, until they end or one is lost (torch elastic's word).

It assigns ranks and devices to nodes, under a plan. One node and many nodes use the same record.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """Round `number` of a run. Ranks are numbered node by node, in the order of the nodes' numbers."""

    number: int
    plan: str
    devices: dict[int, tuple[int, ...]]
    """Device indices of each node's ranks."""

    @property
    def world(self) -> int:
        """Number of ranks in the round."""
        return sum(map(len, self.devices.values()))

    def ranks_of(self, machine: int) -> range:
        """The ranks of a node; none if it does not take part."""
        start = sum(len(there) for k, there in self.devices.items() if k < machine)
        return range(start, start + len(self.devices.get(machine, ())))

    def node_of(self, rank: int) -> int:
        return next(k for k in self.devices if rank in self.ranks_of(k))

    def device_of(self, rank: int) -> int:
        """Index of a rank's device on its node."""
        machine = self.node_of(rank)
        return self.devices[machine][rank - self.ranks_of(machine).start]

    def neighbors_of(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """A rank of the next node, and the ranks of the previous node that have this rank as their neighbor."""
        return self._next_node_rank(rank), tuple(other for other in range(self.world) if self._next_node_rank(other) == rank)

    def count_kept_ranks(self, machine: int) -> int:
        """Number of ranks of this node and of the previous one."""
        machines = sorted(self.devices)
        return len(self.devices[machine]) + len(self.devices[machines[machines.index(machine) - 1]])

    def _next_node_rank(self, rank: int) -> int:
        machines = sorted(self.devices)
        mine = self.node_of(rank)
        there = self.ranks_of(machines[(machines.index(mine) + 1) % len(machines)])
        return there[(rank - self.ranks_of(mine).start) % len(there)]

    def limit_devices(self, world: int) -> dict[int, tuple[int, ...]]:
        """The devices of the first `world` ranks."""
        kept = {k: tuple(d for d, rank in zip(there, self.ranks_of(k)) if rank < world) for k, there in self.devices.items()}
        return {k: there for k, there in kept.items() if there}
