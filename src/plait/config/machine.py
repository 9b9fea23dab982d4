"""The machine: devices, memory, links and price, as a frozen value, a TOML file or a name.

>>> machine = Machine.from_name("h100x8x16")
>>> machine.devices, machine.device.name
(128, 'H100-SXM-80GB')

Data sheets are in `machines/`, each value with its unit and its source. A value without a source is None. Measurements on the machine are
stored next to the data sheet and take precedence. No torch.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, log
from pathlib import Path
from typing import Any

from plait.config import hardware
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.hardware import (
    CORES_NOTE,
    FITTED_CONSTANTS,
    HOP_SECONDS,
    LINK_EFFICIENCY,
    Collectives,
    Device,
    Level,
    Link,
    Loader,
    Matmuls,
    Rates,
    extrapolate_seconds,
    interpolate,
)
from plait.config.machine_file import GB, GIB, TERA, read_catalog, read_machine_file

THREAD_EXPONENT = 0.8
"""Exponent of the number of threads in the rates of a CPU process: two threads take 0.57 of the time of one,
as measured with four models on two cores."""


@dataclass(frozen=True)
class Machine:
    """A machine with `nodes` × `devices_per_node` devices. Ranks fill a node first, so neighbors are on the fastest link.

    `links` are in order from the innermost; `host` is bytes/s in one direction between a device and its host. `price_per_hour` is per
    device. `cores` and `host_memory` (bytes) are per node. `operator`, measured on CPUs, is the seconds of a small operator's forward
    pass on a core.
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
    speeds: tuple[float, ...] = ()
    """If devices of a node differ: the speed of each, as a fraction of `device`; empty if all are equal."""
    memories: tuple[int, ...] = ()
    """The bytes of each of these devices."""

    @staticmethod
    def load(path: str | Path) -> "Machine":
        """Load a machine from a TOML file. Raises all errors together."""
        return _build_machine(read_machine_file(Path(path)))

    @staticmethod
    def from_name(text: str) -> "Machine":
        """Return a machine by name: `h100` is one device, `h100x8` eight on a node, `h100x8x16` sixteen such nodes.

        More devices than on a typical node (`h100x16`) fill several nodes. Raises M010 for an unknown name.
        """
        wanted = re.sub(r"[ _]+", "-", text.strip().lower())
        known = read_catalog()
        fitting = [n for n in known if re.fullmatch(re.escape(n) + r"(x[1-9]\d{0,6}){0,2}", wanted)]
        if not fitting:
            base = re.sub(r"(x\d+){1,2}$", "", wanted)
            names = tuple(dict.fromkeys(path.stem for path in known.values()))
            hint = did_you_mean(base, tuple(known)) if base else f"known: {', '.join(names)}"
            fix = ("--machine h100x8x16    16 nodes of 8 devices", "--machine machine.toml    your own file")
            raise PlaitError(Problem("M010", f"unknown machine {text}        {hint}", fix=fix))
        name = max(fitting, key=len)
        counts = [int(word) for word in wanted.removeprefix(name).split("x")[1:]] or [1]
        said = read_machine_file(known[name])
        typical = said.get("devices_per_node")
        if len(counts) == 1 and typical and counts[0] > typical:
            if counts[0] % typical:
                why = f"{counts[0]} / {typical} = {counts[0] / typical:.2f} nodes"
                fix = (f"{name}x{typical}x{-(-counts[0] // typical)}", f"{name}x{counts[0]}x1    if a node has {counts[0]} devices")
                raise PlaitError(Problem("M010", f"{text} does not fill complete nodes: a node of {name} has {typical} devices", why=why, fix=fix))
            counts = [typical, counts[0] // typical]
        per, nodes = (*counts, 1)[:2]
        result = _build_machine(said | {"devices_per_node": max(per, typical or 1)})  # devices of a node share its network
        return replace(result, name=wanted, devices_per_node=per, nodes=nodes)

    def to_toml(self) -> str:
        """Format the machine as a TOML file; `Machine.load` reads it back to an equal machine."""
        return _format_toml(self)

    def with_network(self, bits_per_s: float) -> "Machine":
        """Replace the network between the nodes by one with this bandwidth per node, which its devices share."""
        return replace(self, links=(*(x for x in self.links if not x.is_between_nodes), self._build_network(bits_per_s)))

    def with_slowest_link(self, bits_per_s: float, latency: float | None = None) -> "Machine":
        """Set the bandwidth of the slowest link: between the nodes, in each direction, or between the devices of a single node.

        `latency`: seconds of a hop there (default: unchanged).
        """
        several, per = self.nodes > 1, self.devices_per_node
        found = [x for x in self.links if x.is_between_nodes] if several else list(self.links[-1:])
        known = tuple(c for c in self.collectives if several and c.ranks <= per)
        link = found[-1] if found else self._build_network(bits_per_s)
        others = tuple(x for x in self.links if x not in found)
        changed = replace(link, bandwidth=bits_per_s / 8 / (per if several else 1), latency=link.latency if latency is None else latency)
        return replace(self, links=(*others, changed), collectives=known)

    def _build_network(self, bits_per_s: float) -> Link:
        rate = bits_per_s / 8 / self.devices_per_node
        return Link("network", None, rate, HOP_SECONDS["network"][0], "network", reached=FITTED_CONSTANTS["network"])

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        inside = f", {self.links[0].name}" if self.links and self.devices_per_node > 1 else ""
        unlike = f" (speeds {', '.join(f'{s:g}' for s in self.speeds)})" if len(set(self.speeds)) > 1 else ""
        return f"{nodes}{self.devices_per_node} × {self.device.name}{unlike}{inside}"

    @property
    def devices(self) -> int:
        """Number of devices on all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def is_heterogeneous(self) -> bool:
        """The devices of a node differ."""
        return len(set(self.speeds)) > 1 or len(set(self.memories)) > 1

    def speed(self, rank: int) -> float:
        """Return the speed of a rank's device, as a fraction of `device`."""
        return self.speeds[rank % self.devices_per_node] if self.speeds else 1.0

    def memory(self, rank: int) -> int:
        """Return the bytes of a rank's device."""
        return self.memories[rank % self.devices_per_node] if self.memories else self.device.memory

    def resize(self, devices: int) -> "Machine":
        """Change the number of devices: fewer or more nodes, or the first devices of one node.

        CPU processes share their host's cores, memory and links: each has `threads` cores.
        """
        if devices > self.devices_per_node and not (self.is_on_cores and self.nodes == 1):
            return replace(self, nodes=ceil(devices / self.devices_per_node))
        more = devices > self.devices_per_node
        parts: dict[str, Any] = {"speeds": () if more else self.speeds[:devices], "memories": () if more else self.memories[:devices]}
        if self.is_on_cores and self.nodes == 1:
            memory = round(self.device.memory * self.devices_per_node / devices)
            resized = replace(self, devices_per_node=devices)
            parts["device"] = replace(self.device.scale_rates(resized.thread_speed / self.thread_speed), memory=memory)
            parts["links"] = tuple(replace(x, devices=max(devices, 2) if x.devices else None) for x in self.links)
        return replace(self, devices_per_node=devices, nodes=1, **parts)

    @property
    def is_on_cores(self) -> bool:
        """The devices are processes on CPU cores."""
        return CORES_NOTE in self.notes

    @property
    def threads(self) -> int:
        """Threads of each CPU process: an equal part of the cores, as `plait.launch` gives it."""
        return max(1, (self.cores or 1) // self.devices_per_node)

    @property
    def thread_speed(self) -> float:
        """Rates of a CPU process, relative to those of one thread; 1 for an accelerator."""
        return self.threads**THREAD_EXPONENT if self.is_on_cores else 1.0

    @property
    def is_measured(self) -> bool:
        """The machine has measurements; otherwise all values are from data sheets."""
        return bool(self.matmuls or self.collectives)

    def matmul_fraction(self, precision: str, flops: float) -> float | None:
        """Return the fraction of the peak that a matmul of `flops` reaches: measured, or else the data sheet's best."""
        curve = next((c.points for c in self.matmuls if c.precision == precision), None)
        if curve is None:
            return self.device.achievable.for_precision(precision)
        return interpolate(tuple((log(x), y) for x, y in curve), log(flops))

    def find_levels(self, ranks: int, stride: int = 1) -> tuple[Level, ...]:
        """Return the levels on which `ranks` devices at stride `stride` meet. Raises M013 for an unknown link."""
        try:
            return hardware.build_levels(self._node_links, ranks, stride)
        except LookupError:
            what = f"the machine {self.name} has no link between {ranks} devices at stride {stride}"
            why = "known links: " + (", ".join(f"{x.name} ({x.devices or 'all'} devices)" for x in self.links) or "none")
            fix = ("--machine machine.toml    a file with [[links]] for these devices",)
            fix += ("plait bench comm    measures the links, if run on this machine",)
            raise PlaitError(Problem("M013", what, why=why, fix=fix)) from None

    @property
    def _node_links(self) -> tuple[Link, ...]:
        """The links, limited inside a node to the node's number of devices."""
        most = self.devices_per_node
        return tuple(
            x if x.is_between_nodes or self.nodes == 1 or (x.devices or most + 1) <= most else replace(x, devices=most)
            for x in self.links
        )

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds to sum `size` bytes over `ranks` devices at stride `stride`, while all such groups do the same."""
        return self._estimate_seconds("all_reduce", size, ranks, stride)

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds until each of `ranks` devices has all `size` bytes, starting from its part."""
        return self._estimate_seconds("all_gather", size, ranks, stride)

    def reduce_scatter(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds until each of `ranks` devices has its part of the sum of `size` bytes."""
        return self._estimate_seconds("reduce_scatter", size, ranks, stride)

    def all_to_all(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds for each of `ranks` devices with `size` bytes to send every other device its part of them."""
        return self._estimate_seconds("all_to_all", size, ranks, stride)

    def send(self, size: float, stride: int = 1) -> float:
        """Return the seconds to send `size` bytes to the device at distance `stride`, while all devices do the same."""
        return self._estimate_seconds("send", size, 2, stride)

    def _estimate_seconds(self, collective: str, size: float, ranks: int, stride: int) -> float:
        if ranks == 1 or size <= 0:
            return 0.0
        model: Callable[..., float] = getattr(hardware, collective)
        seconds = model(size, self.find_levels(ranks, stride))
        inside = (ranks - 1) * stride < self.devices_per_node
        measured = [c for c in self.collectives if c.collective == collective]
        measured = [c for c in measured if (c.ranks <= self.devices_per_node) == inside]
        if not measured:
            return seconds
        near = min(measured, key=lambda c: (abs(log(c.ranks / ranks)), c.ranks))
        if near.ranks == ranks and (inside or stride == 1):
            return extrapolate_seconds(near.points, size)
        return seconds * extrapolate_seconds(near.points, size) / model(size, self.find_levels(near.ranks))


def _build_machine(data: dict[str, Any]) -> Machine:
    """Build the machine of a checked file."""
    per = data.get("devices_per_node", 1)
    notes = [data[key] for key in ("node", "caution", "notes") if key in data]
    host = data.get("host", {}).get("gb_per_s")
    memory, operator = data.get("host_memory_gib"), data.get("operator_us")
    return Machine(
        data["name"],
        _build_device(data["device"]),
        tuple(_build_link(row, per) for row in data.get("links", ())),
        per,
        data.get("nodes", 1),
        host and host * GB,
        data.get("price_per_hour"),
        data.get("cores"),
        memory and round(memory * GIB),
        operator and operator / 1e6,
        data.get("source", ""),
        " · ".join(notes),
        tuple(Matmuls(r["precision"], tuple(zip(r["flops"], r["fraction_of_peak"]))) for r in data.get("matmuls", ())),
        tuple(
            Collectives(r["collective"], r["ranks"], tuple(zip(r["bytes"], r["seconds"])))
            for r in data.get("collectives", ())
        ),
        tuple(Loader(r["job"], r["samples_per_s"]) for r in data.get("loaders", ())),
        tuple(map(float, data.get("speeds", ()))),
        tuple(round(n * GIB) for n in data.get("memories_gib", ())),
    )


def _build_device(data: dict[str, Any]) -> Device:
    peak = {name: value * TERA for name, value in data.get("peak_tflops", {}).items()}
    best = {name: value * TERA / peak[name] for name, value in data.get("matmul_tflops", {}).items() if name in peak}
    moved = data.get("memory_gb_per_s")
    memory = round(data["memory_gib"] * GIB)
    return Device(data["name"], memory, moved and moved * GB, Rates(**peak), Rates(**best), data.get("multiprocessors"))


def _build_link(data: dict[str, Any], per: int) -> Link:
    kind = data["kind"]
    everything = kind in ("network", "efa")
    rate = data["gb_per_s"] * GB if "gb_per_s" in data else data["gbit_per_s_per_node"] * GB / 8 / per
    latency = data["latency_us"] / 1e6 if "latency_us" in data else HOP_SECONDS[kind][0]
    devices = data.get("devices", None if everything else per)
    reached = data.get("reached", FITTED_CONSTANTS["network"] if everything else LINK_EFFICIENCY)
    shares = tuple(data.get("shares", ()))
    return Link(data["name"], devices, rate, latency, kind, shares, reached, data.get("adds", 0.0))


def _format_toml(machine: Machine) -> str:
    """Format the machine as a file that `load` reads back to an equal one."""
    device = machine.device
    top = {
        "name": machine.name, "notes": machine.notes or None, "source": machine.source or None,
        "devices_per_node": machine.devices_per_node, "nodes": machine.nodes, "cores": machine.cores,
        "host_memory_gib": _divide_unit(machine.host_memory, GIB), "price_per_hour": machine.price_per_hour,
        "operator_us": machine.operator and round(machine.operator * 1e6, 6),
        "speeds": list(machine.speeds) or None, "memories_gib": [n / GIB for n in machine.memories] or None,
    }  # fmt: skip
    about = {"name": device.name, "memory_gib": device.memory / GIB}
    about |= {"memory_gb_per_s": _divide_unit(device.memory_bandwidth, GB), "multiprocessors": device.multiprocessors}
    tables: list[tuple[str, Mapping[str, object]]] = [("", top), ("[device]", about)]
    for table, rates in (("peak_tflops", device.peak), ("matmul_tflops", device.achievable)):
        factors = {f.name: (rates.for_precision(f.name), device.peak.for_precision(f.name)) for f in fields(Rates)}
        shown = {n: a and a * (1 if table == "peak_tflops" else b or 0) / TERA for n, (a, b) in factors.items()}
        tables += [(f"[device.{table}]", shown)] if any(shown.values()) else []
    tables += [("[host]", {"gb_per_s": machine.host / GB})] if machine.host else []
    for link in machine.links:
        row = {"name": link.name, "kind": link.kind, "devices": link.devices, "gb_per_s": link.bandwidth / GB}
        row |= {"latency_us": link.latency * 1e6, "reached": link.reached}
        tables.append(("[[links]]", row | {"shares": list(link.shares) or None, "adds": link.adds or None}))
    for curve in machine.matmuls:
        x, y = ([p[i] for p in curve.points] for i in (0, 1))
        tables.append(("[[matmuls]]", {"precision": curve.precision, "flops": x, "fraction_of_peak": y}))
    for each in machine.collectives:
        x, y = ([p[i] for p in each.points] for i in (0, 1))
        row = {"collective": each.collective, "ranks": each.ranks, "bytes": x, "seconds": y}
        tables.append(("[[collectives]]", row))
    tables += [("[[loaders]]", {"job": one.job, "samples_per_s": one.samples_per_s}) for one in machine.loaders]
    lines = []
    for head, row in tables:
        rows = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items() if value is not None]
        lines += ["", head, *rows] if head else rows
    return "\n".join(lines) + "\n"


def _divide_unit(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
