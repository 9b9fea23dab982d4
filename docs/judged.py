"""The tables of planner.md, of `bench/planner.py`'s output: `python docs/generate.py planner`.

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


def sources(alone: dict[str, Any], anchored: dict[str, Any]) -> list[str]:
    """Errors by source, without and with four measured rows of it, and choices."""
    lines = head("source", "rows", "error %", "bias %", "in 90 % interval", "error % with 4 anchors", "regret", "of a random pick",
                 "pairs right %", "rank correlation")  # fmt: skip
    for name, found in alone["sources"].items():
        if "mape" in found:
            after, chosen = anchored["sources"][name], found.get("choice") or {}
            short = name.replace("docs/source/en/", "").partition("(numbers")[0].strip()[:72]
            lines.append(row(short, found["rows"], found["mape"], found["bias"], found["inside_90"],
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


def write() -> None:
    """Write the tables into planner.md."""
    from planner import DATA, report
    from published import read, run_of

    runs = [run_of(line) for path in sorted(DATA.glob("*.csv")) for line in read(path)]
    both = report(runs, 0, 0), report(runs, 4, 0)
    page = DOCS / "planner.md"
    text = page.read_text()
    for part in (sources, kinds, rivals, worst):
        mark = f"<!-- {part.__name__} -->\n"
        new = "\n".join(part(*both))
        text, count = re.subn(f"{mark}.*?<!-- end -->", lambda _: f"{mark}{new}\n<!-- end -->", text, flags=re.S)  # noqa: B023
        assert count == 1, f"{page} has {count} places for {part.__name__}"
    page.write_text(text)
