"""`plait bench`: measure this machine, write machine.toml and print the results. `--machine here` reads the file.

Sections that this call does not measure keep their values: `plait bench data job.py` adds to an earlier file.
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
from plait.config.files import check_writable, write_output
from plait.config.hardware import Collectives, Link, Loader, Matmuls
from plait.config.job import load_job
from plait.config.machine import Machine
from plait.launch import detect, fork
from plait.launch.devices import resolve_kind
from plait.launch.place import Place, find_place, find_rank_membership, is_launched_rank

PARTS = ("compute", "comm", "data")


def run(options: BenchOptions) -> int:
    """Run the command."""
    check_range(options)
    parts = PARTS if options.what == "all" else (options.what,)
    if options.what == "data" and not options.job:
        raise PlaitError(Problem("U001", "plait bench data needs a job", fix=("plait bench data job.py",)))
    check_writable(options.output)
    job = load_job(options.job, options.arguments) if options.job and "data" in parts else None
    kind = resolve_kind(options.device)
    machine = Machine.load(options.output) if options.output.exists() else detect.detect_machine(options.device)
    member = find_rank_membership()
    ranks = member.count if member is not None else options.nproc or machine.devices_per_node
    machine = resize_machine(machine, ranks, kind)
    from plait.cli import measure_machine

    with ProgressLine("bench", options.json or find_place().rank > 0) as line:
        if "compute" in parts:
            line.show("measuring compute", parts.index("compute"), len(parts))
            machine = add_compute(machine, run_on_ranks(lambda place: measure_machine.measure_compute(place, kind), ranks), kind)
        if "comm" in parts and ranks > 1:
            line.show("measuring communication", parts.index("comm"), len(parts))
            (measured, *_) = run_on_ranks(lambda place: measure_machine.measure_collectives(place, kind), ranks)
            for group in measured["groups"]:
                machine = add_collectives(machine, group["ranks"], group["points"], kind)
        if job is not None and options.job is not None:
            line.show("measuring data loading", parts.index("data"), len(parts))
            rates = run_on_ranks(lambda place: {"rate": measure_machine.measure_loading(place, job)}, ranks)
            machine = add_loader(machine, options.job, median(each["rate"] for each in rates))
    if find_place().rank == 0:
        write_output(options.output, format_bench_header() + machine.to_toml())
        print_result(options, bench_to_dict(machine, options.output), format_bench(machine, ranks, options.output))
    return 0


def run_on_ranks(work: Callable[[Place], dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Run `work` on each rank and return the results; if another launcher started this process, only this rank's result."""
    return [work(find_place())] if is_launched_rank() else fork.run_ranks(work, ranks)


def resize_machine(machine: Machine, ranks: int, kind: str) -> Machine:
    """Set the number of devices to the number of processes on a CPU, and drop measurements of a different number."""
    if kind != "cpu" or is_launched_rank() or ranks == machine.devices_per_node:
        return machine
    memory = (machine.host_memory or machine.device.memory * machine.devices_per_node) // ranks
    device = replace(machine.device, memory=memory)
    return replace(
        machine, devices_per_node=ranks, device=device, links=(), matmuls=(), collectives=(), loaders=()
    )  # fmt: skip


def add_compute(machine: Machine, measured: list[dict[str, Any]], kind: str) -> Machine:
    """Add matmul curves: the median over ranks at every size.

    Without a data sheet, the highest measured rate is the peak.
    """
    device, peaks, curves, best = machine.device, {}, [], {}
    for name in measured[0]["matmuls"]:
        lines = [each["matmuls"][name] for each in measured]
        points = [(row[0][0], median(point[1] for point in row)) for row in zip(*lines)]
        top = round_digits(max(rate for _, rate in points))
        peaks[name] = (device.peak.for_precision(name) if kind == "cuda" else None) or top
        best[name] = top / peaks[name]
        curves.append(Matmuls(name, tuple((flops, round_digits(rate / peaks[name])) for flops, rate in points)))
    memory = round_digits(median(each["memory"] for each in measured))
    hosts = [round_digits(each["host"]) for each in measured if "host" in each]
    launches = [each["operator"] for each in measured if "operator" in each]
    operator = round_digits(median(launches) * 1e6) / 1e6 if launches else machine.operator
    peak, achievable = replace(device.peak, **peaks), replace(device.achievable, **best)
    device = replace(device, memory_bandwidth=memory, peak=peak, achievable=achievable)
    return replace(machine, device=device, matmuls=tuple(curves), host=median(hosts) if hosts else machine.host,
                   operator=operator)  # fmt: skip


def add_collectives(machine: Machine, ranks: int, points: dict[str, Any], kind: str) -> Machine:
    """Add the measured collectives of a group of neighboring ranks. On a CPU, the link is derived from the all-reduce."""
    new = tuple(Collectives(name, ranks, make_monotonic(rows)) for name, rows in points.items())
    kept = tuple(each for each in machine.collectives if each.ranks != ranks)
    links = machine.links
    if kind == "cpu" and ranks == machine.devices_per_node:
        (_, least), (size, most) = new[0].points[0], new[0].points[-1]
        hops = 2 * (ranks - 1)
        links = (Link("loopback (gloo)", ranks, round_digits(hops / ranks * size / most), round_digits(least / hops), "loopback"),)
    return replace(machine, collectives=kept + new, links=links)


def make_monotonic(points: list[list[float]]) -> tuple[tuple[float, float], ...]:
    """Lower each time to the minimum of all larger messages. A higher time means that another program was running."""
    return tuple((x, round_digits(min(y for _, y in points[i:]))) for i, (x, _) in enumerate(points))


def add_loader(machine: Machine, job: str, rate: float) -> Machine:
    """Add the samples/s that one rank reads of a job's data."""
    kept = tuple(each for each in machine.loaders if each.job != job)
    return replace(machine, loaders=(*kept, Loader(job, round_digits(rate))))


def format_bench_header() -> str:
    return (
        "# Measured by plait bench. `--machine here` reads this file in the working directory, `--machine FILE` from any path.\n"
    )


def format_bench(machine: Machine, ranks: int, out: Path) -> str:
    """Format the measured values, one per line."""
    lines = [f"machine  {machine}, {ranks} process{'es' * (ranks > 1)} at once"]
    for curve in machine.matmuls:
        flops, part = max(curve.points, key=lambda point: point[1])
        rate, side = part * (machine.device.peak.for_precision(curve.precision) or 0.0), round((flops / 2) ** (1 / 3))
        share = f"  ({part:.0%})" if part < 0.999 else ""
        lines.append(f"compute  matmul {curve.precision:<7} {_format_rate(rate, 'FLOP/s'):>15}{share}  at {side} × {side}")
    if machine.matmuls:
        lines.append(f"         memory         {_format_rate(machine.device.memory_bandwidth or 0.0, 'B/s'):>15}  copied")
    if machine.operator:
        lines.append(f"         small operator {machine.operator * 1e6:>12.1f} µs  forward")
    for each in machine.collectives:
        (_, least), (size, most) = each.points[0], each.points[-1]
        moved = size * _traffic_factor(each) / most
        text = f"comm     {each.collective:<14} {_format_rate(moved, 'B/s'):>15}  {least * 1e6:.0f} µs"
        lines.append(f"{text}  ({each.ranks} ranks)")
    for loader in machine.loaders:
        lines.append(f"data     {loader.samples_per_s:,.0f} samples/s per rank  {loader.job}")
    return "\n".join([*lines, f"wrote    {out}" + (" (--machine here will use it)" if out == detect.MACHINE_FILE else "")])


def _traffic_factor(each: Collectives) -> float:
    """Return the bytes that one device transfers, as a multiple of the message size."""
    part = 1.0 if each.collective == "send" else (each.ranks - 1) / each.ranks
    return 2 * part if each.collective == "all_reduce" else part


def bench_to_dict(machine: Machine, out: Path) -> dict[str, Any]:
    return {
        "machine": str(machine), "file": str(out), "memory_bytes_per_s": machine.device.memory_bandwidth,
        "matmuls": {c.precision: [[x, y * (machine.device.peak.for_precision(c.precision) or 0)] for x, y in c.points] for c in machine.matmuls},
        "collectives": [{"collective": c.collective, "ranks": c.ranks, "points": c.points} for c in machine.collectives],
        "loaders": {each.job: each.samples_per_s for each in machine.loaders},
    }  # fmt: skip


def round_digits(value: float) -> float:
    """Round to four significant digits, the precision of the measurements."""
    return float(f"{value:.4g}")


def _format_rate(value: float, unit: str) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"
