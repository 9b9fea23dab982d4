"""`plait plan --map`: the fastest way to synchronize as text, as JSON, or with --output as an SVG.

The picture has one grid for the same samples and one for the same loss, with a light and a dark theme. A cell shows the fastest way and
its speedup over `dp`, in the color of its kind. Text on every color has a contrast of at least 4.5.
"""

from dataclasses import replace
from html import escape
from typing import Any

from plait.cli.result import print_result
from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError, Problem
from plait.config.files import write_output
from plait.config.keys import KEYS
from plait.config.plan_question import parse_size
from plait.model.sketch_table import format_speed
from plait.planner.answer import find_answer
from plait.planner.plan_request import PlanRequest
from plait.planner.search_space import list_divisors
from plait.planner.sync_map import SyncJob, SyncMap, compute_sync_map, list_sync_ways

WAY_KINDS = {
    "dp": "none", "shares": "shares", "bf16": "format", "int8": "format", "powersgd": "format", "local": "rare",
    "post-local": "rare", "diloco": "outer", "streaming": "outer", "async": "async",
}  # fmt: skip
"""The kind of a way, by the first word of its name."""
LEGEND = {
    "none": "sums in every step", "shares": "batch split by speed", "format": "compressed sums", "rare": "infrequent averaging of weights",
    "outer": "infrequent outer optimizer", "async": "async server",
}  # fmt: skip
STYLE = """
svg{--bg:#fff;--text:#1a1a1a;--soft:#5c5c5c;--none:#d9d9d9;--shares:#a9ccff;--format:#9fdcb4;--rare:#f4cf86;--outer:#c9b3f0;
--async:#ecc5cf;--box:#111}
@media(prefers-color-scheme:dark){svg{--bg:#16181c;--text:#e8e8e8;--soft:#a8a8a8;--none:#54585f;--shares:#2d5fa6;--format:#22703f;
--rare:#85570c;--outer:#6a4fa3;--async:#7d3e50;--box:#fff}}
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--text)}.soft{fill:var(--soft)}.head{font-weight:600}
.cell text{fill:var(--box);text-anchor:middle}.back{fill:var(--bg)}
"""
WIDTH, HEIGHT, LEFT, TOP, GAP = 104, 40, 60, 74, 60
"""Sizes of cells and margins in pixels."""


def print_map(asked: PlanRequest, pins: dict[str, Any], options: PlanOptions) -> int:
    """Print the map of --map. A group is a node, or on one node the fewest devices that fit the job. Inside, it uses the best exact plan."""
    machine, memory = asked.machine, parse_size(options.memory)
    own = {
        key: value
        for key, value in pins.items()
        if KEYS[key].table not in ("groups", "messages") and key != "replica_groups"
    }
    sizes = [machine.devices_per_node] if machine.nodes > 1 else list_divisors(machine.devices)[:-1]
    for devices in sizes:
        within = asked.with_machine(machine.resize(devices))
        job = replace(asked.job, batch=max(1, asked.job.batch * devices // machine.devices))
        found = find_answer(replace(within, job=job), own, memory, 1)
        if found.best is not None:
            break
    else:
        raise PlaitError(explain_no_groups(asked))
    groups, refused = machine.devices // devices, asked.make_refusal()
    every = [
        way
        for way in list_sync_ways(found.best.plan, groups, asked.job.steps)
        if way.name == "dp" or not refused(way.plan)
    ]
    between = f"{groups} nodes" if machine.nodes > 1 else f"{groups} groups of {devices} device{'s' * (devices > 1)}"
    cells = compute_sync_map(SyncJob(asked.pace, asked.job.batch, asked.job.steps), every)
    shown = SyncMap(asked.name, between, tuple(every), cells)
    if options.output:
        write_output(options.output, draw_map(shown.to_dict()))
    print_result(options, shown.to_dict(), shown.to_text())
    return 0


def explain_no_groups(asked: PlanRequest) -> Problem:
    """P070: the devices cannot form two groups that each train the job."""
    devices = asked.machine.devices
    what = (
        f"--map needs two groups that can each train the job, and {devices} device{'s' * (devices > 1)} cannot form them"
    )
    why = "a map compares ways to synchronize groups, and each group has a full replica of the model"
    return Problem("P070", what, why=why, fix=("--gpus 4", "--machine h100x8x4"))


def draw_map(shown: dict[str, Any]) -> str:
    """Draw the SVG of a map, given as `SyncMap.to_dict` returns it."""
    cells = shown["cells"]
    speeds, slower = ([*dict.fromkeys(c[key] for c in cells)] for key in ("bits_per_s", "slower"))
    wide, high = LEFT + WIDTH * len(speeds) + 16, TOP + (HEIGHT * len(slower) + GAP) * 2 + 20
    title = f"Fastest way to synchronize {shown['between']}: {shown['job']}"
    colours = "".join(f".k-{kind}{{fill:var(--{kind})}}" for kind in LEGEND)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" role="img" '
        f'aria-labelledby="map-title"><title id="map-title">{escape(title)}</title><style>{STYLE}{colours}</style>',
        f'<rect class="back" width="{wide}" height="{high}"/><text class="head" x="8" y="18">{escape(title)}</text>',
    ]
    x = 8
    for kind, words in LEGEND.items():
        parts.append(
            f'<rect class="k-{kind}" x="{x}" y="28" width="12" height="12"/><text class="soft" x="{x + 16}" y="38">{words}</text>'
        )
        x += 34 + 6 * len(words)
    y = TOP
    for key, times, words in (
        ("fastest", "seconds", "for the same samples"),
        ("fastest_to_equal_loss", "seconds_to_equal_loss", "to the same loss, fitted to a small model"),
    ):
        parts.append(f'<text x="8" y="{y - 16}">{words}: speedup over dp</text>')
        parts += _draw_grid(cells, speeds, slower, key=key, times=times, y=y)
        y += HEIGHT * len(slower) + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_grid(
    cells: list[dict[str, Any]], speeds: list[float], slower: list[float], *, key: str, times: str, y: int
) -> list[str]:
    """Draw one grid of link speeds and slowdowns from `y` downwards. `key` names the fastest way of a cell, `times` the seconds of each way."""
    found = [f'<text class="soft" x="8" y="{y + HEIGHT * j + 24}">{slow:g} ×</text>' for j, slow in enumerate(slower)]
    below = y + HEIGHT * len(slower) + 14
    found += [
        f'<text class="soft" x="{LEFT + WIDTH * i + 8}" y="{below}">{format_speed(bits)}</text>'
        for i, bits in enumerate(speeds)
    ]
    for cell in cells:
        left, top = LEFT + WIDTH * speeds.index(cell["bits_per_s"]), y + HEIGHT * slower.index(cell["slower"])
        name, seconds = cell[key], cell[times]
        gain = seconds["dp"] / seconds[name]
        found.append(
            f'<g class="cell"><rect class="k-{WAY_KINDS[name.split()[0]]}" x="{left + 1}" y="{top + 1}" width="{WIDTH - 2}" '
            f'height="{HEIGHT - 2}"/><text x="{left + WIDTH / 2}" y="{top + 17}">{escape(name)}</text>'
            f'<text x="{left + WIDTH / 2}" y="{top + 32}">{gain:.3g} ×</text></g>'
        )
    return found
