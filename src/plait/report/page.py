"""Render the figures as one self-contained HTML page, and their head as lines for a terminal.

The page contains its style, scripts, charts (uPlot, MIT, in `assets/`) and figures, and a policy that forbids every request.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from plait.engine.memory_use import format_bytes
from plait.report.figures import CURVES, Figures

MARK_SYMBOLS = {"evaluation": "◆", "checkpoint": "▲", "restart": "↻", "skipped": "✕"}
"""Symbols of marks, as in `page.js`."""
FORECAST_PARTS = {
    "compute": "computing", "recompute": "computing", "tensor": "communication", "gradients": "communication", "bubble": "bubble",
    "optimizer": "optimizer", "data": "data", "sync": "communication", "host": "communication", "fixed": "Python",
}  # fmt: skip
"""Kind in the measured split of each predicted part."""
TABLE_ROWS = 25
"""Rows of the table of curves, for each run."""


def render_page(shown: Figures, follow: str = "") -> str:
    """Render the page. `follow`: the version of the figures, for a page that reloads if its server has another one."""
    run, split = shown["runs"][0], shown["runs"][0]["split"]
    parts = [(name, get_color_class(name)) for name in split["mean"]]
    forecast = [(name, f"k-{FORECAST_PARTS.get(name, 'Python')}", seconds) for name, seconds in run["predicted"]["parts"].items()]
    memory = shown["memory"]
    categories = dict.fromkeys(name for each in [*(r["parts"] for r in memory["ranks"]), memory["predicted"]] for name in each)
    totals = [sum(each.values()) for each in [*(r["parts"] for r in memory["ranks"]), memory["predicted"]]]
    blocks = (shown["timeline"] or {"blocks": {}})["blocks"]
    there = {box[0] for rows in blocks.values() for row in rows for box in row["boxes"]}
    order = ("forward", "backward", "weights", "communication", "data", "optimizer", "checkpoint", "evaluate", "Python")
    return _load_template().render(
        f=shown, follow=follow, title=" · ".join(r["name"] for r in shown["runs"]), curves=CURVES, data=_embed_json(shown), parts=parts,
        forecast=forecast, widest=max([r["seconds"] for r in split["ranks"]] + [run["predicted"]["seconds"] or 0.0]) or 1.0,
        held=[(name, f"m{i % 10}") for i, name in enumerate(categories)], fullest=max(totals, default=1) or 1,
        boxkinds=[(kind, get_color_class(kind)) for kind in order if kind in there] + [("bubble", "k-bubble")],
        metrics=list(dict.fromkeys(e["metric"] for e in shown["evaluations"])), symbols=MARK_SYMBOLS,
        kinds=[kind for kind in MARK_SYMBOLS if any(m["kind"] == kind for m in shown["marks"])], sampled=list(_iter_table_rows(shown)),
        style=_read_asset("uplot.css") + _read_asset("page.css"), uplot=_read_asset("uplot.js"), script=_read_asset("page.js"),
    )  # fmt: skip


def _embed_json(shown: Figures) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(shown, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _read_asset(name: str) -> str:
    return (files("plait.report") / "assets" / name).read_text(encoding="utf-8").replace("</script", "<\\/script")


@cache
def _load_template() -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"of": format_value, "percent": format_percent, "largest": format_largest, "boxed": sum_boxes}
    source = (files("plait.report") / "assets" / "page.html").read_text(encoding="utf-8")
    for name in ("style", "uplot", "script", "data"):  # these contain markup and must not be escaped
        source = source.replace(f"{{{{ {name} }}}}", f"{{{{ {name}|raw }}}}")
    environment.filters["raw"] = Markup
    return environment.from_string(source)


def get_color_class(name: str) -> str:
    """Return the CSS class of a part's color."""
    return f"k-{name.split()[0]}"


def _iter_table_rows(shown: Figures) -> Iterable[list[str]]:
    """Yield rows of the curve table: run, step, and the value of each curve, for some steps."""
    for i, run in enumerate(shown["runs"]):
        curves = [dict(zip(shown["curves"][name][i]["steps"], shown["curves"][name][i]["values"])) for name in CURVES]
        steps = sorted(set(curves[0]).intersection(*curves[1:])) or sorted(curves[0])
        some = steps if len(steps) <= TABLE_ROWS else [steps[k * (len(steps) - 1) // (TABLE_ROWS - 1)] for k in range(TABLE_ROWS)]
        for step in some:
            values = [curve.get(step) for curve in curves]
            yield [run["name"], f"{step:,}", *("not finite" if v is None else f"{v:.5g}" for v in values)]


def sum_boxes(row: Figures, kind: str) -> float:
    """Sum the milliseconds of a kind in a timeline row."""
    return sum(box[2] for box in row["boxes"] if box[0] == kind) / 1e3


def format_value(value: float | None, unit: str) -> str:
    """Format a number with its unit.

    >>> format_value(0.0412, "s"), format_value(2048, "bytes"), format_value(8700.2, "tokens/s"), format_value(None, "s")
    ('41.2 ms', '2.0 KiB', '8,700 tokens/s', '–')
    """
    if value is None:
        return "–"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def format_percent(share: float | None) -> str:
    """Format a fraction: 27.3 %."""
    return "–" if share is None else f"{100 * share:.1f} %"


def format_largest(parts: dict[str, float]) -> str:
    """Format the three largest parts."""
    named = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in named)


def format_head(shown: Figures) -> list[str]:
    """Format the three main figures, the split of the time, and the advice, as lines."""
    lines = []
    for each in shown["head"]:
        said = "" if each["predicted"] is None else f" · predicted {format_value(each['predicted'], each['unit'])}"
        lines.append(f"{each['name'].partition(' of ')[0].partition(',')[0]:<12}{format_value(each['measured'], each['unit'])}{said}")
    mean = shown["runs"][0]["split"]["mean"]
    if total := sum(mean.values()):
        lines.append(f"{'time':<12}" + " · ".join(f"{name} {100 * s / total:.0f} %" for name, s in mean.items() if s > 0.005 * total))
    for a in shown["advice"][:3]:
        lines.append(f"{'change':<12}−{100 * a['gain']:.0f} %  {a['what']}" + (f"    {a['command']}" if a["command"] else ""))
    return [*lines, *(f"{'note':<12}{note}" for note in shown["notes"])]
