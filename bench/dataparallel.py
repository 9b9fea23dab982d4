"""Compares the classic single-process DataParallel with a process per device, and with one device.

    python bench/dataparallel.py [--steps 40]

It runs the same job and batch in three ways, in turn: `dp=1`, `dp=2` and `dp=2 processes=one`. It prints the median step
time over dp=1's, the time breakdown of a step, and the bytes on each device. On a machine with two cores the last
two have the same hardware; they differ in the interpreter lock, the weights sent every step, and device 0's work.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLANS = ("dp=1", "dp=2", "dp=2 processes=one")


def run(plan: str, steps: int, folder: Path) -> list[dict]:
    """Return the metrics rows of one run."""
    job = str(ROOT / "examples/stdlib_gpt/job.py")
    words = ["train", job, "--plan", plan, "--steps", str(steps), "--runs", str(folder), "--save-every", "100000"]
    subprocess.run([sys.executable, "-m", "plait", *words], check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "latest/metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "loss" in r][5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    seen: dict[str, list[dict]] = {plan: [] for plan in PLANS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for plan in PLANS:
                seen[plan] += run(plan, options.steps, Path(folder))
    one = statistics.median(r["seconds"] for r in seen["dp=1"])
    print(f"{'plan':22}{'step / dp=1':>12}   share of the step; MiB per device")
    for plan, rows in seen.items():
        seconds = statistics.median(r["seconds"] for r in rows)
        names = list(rows[0]["spans"])
        shares = ", ".join(
            f"{n} {statistics.median(r['spans'].get(n, 0) / r['seconds'] for r in rows):.0%}" for n in names
        )
        held = " · ".join(f"{n / 2**20:.1f}" for n in rows[-1].get("device_bytes", []))
        print(f"{plan:22}{seconds / one:>12.2f}   {shares}" + (f"; {held}" if held else ""))


if __name__ == "__main__":
    main()
