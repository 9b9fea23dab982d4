"""The figures as one self-contained HTML page, and its head as lines for a terminal.

The page has its style, scripts, charts (uPlot, MIT, in `assets/`) and figures in it, and a policy that forbids every request.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from plait.engine.memory_use import size
from plait.report.figures import CURVES, Figures

SYMBOLS = {"evaluation": "◆", "checkpoint": "▲", "restart": "↻", "skipped": "✕"}
"""Of marks, as `page.js` draws them."""
FORECAST = {
    "compute": "computing", "recompute": "computing", "tensor": "communication", "gradients": "communication", "bubble": "bubble",
    "optimizer": "optimizer", "data": "data", "sync": "communication", "host": "communication", "fixed": "Python",
}  # fmt: skip
"""The parts of a prediction in the words of the measured split."""
SAMPLED = 25
"""Rows of the table of curves, for each run."""


def page(shown: Figures, follow: str = "") -> str:
    """The page. `follow`: the version of the figures, for a page that reloads when its server has others."""
    run, split = shown["runs"][0], shown["runs"][0]["split"]
    parts = [(name, slug(name)) for name in split["mean"]]
    forecast = [(name, f"k-{FORECAST.get(name, 'Python')}", seconds) for name, seconds in run["predicted"]["parts"].items()]
    memory = shown["memory"]
    categories = dict.fromkeys(name for each in [*(r["parts"] for r in memory["ranks"]), memory["predicted"]] for name in each)
    totals = [sum(each.values()) for each in [*(r["parts"] for r in memory["ranks"]), memory["predicted"]]]
    blocks = (shown["timeline"] or {"blocks": {}})["blocks"]
    there = {box[0] for rows in blocks.values() for row in rows for box in row["boxes"]}
    order = ("forward", "backward", "weights", "communication", "data", "optimizer", "checkpoint", "evaluate", "Python")
    return _template().render(
        f=shown, follow=follow, title=" · ".join(r["name"] for r in shown["runs"]), curves=CURVES, data=_embedded(shown), parts=parts,
        forecast=forecast, widest=max([r["seconds"] for r in split["ranks"]] + [run["predicted"]["seconds"] or 0.0]) or 1.0,
        held=[(name, f"m{i % 10}") for i, name in enumerate(categories)], fullest=max(totals, default=1) or 1,
        boxkinds=[(kind, slug(kind)) for kind in order if kind in there] + [("bubble", "k-bubble")],
        metrics=list(dict.fromkeys(e["metric"] for e in shown["evaluations"])), symbols=SYMBOLS,
        kinds=[kind for kind in SYMBOLS if any(m["kind"] == kind for m in shown["marks"])], sampled=list(_sampled(shown)),
        style=_asset("uplot.css") + _asset("page.css"), uplot=_asset("uplot.js"), script=_asset("page.js"),
    )  # fmt: skip


def _embedded(shown: Figures) -> str:
    """JSON that ends no script, whatever names it has in it."""
    return json.dumps(shown, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _asset(name: str) -> str:
    return (files("plait.report") / "assets" / name).read_text(encoding="utf-8").replace("</script", "<\\/script")


@cache
def _template() -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"of": of, "percent": percent, "largest": largest, "boxed": boxed}
    source = (files("plait.report") / "assets" / "page.html").read_text(encoding="utf-8")
    for name in ("style", "uplot", "script", "data"):  # these are no text to escape
        source = source.replace(f"{{{{ {name} }}}}", f"{{{{ {name}|raw }}}}")
    environment.filters["raw"] = Markup
    return environment.from_string(source)


def slug(name: str) -> str:
    """The class of a part's color."""
    return f"k-{name.split()[0]}"


def _sampled(shown: Figures) -> Iterable[list[str]]:
    """Rows of the curves' table: run, step, and a value of each curve, of some steps."""
    for i, run in enumerate(shown["runs"]):
        curves = [dict(zip(shown["curves"][name][i]["steps"], shown["curves"][name][i]["values"])) for name in CURVES]
        steps = sorted(set(curves[0]).intersection(*curves[1:])) or sorted(curves[0])
        some = steps if len(steps) <= SAMPLED else [steps[k * (len(steps) - 1) // (SAMPLED - 1)] for k in range(SAMPLED)]
        for step in some:
            values = [curve.get(step) for curve in curves]
            yield [run["name"], f"{step:,}", *("not finite" if v is None else f"{v:.5g}" for v in values)]


def boxed(row: Figures, kind: str) -> float:
    """Milliseconds of a kind in a row of a timeline."""
    return sum(box[2] for box in row["boxes"] if box[0] == kind) / 1e3


def of(value: float | None, unit: str) -> str:
    """A number with its unit.

    >>> of(0.0412, "s"), of(2048, "bytes"), of(8700.2, "tokens/s"), of(None, "s")
    ('41.2 ms', '2.0 KiB', '8,700 tokens/s', '–')
    """
    if value is None:
        return "–"
    if unit == "bytes":
        return size(value)
    if unit == "s":
        return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def percent(share: float | None) -> str:
    """27.3 %."""
    return "–" if share is None else f"{100 * share:.1f} %"


def largest(parts: dict[str, float]) -> str:
    """The three largest shares in words."""
    named = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in named)


def head(shown: Figures) -> list[str]:
    """The three figures, where the time went, and what to change, as lines."""
    lines = []
    for each in shown["head"]:
        said = "" if each["predicted"] is None else f" · predicted {of(each['predicted'], each['unit'])}"
        lines.append(f"{each['name'].partition(' of ')[0].partition(',')[0]:<12}{of(each['measured'], each['unit'])}{said}")
    mean = shown["runs"][0]["split"]["mean"]
    if total := sum(mean.values()):
        lines.append(f"{'time':<12}" + " · ".join(f"{name} {100 * s / total:.0f} %" for name, s in mean.items() if s > 0.005 * total))
    for a in shown["advice"][:3]:
        lines.append(f"{'change':<12}−{100 * a['gain']:.0f} %  {a['what']}" + (f"    {a['command']}" if a["command"] else ""))
    return [*lines, *(f"{'note':<12}{note}" for note in shown["notes"])]
