"""Parses and checks the options of `plait plan`, independent of the job and the machine."""

import re
from math import inf
from pathlib import Path
from typing import Any

from plait.config.command_options import PlanOptions, check_range
from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan

MIN_BYTES = 2**20
"""Minimum of a number without a unit that is interpreted as bytes."""
HOURS_PER_UNIT = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}
UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def check_plan_options(options: PlanOptions) -> None:
    """Check options independent of the job and the machine. Raises U002, and the errors of `Plan.parse`."""
    check_range(options)
    parse_size(options.memory)
    if options.show or options.dry_run:
        Plan.read(options.plan or "dp=1")
    else:
        parse_pins(options)
    parse_counts(options.scale or "1")
    if options.deadline:
        parse_hours(options.deadline)
    if options.objective == "min-devices" and not options.deadline:
        why = "it selects the fewest devices that finish before the deadline"
        raise PlaitError(Problem("U002", "--objective min-devices needs --deadline", why=why, fix=("--deadline 24h",)))
    if options.maximize and options.objective != "max-batch":
        fix = (f"--objective max-batch --maximize {options.maximize}",)
        raise PlaitError(Problem("U002", "--maximize has no effect without --objective max-batch", fix=fix))
    if options.deadline and options.objective != "min-devices":
        fix = ("--objective min-devices --deadline 24h",)
        raise PlaitError(Problem("U002", "--deadline has no effect without --objective min-devices", fix=fix))
    if options.learn not in (None, "none") and not Path(options.learn).is_dir():
        what, fix = f"--learn {options.learn} is not a folder", ("--learn runs", "--learn none    uses predictions only")
        raise PlaitError(Problem("U002", what, why="--learn names the folder of run directories", fix=fix))


def parse_counts(text: str) -> list[int]:
    """Parse 1,8,64 to numbers."""
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise PlaitError(Problem("U002", f"--scale {text} is not a list of device counts", fix=("--scale 1,8,64,512",)))
    return sorted({int(n) for n in text.split(",")})


def parse_hours(text: str) -> float:
    """Parse 24h, 90m or 3d to hours."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if not found or not float(found[1]):
        raise PlaitError(Problem("U002", f"--deadline {text} is not a time", fix=("--deadline 24h", "--deadline 3d")))
    return float(found[1]) * HOURS_PER_UNIT[found[2]]


def parse_pins(options: PlanOptions) -> dict[str, Any]:
    """Parse the keys of --set and --plan, which the search must not change."""
    words = " ".join([*options.set, *([options.plan] if options.plan else [])])
    given = Plan.parse(words) if words else Plan()
    named = {word.partition("=")[0] for word in words.split()}
    return {key: getattr(given, key) for key in given.to_dict() if key in named}


def parse_size(text_: str | None) -> float | None:
    """Parse 80GiB, 40GB or 1e9 to bytes."""
    if text_ is None:
        return None
    number = text_.strip().upper()
    unit = next((u for u in sorted(UNITS, key=len, reverse=True) if number.endswith(u)), "")
    try:
        found = float(number.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError:
        found = 0.0
    if not 0 < found < inf:
        raise PlaitError(Problem("U002", f"--memory {text_} is not a size", fix=("--memory 80GiB",)))
    if not unit and found < MIN_BYTES:
        why, fix = "a number without a unit means bytes", (f"--memory {text_.strip()}GiB", f"--memory {text_.strip()}MiB")
        raise PlaitError(Problem("U002", f"--memory {text_} has no unit", why=why, fix=fix))
    return found
