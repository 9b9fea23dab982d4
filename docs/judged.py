"""The tables of planner.md, of `bench/planner.py`'s output: `python docs/generate.py planner`; and of runs that the constants have not seen,
of `bench/fit.py`'s: `python docs/generate.py unseen`, which takes a quarter of an hour.

What stands between `<!-- NAME -->` and `<!-- end -->` is written anew; the rest of the page is kept by hand, and has to be
read again when a figure moves.
"""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "bench"))


def row(*cells: Any) -> str:
    """A line of a table; nothing for what is not known."""
    return f"| {' | '.join('' if c is None else str(c) for c in cells)} |"


def head(*names: str) -> list[str]:
    return [row(*names), "|---" * len(names) + "|"]


def short_name(source: str) -> str:
    """A source's name as tables have it."""
    return source.replace("docs/source/en/", "").partition("(numbers")[0].strip()[:72]


def sources(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Errors by source, without and with four measured rows of it, and choices."""
    lines = head("source", "rows", "error %", "bias %", "in 90 % interval", "error % with 4 anchors", "regret", "of a random pick",
                 "pairs right %", "rank correlation")  # fmt: skip
    for name, found in alone["sources"].items():
        if "mape" in found:
            after, chosen = anchored["sources"][name], found.get("choice") or {}
            lines.append(row(short_name(name), found["rows"], found["mape"], found["bias"], found["inside_90"],
                             after.get("mape") if found["rows"] > anchored["anchors"] else None,
                             *(chosen.get(k) for k in ("regret", "regret_random", "pairs_10", "spearman"))))  # fmt: skip
    every, after, chosen = alone["overall"], anchored["overall"], alone["choice"]
    lines.append(row("**all rows**", every["rows"], every["mape"], every["bias"], every["inside_90"], after["mape"],
                     *(chosen[k] for k in ("regret", "regret_random", "pairs_10", "spearman"))))  # fmt: skip
    return [*lines, row("**mean of sources**", "", every["mean_of_sources"], "", "", after["mean_of_sources"], "", "", "", "")]


def kinds(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Errors by what is trained."""
    lines = head("kind", "rows", "error %", "median %", "bias %", "in 90 % interval", "error % with 4 anchors")
    for name, found in alone["kinds"].items():
        cells = (found[k] for k in ("rows", "mape", "median", "bias", "inside_90"))
        lines.append(row(name, *cells, anchored["kinds"][name]["mape"]))
    return lines


def rivals(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """The planner beside simpler models."""
    lines = head("model", "error %", "regret", "pairs right %", "rank correlation")
    found = {f"plait, {sum(alone['fitted'].values())} constants": alone["overall"] | {"choice": alone["choice"]}} | alone["rivals"]
    for name, one in found.items():
        lines.append(row(name, one["mape"], *(one["choice"][k] for k in ("regret", "pairs_10", "spearman"))))
    return [*lines, row("a random pick", "", alone["choice"]["regret_random"], 50, 0)]


def worst(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """The rows predicted worst."""
    return [
        f"{i}. {w['ratio']} × measured: {w['row']}, {w['model']} on {w['gpus']} devices ({w['source'].split(' (')[0][:40]}), `{w['plan']}`"
        for i, w in enumerate(alone["worst"], 1)
    ]


def memory(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """What is predicted of memory, and of what fits."""
    m = alone["memory"]
    return [f"{m['rows']} rows print a peak: mean error {m['mape']} %, bias {m['bias']} %, {m['within_10']} % of them within a tenth. Of "
            f"{m['said_fits']} rows said to fit, {m['false_fits']} ran out of memory; of {m['out_of_memory']} that did, "
            f"{m['out_of_memory_recognised']} are recognized; {m['ran_but_refused']} that ran were said not to fit."]  # fmt: skip


def write() -> None:
    """Write the tables into planner.md."""
    from planner import DATA, report
    from published import read, run_of

    runs = [run_of(line) for path in sorted(DATA.glob("*.csv")) for line in read(path)]
    both = report(runs, 0, 0), report(runs, 4, 0)
    replaced({part.__name__: part(*both) for part in (sources, kinds, rivals, memory, worst)})


def write_unseen() -> None:
    """Write the table of sources that are predicted without their rows into planner.md."""
    from fit import by_source, summary, unseen
    from planner import DATA, Planner
    from published import read, run_of

    rows = [line for path in sorted(DATA.glob("*.csv")) for line in read(path)]
    found, planner = unseen(rows, 4, 2), Planner()
    fitted = [(run, got) for row in rows if not (run := run_of(row)).why and run.rate and (got := planner(run))]
    errors = [by_source(pairs) for pairs in (fitted, found.constants, found.beliefs)]
    lines = head("source", "fitted, error %", "constants unseen", "constants and stack unseen")
    lines += [row(short_name(name), *(round(by[name], 1) for by in errors)) for name in errors[0]]
    lines.append(row("**mean of sources**", *(round(sum(by.values()) / len(by), 1) for by in errors)))
    for name, pairs in (("constants unseen", found.constants), ("constants and stack unseen", found.beliefs)):
        alone, four, inside = summary(pairs)
        lines += ["", f"{name.capitalize()}: {alone:.1f} % in the mean of sources that can give four measured rows, "
                  f"{four:.1f} % once four are known (twelve draws); {inside:.0f} % of the measurements lie in the 90 % interval."]  # fmt: skip
    replaced({"unseen": lines})


def write_layouts() -> None:
    """Write the table of production layouts into planner.md."""
    from layouts import LAYOUTS, line

    lines = head("layout", "as a plan", "published step, s", "predicted, s", "error", "what the planner would choose", "its step, s", "search")
    lines += [line(name, {"row_id": name, "table_or_file": "", **given}, True) for name, given in LAYOUTS.items()]
    replaced({"layouts": lines})


def replaced(parts: dict[str, list[str]]) -> None:
    """Put lines between the marks of planner.md."""
    page = DOCS / "planner.md"
    text = page.read_text()
    for name, lines in parts.items():
        mark = f"<!-- {name} -->\n"
        new = "\n".join(lines)
        text, count = re.subn(f"{mark}.*?<!-- end -->", lambda _: f"{mark}{new}\n<!-- end -->", text, flags=re.S)  # noqa: B023
        assert count == 1, f"{page} has {count} places for {name}"
    page.write_text(text)
