"""Counts the false alarms of the step in own formats, over clean runs of small jobs and plans of many kinds, and the faults that it finds.

    python bench/false_alarms.py runs FILE [--kinds fitted|fresh|NAME,…] [--seeds 0:20] [--plans 2] [--hours 1]
    python bench/false_alarms.py faults FILE
    python bench/false_alarms.py show FILE

`runs` appends a row to FILE for each job and plan, and leaves out those that FILE has, so that it can be stopped and started again.
A job is drawn from its kind and a seed (`bench/zoo_formats.py`), and its plans from the same seed; one more plan sums products in
another order. The functions of `plait verify` make only the step in own formats: no float64 steps after the first, no dry run. `worst`
is the largest distance divided by its limit; above 1, `verify` prints DIFFERENT. The limits were chosen on the `fitted` kinds (seeds
below 100); `fresh` are the others. `faults` runs the table of `tests/exact/test_verify_formats.py` in the same way. `show` counts both, with the
tail of `worst` and the rate of false alarms that follows from it.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zoo_formats as zoo

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.launch import fork
from plait.launch.place import Place
from plait.proof import candidate, phases, plan_formats, probes, reference, scenario, verify
from plait.proof.probes import FORMAT_TENSORS, Trace

PLANS = (
    "dp=2", "dp=2 microbatches=3", "dp=3 microbatches=2", "fsdp=2", "fsdp=2 microbatches=2", "fsdp=2 zero_stage=1",
    "dp=2 activation_checkpointing=full",
    "pp=2 microbatches=4", "pp=2 microbatches=2", "pp=2 microbatches=2 fsdp=2", "offload=optimizer microbatches=3", "offload=all",
)  # fmt: skip
CUTTING = {
    "pictures": ("tp=2",), "transformer": ("tp=2", "cp=2", "tp=2 microbatches=2", "tp=2 fsdp=2"), "mixture": ("tp=2", "ep=2", "tp=2 dp=2"),
    "recurrent": ("cp=2",), "halved": ("tp=2",), "doubled": ("tp=2",), "halved_words": ("tp=2", "tp=2 microbatches=2"),
}  # fmt: skip
"""Plans of a kind that sum products in another order; each job gets one of them."""
IN_FP32 = ("adapters", "halved", "doubled", "halved_words")
"""Kinds with formats of their own. They run only in these formats."""


def judged(job: Job, plan: Plan) -> dict[str, Any]:
    """Judge the step in own formats of a job under a plan, as `verify` does, and return the row."""
    check_plan(job, plan, "cpu")
    parts = 2 * plan.shares * plan.microbatches
    coupled = any(hasattr(module, "running_mean") for module in job.model().modules())
    if coupled and plan.microbatches > 1:
        return {"untried": "batch statistics of micro-batches: not exact by nature, and not compared"}
    hard = scenario.harden(job, plan, parts if coupled else 1)
    with tempfile.TemporaryDirectory(prefix="plait-alarms-") as folder:
        expected = _one_device(hard, plan, Path(folder))
        if "formats" not in expected.facts:
            return {"untried": expected.facts["untried"]}
        known = expected.facts["formats"]
        ranks = _ranks(replace(phases.apply_clips(hard, expected.facts), batch=known["batch"]), plan, Path(folder))
        made = candidate.gather_rank_tensors(Path(folder), FORMAT_TENSORS, [r["formats"]["parts"] for r in ranks])
        actual = Trace({}, {}, {}, {}, {}, **made)
    values, kept = plan_formats.compare_formats(expected, actual, ranks, None)
    losses = {key: loss for r in ranks for key, loss in r["formats"]["losses"].items()}
    return {
        "worst": values.worst, "name": values.name, "kept": kept.worst, "kept_name": f"{kept.name} {kept.detail}",
        "bound": "sums" if known["of_sums"] and losses == known["losses"] else "parts" if known["of_sums"] else "any",
        "unseen": len(plan_formats.describe_blind_spots(known)), "tensors": len(known["limits"]),
    }  # fmt: skip


def _one_device(job: Job, plan: Plan, folder: Path) -> Trace:
    def work(place: Place) -> dict[str, Any]:
        ones = list[reference.OneDevice]()

        def then(one: reference.OneDevice) -> dict[str, Any]:
            one.recorder.close()
            ones.append(one)
            return {}

        out = reference.train_reference(job, 1, scenario.CLIP, torch.float64, "cpu", then=then)
        return out | verify.run_format_reference(plan_formats.shrink_batch(job, plan, ones[0].model), plan, ones[0], out["clip"])

    return Trace.from_process(folder / "reference", work)


def _ranks(job: Job, plan: Plan, folder: Path) -> list[dict[str, Any]]:
    def work(place: Place) -> dict[str, Any]:
        notes, made = candidate.train_plan_formats(job, plan, "cpu", place)
        for name, tensors in made.items():
            probes.write_tensors(folder / f"{name}-{place.rank}.safetensors", tensors)
        return {"formats": notes}

    return fork.run_ranks(work, plan.world, uniform=plan.pp == 1)


def cases(kinds: list[str], seeds: range, plans: int) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, seed, plan) of clean runs."""
    for seed in seeds:
        for kind in kinds:
            drawn = random.Random(f"plans of {kind} {seed}")
            for plan in (*drawn.sample(PLANS, plans), *drawn.sample(CUTTING.get(kind, ()), int(kind in CUTTING))):
                number = (
                    "fp32"
                    if kind in IN_FP32
                    else drawn.choice(("fp32", "fp32", "bf16", "bf16" if "pp" in plan else "fp16"))
                )
                yield kind, seed, f"{plan} precision={number}"


def runs(file: Path, options: argparse.Namespace) -> None:
    """Append the rows of clean runs to a file."""
    lists = {"fitted": list(zoo.FITTED), "fresh": list(zoo.FRESH)}
    first, last = (int(word) for word in options.seeds.split(":"))
    kinds = [kind for word in options.kinds.split(",") for kind in lists.get(word, [word])]
    done, ends = {(r["kind"], r["seed"], r["plan"]) for r in _rows(file)}, time.time() + options.hours * 3600
    for kind, seed, plan in cases(kinds, range(first, last), options.plans):
        if time.time() > ends:
            return
        if (kind, seed, plan) not in done:
            job = (zoo.FITTED | zoo.FRESH)[kind](random.Random(f"{kind} {seed}"))
            _append(file, {"kind": kind, "seed": seed, "plan": plan}, job, plan)


def faults(file: Path) -> None:
    """Append the rows of the table of faults."""
    sys.path += [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests/exact")]
    import pytest
    import test_verify_formats as table

    done = {r["fault"] for r in _rows(file) if "fault" in r}
    for name, (act, job, plan) in table.FAULTS.items():
        if name not in done:
            with pytest.MonkeyPatch.context() as patch:
                act(patch)
                _append(file, {"fault": name, "kind": job, "seed": 0, "plan": plan}, table.JOBS[job](), plan)


def _append(file: Path, row: dict[str, Any], job: Job, plan: str) -> None:
    try:
        row |= judged(job, Plan.parse(plan))
    except PlaitError as error:
        row["refused"] = f"{error.problems[0].code} {error.problems[0].what}"
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def show(file: Path) -> None:
    """Print a summary of a file of rows."""
    rows = _rows(file)
    clean = [r for r in rows if "worst" in r and "fault" not in r]
    for title, some in (
        ("fitted", [r for r in clean if r["kind"] in zoo.FITTED]),
        ("fresh", [r for r in clean if r["kind"] in zoo.FRESH]),
    ):
        _show(title, some)
    for r in clean:
        if r["worst"] > 0.5 or r["kept"]:
            print("  high", r["kind"], r["seed"], r["plan"], f"{r['worst']:.3g}", r["bound"], r["name"], r["kept_name"])
    posed = [r for r in rows if "fault" in r]
    for r in posed:
        print(
            f"  fault {r['fault']:34} {r.get('worst', math.nan):9.3g} of the limit, {r.get('kept', 0)} formats  {r.get('refused', '')}"
        )
    if posed:
        found = sum(r.get("worst", 0) > 1 or r.get("kept", 0) > 0 for r in posed)
        print(f"faults: {found} of {len(posed)} found without the dry run's messages")
    print(
        "refused or not tried:",
        dict(Counter((r.get("refused") or r["untried"])[:60] for r in rows if "worst" not in r)),
    )


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    worst = sorted(r["worst"] for r in rows)
    if not worst:
        return
    wrong = sum(r["worst"] > 1 or r["kept"] > 0 for r in rows)
    at = {p: worst[min(len(worst) - 1, int(p * len(worst)))] for p in (0.5, 0.9, 0.99, 1.0)}
    print(f"{title}: {len(rows)} clean runs of {len({(r['kind'], r['seed']) for r in rows})} jobs, {wrong} accused, by bound",
          dict(Counter(r["bound"] for r in rows)), "· worst, of the limit:", {p: f"{v:.3f}" for p, v in at.items()})  # fmt: skip
    tail = [math.log(w) for w in worst[-max(10, len(worst) // 10) :] if w > 0]
    mean = sum(t - tail[0] for t in tail[1:]) / max(len(tail) - 1, 1)
    if mean and tail[0] < 0:
        rate = len(tail) / len(worst) * math.exp(tail[0] / mean)
        print(
            f"  the upper tenth falls as a power of 1/{mean:.2f}: {rate:.1e} of verdicts would be above the limit (Hill's estimate)"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("runs", "faults", "show"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", default="fitted")
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--plans", type=int, default=2)
    parser.add_argument("--hours", type=float, default=1.0)
    given = parser.parse_args()
    {"runs": lambda: runs(given.file, given), "faults": lambda: faults(given.file), "show": lambda: show(given.file)}[
        given.what
    ]()
