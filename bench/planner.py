"""Compares the planner with published runs: error, order, choice, memory and coverage of its intervals, by source.

    python bench/planner.py [--runs FILE.csv ...] [--anchors 4] [--seed 0] [--json] [--worst 10]

A row of FILE.csv is one run, with the columns of `bench/data/published_runs.csv`; empty cells are unknown. Without
--anchors, each source is predicted without its own rows. With --anchors K, K rows of every source (drawn with --seed)
are measured steps that the predictions of the others may use, and they are left out of the score. This script fits nothing
to rows or sources. Fitted constants are in `plait/planner/constants.py` and `plait.config.hardware`, and their number is printed.
"""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from math import log
from operator import mul
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from baselines import SEVEN, constant, seven
from published import Run, read, run_of
from scores import Case, choice, memory, percent, times
from sites import machine_of
from stacks import BYTES

from plait.config import hardware
from plait.planner.constants import FITTED, Fitted
from plait.planner.correction import (
    ERROR_DEVIATIONS,
    PART_DEVIATIONS,
    SIZE_DEVIATIONS,
    Correction,
    RunTraits,
    compute_log_sizes,
    fit_correction,
    label_layout,
)
from plait.planner.estimate import Estimate, estimate_plan
from plait.planner.formulas import RuntimeCosts, TimeModel
from plait.planner.plan_request import CONTEXT_BYTES, get_usable_memory
from plait.planner.workload import Workload

DATA = Path(__file__).parent / "data"
FOUR = 4.0
"""The cost of making a 4-bit value, over an 8-bit one."""
ROWS = 2.0
"""The cost of making an 8-bit value with a scale of its row, and again with one of its column, over one scale for all."""
UNFITTED = Fitted(
    top=1, plain=1, windows32=1, windows=1, windows_tuned=1, ramp=0, waves=0, fused=0.6, portable=0, earlier=1, tuned=0.6, stream=1, moved=1,
    joined=1, scores=1, cast=1, narrow=1, back=2, host=0, sums=1, tiled=0, apart=0, overlap=1, contention=0, fixed=0, slack=1,
)  # fmt: skip
"""The same model without fitted constants: it assumes the data sheets, and complete overlap."""


class Prediction(NamedTuple):
    """The prediction for a step of `batch` samples, in micro-batches of `samples`."""

    estimate: Estimate
    batch: float
    reserved: float
    """Predicted reserved bytes."""
    samples: float
    full: float
    """The probability that it runs out of memory, for rows that do not print a deciding setting."""


UNSURE = NormalDist(sigma=0.2)
"""The distribution of the logarithm of measured over predicted memory."""


@dataclass
class Planner:
    """Predicts runs, and caches the times of blocks, which many rows have in common."""

    fitted: Fitted = FITTED

    def __post_init__(self) -> None:
        self.paces: dict[Any, TimeModel] = {}

    def pace(self, run: Run) -> TimeModel:
        """Return the times of a run's blocks on its machine."""
        machine = machine_of(run.row)
        assert machine is not None and run.work is not None
        peak, stack = machine.device.peak, run.stack
        if "fp4" in run.row["precision"] and peak.fp4:  # a plan has no 4-bit precision, so this is the 8-bit one, at the 4-bit rate
            machine = replace(machine, device=replace(machine.device, peak=replace(peak, fp8=peak.fp4)))
        compiled = run.row.get("compile") == "yes"  # a plan of plait that compiles has no sequence parallelism
        wide = run.plans[0][0].precision in ("fp32", "tf32")
        held = "alone" if stack.held == "zero" and run.plans[0][0].shares == 1 else stack.held
        software = RuntimeCosts(
            *BYTES["wide" if wide else "four" if run.quantized else held], redone=0.5, portable=stack.portable, overlapped=stack.overlapped,
            action=0.0, even=run.layered, tiled=stack.tiled, once=stack.once, piece=stack.piece, fuses=stack.fuses or compiled,
            launches=stack.launches * (0.5 if compiled else 1.0), channels_last=stack.channels_last,
            hidden=stack.hidden, adds=stack.adds, attention="portable" if stack.attention == "unfused" else stack.attention,
            casts=FOUR if "fp4" in run.row["precision"] else ROWS if "rowwise" in run.row["precision"] else 1.0,
        )  # fmt: skip
        work = adapted(run.work, run.plans[0][1] if run.quantized else 0.0) if run.lora else run.work
        key = (work, software, machine)
        if key not in self.paces:
            self.paces[key] = TimeModel(work, machine, software, self.fitted)
        return self.paces[key]

    def __call__(self, run: Run) -> Prediction | None:
        """Predict the fastest plan that the row allows and that fits."""
        pace, found = self.pace(run), []
        for plan, samples, batch in run.plans:
            try:
                got = estimate_plan(pace, plan, samples)
            except ValueError:  # the schedule does not exist
                continue
            reserved = got.reserved + CONTEXT_BYTES
            over = max(0.0, got.allocated - get_usable_memory(pace.machine))
            found.append((over, got.seconds / batch, len(found), Prediction(got, batch, reserved, samples, 0.0)))
        if not found:
            return None
        best: Prediction = min(found)[-1]
        like = [one.estimate for *_, one in found if one.samples == best.samples]
        weights = [2.0 if one.plan.activation_checkpointing == "none" else 1.0 for one in like]  # the default of the software
        full = [UNSURE.cdf(log(one.allocated / get_usable_memory(pace.machine))) for one in like]
        return best._replace(full=sum(map(mul, weights, full)) / sum(weights))


def adapted(work: Workload, samples: float = 0.0) -> Workload:
    """Return the workload with low-rank adapters. Weights are frozen, and each product with an adapter has four more operators, which read
    its input and add to its result (arXiv 2106.09685). Weights in 4 bits are read, written in 16 bits and read again in every forward, of
    `samples` samples, and backward (arXiv 2305.14314)."""
    blocks = []
    for block in work.blocks:
        mapped = [p for p in block.products if p.weight]
        more = sum((p.rows * p.inner + 3 * p.rows * p.columns) * p.batch * p.times for p in mapped)
        made = 1.3 * (block.weights + block.experts) / samples if samples and block.count > 1 else 0.0
        blocks.append(replace(block, moved=block.moved + more + made, kernels=block.kernels + (5 if samples else 4) * len(mapped)))
    return replace(work, blocks=tuple(blocks), frozen=1.0)


def traits(run: Run, found: Estimate) -> RunTraits:
    """Return the traits of a run, for anchors."""
    labels = {
        "occasion": f"{run.source} {run.row.get('table_or_file', '')}", "device": run.row["gpu"],
        "model": run.row.get("model", ""), "precision": run.row.get("precision", ""),
        "layout": label_layout(found.plan), "software": re.sub(r"[\d.]+", "#", run.row.get("note", "")) + run.row.get("compile", ""),
    }  # fmt: skip
    return RunTraits(labels, {part: found.get_fraction(part) for part in PART_DEVIATIONS}, compute_log_sizes(found), kind(run) == "experts")


def kind(run: Run) -> str:
    """Return the kind of a run: dense 16- and 32-bit training is the main score, and harder kinds are scored separately."""
    assert run.work is not None
    if run.lora:
        return "lora"
    if any(p.experts for block in run.work.blocks for p in block.products):
        return "experts"
    return "8-bit" if any(word in run.row.get("precision", "") for word in ("fp8", "fp4")) else "dense"


def cases(
    runs: Iterable[Run], predict: Callable[[Run], Prediction | None], anchors: int, seed: int
) -> list[Case]:
    """Predict all runs that can be expressed, without the anchors."""
    by_source: dict[str, list[tuple[Run, Prediction]]] = defaultdict(list)
    for run in runs:
        got = None if run.why else predict(run)
        if got is not None:
            by_source[run.source].append((run, got))
    found = []
    for source in sorted(by_source):
        rows = by_source[source]
        timed = [pair for pair in rows if pair[0].rate]
        chosen = random.Random(f"{seed} {source}").sample(timed, min(anchors, max(0, len(timed) - 1)))
        known = [
            (traits(run, got[0]), log(1 / run.rate / (got[0].seconds / got[1]))) for run, got in chosen if run.rate
        ]
        taken = {id(run) for run, _ in chosen}
        found += [case(run, got, known) for run, got in rows if id(run) not in taken]
    return found


def case(run: Run, got: Prediction, known: list[tuple[RunTraits, float]]) -> Case:
    """Return one prediction, corrected by the measured rows of its source."""
    found, batch, reserved = got.estimate, got.batch, got.reserved
    fixed: Correction = fit_correction(traits(run, found), known)
    each = found.seconds / batch
    said = got.full <= 0.5
    parts = {name: round(seconds / found.seconds, 3) for name, seconds in found.parts.items()}
    return Case(
        run.row["row_id"], run.source, run.group, 1 / run.rate if run.rate else None, each * fixed.factor,
        each * fixed.low, each * fixed.high, run.memory, reserved - (CONTEXT_BYTES if run.stack.allocator else 0), run.fits, said, kind(run),
        {"model": run.row.get("model", ""), "gpus": run.row["gpus"], "plan": str(found.plan), "parts": parts},
    )  # fmt: skip


def rival(runs: Iterable[Run], price: Callable[..., float]) -> list[Case]:
    """Return the predictions of a simpler model."""
    found = []
    for run in runs:
        machine = None if run.why else machine_of(run.row)
        if machine is None or not run.rate:
            continue
        each = min(price(run.work, plan, samples, machine) / batch for plan, samples, batch in run.plans)
        found.append(Case(run.row["row_id"], run.source, run.group, 1 / run.rate, each, kind=kind(run)))
    return found


def report(runs: list[Run], anchors: int, seed: int) -> dict[str, Any]:
    """Return all figures, as JSON."""
    done = cases(runs, Planner(), anchors, seed)
    sources = sorted({run.source for run in runs})
    told = {case.row for case in done}
    by = {name: [c for c in done if c.source == name] for name in sources}
    timed = {name: sum(not r.why and bool(r.rate) for r in runs if r.source == name) for name in sources}
    enough = [times(by[name]) for name in sources if timed[name] > anchors]  # the other sources have too few rows
    scored = [v["mape"] for v in enough if v]
    found = {
        "anchors": anchors, "seed": seed, "rows": len(runs), "expressed": len(done) + anchors_used(runs, done),
        "expressed_percent": percent([not run.why for run in runs]),
        "fitted": {"planner": len(fields(Fitted)), "network": len(hardware.FITTED_CONSTANTS),
        "errors": len(ERROR_DEVIATIONS) + len(SIZE_DEVIATIONS) + len(PART_DEVIATIONS) + 2, "choices": 6},
        "overall": times(done) | {"mean_of_sources": round(sum(scored) / len(scored), 1) if scored else None},
        "choice": choice(done), "memory": memory(done),
        "kinds": {k: times([c for c in done if c.kind == k]) for k in sorted({c.kind for c in done})},
        "sources": {
            name: {"expressed": sum(r.row["row_id"] in told for r in runs if r.source == name)} | times(by[name])
            | {"choice": choice(by[name]), "memory": memory(by[name])} for name in sources
        },
        "missing": {why: sum(r.why == why for r in runs) for why in sorted({r.why for r in runs if r.why})},
    }  # fmt: skip
    if not anchors:
        rivals = {
            "plait, unfitted": cases(runs, Planner(UNFITTED), 0, seed),
            f"simple model, {len(SEVEN)} constants": rival(runs, seven),
            "constant MFU and bubble": rival(runs, constant),
        }
        found["rivals"] = {name: times(c) | {"choice": choice(c)} for name, c in rivals.items()}
    found["worst"] = worst(done)
    return found


def anchors_used(runs: list[Run], done: list[Case]) -> int:
    """Return the number of rows that were used as anchors."""
    told = {case.row for case in done}
    return sum(not run.why and run.row["row_id"] not in told for run in runs)


def worst(done: list[Case], count: int = 10) -> list[dict[str, Any]]:
    """Return the rows with the largest errors."""
    timed = sorted((c for c in done if c.measured), key=lambda c: -abs(log(c.predicted / (c.measured or 1))))
    return [
        {"row": c.row, "source": c.source, "ratio": round(c.predicted / (c.measured or 1), 2)} | c.what
        for c in timed[:count]
    ]


def text(found: dict[str, Any]) -> str:
    """Format the printed tables."""
    lines = [f"{found['expressed']} of {found['rows']} rows expressed ({found['expressed_percent']} %), anchors {found['anchors']} a source; "
             f"fitted constants {sum(found['fitted'].values())}: {found['fitted']}"]  # fmt: skip
    head = f"{'source':<64}{'rows':>5}{'MAPE':>7}{'bias':>7}{'p90':>7}{'in 90':>7}{'regret':>8}{'random':>8}{'pairs':>7}{'rank':>7}"
    lines += [head, "-" * len(head)]
    for name, row in [*found["sources"].items(), ("all", found["overall"] | {"choice": found["choice"]})]:
        if "mape" in row:
            lines.append(line(name, row))
    lines.append(f"mean of sources: {found['overall']['mean_of_sources']} %")
    lines += [line(f"· {name}", row) for name, row in found["kinds"].items() if row]
    lines += [line(f"rival: {name}", row) for name, row in found.get("rivals", {}).items()]
    lines.append(f"memory: {found['memory']}")
    lines += [f"worst: {w['ratio']:<6} {w['row']} {w['model']} on {w['gpus']}: {w['plan']}" for w in found["worst"]]
    lines += [f"missing: {count} rows, {why}" for why, count in found["missing"].items()]
    return "\n".join(lines)


def line(name: str, row: dict[str, Any]) -> str:
    """Format the line of one source."""
    chosen = row.get("choice") or {}
    cell = lambda value, width: f"{'' if value is None else value:>{width}}"  # noqa: E731
    return (
        f"{name[:63]:<64}{row['rows']:>5}{cell(row['mape'], 7)}{cell(row['bias'], 7)}{cell(row['p90'], 7)}"
        f"{cell(row['inside_90'], 7)}{cell(chosen.get('regret'), 8)}{cell(chosen.get('regret_random'), 8)}"
        f"{cell(chosen.get('pairs_10'), 7)}{cell(chosen.get('spearman'), 7)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, action="append", help="published runs; all of bench/data without it")
    parser.add_argument("--anchors", type=int, default=0, help="measured runs of each source that may be used (0)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    files = options.runs or sorted(DATA.glob("*.csv"))
    runs = [run_of(row) for path in files for row in read(path)]
    found = report(runs, options.anchors, options.seed)
    print(json.dumps(found, indent=1) if options.json else text(found))


if __name__ == "__main__":
    main()
