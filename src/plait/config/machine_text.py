"""A machine as text: what a TOML file says, every fault at once; the catalogue in `machines/`; and TOML written again.

Every key carries its unit in its name: `gb` is 10^9 bytes, `gib` 2^30 bytes, `gbit` 10^9 bits, `tflops` 10^12 flop/s.
"""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.machine import Collectives, Device, Loader, Machine, Matmuls, Rates
from plait.config.network import FITTED, HOPS, REACHED, Link
from plait.config.plain_file import read_plain

LEAST, MOST = 1e-12, 1e18
"""Numbers of a machine lie between these: others overflow when they are multiplied."""
FILE_BYTES = 4 << 20
"""The largest file of a machine that is read: `plait bench` writes some kilobytes."""
CATALOGUE = Path(__file__).parents[1] / "machines"
GIB, GB, TERA = 2**30, 1e9, 1e12

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and LEAST <= value <= MOST


def _part(value: Any) -> bool:
    return _positive(value) and value <= 1


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**20


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_positive, value))


EXPECTED: dict[Check, str] = {
    _text: "a text", _positive: "a number above 0 (1e-12 to 1e18)", _part: "a number from 0 to 1", _count: "a whole number from 1 to 1048576",
    _texts: "a list of texts", _numbers: "a list of numbers above 0 (1e-12 to 1e18)",
}  # fmt: skip
RATES: dict[str, Check] = {f.name: _positive for f in fields(Rates)}
KEYS: dict[str, dict[str, Check]] = {
    "": {
        "name": _text, "aliases": _texts, "reported": _texts, "node": _text, "source": _text, "caution": _text,
        "notes": _text, "devices_per_node": _count, "nodes": _count, "cores": _count, "host_memory_gib": _positive,
        "price_per_hour": _positive, "operator_us": _positive,
    },
    "device": {"name": _text, "memory_gib": _positive, "memory_gb_per_s": _positive, "source": _text},
    "device.peak_tflops": RATES,
    "device.matmul_tflops": RATES,
    "host": {"link": _text, "gb_per_s": _positive, "source": _text},
    "links": {
        "name": _text, "kind": _text, "devices": _count, "gb_per_s": _positive, "gbit_per_s_per_node": _positive,
        "latency_us": _positive, "shares": _numbers, "reached": _part, "adds": _part, "source": _text,
    },
    "matmuls": {"precision": _text, "flops": _numbers, "fraction_of_peak": _numbers},
    "collectives": {"collective": _text, "ranks": _count, "bytes": _numbers, "seconds": _numbers},
    "loaders": {"job": _text, "samples_per_s": _positive},
}  # fmt: skip
LISTS = ("links", "matmuls", "collectives", "loaders")


def load(path: Path) -> Machine:
    """A machine from a TOML file: of the catalogue, or one's own."""
    return machine(_read(path))


@cache
def catalogue() -> dict[str, Path]:
    """The files of `machines/` by name and by every other name."""
    found: dict[str, Path] = {}
    for path in sorted(CATALOGUE.glob("*.toml")):
        said = tomllib.loads(path.read_text(encoding="utf-8"))
        found |= dict.fromkeys((said["name"], *said.get("aliases", [])), path)
    return found


def named(text: str) -> Machine:
    """`h100`, `h100x8` or `h100x8x16`: a device of the catalogue, devices per node, nodes."""
    wanted = re.sub(r"[ _]+", "-", text.strip().lower())
    known = catalogue()
    fitting = [n for n in known if re.fullmatch(re.escape(n) + r"(x[1-9]\d{0,6}){0,2}", wanted)]
    if not fitting:
        base = re.sub(r"(x\d+){1,2}$", "", wanted)
        names = tuple(dict.fromkeys(path.stem for path in known.values()))
        hint = did_you_mean(base, tuple(known)) if base else f"known: {', '.join(names)}"
        fix = ("h100x8x16 is 16 nodes of 8 devices", "machine.toml    a file of your own")
        raise PlaitError(Problem("M010", f"there is no machine {text}        {hint}", fix=fix))
    name = max(fitting, key=len)
    counts = [int(word) for word in wanted.removeprefix(name).split("x")[1:]] or [1]
    said = _read(known[name])
    typical = said.get("devices_per_node")
    if len(counts) == 1 and typical and counts[0] > typical:
        if counts[0] % typical:
            why = f"{counts[0]} / {typical} = {counts[0] / typical:.2f} nodes"
            fix = (f"{name}x{typical}x{-(-counts[0] // typical)}", f"{name}x{counts[0]}x1    if a node has so many")
            raise PlaitError(Problem("M010", f"{text}: {name} has {typical} devices on a node", why=why, fix=fix))
        counts = [typical, counts[0] // typical]
    per, nodes = (*counts, 1)[:2]
    result = machine(said | {"devices_per_node": max(per, typical or 1)})  # devices of a node share its network
    return replace(result, name=wanted, devices_per_node=per, nodes=nodes)


def machine(said: dict[str, Any]) -> Machine:
    """The machine that a checked file describes."""
    per = said.get("devices_per_node", 1)
    notes = [said[key] for key in ("node", "caution", "notes") if key in said]
    host = said.get("host", {}).get("gb_per_s")
    memory, operator = said.get("host_memory_gib"), said.get("operator_us")
    return Machine(
        said["name"],
        _device(said["device"]),
        tuple(_link(row, per) for row in said.get("links", ())),
        per,
        said.get("nodes", 1),
        host and host * GB,
        said.get("price_per_hour"),
        said.get("cores"),
        memory and round(memory * GIB),
        operator and operator / 1e6,
        said.get("source", ""),
        " · ".join(notes),
        tuple(Matmuls(r["precision"], tuple(zip(r["flops"], r["fraction_of_peak"]))) for r in said.get("matmuls", ())),
        tuple(
            Collectives(r["collective"], r["ranks"], tuple(zip(r["bytes"], r["seconds"])))
            for r in said.get("collectives", ())
        ),
        tuple(Loader(r["job"], r["samples_per_s"]) for r in said.get("loaders", ())),
    )


def _device(said: dict[str, Any]) -> Device:
    peak = {name: value * TERA for name, value in said.get("peak_tflops", {}).items()}
    best = {name: value * TERA / peak[name] for name, value in said.get("matmul_tflops", {}).items() if name in peak}
    moved = said.get("memory_gb_per_s")
    return Device(
        said["name"], round(said["memory_gib"] * GIB), moved and moved * GB, Rates(**peak), Rates(**best)
    )  # fmt: skip


def _link(said: dict[str, Any], per: int) -> Link:
    kind = said["kind"]
    everything = kind in ("network", "efa")
    rate = said["gb_per_s"] * GB if "gb_per_s" in said else said["gbit_per_s_per_node"] * GB / 8 / per
    latency = said["latency_us"] / 1e6 if "latency_us" in said else HOPS[kind][0]
    devices = said.get("devices", None if everything else per)
    reached = said.get("reached", FITTED["network"] if everything else REACHED)
    shares = tuple(said.get("shares", ()))
    return Link(said["name"], devices, rate, latency, kind, shares, reached, said.get("adds", 0.0))


def to_toml(machine: Machine) -> str:
    """The machine as a file that `load` reads back to an equal one."""
    device, lines = machine.device, []
    top = {
        "name": machine.name, "notes": machine.notes or None, "source": machine.source or None,
        "devices_per_node": machine.devices_per_node, "nodes": machine.nodes, "cores": machine.cores,
        "host_memory_gib": _scaled(machine.host_memory, GIB), "price_per_hour": machine.price_per_hour,
        "operator_us": machine.operator and round(machine.operator * 1e6, 6),
    }  # fmt: skip
    lines += _rows(top)
    about = {
        "name": device.name,
        "memory_gib": device.memory / GIB,
        "memory_gb_per_s": _scaled(device.memory_bandwidth, GB),
    }
    lines += ["", "[device]", *_rows(about)]
    for table, rates in (("peak_tflops", device.peak), ("matmul_tflops", device.achievable)):
        factors = {f.name: (rates.of(f.name), device.peak.of(f.name)) for f in fields(Rates)}
        shown = {n: a and a * (1 if table == "peak_tflops" else b or 0) / TERA for n, (a, b) in factors.items()}
        lines += ["", f"[device.{table}]", *_rows(shown)] if any(shown.values()) else []
    lines += ["", "[host]", *_rows({"gb_per_s": machine.host / GB})] if machine.host else []
    for link in machine.links:
        row = {"name": link.name, "kind": link.kind, "devices": link.devices, "gb_per_s": link.bandwidth / GB}
        row |= {"latency_us": link.latency * 1e6, "reached": link.reached}
        row |= {"shares": list(link.shares) or None, "adds": link.adds or None}
        lines += ["", "[[links]]", *_rows(row)]
    for curve in machine.matmuls:
        x, y = ([p[i] for p in curve.points] for i in (0, 1))
        lines += ["", "[[matmuls]]", *_rows({"precision": curve.precision, "flops": x, "fraction_of_peak": y})]
    for each in machine.collectives:
        x, y = ([p[i] for p in each.points] for i in (0, 1))
        row = {"collective": each.collective, "ranks": each.ranks, "bytes": x, "seconds": y}
        lines += ["", "[[collectives]]", *_rows(row)]
    for loader in machine.loaders:
        lines += ["", "[[loaders]]", *_rows({"job": loader.job, "samples_per_s": loader.samples_per_s})]
    return "\n".join(lines) + "\n"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _rows(said: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in said.items() if value is not None]


def _read(path: Path) -> dict[str, Any]:
    """What a file says, checked. All faults are raised together."""
    try:
        said = tomllib.loads(read_plain(path, FILE_BYTES).decode("utf-8"))
    except OSError as error:
        what = f"cannot read the machine {str(path)[:300]}"
        raise PlaitError(Problem("M012", what, error.strerror or str(error), fix=("--machine h100x8",))) from None
    except (ValueError, RecursionError) as error:
        raise PlaitError(Problem("M012", f"{path} is not TOML", str(error)[:200], str(path))) from None
    problems = [problem for table, rows in _tables(said) for row in rows for problem in _faults(table, row, str(path))]
    problems += [Problem("M012", f"{path.name} has no {key}", where=str(path)) for key in _missing(said)]
    if problems:
        raise PlaitError(problems[:20])
    return said


def _tables(said: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Every table with its rows: the top, [device] and those inside it, [host], and each of the lists."""
    device = said.get("device", {})
    inner = [f"device.{name}" for name in ("peak_tflops", "matmul_tflops")]
    tables = [("", [{k: v for k, v in said.items() if k not in KEYS}])]
    if isinstance(device, dict):
        tables.append(("device", [{k: v for k, v in device.items() if f"device.{k}" not in inner}]))
        tables += [(name, [device[name[7:]]]) for name in inner if name[7:] in device]
    else:
        tables.append(("device", [device]))
    tables += [("host", [said["host"]])] if "host" in said else []
    return tables + [
        (name, said[name] if isinstance(said[name], list) else [said[name]]) for name in LISTS if name in said
    ]


def _faults(table: str, row: Any, where: str) -> list[Problem]:
    head = f"[{table}] " if table else ""
    if not isinstance(row, dict):
        return [Problem("M012", f"{table} is a table of keys", where=where)]
    found = []
    for key, value in row.items():
        check = KEYS[table].get(key)
        if check is None:
            hint = did_you_mean(key, tuple(KEYS[table]))
            found.append(Problem("M011", f"unknown key of a machine:  {head}{key}        {hint}", where=where))
        elif not check(value):
            found.append(
                Problem(
                    "M012",
                    f"{head}{key[:60]} = {_shown(value)}        expected {EXPECTED[check]}",
                    where=where,
                )
            )
    if found:
        return found
    return [Problem("M012", f"{head}{what}", where=where) for what in _disagreements(table, row)]


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, default=str)[:60]
    except (ValueError, RecursionError):
        return "a number of thousands of digits"


def _disagreements(table: str, row: dict[str, Any]) -> list[str]:
    """What a row of good values lacks, or says twice."""
    if table == "links":
        lacks = [f"{key} is missing" for key in ("name", "kind") if key not in row]
        kind = row.get("kind", "nvlink")
        lacks += [f"kind = {kind}        {did_you_mean(kind, tuple(HOPS))}"] if kind not in HOPS else []
        one = ("gb_per_s" in row) + ("gbit_per_s_per_node" in row)
        return lacks + (["give one of gb_per_s (per device) and gbit_per_s_per_node"] if one != 1 else [])
    pairs = {"matmuls": ("precision", "flops", "fraction_of_peak"), "collectives": ("collective", "bytes", "seconds")}
    if table not in pairs:
        return []
    name, x, y = pairs[table]
    lacks = [f"{key} is missing" for key in (name, x, y) if key not in row]
    if not lacks and (len(row[x]) != len(row[y]) or row[x] != sorted(set(row[x]))):
        lacks.append(f"{x} and {y} are lists of the same length, {x} rising")
    return lacks


def _missing(said: dict[str, Any]) -> list[str]:
    device = said.get("device", {})
    inner = [f"[device] {key}" for key in ("name", "memory_gib") if not isinstance(device, dict) or key not in device]
    return [key for key in ("name", "device") if key not in said] + inner
