"""Rates of devices and of the links between them: data sheets, measurements, and the seconds of a collective. No torch.

[Note: Collectives]
The time of a collective is computed from links, sizes and the placement of ranks. No torch, no device.

A group is `ranks` devices with the distance `stride` in rank order. It meets on levels: first the devices of one island (NVLink), then
those of one node, then the nodes. All groups of one axis communicate at the same time, as in training. The bandwidth of a link is per
device, so a group with one device in each node has one device's share of the node's network.

The algorithms are NCCL's, in three protocols that trade bandwidth for latency. The fastest is used:

* ring: every device sends 2 (n-1)/n of the bytes. Of these, 1/g leave by each device's share of a slower link if g devices of the group
  are below it. The pipeline of chunks has the speed of its slowest link. 2 (n-1) hops.
* tree: devices of a node form a chain, nodes a double binary tree, with fewer hops: 2 (g-1 + log2 k). An inner node sends up once and
  down twice, half of the bytes in each of two trees. These are the bytes of a long ring, and half of them for two nodes.
  If the node's switch reduces (NVLS), a device sends and receives (1 + 1/g) of the bytes instead of a chain's 2.

All-gather and reduce-scatter are rings of one lap. `bench/collectives.py` compares this with published measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import ceil, inf, log2
from typing import NamedTuple

DEVICE_KINDS, UNSUPPORTED_DEVICES = ("auto", "cpu", "cuda"), ("xpu", "mps")
"""Values of `--device`, and device types of torch that plait does not support yet."""
CORES_NOTE = "processes on cores"
"""The note of a machine without accelerators."""


@dataclass(frozen=True)
class Rates:
    """One rate per precision; None if unknown."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None

    def for_precision(self, precision: str) -> float | None:
        """Return the rate of one precision."""
        return getattr(self, precision)

    def scale(self, factor: float) -> "Rates":
        """Return these rates times `factor`."""
        return Rates(**{f.name: rate * factor for f in fields(Rates) if (rate := self.for_precision(f.name)) is not None})


@dataclass(frozen=True)
class Device:
    """One device. `memory` is in bytes, `memory_bandwidth` in bytes/s, `peak` in dense flop/s.

    `achievable` is the fraction of the peak that the best matmuls reach.
    """

    name: str
    memory: int
    memory_bandwidth: float | None = None
    peak: Rates = Rates()
    achievable: Rates = Rates()
    multiprocessors: int | None = None
    """Number of streaming multiprocessors, each of which computes one tile of a matmul at a time."""

    def scale_rates(self, factor: float) -> "Device":
        """Return a device with `factor` times the memory bandwidth and the peaks."""
        return replace(self, memory_bandwidth=self.memory_bandwidth and self.memory_bandwidth * factor, peak=self.peak.scale(factor))


@dataclass(frozen=True)
class Matmuls:
    """Measured: points (flops of one matmul, fraction of the peak), smallest first."""

    precision: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Collectives:
    """Measured: points (bytes, seconds) of one collective in a group of neighboring ranks, smallest first."""

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Loader:
    """Measured: samples/s that one rank reads of a job's data while the other ranks of its node read too."""

    job: str
    samples_per_s: float


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Interpolate linearly between points. Outside of them, the value is that of the first or last point.

    >>> interpolate(((1.0, 10.0), (3.0, 20.0)), 2.0)
    15.0
    """
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def extrapolate_seconds(points: tuple[tuple[float, float], ...], size: float) -> float:
    """Return the seconds for `size` bytes: interpolated between the measured points, extrapolated from the last two."""
    if len(points) < 2 or size <= points[-1][0]:
        return interpolate(points, size)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, y1 - y0) * (size - x1) / (x1 - x0)


@dataclass(frozen=True)
class Link:
    """A link between `devices` consecutive devices (None: all devices of the machine).

    `bandwidth`: bytes/s in one direction per device (data sheet). `reached`: fraction of it for large messages. `latency`: seconds of one
    hop in the simple protocol. `shares`: for a mesh instead of a switch, the fraction of the bandwidth that rings through the first 2, 3,
    … devices can use. `adds`: for a switch that reduces (NVLink SHARP), the fraction of the reached bandwidth during a reduction.
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
        """Return the seconds of one hop in each protocol: faster protocols keep their ratio to `latency`."""
        table = HOP_SECONDS[self.kind]
        return tuple(self.latency * seconds / table[0] for seconds in table)

    def rate(self, ranks: int) -> float:
        """Return the bytes/s in one direction per device that a group with `ranks` devices on this link can use."""
        share = self.shares[ranks - 2] if 2 <= ranks < len(self.shares) + 2 else 1.0
        return self.bandwidth * share * self.reached

    @property
    def is_between_nodes(self) -> bool:
        """The link connects nodes, for which NCCL has trees."""
        return self.kind in ("network", "efa")


class Protocol(NamedTuple):
    """A protocol of NCCL: the fraction of a link's bandwidth that it reaches, and seconds per call."""

    bandwidth: float
    call: float


PROTOCOLS = (Protocol(1.0, 8.4e-6), Protocol(0.92, 14e-6), Protocol(0.5, 6.6e-6))
"""Simple, LL128 and LL, from the tuning table of NCCL's source (src/graph/tuning.cc)."""

FITTED_CONSTANTS = {
    "network": 0.97,  # fraction of the data sheet's bandwidth that is reached between nodes
    "call": 29e-6,  # seconds to start a collective: the kernel, and waiting for all ranks
    "efa hop": 84e-6,  # seconds of a hop between nodes over EFA, in every protocol
}
"""All constants fitted to measurements (collectives of A100, V100 and B200 nodes), with their meaning."""

HOP_SECONDS = {
    "nvlink": (3.4e-6, 1.9e-6, 0.6e-6),
    "pcie": (5.7e-6, 2.5e-6, 1.0e-6),
    "network": (14e-6, 4.0e-6, 2.7e-6),
    "loopback": (100e-6, 100e-6, 100e-6),
    "efa": (FITTED_CONSTANTS["efa hop"],) * 3,
}
"""Seconds of one hop by kind of link in each protocol, from the same table. EFA's is fitted.

Gloo over the loopback interface has no data sheet: `plait bench comm` measures it.
"""

SWITCH_SECONDS = 23e-6
"""Seconds until a switch starts a reduction (from the same table)."""

LINK_EFFICIENCY = 0.82
"""Fraction of its bandwidth that a link inside a node reaches by default. The protocol uses about a fifth of NVLink.

NVIDIA in github.com/NVIDIA/nccl-tests/issues/212.
"""

TREE_EFFICIENCY = 0.92
"""Fraction of a ring's bandwidth that a tree reaches inside a node (from the same table)."""


class Level(NamedTuple):
    """A level on which `ranks` members, or groups of members, meet: bytes/s in one direction per device, seconds per hop in each protocol.

    `inside` devices of the group are below each member. The group has `repeats` such meetings in parallel.
    """

    ranks: int
    bandwidth: float
    hops: tuple[float, ...]
    inside: int
    repeats: int
    is_between_nodes: bool
    adds: float


def build_levels(links: tuple[Link, ...], ranks: int, stride: int = 1) -> tuple[Level, ...]:
    """Build the levels of a group, innermost first, for links given innermost first. Empty for a single rank.

    A group that does not fill its nodes evenly (12 ranks on nodes of 8) is distributed evenly over the fewest nodes. Raises LookupError
    if no link connects the group.
    """
    group, inside = [], 1
    for link in links:
        reach = inf if link.devices is None else max(1, link.devices // stride)
        groups = max(1, ceil(ranks / reach))
        members = ceil(ranks / groups)
        if members > inside:
            meeting = ceil(members / inside)
            group.append(Level(meeting, link.rate(members), link.hops(), inside, groups, link.is_between_nodes, link.adds))
            inside = members
    if inside < ranks:
        raise LookupError(f"no link connects {ranks} devices at stride {stride}")
    return tuple(group)


def all_reduce(size: float, group: tuple[Level, ...]) -> float:
    """Return the seconds of an all-reduce of `size` bytes over a group."""

    def best(which: int) -> float:
        ways = [_ring_seconds(size, group, which, 2), _tree_seconds(size, group, which, False)]
        return min([*ways, _tree_seconds(size, group, which, True)] if group[0].adds and which == 0 else ways)

    return _min_over_protocols(group, best)


def all_gather(size: float, group: tuple[Level, ...]) -> float:
    """Return the seconds of an all-gather to `size` bytes in total. A reduce-scatter takes the same time."""
    return _min_over_protocols(group, lambda which: _ring_seconds(size, group, which, 1))


reduce_scatter = all_gather


def all_to_all(size: float, group: tuple[Level, ...]) -> float:
    """Return the seconds of an all-to-all of `size` bytes per device, sent directly, to up to 8 devices at a time."""

    def exchange(which: int) -> float:
        n, seconds, hops = _count_ranks(group), 0.0, 0.0
        for level in group:
            peers = level.inside * (level.ranks - 1)
            seconds = max(seconds, _transfer_seconds(size * peers / n, level, which))
            hops += ceil(peers / 8) * level.hops[which]
        return seconds + hops

    return _min_over_protocols(group, exchange)


def send(size: float, group: tuple[Level, ...]) -> float:
    """Return the seconds to send `size` bytes from one of two devices to the other."""
    return _min_over_protocols(group, lambda which: _transfer_seconds(size, group[-1], which) + group[-1].hops[which])


def _count_ranks(group: tuple[Level, ...]) -> int:
    return group[-1].inside * group[-1].ranks if group else 1


def _transfer_seconds(size: float, level: Level, which: int) -> float:
    """Return the seconds to transfer `size` bytes with a device's share of a level."""
    return size / level.bandwidth / PROTOCOLS[which].bandwidth


def _min_over_protocols(group: tuple[Level, ...], seconds: Callable[[int], float]) -> float:
    if not group:
        return 0.0
    return FITTED_CONSTANTS["call"] + min(p.call + seconds(which) for which, p in enumerate(PROTOCOLS))


def _ring_seconds(size: float, group: tuple[Level, ...], which: int, laps: int) -> float:
    n = _count_ranks(group)
    passed = laps * (n - 1) / n * size
    slowest = max(_transfer_seconds(passed / level.inside, level, which) for level in group)
    return slowest + laps * sum((level.ranks - 1) * level.repeats * level.hops[which] for level in group)


def _tree_seconds(size: float, group: tuple[Level, ...], which: int, added: bool) -> float:
    """Seconds of a double binary tree of nodes. Inside nodes, it has chains, or with `added` a switch that reduces (NVLS)."""
    inner, outer = (group[:-1], group[-1]) if group[-1].is_between_nodes else (group, None)
    if outer is None and not added:
        return inf  # a chain alone has a ring's hops, and more bytes
    seconds, hops = [0.0], 0.0
    for level in inner:
        part = size / level.inside
        if added and level.adds:
            seconds.append(part * (1 + 1 / level.ranks) / level.bandwidth / level.adds)
            hops += SWITCH_SECONDS / 2
        else:
            seconds.append(_transfer_seconds(2 * part / TREE_EFFICIENCY, level, which))
            hops += (level.ranks - 1) * level.hops[which]
    if outer is not None:
        seconds.append(_transfer_seconds(2 * size * min(1.0, (outer.ranks - 1) / 2) / outer.inside, outer, which))
        hops += log2(outer.ranks) * outer.hops[which]
    return max(seconds) + 2 * hops
