"""`plait bench`: measure this machine, write machine.toml, show the table. `--machine here` uses what was written.

Parts that are not measured this time stay as the file has them: `plait bench data job.py` adds to an earlier run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import BenchOptions, check_range
from plait.config.errors import PlaitError, Problem
from plait.config.files import check_writable, write
from plait.config.hardware import Collectives, Link, Loader, Matmuls
from plait.config.job import load_job
from plait.config.machine import Machine
from plait.launch import detect, fork
from plait.launch.devices import kind_of
from plait.launch.place import Place, current, joined, joining

PARTS = ("compute", "comm", "data")


def run(options: BenchOptions) -> int:
    """The command."""
    check_range(options)
    parts = PARTS if options.what == "all" else (options.what,)
    if options.what == "data" and not options.job:
        raise PlaitError(Problem("U001", "plait bench data needs a job", fix=("plait bench data job.py",)))
    check_writable(options.output)
    job = load_job(options.job, options.arguments) if options.job and "data" in parts else None
    kind = kind_of(options.device)
    machine = Machine.load(options.output) if options.output.exists() else detect.found(options.device)
    member = joined()
    ranks = member.count if member is not None else options.nproc or machine.devices_per_node
    machine = sized(machine, ranks, kind)
    from plait.cli import measure_machine

    with ProgressLine("bench", options.json or current().rank > 0) as line:
        if "compute" in parts:
            line.show("measuring compute", parts.index("compute"), len(parts))
            machine = with_compute(machine, everywhere(lambda place: measure_machine.compute(place, kind), ranks), kind)
        if "comm" in parts and ranks > 1:
            line.show("measuring communication", parts.index("comm"), len(parts))
            (measured, *_) = everywhere(lambda place: measure_machine.communicate(place, kind), ranks)
            for group in measured["groups"]:
                machine = with_collectives(machine, group["ranks"], group["points"], kind)
        if job is not None and options.job is not None:
            line.show("measuring the loader", parts.index("data"), len(parts))
            rates = everywhere(lambda place: {"rate": measure_machine.load(place, job)}, ranks)
            machine = with_loader(machine, options.job, median(each["rate"] for each in rates))
    if current().rank == 0:
        write(options.output, header() + machine.to_toml())
        print_result(options, facts(machine, options.output), table(machine, ranks, options.output))
    return 0


def everywhere(work: Callable[[Place], dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What `work` returned on each of so many ranks; only this rank's when another launcher started us."""
    return [work(current())] if joining() else fork.run(work, ranks)


def sized(machine: Machine, ranks: int, kind: str) -> Machine:
    """On a CPU there are as many devices as processes are started; what another number of them measured is dropped."""
    if kind != "cpu" or joining() or ranks == machine.devices_per_node:
        return machine
    memory = (machine.host_memory or machine.device.memory * machine.devices_per_node) // ranks
    device = replace(machine.device, memory=memory)
    return replace(
        machine, devices_per_node=ranks, device=device, links=(), matmuls=(), collectives=(), loaders=()
    )  # fmt: skip


def with_compute(machine: Machine, measured: list[dict[str, Any]], kind: str) -> Machine:
    """The machine with curves of what the ranks measured, the median of them at every size.

    Without a data sheet the best rate is the peak.
    """
    device, peaks, curves, best = machine.device, {}, [], {}
    for name in measured[0]["matmuls"]:
        lines = [each["matmuls"][name] for each in measured]
        points = [(row[0][0], median(point[1] for point in row)) for row in zip(*lines)]
        top = short(max(rate for _, rate in points))
        peaks[name] = (device.peak.of(name) if kind == "cuda" else None) or top
        best[name] = top / peaks[name]
        curves.append(Matmuls(name, tuple((flops, short(rate / peaks[name])) for flops, rate in points)))
    memory = short(median(each["memory"] for each in measured))
    hosts = [short(each["host"]) for each in measured if "host" in each]
    launches = [each["operator"] for each in measured if "operator" in each]
    operator = short(median(launches) * 1e6) / 1e6 if launches else machine.operator
    peak, achievable = replace(device.peak, **peaks), replace(device.achievable, **best)
    device = replace(device, memory_bandwidth=memory, peak=peak, achievable=achievable)
    return replace(machine, device=device, matmuls=tuple(curves), host=median(hosts) if hosts else machine.host,
                   operator=operator)  # fmt: skip


def with_collectives(machine: Machine, ranks: int, points: dict[str, Any], kind: str) -> Machine:
    """The machine with what a group of so many neighbours measured; on a CPU its link follows from the all-reduce."""
    new = tuple(Collectives(name, ranks, rising(rows)) for name, rows in points.items())
    kept = tuple(each for each in machine.collectives if each.ranks != ranks)
    links = machine.links
    if kind == "cpu" and ranks == machine.devices_per_node:
        (_, least), (size, most) = new[0].points[0], new[0].points[-1]
        hops = 2 * (ranks - 1)
        links = (Link("loopback (gloo)", ranks, short(hops / ranks * size / most), short(least / hops), "loopback"),)
    return replace(machine, collectives=kept + new, links=links)


def rising(points: list[list[float]]) -> tuple[tuple[float, float], ...]:
    """The points with no time above that of a larger message: where there is one, something else was busy."""
    return tuple((x, short(min(y for _, y in points[i:]))) for i, (x, _) in enumerate(points))


def with_loader(machine: Machine, job: str, rate: float) -> Machine:
    """The machine with the samples/s that one rank reads of a job's data."""
    kept = tuple(each for each in machine.loaders if each.job != job)
    return replace(machine, loaders=(*kept, Loader(job, short(rate))))


def header() -> str:
    """The first lines of the file."""
    return (
        "# Measured by plait bench. `--machine here` reads this file where it lies, `--machine FILE` from anywhere.\n"
    )


def table(machine: Machine, ranks: int, out: Path) -> str:
    """What is known by measurement, a line each."""
    lines = [f"machine  {machine}, {ranks} process{'es' * (ranks > 1)} at once"]
    for curve in machine.matmuls:
        flops, part = max(curve.points, key=lambda point: point[1])
        rate, side = part * (machine.device.peak.of(curve.precision) or 0.0), round((flops / 2) ** (1 / 3))
        share = f"  ({part:.0%})" if part < 0.999 else ""
        lines.append(f"compute  matmul {curve.precision:<7} {_unit(rate, 'FLOP/s'):>15}{share}  at {side} × {side}")
    if machine.matmuls:
        lines.append(f"         memory         {_unit(machine.device.memory_bandwidth or 0.0, 'B/s'):>15}  copied")
    if machine.operator:
        lines.append(f"         small operator {machine.operator * 1e6:>12.1f} µs  forward")
    for each in machine.collectives:
        (_, least), (size, most) = each.points[0], each.points[-1]
        moved = size * _passed(each) / most
        text = f"comm     {each.collective:<14} {_unit(moved, 'B/s'):>15}  {least * 1e6:.0f} µs"
        lines.append(f"{text}  ({each.ranks} ranks)")
    for loader in machine.loaders:
        lines.append(f"data     {loader.samples_per_s:,.0f} samples/s per rank  {loader.job}")
    return "\n".join([*lines, f"wrote    {out}" + (" (--machine here will use it)" if out == detect.FILE else "")])


def _passed(each: Collectives) -> float:
    """How much of the bytes one device passes on."""
    part = 1.0 if each.collective == "send" else (each.ranks - 1) / each.ranks
    return 2 * part if each.collective == "all_reduce" else part


def facts(machine: Machine, out: Path) -> dict[str, Any]:
    return {
        "machine": str(machine), "file": str(out), "memory_bytes_per_s": machine.device.memory_bandwidth,
        "matmuls": {c.precision: [[x, y * (machine.device.peak.of(c.precision) or 0)] for x, y in c.points] for c in machine.matmuls},
        "collectives": [{"collective": c.collective, "ranks": c.ranks, "points": c.points} for c in machine.collectives],
        "loaders": {each.job: each.samples_per_s for each in machine.loaders},
    }  # fmt: skip


def short(value: float) -> float:
    """Four digits: more than a measurement is good for."""
    return float(f"{value:.4g}")


def _unit(value: float, unit: str) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"
