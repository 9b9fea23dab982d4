"""Formats the results of `bench/slow_link.py` as Markdown and as a picture."""

from collections.abc import Callable
from html import escape
from math import inf
from typing import Any

WIDTH, ROW, NAME, LEFT, TOP, GAP = 150, 15, 66, 12, 64, 44
"""The pixels of a panel's bars, of a row, of an arm's name, and around panels."""
COLUMNS = 4
FASTEST = (
    ("samples", "for the same samples"), ("loss", "to the target loss"), ("loss, all ranks", "to the target loss, of arms that use all ranks"),
)  # fmt: skip
STYLE = """
svg{--bg:#fff;--text:#1a1a1a;--soft:#5c5c5c;--bar:#a9ccff;--best:#9fdcb4;--tick:#b3261e}
@media(prefers-color-scheme:dark){svg{--bg:#16181c;--text:#e8e8e8;--soft:#a8a8a8;--bar:#2d5fa6;--best:#22703f;--tick:#ff8a80}}
text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--text)}.soft{fill:var(--soft)}.head{font-weight:600;font-size:12px}
.bar{fill:var(--bar)}.best{fill:var(--best)}.tick{stroke:var(--tick);stroke-width:2}.back{fill:var(--bg)}
"""


def table(result: dict[str, Any]) -> str:
    """Format all tables."""
    seeds = ", ".join(map(str, result["seeds"]))
    lines = [
        f"{result['steps']} steps of {result['ranks']} ranks, means of seeds {seeds}; loopback {result['loopback'] / 1e6:.0f} MB/s per rank; "
        f"one rank alone computes {1e3 * result['computing']:.1f} ms per step; outer learning rate and momentum {result['outer']}",
        "",
        *_arms(result),
        "",
        "Milliseconds per step, measured and (predicted), and seconds to the target loss:",
        "",
        *_by_setting(result, lambda a: f"{1e3 * a['step']:.0f} ({1e3 * a['predicted_step']:.0f}) · {reached(a)}"),
        "",
        "Updates, and the loss after them, in the time that the first arm to finish took:",
        "",
        *_by_setting(result, lambda a: f"{a['updates']:.0f} · {a['loss']:.3f}"),
    ]
    for what, words in FASTEST:
        right = [row["winners"][what]["right"] for row in result["settings"]]
        lines += [
            "",
            f"Fastest {words}: predicted and measured agree, to 10 %, in {sum(right)} of {len(right)} settings.",
            "",
        ]
        lines += ["| setting | measured | predicted | takes longer by |", "|---|---|---|---|"]
        for row in result["settings"]:
            w = row["winners"][what]
            lines.append(f"| {row['setting']} | {w['measured']} | {w['predicted']} | {100 * (w['over'] - 1):.1f} % |")
    lines += [f"\nmissing: {name}: {why}" for name, why in result["missing"].items()]
    return "\n".join(lines)


def _by_setting(result: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    """Format a row for each arm and a column for each setting."""
    rows = result["settings"]
    lines = [f"| arm | {' | '.join(row['setting'] for row in rows)} |", "|---" * (len(rows) + 1) + "|"]
    for name in result["plans"]:
        lines.append(f"| {name} | {' | '.join(cell(row['arms'][name]) for row in rows)} |")
    return lines


def _arms(result: dict[str, Any]) -> list[str]:
    """Format the values that do not depend on a setting."""
    first = result["settings"][0]["arms"]
    shown = {name: "" if part is None else f"{part:.2f}" for name, part in result["progress"].items()}
    lines = [
        "| arm | plan | bytes per step | predicted | final loss | progress of a sample | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, plan in result["plans"].items():
        a, losses = first[name], " · ".join(f"{x:.4f}" for x in result["losses"].get(name, ()))
        lines.append(
            f"| {name} | `{plan}` | {a['sent'] / 1e3:.1f} kB | {a['predicted_sent'] / 1e3:.1f} kB | {losses} | "
            f"{shown[name]} | {a['predicted_progress']:.2f} |"
        )
    return lines


def reached(arm: dict[str, Any]) -> str:
    """Format the time at which the target was reached."""
    return f"{arm['to_target']:.1f}" if arm["to_target"] < inf else "never"


def guessed(arm: dict[str, Any]) -> float:
    """Return the predicted seconds for the progress of a step of dp."""
    return arm["predicted_step"] / arm["predicted_progress"]


def picture(result: dict[str, Any]) -> str:
    """Draw a panel for every setting: the speedup of each arm over dp at the target loss, with a tick at the prediction."""
    rows, count = result["settings"], len(result["settings"][0]["arms"])
    high = ROW * count + GAP
    wide = LEFT + (NAME + WIDTH + 20) * min(COLUMNS, len(rows))
    tall = TOP + high * -(-len(rows) // COLUMNS)
    title = "Time to the same loss over slow links: how many times as fast as dp, measured (bars) and predicted (ticks)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" role="img" '
        f'aria-labelledby="slow-title"><title id="slow-title">{escape(title)}</title><style>{STYLE}</style>',
        f'<rect class="back" width="{wide}" height="{tall}"/><text class="head" x="{LEFT}" y="20">{escape(title)}</text>',
        f'<text class="soft" x="{LEFT}" y="36">Fractions are of what loopback reaches; no bar: the target was not reached.</text>',
    ]
    for i, row in enumerate(rows):
        x, y = LEFT + (NAME + WIDTH + 20) * (i % COLUMNS), TOP + high * (i // COLUMNS)
        parts.append(f'<text class="head" x="{x}" y="{y}">{escape(row["setting"])}</text>')
        parts += _panel(row["arms"], x, y + 6)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(arms: dict[str, dict[str, Any]], x: int, y: int) -> list[str]:
    dp = arms["dp"]
    bars = {name: dp["to_target"] / a["to_target"] for name, a in arms.items()}
    ticks = {name: guessed(dp) / guessed(a) for name, a in arms.items()}
    most, best = max(*bars.values(), *ticks.values()), max(bars, key=lambda name: bars[name])
    parts = []
    for j, name in enumerate(arms):
        top, long, tick = y + ROW * j, WIDTH * bars[name] / most, x + NAME + WIDTH * ticks[name] / most
        parts.append(f'<text class="soft" x="{x}" y="{top + 11}">{escape(name)}</text>')
        parts.append(
            f'<rect class="{"best" if name == best else "bar"}" x="{x + NAME}" y="{top + 2}" width="{long:.1f}" height="{ROW - 4}"/>'
        )
        parts.append(f'<line class="tick" x1="{tick:.1f}" x2="{tick:.1f}" y1="{top + 1}" y2="{top + ROW - 1}"/>')
        if bars[name]:
            parts.append(f'<text x="{x + NAME + 3}" y="{top + 11}">{bars[name]:.2g} ×</text>')
    return parts
