"""A timeline as one self-contained HTML page: two SVGs in a box that scrolls, light or dark as the reader likes.

Text on every colour has a contrast of at least 4.5, in light and in dark.
"""

from html import escape
from math import ceil
from statistics import median
from typing import NamedTuple

from plait.config.version import __version__
from plait.report.timeline import COMPUTE, RankRow, Span, StepBox, Timeline

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--text:#1a1a1a;--soft:#5c5c5c;--line:#d0d0d0;--F:#a9ccff;--B:#9fdcb4;--W:#f4cf86;
--comm:#c9b3f0;--other:#d9d9d9;--data:#ecc5cf;--idle:#eee;--edge:#0003;--box:#111}
@media(prefers-color-scheme:dark){:root{--bg:#16181c;--text:#e8e8e8;--soft:#a8a8a8;--line:#3c4048;--F:#2d5fa6;--B:#22703f;
--W:#85570c;--comm:#6a4fa3;--other:#54585f;--data:#7d3e50;--idle:#24272e;--edge:#0006;--box:#fff}}
body{margin:0 auto;max-width:1400px;padding:16px;background:var(--bg);color:var(--text);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:15px;margin:14px 0 4px;position:sticky;left:0;width:max-content}
p{margin:0 0 6px}.note,footer,caption{color:var(--soft);font-size:13px}footer{margin-top:20px;overflow-wrap:anywhere}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:10px 0;padding:0;font-size:13px}
.key{display:inline-block;width:16px;height:12px;margin-right:6px;border:1px solid var(--line);vertical-align:-1px}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;padding:0 12px 8px}
.rows{display:flex}.names{position:sticky;left:-12px;flex:none;background:var(--bg);padding-left:12px;margin-left:-12px;z-index:1}
.time{flex:none;display:block}svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--text)}
.time g text{text-anchor:middle;fill:var(--box);pointer-events:none;font-size:11px}
.time .axis text{fill:var(--soft)}.time .axis text.start{text-anchor:start}.axis line{stroke:var(--line);stroke-width:.5}
.time rect{stroke:var(--edge);stroke-width:.5}.time rect.idle{fill:var(--idle);stroke:none}
.k-F rect{fill:var(--F)}.k-B rect{fill:var(--B)}.k-W rect{fill:var(--W)}.k-send rect{fill:var(--comm)}
.k-data rect{fill:var(--data)}.k-reduce rect,.k-optimizer rect,.k-loss rect,.k-replicate rect,.k-collect rect{fill:var(--other)}
.key.k-F{background:var(--F)}.key.k-B{background:var(--B)}.key.k-W{background:var(--W)}.key.k-send{background:var(--comm)}
.key.k-data{background:var(--data)}.key.k-reduce,.key.k-optimizer{background:var(--other)}.key.k-idle{background:var(--idle)}
.further rect{fill-opacity:.6}
table{display:inline-table;border-collapse:collapse;margin:16px 32px 0 0;font-size:13px;font-variant-numeric:tabular-nums}
caption{text-align:left;white-space:nowrap;padding-bottom:4px}th,td{padding:2px 14px 2px 0;text-align:right;font-weight:normal}
"""


WIDTH, WIDEST, NUMBER = 960, 16000, 14
"""Pixels: of a picture at least and at most, and of a typical box so that its number fits."""
ROW, BOX, TOP, AXIS, NAMES = 30, 24, 4, 24, 148
BOXES = 5000
"""More are not drawn: a browser becomes slow."""
WORDS = {
    "F": "forward", "B": "backward", "I": "backward, gradient of the inputs", "W": "backward, gradient of the weights",
}  # fmt: skip
LEGEND = {
    "F": "F forward", "B": "B backward", "I": "I backward, of inputs", "W": "W backward, of weights",
    "forward": "forward", "replicate": "replicate", "loss": "loss", "backward": "backward", "collect": "collect",
    "receive": "receive", "send": "send", "data": "data", "reduce": "reduce, optimizer",
}  # fmt: skip
SORTS = {"I": "B", "receive": "send", "forward": "F", "backward": "B"}


def page(shown: Timeline) -> str:
    """The whole page."""
    ranks = drawn(shown)
    blocks = shown.blocks
    frame = _frame([b for block in blocks.values() for row in block.rows for b in row.boxes])
    pictures = "".join(_picture(name, shown, block, ranks, frame) for name, block in blocks.items())
    title = f"{shown.run.resolve().name} · step {shown.step}"
    legend = "".join(f'<li><span class="key {kind}"></span>{escape(text)}</li>' for kind, text in _legend(shown))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<link rel=\"icon\" href=\"data:,\">\n<style>{STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(_summary(shown))}</p>\n"
        + "".join(f'<p class="note">{escape(text)}</p>\n' for text in _notes(shown, ranks))
        + f'<ul class="legend">{legend}</ul>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="timeline">'
        f'<div style="width:{frame.width + NAMES}px">{pictures}</div></div>\n'
        f"{_tables(shown)}<footer>plait {__version__} · {escape(str(shown.run))} · the same as a trace for Perfetto: trace.json</footer>\n"
        "</body></html>\n"
    )  # fmt: skip


def _legend(shown: Timeline) -> list[tuple[str, str]]:
    """(class, words) of the colours that are in the picture."""
    there = {b.sort for row in shown.measured.rows for b in row.boxes}
    words: dict[str, list[str]] = {}
    for sort, text in LEGEND.items():
        if sort in there and text not in words.setdefault(_class(sort), []):
            words[_class(sort)].append(text)
    return [(kind, ", ".join(texts)) for kind, texts in words.items() if texts] + [("k-idle", "idle")]


def drawn(shown: Timeline) -> list[int]:
    """Ranks to draw: all, or as many as `BOXES` allows, evenly from the first to the last."""
    ranks = len(shown.measured.rows)
    total = sum(len(row.boxes) for block in shown.blocks.values() for row in block.rows)
    if total <= BOXES or ranks <= 2:
        return list(range(ranks))
    count = max(2, min(ranks, ranks * BOXES // total))
    return sorted({round(i * (ranks - 1) / (count - 1)) for i in range(count)})


def _summary(shown: Timeline) -> str:
    plan = f"plan {shown.plan}"
    if shown.measured.bubble is None:
        return f"{plan} · no pipeline: where each rank's time went"
    parts = [plan, f"bubble {percent(shown.measured.bubble)} measured"]
    parts[-1] += f", {percent(shown.predicted.bubble)} predicted" if shown.predicted else ""
    parts.append(f"from first to last action {ms(shown.measured.makespan)} measured")
    parts[-1] += f", {ms(shown.predicted.makespan)} predicted" if shown.predicted else ""
    return " · ".join(parts)


def _notes(shown: Timeline, ranks: list[int]) -> list[str]:
    notes = [shown.note] if shown.note else []
    if shown.predicted:
        notes.append(
            "The number in a box is its micro-batch. Predicted: the planned table, played with the median times of "
            f"{shown.steps} measured step{'s' if shown.steps != 1 else ''}."
            + (" Paler boxes are of a rank's further stages." if shown.plan.stages_per_rank > 1 else "")
        )
    if len(ranks) < len(shown.measured.rows):
        which = ", ".join(map(str, ranks))
        notes.append(f"More than {BOXES:,} boxes: of {len(shown.measured.rows)} ranks only {which} are drawn.")
    return notes


class _Frame(NamedTuple):
    """The second at the left edge of a picture, pixels per second, and its width in pixels."""

    first: float
    scale: float
    width: int

    def x(self, second: float) -> float:
        return (second - self.first) * self.scale


def _frame(boxes: list[Span]) -> _Frame:
    """That of a picture at least `WIDTH` wide, and wide enough for numbers in typical boxes."""
    first, last = min((b.start for b in boxes), default=0.0), max((b.end for b in boxes), default=0.0)
    took: dict[str, list[float]] = {}
    for b in boxes:
        if b.sort in COMPUTE:
            took.setdefault(b.sort, []).append(b.end - b.start)
    shortest, seconds = min(map(median, took.values()), default=0.0), last - first
    wanted = NUMBER / shortest if shortest > 0 else 0.0
    scale = min(max(WIDTH / seconds, wanted), WIDEST / seconds) if seconds else 1.0
    return _Frame(first, scale, round(seconds * scale) + 24)


def _picture(name: str, shown: Timeline, block: StepBox, ranks: list[int], frame: _Frame) -> str:
    rows = [row for row in block.rows if row.rank in ranks or shown.predicted is block]
    height = TOP + ROW * len(rows) + AXIS
    bubble = "" if block.bubble is None else f" · bubble {percent(block.bubble)}"
    names = "".join(f'<text x="0" y="{TOP + ROW * i + 17}">{escape(r.label)}</text>' for i, r in enumerate(rows))
    what = f"{name.capitalize()}: a row per rank, time from left to right"
    body = "".join(_row(row, TOP + ROW * i, block, frame) for i, row in enumerate(rows))
    return (
        f"<h2>{name.capitalize()}{escape(bubble)}</h2>\n"
        f'<div class="rows"><svg class="names" width="{NAMES}" height="{height}" aria-hidden="true">{names}</svg>'
        f'<svg class="time" id="{name}" role="img" aria-labelledby="{name}-title {name}-desc" width="{frame.width}" '
        f'height="{height}"><title id="{name}-title">{escape(what)}</title>'
        f'<desc id="{name}-desc">{escape(_summary(shown))}</desc>\n'
        f"{_axis(frame, height)}{body}</svg></div>\n"
    )


def _row(row: RankRow, y: int, block: StepBox, frame: _Frame) -> str:
    start = 0.0 if block.makespan else min((b.start for b in row.boxes), default=0.0)
    end = block.makespan or max((b.end for b in row.boxes), default=0.0)
    x, w = frame.x(start), (end - start) * frame.scale
    idle = f'<rect class="idle" x="{x:.2f}" y="{y}" width="{w:.2f}" height="{BOX}"/>'
    stage = min((b.about[1] for b in row.boxes if b.about), default=0)
    boxes = "".join(_box(b, row, y, frame, bool(b.about) and b.about[1] > stage) for b in row.boxes)
    return f'<g data-rank="{row.rank}">{idle}{boxes}</g>\n'


def _box(box: Span, row: RankRow, y: int, frame: _Frame, further: bool) -> str:
    """`further`: of a stage that is not the rank's first."""
    x, w = frame.x(box.start), max((box.end - box.start) * frame.scale, 0.01)
    at = f"{ms(box.end - box.start)} from {ms(box.start)} on · {row.label}"
    said, text = box.name, ""
    if box.about is not None:
        kind, stage, micro = box.about
        what = WORDS[kind] if box.sort in COMPUTE else f"{box.sort}, for the {WORDS[kind]}"
        said = f"{what} · stage {stage} · micro-batch {micro}"
        text = str(micro) if box.sort in COMPUTE else ""
    elif w > 7 * len(box.name) + 6:
        text = box.name
    label = ""
    if text and w >= 6.2 * len(text) + 2:
        label = f'<text x="{x + w / 2:.2f}" y="{y + 16}">{escape(text)}</text>'
    about = f' data-name="{escape(box.name)}"'
    rect = f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{BOX}"/>'
    return f'<g class="{_class(box.sort)}{" further" * further}"{about}><title>{escape(said)} · {escape(at)}</title>{rect}{label}</g>'


def _class(sort: str) -> str:
    return f"k-{SORTS.get(sort, sort)}"


def _axis(frame: _Frame, height: int) -> str:
    """Ticks at round times, 70 pixels or more apart; 0 is the first action."""
    step = next(n * 10.0**e for e in range(-9, 9) for n in (1, 2, 5) if n * 10.0**e * frame.scale >= 70)
    y, parts, k = height - AXIS + 2, [], ceil(frame.first / step)
    while (x := frame.x(k * step)) < frame.width - 20:
        anchor = ' class="start"' if x < 20 else ""
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y + 4}"/>')
        parts.append(f'<text{anchor} x="{x:.1f}" y="{y + 16}">{ms(k * step).replace("-", "−")}</text>')
        k += 1
    return f'<g class="axis">{"".join(parts)}</g>'


def _tables(shown: Timeline) -> str:
    if not shown.times:
        return ""
    kinds = [kind for kind in COMPUTE if any(k == kind for _, k in shown.times)]
    head = "".join(f"<th>{kind}</th>" for kind in kinds)
    rows = ""
    for stage in sorted({s for s, _ in shown.times}):
        cells = "".join(f"<td>{ms(t) if (t := shown.times.get((stage, kind))) else ''}</td>" for kind in kinds)
        rows += f"<tr><th>{stage}</th>{cells}</tr>"
    first = f"<table><caption>Median time of a micro-batch</caption><tr><th>stage</th>{head}</tr>{rows}</table>"
    idle = ""
    shares = len(shown.measured.rows) // len(shown.predicted.rows) if shown.predicted else 1
    for row in shown.measured.rows:
        told = percent(shown.predicted.idle(shown.predicted.rows[row.rank // shares])) if shown.predicted else ""
        idle += f"<tr><th>{row.rank}</th><td>{percent(shown.measured.idle(row))}</td><td>{told}</td></tr>"
    head = "<tr><th>rank</th><th>measured</th><th>predicted</th></tr>"
    return f"{first}\n<table><caption>Share of the time not computing</caption>{head}{idle}</table>\n"


def percent(share: float | None) -> str:
    """A share as text: 27.3 %."""
    return "" if share is None else f"{100 * share:.1f} %"


def ms(seconds: float) -> str:
    """A time as text, in milliseconds or, from 10 on, seconds."""
    if abs(seconds) >= 10:
        return f"{seconds:.3g} s"
    value = seconds * 1e3
    return f"{value:.0f} ms" if abs(value) >= 100 or value == round(value) else f"{value:.3g} ms"
