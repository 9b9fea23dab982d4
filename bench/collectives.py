"""Compares times of collectives that `plait.config.hardware` predicts with published measurements.

    python bench/collectives.py FILE.csv [--all] [--fit]

FILE.csv has one measurement a row: source, gpu, interconnect, collective, ranks, nodes, payload_bytes, time_us. Devices are
those of `machines/`. --all prints every row. --fit searches better constants, to measure their effect. Two rows of
32 and 64 KiB over 4 nodes take 6 and 3 ms, while 128 KiB take 0.6 ms, because connections were being made. They count, and the
error without them is printed, too.
"""

import argparse
import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from plait.config import hardware
from plait.config.machine import Machine

DEVICES = {"A100-SXM": "a100", "V100-SXM2": "v100-16gb", "V100-SXM2-16GB": "v100-16gb", "V100-SXM2-32GB": "v100",
           "B200-SXM": "b200", "H100-SXM": "h100"}  # fmt: skip
FACTORS = (0.8, 0.9, 0.97, 1.03, 1.1, 1.25)


def machine_of(row: dict[str, str]) -> Machine:
    """Return the machine of a row: 8 devices a node, EFA between nodes if the row states it."""
    machine = Machine.from_name(f"{DEVICES[row['gpu']]}x8x{row['nodes']}")
    if "EFA" not in row["interconnect"]:
        return machine
    efa = (replace(x, kind="efa", latency=hardware.HOP_SECONDS["efa"][0]) if x.is_between_nodes else x for x in machine.links)
    return replace(machine, links=tuple(efa))


def errors(rows: list[dict[str, str]]) -> dict[tuple[str, ...], list[tuple[dict[str, str], float, float]]]:
    """Return (row, predicted, measured) in microseconds, by device, ranks and nodes."""
    found = defaultdict(list)
    for row in rows:
        measured = float(row["time_us"])
        seconds = getattr(machine_of(row), row["collective"])(float(row["payload_bytes"]), int(row["ranks"]))
        found[row["gpu"], row["ranks"], row["nodes"]].append((row, seconds * 1e6, measured))
    return found


def mape(cases: list[tuple[dict[str, str], float, float]]) -> float:
    return mean(abs(p / m - 1) for _, p, m in cases)


def fit(rows: list[dict[str, str]]) -> None:
    """Change one constant at a time while the mean error falls."""

    def score() -> float:
        hardware.HOP_SECONDS["efa"] = (hardware.FITTED_CONSTANTS["efa hop"],) * 3
        return mape([case for cases in errors(rows).values() for case in cases])

    best = score()
    for _ in range(4):
        for name in hardware.FITTED_CONSTANTS:
            for factor in FACTORS:
                before = hardware.FITTED_CONSTANTS[name]
                hardware.FITTED_CONSTANTS[name] = min(before * factor, 1.0) if name in ("link", "network") else before * factor
                now = score()
                best, hardware.FITTED_CONSTANTS[name] = (now, hardware.FITTED_CONSTANTS[name]) if now < best else (best, before)
    score()
    print("fitted:", ", ".join(f"{name} {value:.4g}" for name, value in hardware.FITTED_CONSTANTS.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    with options.file.open(encoding="utf-8", newline="") as file:
        said = list(csv.DictReader(file))
    rows = [row for row in said if row["time_us"]]
    if options.fit:
        fit(rows)
    found = errors(rows)
    print(f"{'device':<12}{'ranks':>6}{'nodes':>6}{'rows':>6}{'error':>8}{'bias':>8}{'worst':>8}")
    for (gpu, ranks, nodes), cases in found.items():
        worst = max((p / m - 1 for _, p, m in cases), key=abs)
        bias = mean(p / m - 1 for _, p, m in cases)
        print(f"{gpu:<12}{ranks:>6}{nodes:>6}{len(cases):>6}{mape(cases):>8.1%}{bias:>+8.1%}{worst:>+8.0%}")
        for row, p, m in cases if options.all else ():
            print(
                f"    {int(row['payload_bytes']):>12} bytes  predicted {p:>10.1f} us  measured {m:>10.1f}  {p / m - 1:>+6.0%}"
            )
    every = [case for cases in found.values() for case in cases]
    settled = [c for c in every if not (int(c[0]["nodes"]) > 1 and float(c[0]["payload_bytes"]) < 2**17)]
    links = {
        link.name
        for row in rows
        for link in machine_of(row).links
        if link.reached not in (hardware.LINK_EFFICIENCY, *hardware.FITTED_CONSTANTS.values())
    }
    large = [c for c in every if float(c[0]["payload_bytes"]) >= 2**23]
    print(
        f"mean absolute error {mape(every):.1%} of {len(every)} rows, median {median(abs(p / m - 1) for _, p, m in every):.1%}"
        f" · without the {len(every) - len(settled)} rows of connections being made {mape(settled):.1%}"
        f" · from 8 MiB {mape(large):.1%} · {len(hardware.FITTED_CONSTANTS) + len(links) + 1} constants fitted"
        f" · {len(said) - len(rows)} rows state no time"
    )


if __name__ == "__main__":
    main()
