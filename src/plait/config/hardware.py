"""What devices and the links between them do per second: data sheets, measurements, and the seconds of a collective. No torch.

What is known of a kind of device: rates and memory of its data sheet, and what was measured on the machine itself.

[Note: Collectives]
How long a collective takes: pure arithmetic from links, sizes and places. No torch, no device.

A group is `ranks` devices `stride` apart in rank order. It meets on levels: first the devices of one island (NVLink),
then those of one node, then the nodes. All groups of one axis are taken to be busy at once, as they are in training:
the bandwidth of a link is per device, so a group with one device in each node has one share of the node's network.

Algorithms as NCCL has them, in three protocols that trade bandwidth for latency; the fastest counts:

* ring: every device passes 2 (n-1)/n of the bytes on. Of these, 1/g leave by each device's share of a slower link when g
  devices of the group are below it. The pipeline of chunks moves at the speed of its slowest link. 2 (n-1) hops.
* tree: devices of a node in a chain, nodes in a double binary tree: fewer hops, 2 (g-1 + log2 k). A node in the middle
  sends up once and down twice, half of the bytes in each of two trees: the same bytes as a long ring, half for two nodes.
  Where the node's switch can add up (NVLS), a device sends and receives (1 + 1/g) of the bytes instead of a chain's 2.

All-gather and reduce-scatter are rings of one lap. `bench/collectives.py` compares this with published measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, log2
from typing import NamedTuple

KINDS, NOT_YET = ("auto", "cpu", "cuda"), ("xpu", "mps")
"""What `--device` takes, and kinds of devices that torch knows and plait does not train on yet."""
CORES = "processes on cores"
"""The note of a machine without accelerators."""


@dataclass(frozen=True)
class Rates:
    """One number per precision, None where it is not known."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None

    def of(self, precision: str) -> float | None:
        """The number of one precision."""
        return getattr(self, precision)


@dataclass(frozen=True)
class Device:
    """One device. `memory` is in bytes, `memory_bandwidth` in bytes/s, `peak` in flop/s, dense.

    `achievable` is the part of the peak that the best matmuls reach.
    """

    name: str
    memory: int
    memory_bandwidth: float | None = None
    peak: Rates = Rates()
    achievable: Rates = Rates()
    multiprocessors: int | None = None
    """Parts that compute a tile of a matmul each."""


@dataclass(frozen=True)
class Matmuls:
    """Measured: points (flops of one matmul, part of the peak it reached), smallest first."""

    precision: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Collectives:
    """Measured: points (bytes, seconds) of one collective in a group of neighbouring ranks, smallest first."""

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Loader:
    """Measured: samples/s that one rank reads of a job's data, while the other ranks of its node do the same."""

    job: str
    samples_per_s: float


def between(points: tuple[tuple[float, float], ...], x: float) -> float:
    """The value at `x` on straight lines between points, and that of the first and the last outside of them.

    >>> between(((1.0, 10.0), (3.0, 20.0)), 2.0)
    15.0
    """
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def seconds_at(points: tuple[tuple[float, float], ...], size: float) -> float:
    """Seconds for `size` bytes: between the measured points, and straight on beyond the last two."""
    if len(points) < 2 or size <= points[-1][0]:
        return between(points, size)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, y1 - y0) * (size - x1) / (x1 - x0)


@dataclass(frozen=True)
class Link:
    """What joins `devices` consecutive devices (None: all of the machine).

    `bandwidth` is bytes/s one way per device as the data sheet has it, `reached` the part of it that large messages reach,
    `latency` seconds of one hop in the simple protocol. `shares`, where the devices are joined by a mesh and not by a
    switch, is the part of the bandwidth that rings through the first 2, 3, … devices can use. `adds`, of a switch that
    can add up what devices send (NVLink SHARP), is the part of what it reaches that it reaches then.
    """

    name: str
    devices: int | None
    bandwidth: float
    latency: float
    kind: str = "nvlink"
    shares: tuple[float, ...] = ()
    reached: float = 1.0
    adds: float = 0.0

    def hops(self) -> tuple[float, ...]:
        """Seconds of one hop in each protocol: faster ones keep their ratio to `latency`."""
        table = HOPS[self.kind]
        return tuple(self.latency * seconds / table[0] for seconds in table)

    def rate(self, ranks: int) -> float:
        """Bytes/s one way per device that a group with `ranks` devices on this link can use."""
        share = self.shares[ranks - 2] if 2 <= ranks < len(self.shares) + 2 else 1.0
        return self.bandwidth * share * self.reached

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
    "network": 0.97,  # part of the data sheet's bandwidth that is reached between nodes
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

SWITCH = 23e-6
"""Seconds until a switch begins to add up (the same table)."""

REACHED = 0.82
"""Part of its bandwidth that a link inside a node reaches where no source says it: protocol takes about a fifth of NVLink.

NVIDIA in github.com/NVIDIA/nccl-tests/issues/212.
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
    adds: float


def levels(links: tuple[Link, ...], ranks: int, stride: int = 1) -> tuple[Level, ...]:
    """The levels of a group, innermost first, for links given innermost first. None for a single rank.

    Where a group does not fill its nodes evenly (12 ranks on nodes of 8) the fewest nodes are shared out evenly.
    Raises LookupError when no link reaches all of the group.
    """
    group, inside = [], 1
    for link in links:
        reach = inf if link.devices is None else max(1, link.devices // stride)
        groups = max(1, ceil(ranks / reach))
        members = ceil(ranks / groups)
        if members > inside:
            meeting = ceil(members / inside)
            group.append(Level(meeting, link.rate(members), link.hops(), inside, groups, link.between_nodes, link.adds))
            inside = members
    if inside < ranks:
        raise LookupError(f"no link joins {ranks} devices {stride} apart")
    return tuple(group)


def all_reduce(size: float, group: tuple[Level, ...]) -> float:
    """Seconds to sum `size` bytes over a group."""

    def best(which: int) -> float:
        ways = [_ring(size, group, which, 2), _tree(size, group, which, False)]
        return min([*ways, _tree(size, group, which, True)] if group[0].adds and which == 0 else ways)

    return _fastest(group, best)


def all_gather(size: float, group: tuple[Level, ...]) -> float:
    """Seconds until every device has the `size` bytes of which each had its part. A reduce-scatter takes as long."""
    return _fastest(group, lambda which: _ring(size, group, which, 1))


reduce_scatter = all_gather


def all_to_all(size: float, group: tuple[Level, ...]) -> float:
    """Seconds for every device to send each other one its part of `size` bytes, directly, to up to 8 at a time."""

    def exchange(which: int) -> float:
        n, seconds, hops = _ranks(group), 0.0, 0.0
        for level in group:
            peers = level.inside * (level.ranks - 1)
            seconds = max(seconds, _over(size * peers / n, level, which))
            hops += ceil(peers / 8) * level.hops[which]
        return seconds + hops

    return _fastest(group, exchange)


def send(size: float, group: tuple[Level, ...]) -> float:
    """Seconds to send `size` bytes from one of two devices to the other."""
    return _fastest(group, lambda which: _over(size, group[-1], which) + group[-1].hops[which])


def _ranks(group: tuple[Level, ...]) -> int:
    return group[-1].inside * group[-1].ranks if group else 1


def _over(size: float, level: Level, which: int) -> float:
    """Seconds for a device's share of a level to move so many bytes."""
    return size / level.bandwidth / PROTOCOLS[which].bandwidth


def _fastest(group: tuple[Level, ...], seconds: Callable[[int], float]) -> float:
    if not group:
        return 0.0
    return FITTED["call"] + min(p.call + seconds(which) for which, p in enumerate(PROTOCOLS))


def _ring(size: float, group: tuple[Level, ...], which: int, laps: int) -> float:
    n = _ranks(group)
    passed = laps * (n - 1) / n * size
    slowest = max(_over(passed / level.inside, level, which) for level in group)
    return slowest + laps * sum((level.ranks - 1) * level.repeats * level.hops[which] for level in group)


def _tree(size: float, group: tuple[Level, ...], which: int, added: bool) -> float:
    """A double binary tree of nodes. Inside them, chains; or, with `added`, a switch that adds up (NVLS)."""
    inner, outer = (group[:-1], group[-1]) if group[-1].between_nodes else (group, None)
    if outer is None and not added:
        return inf  # a chain alone has a ring's hops, and more bytes
    seconds, hops = [0.0], 0.0
    for level in inner:
        part = size / level.inside
        if added and level.adds:
            seconds.append(part * (1 + 1 / level.ranks) / level.bandwidth / level.adds)
            hops += SWITCH / 2
        else:
            seconds.append(_over(2 * part / TREE, level, which))
            hops += (level.ranks - 1) * level.hops[which]
    if outer is not None:
        seconds.append(_over(2 * size * min(1.0, (outer.ranks - 1) / 2) / outer.inside, outer, which))
        hops += log2(outer.ranks) * outer.hops[which]
    return max(seconds) + 2 * hops
