"""How long a collective takes: pure arithmetic from links, sizes and places. No torch, no device.

A group is `ranks` devices `stride` apart in rank order. It meets on levels: first the devices of one island (NVLink),
then those of one node, then the nodes. All groups of one axis are taken to be busy at once, as they are in training:
the bandwidth of a link is per device, so a group with one device in each node has one share of the node's network.

Two algorithms, as NCCL has them, in three protocols that trade bandwidth for latency; the fastest counts:

* ring: every device passes 2 (n-1)/n of the bytes on. Of these, 1/g leave by each device's share of a slower link when g
  devices of the group are below it. The pipeline of chunks moves at the speed of its slowest link. 2 (n-1) hops.
* tree: devices of a node in a chain, nodes in a double binary tree: fewer hops, 2 (g-1 + log2 k). A node in the middle
  sends up once and down twice, half of the bytes in each of two trees: the same bytes as a long ring, half for two nodes.

All-gather and reduce-scatter are rings of one lap. `bench/collectives.py` compares this with published measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """What joins `devices` consecutive devices (None: all of the machine).

    `bandwidth` is bytes/s one way per device, `latency` seconds of one hop in the simple protocol. `shares`, where the
    devices are joined by a mesh and not by a switch, is the part of the bandwidth that rings through the first 2, 3, …
    devices can use.
    """

    name: str
    devices: int | None
    bandwidth: float
    latency: float
    kind: str = "nvlink"
    shares: tuple[float, ...] = ()

    def hops(self) -> tuple[float, ...]:
        """Seconds of one hop in each protocol: faster ones keep their ratio to `latency`."""
        table = HOPS[self.kind]
        return tuple(self.latency * seconds / table[0] for seconds in table)

    def rate(self, ranks: int) -> float:
        """Bytes/s one way per device that a group with `ranks` devices on this link can use."""
        share = self.shares[ranks - 2] if 2 <= ranks < len(self.shares) + 2 else 1.0
        return self.bandwidth * share * FITTED["network" if self.between_nodes else "link"]

    @property
    def between_nodes(self) -> bool:
        """Whether it joins nodes: there NCCL has trees."""
        return self.kind in ("network", "efa")


class Protocol(NamedTuple):
    """One of NCCL's ways to move bytes: the part of a link's bandwidth it reaches, and seconds per call."""

    bandwidth: float
    call: float


PROTOCOLS = (Protocol(1.0, 8.4e-6), Protocol(0.92, 14e-6), Protocol(0.5, 6.6e-6))
"""Simple, LL128 and LL, from the tuning table of NCCL's source (src/graph/tuning.cc)."""

FITTED = {
    "link": 0.98,  # part of the data sheet's bandwidth that a link inside a node reaches
    "network": 0.97,  # the same between nodes
    "memory passes": 3.0,  # how often an all-reduce's bytes cross device memory on the way; half for one lap
    "call": 29e-6,  # seconds to start any collective: kernel, ranks meeting
    "efa hop": 84e-6,  # seconds of a hop between nodes over EFA, in every protocol
}
"""All constants fitted to measurements (collectives of A100, V100 and B200 nodes), with what each stands for."""

HOPS = {
    "nvlink": (3.4e-6, 1.9e-6, 0.6e-6),
    "pcie": (5.7e-6, 2.5e-6, 1.0e-6),
    "network": (14e-6, 4.0e-6, 2.7e-6),
    "loopback": (100e-6, 100e-6, 100e-6),
    "efa": (FITTED["efa hop"],) * 3,
}
"""Seconds of one hop by kind of link in each protocol: the same table. EFA's is fitted.

Gloo over the loopback interface has no data sheet: `plait bench comm` measures it.
"""

TREE = 0.92
"""Part of a ring's bandwidth that a tree reaches inside a node (the same table)."""


class Level(NamedTuple):
    """Where `ranks` members, or groups of members, meet: bytes/s one way per device, seconds per hop in each protocol.

    `inside` devices of the group are below each of them; `repeats` such meetings exist side by side in the group.
    """

    ranks: int
    bandwidth: float
    hops: tuple[float, ...]
    inside: int
    repeats: int
    between_nodes: bool


def levels(links: tuple[Link, ...], ranks: int, stride: int = 1) -> tuple[Level, ...]:
    """The levels of a group, innermost first, for links given innermost first. None for a single rank.

    Where a group does not fill its nodes evenly (12 ranks on nodes of 8) the fewest nodes are shared out evenly.
    Raises LookupError when no link reaches all of the group.
    """
    found, inside = [], 1
    for link in links:
        reach = inf if link.devices is None else max(1, link.devices // stride)
        groups = max(1, ceil(ranks / reach))
        members = ceil(ranks / groups)
        if members > inside:
            meeting = ceil(members / inside)
            found.append(Level(meeting, link.rate(members), link.hops(), inside, groups, link.between_nodes))
            inside = members
    if inside < ranks:
        raise LookupError(f"no link joins {ranks} devices {stride} apart")
    return tuple(found)


def all_reduce(size: float, group: tuple[Level, ...], memory: float = inf) -> float:
    """Seconds to sum `size` bytes over a group; `memory` is the bytes/s of a device's memory."""
    return _fastest(
        group, lambda which: min(_ring(size, group, which, 2), _tree(size, group, which)), _passes(size, memory, 2)
    )


def all_gather(size: float, group: tuple[Level, ...], memory: float = inf) -> float:
    """Seconds until every device has the `size` bytes of which each had its part. A reduce-scatter takes as long."""
    return _fastest(group, lambda which: _ring(size, group, which, 1), _passes(size, memory, 1))


reduce_scatter = all_gather


def all_to_all(size: float, group: tuple[Level, ...], memory: float = inf) -> float:
    """Seconds for every device to send each other one its part of `size` bytes, directly, to up to 8 at a time."""

    def exchange(which: int) -> float:
        n, seconds, hops = _ranks(group), 0.0, 0.0
        for level in group:
            peers = level.inside * (level.ranks - 1)
            seconds = max(seconds, size * peers / n / level.bandwidth)
            hops += ceil(peers / 8) * level.hops[which]
        return _moving(seconds, which) + hops

    return _fastest(group, exchange, _passes(size, memory, 1))


def send(size: float, group: tuple[Level, ...], memory: float = inf) -> float:
    """Seconds to send `size` bytes from one of two devices to the other; nothing is added up, so memory plays no part."""
    return _fastest(group, lambda which: _moving(size / group[-1].bandwidth, which) + group[-1].hops[which], 0.0)


def _ranks(group: tuple[Level, ...]) -> int:
    return group[-1].inside * group[-1].ranks if group else 1


def _moving(seconds: float, which: int) -> float:
    return seconds / PROTOCOLS[which].bandwidth


def _passes(size: float, memory: float, laps: int) -> float:
    return size * FITTED["memory passes"] * laps / 2 / memory


def _fastest(group: tuple[Level, ...], seconds: Callable[[int], float], passes: float) -> float:
    if not group:
        return 0.0
    return FITTED["call"] + passes + min(p.call + seconds(which) for which, p in enumerate(PROTOCOLS))


def _ring(size: float, group: tuple[Level, ...], which: int, laps: int) -> float:
    n = _ranks(group)
    bytes_ = laps * (n - 1) / n * size
    slowest = max(bytes_ / level.inside / level.bandwidth for level in group)
    hops = sum((level.ranks - 1) * level.repeats * level.hops[which] for level in group)
    return _moving(slowest, which) + laps * hops


def _tree(size: float, group: tuple[Level, ...], which: int) -> float:
    *inner, outer = group
    if not outer.between_nodes:  # a chain: a ring's hops, and more bytes
        return inf
    chains = [2 * size / level.inside / level.bandwidth / TREE for level in inner]
    between = 2 * size * min(1.0, (outer.ranks - 1) / 2) / outer.inside / outer.bandwidth
    hops = sum((level.ranks - 1) * level.hops[which] for level in inner) + log2(outer.ranks) * outer.hops[which]
    return _moving(max([*chains, between]), which) + 2 * hops
