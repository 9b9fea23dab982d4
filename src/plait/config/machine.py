"""The machine: what there is to train on. Devices, memory, links, price; a small frozen value, a TOML file or a name.

>>> machine = Machine.named("h100x8x16")
>>> machine.devices, machine.device.name
(128, 'H100-SXM-80GB')

Data sheets are in `machines/`, each number with its unit and its source. A value that no source gives is None. What was
measured on the machine itself stands beside the data sheet and is preferred. Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from pathlib import Path

from plait.config import network
from plait.config.errors import PlaitError, Problem
from plait.config.network import FITTED, HOPS, Level, Link

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


@dataclass(frozen=True)
class Machine:
    """`nodes` times `devices_per_node` devices. Ranks go through a node first, so neighbours are on the fastest link.

    `links` stand from the innermost outwards; `host` is bytes/s one way between a device and its host. `price_per_hour`
    is of one device. `cores` and `host_memory` (bytes) are of one node. `operator`, measured on processors, is the seconds
    that a core takes for a small operator's forward pass.
    """

    name: str
    device: Device
    links: tuple[Link, ...] = ()
    devices_per_node: int = 1
    nodes: int = 1
    host: float | None = None
    price_per_hour: float | None = None
    cores: int | None = None
    host_memory: int | None = None
    operator: float | None = None
    source: str = ""
    notes: str = ""
    matmuls: tuple[Matmuls, ...] = ()
    collectives: tuple[Collectives, ...] = ()
    loaders: tuple[Loader, ...] = ()

    @staticmethod
    def load(path: str | Path) -> "Machine":
        """A machine from a TOML file. All faults are raised together."""
        from plait.config import machine_text as machinefile

        return machinefile.load(Path(path))

    @staticmethod
    def named(text: str) -> "Machine":
        """A machine by name: `h100` is one device, `h100x8` eight on a node, `h100x8x16` sixteen such nodes.

        More devices than a typical node has (`h100x16`) fill several. M010 when there is no such machine.
        """
        from plait.config import machine_text as machinefile

        return machinefile.named(text)

    def to_toml(self) -> str:
        """The machine as a TOML file; `Machine.load` reads it back to an equal machine."""
        from plait.config import machine_text as machinefile

        return machinefile.to_toml(self)

    def with_nodes(self, nodes: int) -> "Machine":
        """The same nodes in another number."""
        return replace(self, nodes=nodes)

    def with_network(self, bits_per_s: float) -> "Machine":
        """The same nodes, each with so many bit/s to the others, which its devices share."""
        rate = bits_per_s / 8 / self.devices_per_node
        link = Link("network", None, rate, HOPS["network"][0], "network", reached=FITTED["network"])
        return replace(self, links=(*(x for x in self.links if not x.between_nodes), link))

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        inside = f", {self.links[0].name}" if self.links and self.devices_per_node > 1 else ""
        return f"{nodes}{self.devices_per_node} × {self.device.name}{inside}"

    @property
    def devices(self) -> int:
        """Devices on all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def on_cores(self) -> bool:
        """Whether devices are processes on a processor's cores."""
        return CORES in self.notes

    @property
    def measured(self) -> bool:
        """Whether anything was measured on the machine itself; otherwise it is known from data sheets."""
        return bool(self.matmuls or self.collectives)

    def matmul_fraction(self, precision: str, flops: float) -> float | None:
        """The part of the peak that a matmul of so many flops reaches: as measured, else the data sheet's best."""
        curve = next((c.points for c in self.matmuls if c.precision == precision), None)
        if curve is None:
            return self.device.achievable.of(precision)
        return between(tuple((log(x), y) for x, y in curve), log(flops))

    def group(self, ranks: int, stride: int = 1) -> tuple[Level, ...]:
        """On which links `ranks` devices `stride` apart meet. M013 when a link is not known."""
        try:
            return network.levels(self._within, ranks, stride)
        except LookupError:
            raise PlaitError(self._no_link(ranks, stride)) from None

    @property
    def _within(self) -> tuple[Link, ...]:
        """The links, where those inside a node join no more devices than the node has."""
        most = self.devices_per_node
        return tuple(
            x if x.between_nodes or self.nodes == 1 or (x.devices or most + 1) <= most else replace(x, devices=most)
            for x in self.links
        )

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds to sum `size` bytes over `ranks` devices `stride` apart, while all such groups do the same."""
        return self._seconds("all_reduce", size, ranks, stride)

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each of `ranks` devices has all `size` bytes, of which it had its part."""
        return self._seconds("all_gather", size, ranks, stride)

    def reduce_scatter(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each of `ranks` devices has its part of the sum of `size` bytes."""
        return self._seconds("reduce_scatter", size, ranks, stride)

    def all_to_all(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds for each of `ranks` devices, `size` bytes on each, to send every other one its part of them."""
        return self._seconds("all_to_all", size, ranks, stride)

    def send(self, size: float, stride: int = 1) -> float:
        """Seconds to send `size` bytes to the device `stride` further on, while all devices do the same."""
        return self._seconds("send", size, 2, stride)

    def _seconds(self, collective: str, size: float, ranks: int, stride: int) -> float:
        if ranks == 1 or size <= 0:
            return 0.0
        model: Callable[..., float] = getattr(network, collective)
        seconds = model(size, self.group(ranks, stride))
        inside = (ranks - 1) * stride < self.devices_per_node
        measured = [
            c for c in self.collectives if c.collective == collective and (c.ranks <= self.devices_per_node) == inside
        ]
        if not measured:
            return seconds
        near = min(measured, key=lambda c: (abs(log(c.ranks / ranks)), c.ranks))
        if near.ranks == ranks and (inside or stride == 1):
            return seconds_at(near.points, size)
        return seconds * seconds_at(near.points, size) / model(size, self.group(near.ranks))

    def _no_link(self, ranks: int, stride: int) -> Problem:
        return Problem(
            "M013",
            f"{self.name}: no link is known that joins {ranks} devices {stride} apart",
            why="known: " + (", ".join(f"{x.name} ({x.devices or 'all'} devices)" for x in self.links) or "none"),
            fix=(
                "machine.toml    a file with [[links]] for it",
                "plait bench comm    measures them on the machine itself",
            ),
        )


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
