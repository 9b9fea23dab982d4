"""Runs the checks of an hour on a GPU, each in its own process. Finished checks are saved, so that a later call resumes there.

A check is a function that returns a row: {column: value}, with `saw` for text and `data` for values that are saved and not printed.
It runs in a process forked from one that never uses a device. Its allocations and failures end with its process, and it may fork
ranks. If it raises, dies or exceeds its time limit, the row has its traceback and its output; the other checks continue.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from plait.launch import forkable
from plait.launch.devices import list_cuda_devices, resolve_kind

Row = dict[str, Any]
Look = Callable[[], Row]
LIMIT = 240.0
"""The limit in seconds of one check."""
HIDDEN = ("ok", "seconds", "error", "trace", "log", "data")
TAIL = 4000


@dataclass(frozen=True)
class Setting:
    """The device and files of a call. `seconds`: the time for one measurement; `ends`: no check starts after this time (perf_counter)."""

    kind: str
    out: Path
    seconds: float
    ends: float = float("inf")
    ranks: int = 1

    @staticmethod
    def of(options: Any, ranks: int = 1) -> "Setting":
        """Build the setting from the command line."""
        kind = resolve_kind(options.device)
        seconds = options.seconds if options.seconds is not None else 5.0 if kind == "cuda" else 0.2
        ends = perf_counter() + 60 * options.minutes if options.minutes else float("inf")
        options.out.mkdir(parents=True, exist_ok=True)
        return Setting(kind, options.out.resolve(), seconds, ends, ranks)

    @property
    def gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.gpu else torch.device("cpu")

    @property
    def name(self) -> str:
        """Return the names of the device and of torch's version, without a query of CUDA."""
        names = list_cuda_devices() if self.gpu else []
        return f"{names[0] if names else 'cpu'}, torch {torch.__version__}"


class Part(NamedTuple):
    """Checks that make one table."""

    title: str
    looks: Callable[[Setting], Mapping[str, Look]]
    limit: float = LIMIT


def wait(setting: Setting) -> None:
    """Wait until the device is idle."""
    if setting.gpu:
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], setting: Setting, part: float = 1.0) -> float:
    """Return the seconds of one call: the median of blocks, within `part` of the time of one measurement, after warm-up calls."""
    for _ in range(2):
        work()
    wait(setting)
    began = perf_counter()
    work()
    wait(setting)
    block = max(1, round(0.02 / max(perf_counter() - began, 1e-6)))
    times, ends = [], perf_counter() + setting.seconds * part
    while len(times) < 3 or perf_counter() < ends:
        began = perf_counter()
        for _ in range(block):
            work()
        wait(setting)
        times.append((perf_counter() - began) / block)
    return median(times)


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile."""
    ordered = sorted(numbers)
    if len(ordered) < 3:
        return ordered[0], median(ordered), ordered[-1]
    at = lambda part: ordered[round(part * (len(ordered) - 1))]  # noqa: E731
    return at(0.25), median(ordered), at(0.75)


def spread(numbers: Sequence[float]) -> str:
    """Format median and quartiles."""
    low, middle, high = quartiles(numbers)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


# — the processes —


def _seen(see: Look, file: Path, log: Path) -> None:
    """Run a check in its own process, and write the row."""
    os.setsid()
    with log.open("ab") as to:
        os.dup2(to.fileno(), 1)
        os.dup2(to.fileno(), 2)
    forkable.keep_forkable()  # imports of a check may query CUDA, and the check may still fork
    began = perf_counter()
    try:
        row: Row = {"ok": True, **see()}
    except BaseException as error:
        row = {"ok": False, "error": f"{type(error).__name__}: {error}".strip()[:600]}
        row["trace"] = (traceback.format_exc() + (getattr(error, "trace", "") or ""))[-TAIL:]
    row["seconds"] = round(perf_counter() - began, 1)
    write(file, row)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of compilers and communicators may not end


def write(file: Path, value: Any) -> None:
    """Write JSON atomically."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    part.rename(file)


def look(see: Look, folder: Path, limit: float) -> Row:
    """Run a check in its own process and return its row."""
    file, log = folder / "row.json", folder / "look.log"
    file.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_seen, args=(see, file, log))
    began = perf_counter()
    process.start()
    try:
        process.join(limit)
        answered = not process.is_alive()
    finally:
        if process.pid is not None:
            _end(process.pid)
        process.join()
    said = log.read_text(encoding="utf-8", errors="replace")[-TAIL:] if log.exists() else ""
    if file.exists():
        row = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        return row if row["ok"] else row | {"log": said}
    why = f"ended with exit code {process.exitcode}" if answered else f"has not answered in {limit:.0f} s"
    return {"ok": False, "error": why, "log": said, "seconds": round(perf_counter() - began, 1)}


def _end(pid: int) -> None:
    """End the process and its remaining children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# — parts, kept —


def known(setting: Setting, name: str) -> dict[str, Row]:
    """Return the saved rows of a part for the same device and torch."""
    file = setting.out / f"{name}.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["device"] != setting.name:
        raise SystemExit(f"{file} is of {found['device']}, and this is {setting.name}: choose another --out")
    return found["rows"]


def run(setting: Setting, parts: Mapping[str, Part], again: bool = False) -> bool:
    """Run the checks without a saved row. Returns False if the time was up before the last one."""
    for name, part in parts.items():
        rows = {} if again else known(setting, name)
        looks = part.looks(setting)
        missing = [each for each in looks if each not in rows]
        print(f"{name}: {part.title}" + ("" if missing else " (there)"), flush=True)
        for each in missing:
            if perf_counter() > setting.ends:
                print("time is up: the same command goes on from here", flush=True)
                return False
            rows[each] = row = look(looks[each], setting.out, part.limit)
            write(
                setting.out / f"{name}.json", {"part": name, "title": part.title, "device": setting.name, "rows": rows}
            )
            mark, said = "✓" if row["ok"] else "✗", row.get("error") or _said(row)
            print(f"  {mark} {each:<44} {said}  ({row['seconds']} s)", flush=True)
    return True


def _said(row: Row) -> str:
    return "; ".join(cell(v) if k == "saw" else f"{k} {cell(v)}" for k, v in row.items() if k not in HIDDEN)


def cell(value: Any) -> str:
    """Format a value with four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")


def table(title: str, rows: Mapping[str, Row]) -> list[str]:
    """Format rows as a table in Markdown."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row if key not in HIDDEN))
    failed = [row for row in rows.values() if not row["ok"]]
    columns = ["saw", *columns] if failed and "saw" not in columns else columns
    lines = [f"**{title}**", "", f"| | | {' | '.join('' if c == 'saw' else c for c in columns)} | s |"]
    lines.append("|---|---|" + "---|" * (len(columns) + 1))
    for name, row in rows.items():
        cells = row if row["ok"] else {**row, "saw": row["error"].split("\n")[0][:200]}
        values = [cell(cells[c]) if c in cells else "" for c in columns]
        lines.append(f"| {name} | {'✓' if row['ok'] else '✗'} | {' | '.join(values)} | {row['seconds']} |")
    return [*lines, ""]


def report(setting: Setting, parts: Mapping[str, Part]) -> bool:
    """Print and write all saved rows. Returns False if a check has failed."""
    seen = {name: known(setting, name) for name in parts}
    lines = [f"{setting.name}", ""]
    for name, part in parts.items():
        if seen[name]:
            lines += table(part.title, seen[name])
    (setting.out / "table.md").write_text("\n".join(lines), encoding="utf-8")
    write(setting.out / "all.json", {"device": setting.name, "parts": seen})
    print("\n" + "\n".join(lines) + f"\nwrote {setting.out / 'table.md'} and {setting.out / 'all.json'}", flush=True)
    failed = [f"{name}: {each}" for name, rows in seen.items() for each, row in rows.items() if not row["ok"]]
    for each in failed:
        print(f"✗ {each}")
    return not failed


def asked(known_parts: Mapping[str, Part], words: str | None) -> dict[str, Part]:
    """Return the parts that the command line names, in their order, or all parts."""
    wanted = words.split(",") if words else list(known_parts)
    unknown = [name for name in wanted if name not in known_parts]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]}; there are {', '.join(known_parts)}")
    return {name: part for name, part in known_parts.items() if name in wanted}


def options(parser: Any, out: str) -> None:
    """Add the options of both commands."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"folder of the results ({out})")
    parser.add_argument("--parts", help="some of the parts, separated by commas")
    parser.add_argument("--minutes", type=float, help="begin no look after so many minutes; the same call then goes on")
    parser.add_argument("--seconds", type=float, help="for how long each thing is timed (5 on a GPU, 0.2 on a CPU)")
    parser.add_argument("--again", action="store_true", help="look again at what is there already")


def main(parser: Any, parts: Mapping[str, Part], ranks: Callable[[Any], int] = lambda options: 1) -> int:
    """Run either command. Returns 1 if a check has failed, and 0 otherwise, even if the time was up before the last check."""
    given = parser.parse_args()
    forkable.keep_forkable()
    torch.set_num_threads(1)  # a forked copy of a thread pool is dead
    setting, wanted = Setting.of(given, ranks(given)), asked(parts, given.parts)
    print(setting.name, flush=True)
    run(setting, wanted, given.again)
    return 0 if report(setting, wanted) else 1
