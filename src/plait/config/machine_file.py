"""Reads and checks a machine's TOML file, with all errors at once; and the catalog of data sheets in `machines/`.

Every key has its unit in its name: `gb` is 10^9 bytes, `gib` 2^30 bytes, `gbit` 10^9 bits, `tflops` 10^12 flop/s.
"""

import tomllib
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.files import read_plain_file, to_json_text
from plait.config.hardware import HOP_SECONDS, Rates

MIN_NUMBER, MAX_NUMBER = 1e-12, 1e18
"""Range of numbers in a machine file: others overflow in products."""
FILE_BYTES = 4 << 20
"""Maximum size of a machine file in bytes: `plait bench` writes some kilobytes."""
CATALOG_FOLDER = Path(__file__).parents[1] / "machines"
GIB, GB, TERA = 2**30, 1e9, 1e12

Check = Callable[[Any], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and MIN_NUMBER <= value <= MAX_NUMBER


def _is_fraction(value: object) -> bool:
    return _is_positive(value) and value <= 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**20


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_positive, value))


def _is_fractions(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_fraction, value))


EXPECTED: dict[Check, str] = {
    _is_text: "a string", _is_positive: "a number above 0 (1e-12 to 1e18)", _is_fraction: "a number from 0 to 1",
        _is_count: "a whole number from 1 to 1048576",
    _is_fractions: "a list of numbers from 0 to 1", _is_texts: "a list of strings", _is_numbers: "a list of numbers above 0 (1e-12 to 1e18)",
}  # fmt: skip
RATES: dict[str, Check] = {f.name: _is_positive for f in fields(Rates)}
MACHINE_KEYS: dict[str, dict[str, Check]] = {
    "": {
        "name": _is_text, "aliases": _is_texts, "reported": _is_texts, "node": _is_text, "source": _is_text, "caution": _is_text,
        "notes": _is_text, "devices_per_node": _is_count, "nodes": _is_count, "cores": _is_count, "host_memory_gib": _is_positive,
        "price_per_hour": _is_positive, "operator_us": _is_positive, "speeds": _is_fractions, "memories_gib": _is_numbers,
    },
    "device": {"name": _is_text, "memory_gib": _is_positive, "memory_gb_per_s": _is_positive, "multiprocessors": _is_count, "source": _is_text},
    "device.peak_tflops": RATES,
    "device.matmul_tflops": RATES,
    "host": {"link": _is_text, "gb_per_s": _is_positive, "source": _is_text},
    "links": {
        "name": _is_text, "kind": _is_text, "devices": _is_count, "gb_per_s": _is_positive, "gbit_per_s_per_node": _is_positive,
        "latency_us": _is_positive, "shares": _is_numbers, "reached": _is_fraction, "adds": _is_fraction, "source": _is_text,
    },
    "matmuls": {"precision": _is_text, "flops": _is_numbers, "fraction_of_peak": _is_numbers},
    "collectives": {"collective": _is_text, "ranks": _is_count, "bytes": _is_numbers, "seconds": _is_numbers},
    "loaders": {"job": _is_text, "samples_per_s": _is_positive},
}  # fmt: skip
LIST_TABLES = ("links", "matmuls", "collectives", "loaders")


@cache
def read_catalog() -> dict[str, Path]:
    """Return the files of `machines/` by name and alias."""
    files: dict[str, Path] = {}
    for path in sorted(CATALOG_FOLDER.glob("*.toml")):
        said = tomllib.loads(path.read_text(encoding="utf-8"))
        files |= dict.fromkeys((said["name"], *said.get("aliases", [])), path)
    return files


def read_machine_file(path: Path) -> dict[str, Any]:
    """Read and check a machine file. Raises all errors together."""
    try:
        said = tomllib.loads(read_plain_file(path, FILE_BYTES).decode("utf-8"))
    except OSError as error:
        what = f"the machine file {str(path)[:300]} cannot be read"
        raise PlaitError(Problem("M012", what, error.strerror or str(error), fix=("--machine h100x8",))) from None
    except (ValueError, RecursionError) as error:
        raise PlaitError(Problem("M012", f"the machine file {path} is not TOML", str(error)[:200], str(path))) from None
    problems = [problem for table, rows in _split_tables(said) for row in rows for problem in _find_faults(table, row, str(path))]
    device = said.get("device", {})
    missing = [key for key in ("name", "device") if key not in said]
    known = device if isinstance(device, dict) else {}
    missing += [f"[device] {key}" for key in ("name", "memory_gib") if key not in known]
    problems += [Problem("M012", f"the machine file {path.name} has no {key}", where=str(path)) for key in missing]
    if problems:
        raise PlaitError(problems[:20])
    return said


def _split_tables(data: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Return every table with its rows: the top, [device] and its tables, [host], and each of the lists."""
    device = data.get("device", {})
    inner = [f"device.{name}" for name in ("peak_tflops", "matmul_tflops")]
    tables = [("", [{k: v for k, v in data.items() if k not in MACHINE_KEYS}])]
    if isinstance(device, dict):
        tables.append(("device", [{k: v for k, v in device.items() if f"device.{k}" not in inner}]))
        tables += [(name, [device[name[7:]]]) for name in inner if name[7:] in device]
    else:
        tables.append(("device", [device]))
    tables += [("host", [data["host"]])] if "host" in data else []
    return tables + [
        (name, data[name] if isinstance(data[name], list) else [data[name]]) for name in LIST_TABLES if name in data
    ]


def _find_faults(table: str, row: object, where: str) -> list[Problem]:
    head = f"[{table}] " if table else ""
    if not isinstance(row, dict):
        return [Problem("M012", f"[{table}] is not a table of keys", where=where)]
    problems = []
    for key, value in row.items():
        check = MACHINE_KEYS[table].get(key)
        if check is None:
            hint = did_you_mean(key, tuple(MACHINE_KEYS[table]))
            problems.append(Problem("M011", f"unknown key in the machine file:  {head}{key}        {hint}", where=where))
        elif not check(value):
            what = f"{head}{key[:60]} = {to_json_text(value)[:60]}        expected {EXPECTED[check]}"
            problems.append(Problem("M012", what, where=where))
    if problems:
        return problems
    return [Problem("M012", f"{head}{what}", where=where) for what in _find_disagreements(table, row)]


def _find_disagreements(table: str, row: dict[str, Any]) -> list[str]:
    """Describe missing and contradictory values of a row whose values are valid."""
    if table == "links":
        lacks = [f"{key} is missing" for key in ("name", "kind") if key not in row]
        kind = row.get("kind", "nvlink")
        lacks += [f"kind = {kind}        {did_you_mean(kind, tuple(HOP_SECONDS))}"] if kind not in HOP_SECONDS else []
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
