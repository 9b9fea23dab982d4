"""`plait plan --map`: which way to synchronise is fastest, as text, as JSON, or with --output as one SVG.

The picture has a grid for the same samples and one for the same loss, light or dark as the reader likes. A cell has the name of the fastest way
and how many times as fast as `dp` it is; its colour is that of its kind. Text on every colour has a contrast of at least 4.5.
"""

from dataclasses import replace
from html import escape
from typing import Any

from plait.cli.result import print_result
from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError, Problem
from plait.config.files import write
from plait.config.keys import KEYS
from plait.config.plan_question import size
from plait.model.table import speed
from plait.planner.answer import ask
from plait.planner.late_map import LateJob, LateMap, late_map, ways
from plait.planner.question import PlanRequest
from plait.planner.search_space import divisors

KINDS = {
    "dp": "none", "shares": "shares", "bf16": "format", "int8": "format", "powersgd": "format", "local": "rare",
    "post-local": "rare", "diloco": "outer", "streaming": "outer", "async": "async",
}  # fmt: skip
"""Of the first word of a way's name."""
LEGEND = {
    "none": "sums in every step", "shares": "and shares by speed", "format": "sums in fewer bytes", "rare": "weights averaged now and then",
    "outer": "an outer optimizer now and then", "async": "a server",
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
"""Pixels of a cell, and around the grids."""


def mapped(asked: PlanRequest, pins: dict[str, Any], options: PlanOptions) -> int:
    """--map: one group is a node, or, where there is one node, what the job needs of its devices; inside, the best exact plan."""
    machine, memory = asked.machine, size(options.memory)
    own = {
        key: value
        for key, value in pins.items()
        if KEYS[key].table not in ("groups", "messages") and key != "replica_groups"
    }
    sizes = [machine.devices_per_node] if machine.nodes > 1 else divisors(machine.devices)[:-1]
    for devices in sizes:
        within = asked.on(machine.sized(devices))
        job = replace(asked.job, batch=max(1, asked.job.batch * devices // machine.devices))
        found = ask(replace(within, job=job), own, memory, 1)
        if found.best is not None:
            break
    else:
        raise PlaitError(no_groups(asked))
    groups, refused = machine.devices // devices, asked.refused()
    every = [
        way
        for way in ways(found.best.plan, groups, asked.job.steps)
        if way.name == "dp" or not refused(way.plan)
    ]
    between = f"{groups} nodes" if machine.nodes > 1 else f"{groups} groups of {devices} device{'s' * (devices > 1)}"
    cells = late_map(LateJob(asked.pace, asked.job.batch, asked.job.steps), every)
    shown = LateMap(asked.name, between, tuple(every), cells)
    if options.output:
        write(options.output, page(shown.to_dict()))
    print_result(options, shown.to_dict(), shown.text())
    return 0


def no_groups(asked: PlanRequest) -> Problem:
    """P070: there are no two groups that could each train the job."""
    devices = asked.machine.devices
    what = (
        f"--map needs two groups that can each train the job, and {devices} device{'s' * (devices > 1)} cannot form them"
    )
    why = "a map compares ways to synchronize groups, and each group has a full replica of the model"
    return Problem("P070", what, why=why, fix=("--gpus 4", "--machine h100x8x4"))


def page(shown: dict[str, Any]) -> str:
    """The picture of a map, as `LateMap.to_dict` has it."""
    cells = shown["cells"]
    speeds, slower = ([*dict.fromkeys(c[key] for c in cells)] for key in ("bits_per_s", "slower"))
    wide, high = LEFT + WIDTH * len(speeds) + 16, TOP + (HEIGHT * len(slower) + GAP) * 2 + 20
    title = f"Fastest way to synchronise {shown['between']}: {shown['job']}"
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
        parts.append(f'<text x="8" y="{y - 16}">{words}: times as fast as dp</text>')
        parts += _grid(cells, speeds, slower, key=key, times=times, y=y)
        y += HEIGHT * len(slower) + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(
    cells: list[dict[str, Any]], speeds: list[float], slower: list[float], *, key: str, times: str, y: int
) -> list[str]:
    """Cells of these speeds of the link and these slownesses, from `y` on. `key` names the fastest, `times` the seconds of each."""
    found = [f'<text class="soft" x="8" y="{y + HEIGHT * j + 24}">{slow:g} ×</text>' for j, slow in enumerate(slower)]
    below = y + HEIGHT * len(slower) + 14
    found += [
        f'<text class="soft" x="{LEFT + WIDTH * i + 8}" y="{below}">{speed(bits)}</text>'
        for i, bits in enumerate(speeds)
    ]
    for cell in cells:
        left, top = LEFT + WIDTH * speeds.index(cell["bits_per_s"]), y + HEIGHT * slower.index(cell["slower"])
        name, seconds = cell[key], cell[times]
        gain = seconds["dp"] / seconds[name]
        found.append(
            f'<g class="cell"><rect class="k-{KINDS[name.split()[0]]}" x="{left + 1}" y="{top + 1}" width="{WIDTH - 2}" '
            f'height="{HEIGHT - 2}"/><text x="{left + WIDTH / 2}" y="{top + 17}">{escape(name)}</text>'
            f'<text x="{left + WIDTH / 2}" y="{top + 32}">{gain:.3g} ×</text></g>'
        )
    return found
