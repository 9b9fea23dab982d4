"""Write the tables of planner.md between their marks, `<!-- NAME -->` and `<!-- end -->`. The rest of the page is written by hand.

    python docs/generate.py planner    the tables of `bench/planner.py`
    python docs/generate.py unseen     the table of predictions for unseen runs, of `bench/fit.py`; takes a quarter of an hour
    python docs/generate.py layouts    the table of production layouts, of `bench/layouts.py`

If a figure changes, check the text around its table.
"""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "bench"))


def format_row(*cells: Any) -> str:
    """Format a row of a Markdown table. A cell of None is empty."""
    return f"| {' | '.join('' if c is None else str(c) for c in cells)} |"


def format_header(*names: str) -> list[str]:
    return [format_row(*names), "|---" * len(names) + "|"]


def short_name(source: str) -> str:
    """Shorten a source's name for a table."""
    return source.replace("docs/source/en/", "").partition("(numbers")[0].strip()[:72]


def sources(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Format errors by source, without anchors and with four, and the quality of choices."""
    lines = format_header("source", "rows", "error %", "bias %", "in 90 % interval", "error % with 4 anchors", "regret", "of a random pick",
                 "pairs right %", "rank correlation")  # fmt: skip
    for name, found in alone["sources"].items():
        if "mape" in found:
            after, chosen = anchored["sources"][name], found.get("choice") or {}
            lines.append(format_row(short_name(name), found["rows"], found["mape"], found["bias"], found["inside_90"],
                             after.get("mape") if found["rows"] > anchored["anchors"] else None,
                             *(chosen.get(k) for k in ("regret", "regret_random", "pairs_10", "spearman"))))  # fmt: skip
    every, after, chosen = alone["overall"], anchored["overall"], alone["choice"]
    lines.append(format_row("**all rows**", every["rows"], every["mape"], every["bias"], every["inside_90"], after["mape"],
                     *(chosen[k] for k in ("regret", "regret_random", "pairs_10", "spearman"))))  # fmt: skip
    return [
        *lines,
        format_row(
            "**mean of sources**", "", every["mean_of_sources"], "", "", after["mean_of_sources"], "", "", "", ""
        ),
    ]


def kinds(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Format errors by kind of model."""
    lines = format_header("kind", "rows", "error %", "median %", "bias %", "in 90 % interval", "error % with 4 anchors")
    for name, found in alone["kinds"].items():
        cells = (found[k] for k in ("rows", "mape", "median", "bias", "inside_90"))
        lines.append(format_row(name, *cells, anchored["kinds"][name]["mape"]))
    return lines


def rivals(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Format the comparison of the planner with simpler models."""
    lines = format_header("model", "error %", "regret", "pairs right %", "rank correlation")
    found = {
        f"plait, {sum(alone['fitted'].values())} constants": alone["overall"] | {"choice": alone["choice"]}
    } | alone["rivals"]
    for name, one in found.items():
        lines.append(format_row(name, one["mape"], *(one["choice"][k] for k in ("regret", "pairs_10", "spearman"))))
    return [*lines, format_row("a random pick", "", alone["choice"]["regret_random"], 50, 0)]


def worst(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """List the rows with the largest errors."""
    return [
        f"{i}. {w['ratio']} × measured: {w['row']}, {w['model']} on {w['gpus']} devices ({w['source'].split(' (')[0][:40]}), `{w['plan']}`"
        for i, w in enumerate(alone["worst"], 1)
    ]


def memory(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Summarize the predictions of peak memory and of plans that fit."""
    m = alone["memory"]
    return [f"{m['rows']} rows have a published peak. Mean error is {m['mape']} %, bias {m['bias']} %; {m['within_10']} % of the predictions "
            f"are within 10 %. Of {m['said_fits']} runs predicted to fit, {m['false_fits']} ran out of memory. Of {m['out_of_memory']} "
            f"that ran out of memory, {m['out_of_memory_recognised']} are recognized. {m['ran_but_refused']} runs that fit were "
            "predicted not to."]  # fmt: skip


def write() -> None:
    """Write the tables of `bench/planner.py` into planner.md."""
    from planner import DATA, report
    from published import read, run_of

    runs = [run_of(line) for path in sorted(DATA.glob("*.csv")) for line in read(path)]
    both = report(runs, 0, 0), report(runs, 4, 0)
    replace_tables({part.__name__: part(*both) for part in (sources, kinds, rivals, memory, worst)})


def write_unseen() -> None:
    """Write the table of predictions for unseen runs into planner.md."""
    from fit import by_source, summary, unseen
    from planner import DATA, Planner
    from published import read, run_of

    rows = [line for path in sorted(DATA.glob("*.csv")) for line in read(path)]
    found, planner = unseen(rows, 4, 2), Planner()
    fitted = [(run, got) for row in rows if not (run := run_of(row)).why and run.rate and (got := planner(run))]
    errors = [by_source(pairs) for pairs in (fitted, found.constants, found.beliefs)]
    lines = format_header("source", "fitted, error %", "constants unseen", "constants and stack unseen")
    lines += [format_row(short_name(name), *(round(by[name], 1) for by in errors)) for name in errors[0]]
    lines.append(format_row("**mean of sources**", *(round(sum(by.values()) / len(by), 1) for by in errors)))
    for name, pairs in (("constants unseen", found.constants), ("constants and stack unseen", found.beliefs)):
        alone, four, inside = summary(pairs)
        lines += ["", f"{name.capitalize()}: mean error {alone:.1f} % over sources with enough rows for four anchors, {four:.1f} % with these "
                  f"anchors (mean of twelve draws). {inside:.0f} % of the measurements lie in the 90 % interval."]  # fmt: skip
    replace_tables({"unseen": lines})


def write_layouts() -> None:
    """Write the table of production layouts into planner.md."""
    from layouts import LAYOUTS, line

    lines = format_header(
        "layout", "as a plan", "published step, s", "predicted, s", "error", "planner's choice", "its step, s", "search"
    )
    lines += [line(name, {"row_id": name, "table_or_file": "", **given}, True) for name, given in LAYOUTS.items()]
    replace_tables({"layouts": lines})


def replace_tables(parts: dict[str, list[str]]) -> None:
    """Replace the lines between the marks of planner.md."""
    page = DOCS / "planner.md"
    text = page.read_text()
    for name, lines in parts.items():
        mark = f"<!-- {name} -->\n"
        new = "\n".join(lines)
        text, count = re.subn(f"{mark}.*?<!-- end -->", lambda _: f"{mark}{new}\n<!-- end -->", text, flags=re.S)  # noqa: B023
        assert count == 1, f"{page} has {count} marks named {name}"
    page.write_text(text)
