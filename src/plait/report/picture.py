"""Draw one figure as an SVG for a paper or a notebook, without scripts and in the color of the surrounding text.

The page uses a library that needs a browser; this SVG needs none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

from plait.report.figures import Figures
from plait.report.page import format_value

PICTURES = ("loss", "timeline", "memory", "scaling")
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 640, 96, 16, 28, 30
COLORS = ("#3b73d1", "#c8601a", "#1f8f6c", "#8a4fc4", "#a98408", "#0e8aa0", "#b53c86", "#6b7280", "#7a9a2e", "#8b6f5a")
KIND_COLORS = {
    "forward": "#3b73d1", "computing": "#3b73d1", "backward": "#1f8f6c", "weights": "#7a9a2e", "communication": "#c8601a", "data": "#b53c86",
    "optimizer": "#8a4fc4", "checkpoint": "#0e8aa0", "evaluate": "#6b7280",
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """A named line through points."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    dash: str = ""


@dataclass(frozen=True)
class Bar:
    """A named row of boxes: (color, start, length, title), in the unit of the axis."""

    name: str
    boxes: Sequence[tuple[str, float, float, str]]


def draw_picture(shown: Figures, name: str) -> str:
    """Draw one of `PICTURES`; empty if the runs have no figures for it."""
    if name == "loss":
        curves = shown["curves"]["loss"]
        return draw_lines("loss by step", [Series(c["run"], c["steps"], c["values"]) for c in curves])
    if name == "scaling":
        rows = shown["scaling"]
        devices = [r["devices"] for r in rows]
        named = {"speed": ("measured", ""), "ideal": ("ideal", "4 4"), "predicted": ("predicted", "8 3")}
        unit = rows[0]["unit"] if rows else ""
        return draw_lines(f"{unit} by devices", [Series(w, devices, [r[k] for r in rows], dash) for k, (w, dash) in named.items()], zero=True)
    if name == "memory":
        return _draw_memory(shown)
    return _draw_timeline(shown)


def _draw_memory(shown: Figures) -> str:
    memory = shown["memory"]
    rows = [(f"rank {r['rank']}", r["parts"]) for r in memory["ranks"]] + [("predicted", memory["predicted"])] * bool(memory["predicted"])
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    found = list[Bar]()
    for label, parts in rows:
        at, boxes = 0.0, list[tuple[str, float, float, str]]()
        for name, n in parts.items():
            boxes.append((colors[name], at, n, f"{name} {format_value(n, 'bytes')}"))
            at += n
        found.append(Bar(label, boxes))
    return draw_bars("memory by rank", found, colors, "bytes")


def _draw_timeline(shown: Figures) -> str:
    timeline = shown["timeline"]
    if timeline is None:
        return ""
    found, kinds = list[Bar](), dict[str, str]()
    for name, rows in timeline["blocks"].items():
        for row in rows:
            kinds |= {box[0]: KIND_COLORS.get(box[0], "#8b6f5a") for box in row["boxes"]}
            boxes = [
                (KIND_COLORS.get(k, "#8b6f5a"), start / 1e6, took / 1e6, f"{n} {format_value(took / 1e6, 's')}")
                for k, start, took, n in row["boxes"]
            ]
            found.append(Bar(f"{row['rank']} {name}", boxes))
    return draw_bars(f"step {timeline['step']}, by rank", found, kinds, "s")


def draw_lines(title: str, series: Sequence[Series], zero: bool = False) -> str:
    """Draw lines over one x axis. `zero`: the y axis starts at 0."""
    points = [[(x, y) for x, y in zip(s.steps, s.values) if y is not None and isfinite(y)] for s in series]
    every = [p for each in points for p in each]
    if not every:
        return ""
    high, height = 232, 292
    x0, x1 = min(p[0] for p in every), max(p[0] for p in every)
    y0, y1 = 0.0 if zero else min(p[1] for p in every), max(p[1] for p in every)
    x = lambda v: LEFT + (WIDTH - LEFT - RIGHT) * ((v - x0) / (x1 - x0) if x1 > x0 else 0.5)  # noqa: E731
    y = lambda v: TOP + high * ((y1 - v) / (y1 - y0) if y1 > y0 else 0.5)  # noqa: E731
    parts = [f'<path d="M{LEFT} {TOP}V{TOP + high}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" stroke-opacity=".4"/>']
    for i, (each, s) in enumerate(zip(points, series)):
        if each:
            path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in each)
            dash = f' stroke-dasharray="{s.dash}"' if s.dash else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[i % len(COLORS)]}" stroke-width="1.75"{dash}/>')
    ticks = [(LEFT, TOP + high + 16, "start", f"{x0:g}"), (WIDTH - RIGHT, TOP + high + 16, "end", f"{x1:g}"),
             (LEFT - 6, TOP + 10, "end", f"{y1:.4g}"), (LEFT - 6, TOP + high, "end", f"{y0:.4g}")]  # fmt: skip
    key = {s.name: COLORS[i % len(COLORS)] for i, s in enumerate(series)}
    return _wrap_svg(title, height, [*parts, *(_draw_text(*t) for t in ticks), *_draw_legend(key, height - 8)])


def draw_bars(title: str, rows: Sequence[Bar], key: dict[str, str], unit: str) -> str:
    """Draw rows of boxes over one x axis."""
    every = [box for row in rows for box in row.boxes]
    if not every:
        return ""
    low, top = min(0.0, *(b[1] for b in every)), max(b[1] + b[2] for b in every)
    scale = (WIDTH - LEFT - RIGHT) / (top - low or 1.0)
    parts, height = list[str](), TOP + 26 * len(rows) + BOTTOM + 20
    for i, row in enumerate(rows):
        y = TOP + 26 * i
        parts.append(_draw_text(LEFT - 6, y + 15, "end", row.name))
        parts += [
            f'<rect x="{LEFT + (start - low) * scale:.2f}" y="{y}" width="{max(took * scale, 0.05):.2f}" height="20" fill="{color}" '
            f'stroke="currentColor" stroke-opacity=".25" stroke-width=".4"><title>{escape(words)}</title></rect>'
            for color, start, took, words in row.boxes
        ]
    parts += [_draw_text(LEFT - low * scale, height - 32, "start", "0"), _draw_text(WIDTH - RIGHT, height - 32, "end", format_value(top, unit))]
    return _wrap_svg(title, height, [*parts, *_draw_legend(key, height - 8)])


def _draw_legend(key: dict[str, str], y: float) -> list[str]:
    found, x = list[str](), 8.0
    for name, color in key.items():
        found.append(f'<rect x="{x}" y="{y - 10}" width="12" height="10" fill="{color}"/>{_draw_text(x + 16, y, "start", name)}')
        x += 34 + 6.4 * len(name)
    return found


def _draw_text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _wrap_svg(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" style="max-width:100%" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="currentColor"><title>{escape(title)}</title>'
        f"{_draw_text(8, 16, 'start', title)}{''.join(parts)}</svg>\n"
    )
