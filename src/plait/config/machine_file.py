"""A machine's TOML file, read and checked, with every fault at once; and the catalogue of data sheets in `machines/`.

Every key carries its unit in its name: `gb` is 10^9 bytes, `gib` 2^30 bytes, `gbit` 10^9 bits, `tflops` 10^12 flop/s.
"""

import tomllib
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.files import as_json, read_plain
from plait.config.hardware import HOPS, Rates

LEAST, MOST = 1e-12, 1e18
"""Numbers of a machine lie between these: others overflow when they are multiplied."""
FILE_BYTES = 4 << 20
"""The largest file of a machine that is read: `plait bench` writes some kilobytes."""
CATALOGUE = Path(__file__).parents[1] / "machines"
GIB, GB, TERA = 2**30, 1e9, 1e12

Check = Callable[[Any], bool]


def _text(value: object) -> bool:
    return isinstance(value, str)


def _positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and LEAST <= value <= MOST


def _part(value: object) -> bool:
    return _positive(value) and value <= 1


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**20


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_positive, value))


def _parts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_part, value))


EXPECTED: dict[Check, str] = {
    _text: "a string", _positive: "a number above 0 (1e-12 to 1e18)", _part: "a number from 0 to 1", _count: "a whole number from 1 to 1048576",
    _parts: "a list of numbers from 0 to 1", _texts: "a list of strings", _numbers: "a list of numbers above 0 (1e-12 to 1e18)",
}  # fmt: skip
RATES: dict[str, Check] = {f.name: _positive for f in fields(Rates)}
KEYS: dict[str, dict[str, Check]] = {
    "": {
        "name": _text, "aliases": _texts, "reported": _texts, "node": _text, "source": _text, "caution": _text,
        "notes": _text, "devices_per_node": _count, "nodes": _count, "cores": _count, "host_memory_gib": _positive,
        "price_per_hour": _positive, "operator_us": _positive, "speeds": _parts, "memories_gib": _numbers,
    },
    "device": {"name": _text, "memory_gib": _positive, "memory_gb_per_s": _positive, "multiprocessors": _count, "source": _text},
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


@cache
def catalogue() -> dict[str, Path]:
    """The files of `machines/` by name and by every other name."""
    files: dict[str, Path] = {}
    for path in sorted(CATALOGUE.glob("*.toml")):
        said = tomllib.loads(path.read_text(encoding="utf-8"))
        files |= dict.fromkeys((said["name"], *said.get("aliases", [])), path)
    return files


def read_file(path: Path) -> dict[str, Any]:
    """What a file says, checked. All faults are raised together."""
    try:
        said = tomllib.loads(read_plain(path, FILE_BYTES).decode("utf-8"))
    except OSError as error:
        what = f"the machine file {str(path)[:300]} cannot be read"
        raise PlaitError(Problem("M012", what, error.strerror or str(error), fix=("--machine h100x8",))) from None
    except (ValueError, RecursionError) as error:
        raise PlaitError(Problem("M012", f"the machine file {path} is not TOML", str(error)[:200], str(path))) from None
    problems = [problem for table, rows in _tables(said) for row in rows for problem in _faults(table, row, str(path))]
    device = said.get("device", {})
    missing = [key for key in ("name", "device") if key not in said]
    known = device if isinstance(device, dict) else {}
    missing += [f"[device] {key}" for key in ("name", "memory_gib") if key not in known]
    problems += [Problem("M012", f"the machine file {path.name} has no {key}", where=str(path)) for key in missing]
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


def _faults(table: str, row: object, where: str) -> list[Problem]:
    head = f"[{table}] " if table else ""
    if not isinstance(row, dict):
        return [Problem("M012", f"[{table}] is not a table of keys", where=where)]
    problems = []
    for key, value in row.items():
        check = KEYS[table].get(key)
        if check is None:
            hint = did_you_mean(key, tuple(KEYS[table]))
            problems.append(Problem("M011", f"unknown key in the machine file:  {head}{key}        {hint}", where=where))
        elif not check(value):
            what = f"{head}{key[:60]} = {as_json(value)[:60]}        expected {EXPECTED[check]}"
            problems.append(Problem("M012", what, where=where))
    if problems:
        return problems
    return [Problem("M012", f"{head}{what}", where=where) for what in _disagreements(table, row)]


def _disagreements(table: str, row: dict[str, Any]) -> list[str]:
    """What a row of good values lacks, or says twice."""
    if table == "links":
        lacks = [f"{key} is missing" for key in ("name", "kind") if key not in row]
        kind = row.get("kind", "nvlink")
        lacks += [f"kind = {kind}        {did_you_mean(kind, tuple(HOPS))}"] if kind not in HOPS else []
        one = ("gb_per_s" in row) + ("gbit_per_s_per_node" in row)
        return lacks + (["give one of gb_per_s (per device) and gbit_per_s_per_node"] if one != 1 else [])
    if not table:
        per = row.get("devices_per_node", 1)
        lists = [(key, len(row[key])) for key in ("speeds", "memories_gib") if key in row]
        return [f"{key} has {n} numbers for devices_per_node = {per}" for key, n in lists if n != per]
    pairs = {"matmuls": ("precision", "flops", "fraction_of_peak"), "collectives": ("collective", "bytes", "seconds")}
    if table not in pairs:
        return []
    name, x, y = pairs[table]
    lacks = [f"{key} is missing" for key in (name, x, y) if key not in row]
    if not lacks and (len(row[x]) != len(row[y]) or row[x] != sorted(set(row[x]))):
        lacks.append(f"{x} and {y} are lists of the same length, {x} rising")
    return lacks
