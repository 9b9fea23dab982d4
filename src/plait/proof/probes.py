"""Probes of `verify`: the traces of both sides, and the comparisons between them.

A difference is relative to the scale of its tensor. A tensor that is truly zero (such as the gradient of an attention's key bias) has
only rounding errors of related tensors. Its difference is relative to their scale.

Processes of a proof write their tensors to files by name. Complex tensors are stored as real pairs.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.launch import fork
from plait.launch.place import Place

_COMPLEX = " (real and imaginary)"


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    plain = {name: t.detach().cpu().resolve_conj() for name, t in tensors.items()}
    real = {n + _COMPLEX * t.is_complex(): torch.view_as_real(t) if t.is_complex() else t for n, t in plain.items()}
    save_file({name: t.contiguous().clone() for name, t in real.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of `write_tensors`.

    Pairs are copied: tensors in a file are aligned to 8 bytes only, and complex128 functions crash the process at such addresses.
    """
    stored = load_file(path)
    return {
        n.removesuffix(_COMPLEX): torch.view_as_complex(t.clone()) if n.endswith(_COMPLEX) else t
        for n, t in stored.items()
    }


TOLERANCE = 1e-9
"""Relative difference of two float64 runs above which they are different trainings."""
FLOOR = 1e-5
"""A gradient that is truly zero is compared on this fraction of the largest gradient of its step."""


@dataclass(frozen=True)
class Trace:
    """Result of one side: tensors by name, and facts (rows per step, ids, ...)."""

    facts: dict[str, Any]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    average: dict[str, Tensor] = field(default_factory=dict)
    """Averaged weights, if the job has an average (`Job.ema`)."""
    own_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first full batch, and weights after the last (`proof/full_batch.py`)."""
    own_weights: dict[str, Tensor] = field(default_factory=dict)
    formats_start: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the step in the plan's own number formats (`proof/plan_formats.py`)."""
    formats_gradient: dict[str, Tensor] = field(default_factory=dict)
    formats_weight: dict[str, Tensor] = field(default_factory=dict)
    formats_state: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def from_process(
        folder: Path, work: Callable[[Place], dict[str, Any]], name: str = "", concurrently: Callable[[Place], dict[str, Any]] | None = None
    ) -> "Trace":
        """Run `work` in its own process (`name`, for messages) and read its tensors from `folder`.

        `concurrently` is the work of a second process at the same time.
        """

        def side(place: Place) -> dict[str, Any]:
            out = work(place)
            folder.mkdir(exist_ok=True)  # an earlier process may have failed after it: overwrite all tensors
            for group in TRACE_TENSORS:
                write_tensors(folder / f"{group}.safetensors", out.pop(group, {}))
            return out

        names = ({0: name} if name else {}) | {1: "the process that analyzes the model"}
        works = (side,) if concurrently is None else (side, concurrently)
        target = lambda place: works[place.rank](replace(place, rank=0, world=1))  # noqa: E731
        facts, *_ = fork.run_ranks(target, len(works), fork.Listener(names=names), uniform=False)
        return Trace(facts, **{group: read_tensors(folder / f"{group}.safetensors") for group in TRACE_TENSORS})


TRACE_TENSORS = tuple(each.name for each in fields(Trace) if each.name != "facts")
"""Groups that are compared tensor by tensor: in the small batches, in the full batches, and in the plan's number formats."""
FULL_BATCH_TENSORS, FORMAT_TENSORS = (tuple(n for n in TRACE_TENSORS if n.startswith(f"{part}_")) for part in ("own", "formats"))
SMALL_BATCH_TENSORS = tuple(n for n in TRACE_TENSORS if n not in (*FULL_BATCH_TENSORS, *FORMAT_TENSORS))


@dataclass(frozen=True)
class Probe:
    """One comparison. `worst`: the largest relative difference, or for exact probes the number of differences."""

    code: str
    title: str
    worst: float = 0.0
    tolerance: float = TOLERANCE
    name: str = ""
    """The first wrong tensor in the model's order, else the worst one."""
    detail: str = ""

    @property
    def equal(self) -> bool:
        return self.worst <= self.tolerance


def as_double(t: Tensor) -> Tensor:
    """Convert a tensor of any format to float64: bools become 0 and 1, complex tensors get a last dim of two."""
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def is_discrete(t: Tensor) -> bool:
    """True for integers and bools, which do not round."""
    return not (t.is_floating_point() or t.is_complex())


def measure_scale(t: Tensor, floor: float = 0.0) -> float:
    """Scale of a tensor: its largest absolute value, but at least `floor`."""
    return max(float(t.abs().max()) if t.numel() else 0.0, floor, 1e-300)


def relative_max_diff(a: Tensor, b: Tensor, scale: float) -> float:
    """Largest difference of two tensors of one shape, relative to `scale`. NaN counts as infinite."""
    difference = float((a - b).abs().max()) / scale if a.numel() else 0.0
    return difference if difference == difference else math.inf


def relative_diff(expected: float, actual: float) -> float:
    """Relative difference of two numbers. NaN counts as infinite."""
    difference = abs(expected - actual) / max(abs(expected), 1e-300)
    return difference if difference == difference else math.inf


def find_constant_ratio(expected: Tensor, actual: Tensor) -> float | None:
    """actual / expected if it is one constant on all elements above noise, else None."""
    expected, actual = as_double(expected), as_double(actual)
    if not expected.numel():
        return None
    big = expected.abs() > 1e-3 * expected.abs().max()
    if not bool(big.any()):
        return None
    ratios = actual[big] / expected[big]
    middle = float(ratios.median())
    return middle if float((ratios - middle).abs().max()) < 1e-6 * max(1.0, abs(middle)) else None


def compute_floor(tensors: dict[str, Tensor]) -> float:
    """Smallest scale for comparing tensors: a gradient that is truly zero is compared on the scale of the others."""
    return FLOOR * max(
        (float(t.abs().max()) for t in tensors.values() if t.numel() and not is_discrete(t)), default=0.0
    )


def measure_movement(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Largest change of any weight. Updates are compared on this scale and on the scale of the weight."""
    pairs = ((as_double(after[n]), as_double(t)) for n, t in before.items() if t.numel() and not is_discrete(t))
    return max((float((new - old).abs().max()) for new, old in pairs), default=0.0)


def compare_tensors(
    code: str, title: str, expected: dict[str, Tensor], actual: dict[str, Tensor], names: list[str], floor: float
) -> Probe:
    """Compare tensors by name, relative to their scale or `floor`. The result names the first wrong tensor in the order of `names`."""
    missing = sorted(set(expected) ^ set(actual))
    if missing:
        where = "the split run" if missing[0] in expected else "one device"
        return Probe(code, title, math.inf, name=missing[0], detail=f"it is missing in {where}")
    differences = {}
    for name in names:
        if name in expected:
            differences[name] = _compare_values(expected[name], actual[name], floor)
    if not differences:
        return Probe(code, title)
    worst = max(differences.values())
    first_wrong = next((n for n in names if differences.get(n, 0.0) > TOLERANCE), None)
    name = first_wrong or max(differences, key=lambda n: differences[n])
    return Probe(code, title, worst, name=name, detail=_describe_ratio(expected[name], actual[name]) if first_wrong else "")


def _compare_values(expected: Tensor, actual: Tensor, floor: float) -> float:
    """Largest difference relative to the scale of `expected` or to `floor`. Integers and bools must be equal."""
    if expected.shape != actual.shape:
        return math.inf
    a, b = as_double(expected), as_double(actual)
    if is_discrete(expected):
        return 0.0 if torch.equal(expected, actual) else max(relative_max_diff(a, b, measure_scale(a)), 1.0)
    return relative_max_diff(a, b, measure_scale(a, floor))


def _describe_ratio(expected: Tensor, actual: Tensor) -> str:
    constant = find_constant_ratio(expected, actual) if expected.shape == actual.shape else None
    return f"ratio {constant:.4g} on every element" if constant is not None else "no constant ratio"


def compare_rows(
    code: str, title: str, expected: list[dict[str, float]], actual: list[dict[str, float]], keys: tuple[str, ...]
) -> Probe:
    """Compare values of every step. The result names the first wrong value, else the worst."""
    worst, name = 0.0, ""
    for step, (a, b) in enumerate(zip(expected, actual), 1):
        for key in keys:
            difference = relative_diff(a[key], b[key])
            if difference > worst:
                worst, name = difference, f"{key}, step {step}"
            if difference > TOLERANCE:
                return Probe(code, title, worst, name=name, detail=f"{b[key]:.6g} instead of {a[key]:.6g}")
    return Probe(code, title, worst, name=name)


def compare_logged(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> Probe:
    """Compare the values logged by the job in every step, relative to the largest value of each name."""
    title, worst, where = "logged values, every step", 0.0, ""
    pairs = [(a.get("logged", {}), b.get("logged", {})) for a, b in zip(expected, actual)]
    scales = {name: max(abs(a.get(name, 0.0)) for a, _ in pairs) or 1.0 for a, _ in pairs for name in a}
    for step, (a, b) in enumerate(pairs, 1):
        if missing := sorted(a.keys() ^ b.keys()):
            side = "the split run" if missing[0] in a else "one device"
            return Probe("L", title, math.inf, name=f"{missing[0]}, step {step}", detail=f"it is missing in {side}")
        for name in a:
            same = a[name] == b[name] or (a[name] != a[name] and b[name] != b[name])
            difference = 0.0 if same else abs(a[name] - b[name]) / scales[name]
            difference = difference if difference == difference else math.inf
            if difference > worst:
                worst, where = difference, f"{name}, step {step}"
            if difference > TOLERANCE:
                return Probe("L", title, worst, name=where, detail=f"{b[name]:.6g} instead of {a[name]:.6g}")
    return Probe("L", title, worst, name=where)


def compare_replicas(code: str, title: str, steps: list[list[list[Any]]]) -> Probe:
    """Check that replicas were bit-equal on all ranks after every step. `steps`: for each rank, [what, digests by name] before and after each
    update."""
    first, drifted = dict[tuple[int, str], int](), list[tuple[int, str, str]]()
    for rows in steps:
        for i, (what, digest) in enumerate(rows):
            for key, value in digest.items():
                if first.setdefault((i, key), value) != value:
                    drifted.append((i // 2 + 1, what, key.partition(" @")[0]))
    if not drifted:
        return Probe(code, title, tolerance=0)
    step, what, name = min(drifted, key=lambda row: row[0])
    return Probe(code, title, len(drifted), 0, name, f"its {what} differs between ranks from step {step}")


def explain_replicas(probe: Probe, buffers: Container[str]) -> tuple[str, str]:
    """(code, sentence) if replicas differ."""
    if probe.name in buffers:
        return "V011", f"buffer {probe.name} differs between ranks from step {probe.detail.rpartition(' ')[2]}"
    return "V004", f"{probe.name}: {probe.detail}; it is updated or reduced on some ranks only"


def compare_samples(expected: Trace, ranks: list[dict[str, Any]]) -> Probe:
    """Check that the ranks together read the samples of the reference, in the same order and with the same content."""
    for step, (epoch, ids) in enumerate(expected.facts["ids"]):
        given = [i for r in ranks if r["reads"] for i in r["ids"][step][1]]
        if given != ids or any(r["ids"][step][0] != epoch for r in ranks):
            repeated = len(given) - len(set(given))
            detail = f"step {step + 1}: {len(given)} samples instead of {len(ids)}, {repeated} repeated, {len(set(ids) - set(given))} missing"
            return Probe("D", "samples", 1, 0, f"step {step + 1}", detail)
    last = {i: step for step, (_, ids) in enumerate(expected.facts["ids"]) for i in ids}
    for r in ranks:
        mine = {i: step for step, (_, ids) in enumerate(r["ids"]) for i in ids}
        for i in (i for i, step in mine.items() if step == last.get(i)):
            if r["seen"].get(str(i)) != expected.facts["seen"].get(str(i)):
                detail = "its content differs: augmentation is not seeded by (seed, epoch, sample)"
                return Probe("D", "samples", 1, 0, f"sample {i}", detail)
    return Probe("D", "samples", tolerance=0)


def compare_collectives(ranks: list[dict[str, Any]], dry: list[dict[str, Any]] | str) -> Probe:
    """Compare the collectives of ranks with each other, and their counts and bytes with a dry run.

    `dry`: messages of each rank in a dry run (`first_step` of `planner/dryrun/dry_run.py`), or the reason for having none.
    """
    title = "collectives"
    for rank, r in enumerate(ranks):
        first = next(i for i, other in enumerate(ranks) if other["stage"] == r["stage"])
        rows = [_select_calls(ranks[i], ranks[first]["alike"] == r["alike"]) for i in (first, rank)]
        for k, (a, b) in enumerate(zip(rows[0] + [""], rows[1] + [""])):
            if a != b:
                told = f"rank {first} called {a or 'nothing'}, rank {rank} {b or 'nothing'}"
                return Probe("C", title, 1, 0, f"#{k + 1}", told)
    detail = ", ".join(f"{calls} × {op}" for op, (calls, _) in ranks[0]["sent"].items())
    if any(r["varies"] for r in ranks):
        dry = "the model's branches are random, and so are its messages"
    if isinstance(dry, str):
        return Probe("C", title, tolerance=0, detail=f"{detail}; not compared with a dry run: {dry}")
    for rank, (r, expected) in enumerate(zip(ranks, dry)):
        if expected["sizes"] is not None and list(map(tuple, r["sizes"])) != list(map(tuple, expected["sizes"])):
            continue  # its samples have other sizes than those of the simulated rank, or zero weight
        for op in {**expected["totals"], **r["sent"]}:
            a, b = (list(side.get(op, (0, 0))) for side in (r["sent"], expected["totals"]))
            if a != b:
                told = f"{a[0]} calls of {a[1]} bytes on rank {rank}, but {b[0]} of {b[1]} in a dry run"
                return Probe("C", title, 1, 0, op, told)
    return Probe("C", title, tolerance=0, detail=detail)


def _select_calls(rank: dict[str, Any], alike: bool) -> list[str]:
    """List the calls to compare. Calls between stages depend on the number of samples of a rank and are left out unless `alike`."""
    if alike:
        return rank["collectives"]
    return [row.partition(" ")[0] for row in rank["collectives"] if not row.startswith(("send", "recv_"))]
