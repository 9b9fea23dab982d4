"""The judgement of `verify`: probes compared, the first wrong tensor named, and the likely cause."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.errors import DIFFERENT
from plait.plan import Plan

TOLERANCE = 1e-9
WEIGHTS = "micro-batches or ranks enter with the wrong weight, or some are lost: no constant ratio"


@dataclass(frozen=True)
class Trace:
    """What one side did: tensors by name, and facts (rows per step, ids, ...)."""

    facts: dict[str, Any]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Probe:
    """One comparison. `worst` is the largest relative difference, or the number of differences for exact probes."""

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


@dataclass(frozen=True)
class Verdict:
    """Equal to one device or not, and if not, where first and why probably."""

    plan: str
    probes: tuple[Probe, ...]
    code: str = ""
    cause: str = ""
    inexact: tuple[str, ...] = ()
    world: int = 1
    forced: dict[str, Any] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return all(p.equal for p in self.probes)

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else DIFFERENT

    @property
    def first_wrong(self) -> Probe | None:
        return next((p for p in self.probes if not p.equal), None)

    @property
    def parameter(self) -> str:
        """The first wrong parameter or buffer: by its gradient, else between replicas, else by its value."""
        wrong = {p.code: p.name for p in self.probes if not p.equal}
        return next((wrong[code] for code in "IGRUB" if code in wrong), "")

    def to_dict(self) -> dict[str, Any]:
        measured = [p for p in self.probes if p.tolerance > 0]
        worst = max(measured, key=lambda p: p.worst if p.worst == p.worst else float("inf"))
        wrong = self.first_wrong
        return {
            "equal": self.equal, "plan": self.plan, "worst": {"probe": worst.code, "name": worst.name, "relative": worst.worst},
            "first_wrong": {"probe": wrong.code, "name": wrong.name, "parameter": self.parameter, "detail": wrong.detail} if wrong else None,
            "cause": {"code": self.code, "text": self.cause} if self.cause else None, "inexact": list(self.inexact),
            "forced": self.forced,
            "probes": {p.code: {"title": p.title, "worst": p.worst, "tolerance": p.tolerance, "equal": p.equal, "name": p.name,
                                "detail": p.detail} for p in self.probes},
        }  # fmt: skip


def judge(expected: Trace, actual: Trace, ranks: list[dict[str, Any]], plan: Plan) -> Verdict:
    """Compare the reference with the candidate's rank 0, and the candidate's ranks with each other."""
    names = actual.facts["names"]
    probes = (
        _tensors("I", "initial weights", expected.initial, actual.initial, names, _scale_of(expected.initial)),
        _tensors("G", "gradients, step 1", expected.gradients, actual.gradients, names, _scale_of(expected.gradients)),
        _tensors("U", f"weights, step {len(expected.facts['rows'])}", expected.weights, actual.weights, names, _moved(expected)),
        _rows("U2", "loss and norm, every step", expected, actual, ("loss", "norm")),
        _tensors("B", "buffers", expected.buffers, actual.buffers, list(expected.buffers), _scale_of(expected.buffers)),
        _replicas(ranks),
        _samples(expected, ranks),
        _rows("S", "learning rate and clock", expected, actual, ("lr", "samples")),
        _collectives(ranks),
    )
    code, cause = _cause(probes, expected, actual, plan)
    first = actual.facts["rows"][0]
    forced = {
        "clip": expected.facts["clip"], "clipped": all(r["norm"] > expected.facts["clip"] for r in expected.facts["rows"]),
        "batch": first["samples"], "sizes": [len(ids) for _, ids in expected.facts["ids"]], "steps": len(expected.facts["rows"]),
    }  # fmt: skip
    return Verdict(str(plan), probes, code, cause, world=plan.world, forced=forced)


def _scale_of(tensors: dict[str, Tensor]) -> float:
    """Floor of the scale of a tensor: a gradient that is truly zero is compared with its neighbourhood."""
    return 1e-5 * max((float(t.abs().max()) for t in tensors.values() if t.numel() and t.is_floating_point()), default=0.0)


def _moved(trace: Trace) -> float:
    """The largest movement of any weight: an update is judged beside the weight it changes and beside the others' updates."""
    return max((float((trace.weights[n] - t).abs().max()) for n, t in trace.initial.items() if t.numel()), default=0.0)


def _tensors(code: str, title: str, expected: dict[str, Tensor], actual: dict[str, Tensor], names: list[str], floor: float) -> Probe:
    missing = sorted(set(expected) ^ set(actual))
    if missing:
        where = "the split run" if missing[0] in expected else "one device"
        return Probe(code, title, float("inf"), name=missing[0], detail=f"it is missing in {where}")
    differences = {}
    for name in names:
        if name in expected:
            a, b = expected[name].double(), actual[name].double()
            scale = max(float(a.abs().max()) if a.numel() else 0.0, floor, 1e-300)
            difference = float((a - b).abs().max()) / scale if a.numel() and a.shape == b.shape else 0.0
            differences[name] = difference if difference == difference and a.shape == b.shape else float("inf")
    if not differences:
        return Probe(code, title)
    worst = max(differences.values())
    first_wrong = next((n for n in names if differences.get(n, 0.0) > TOLERANCE), None)
    name = first_wrong or max(differences, key=lambda n: differences[n])
    return Probe(code, title, worst, name=name, detail=_ratio_text(expected[name], actual[name]) if first_wrong else "")


def ratio(expected: Tensor, actual: Tensor) -> float | None:
    """actual / expected where it is one number on every element that is not noise, else None."""
    big = expected.abs() > 1e-3 * expected.abs().max()
    if not bool(big.any()):
        return None
    ratios = actual[big].double() / expected[big].double()
    middle = float(ratios.median())
    return middle if float((ratios - middle).abs().max()) < 1e-6 * max(1.0, abs(middle)) else None


def _ratio_text(expected: Tensor, actual: Tensor) -> str:
    constant = ratio(expected, actual) if expected.shape == actual.shape else None
    return f"ratio {constant:.4g} on every element" if constant is not None else "no constant ratio"


def _rows(code: str, title: str, expected: Trace, actual: Trace, keys: tuple[str, ...]) -> Probe:
    worst, name, detail = 0.0, "", ""
    for step, (a, b) in enumerate(zip(expected.facts["rows"], actual.facts["rows"]), 1):
        for key in keys:
            difference = abs(a[key] - b[key]) / max(abs(a[key]), 1e-300)
            difference = difference if difference == difference else float("inf")
            if difference > worst and (worst <= TOLERANCE or not detail):
                worst, name = difference, f"{key}, step {step}"
                detail = f"{b[key]:.6g} instead of {a[key]:.6g}" if difference > TOLERANCE else ""
    return Probe(code, title, worst, name=name, detail=detail)


def _replicas(ranks: list[dict[str, Any]]) -> Probe:
    drifted = [row for r in ranks for row in r["drifted"]]
    if not drifted:
        return Probe("R", "replicas, bit for bit", tolerance=0)
    step, what, name = min(drifted, key=lambda row: row[0])
    first = next(row for row in drifted if row[0] == step)
    return Probe("R", "replicas, bit for bit", len(drifted), 0, first[2], f"its {first[1]} differs between ranks from step {step}")


def _samples(expected: Trace, ranks: list[dict[str, Any]]) -> Probe:
    for step, (epoch, ids) in enumerate(expected.facts["ids"]):
        given = [i for r in ranks for i in r["ids"][step][1]]
        if given != ids or any(r["ids"][step][0] != epoch for r in ranks):
            repeated = len(given) - len(set(given))
            detail = f"step {step + 1}: {len(given)} samples instead of {len(ids)}, {repeated} repeated, {len(set(ids) - set(given))} missing"
            return Probe("D", "samples", 1, 0, f"step {step + 1}", detail)
    last = {i: step for step, (_, ids) in enumerate(expected.facts["ids"]) for i in ids}
    for r in ranks:
        mine = {i: step for step, (_, ids) in enumerate(r["ids"]) for i in ids}
        for i, step in mine.items():
            same_moment = step == last.get(i)
            if same_moment and r["seen"].get(str(i)) != expected.facts["seen"].get(str(i)):
                return Probe("D", "samples", 1, 0, f"sample {i}", "its content differs: augmentation is not keyed by (seed, epoch, sample)")
    return Probe("D", "samples", tolerance=0)


def _collectives(ranks: list[dict[str, Any]]) -> Probe:
    title = "collectives"
    for rank, r in enumerate(ranks[1:], 1):
        for k, (a, b) in enumerate(zip(ranks[0]["collectives"] + [""], r["collectives"] + [""])):
            if a != b:
                return Probe("C", title, 1, 0, f"#{k + 1}", f"rank 0 called {a or 'nothing'}, rank {rank} {b or 'nothing'}")
    calls: dict[str, list[int]] = {}
    for op, n, size in ranks[0]["priced"]:
        row = calls.setdefault(op, [0, 0])
        row[0], row[1] = row[0] + n, row[1] + size
    counted = {op: [n, ranks[0]["bytes"][op]] for op, n in ranks[0]["calls"].items()}
    for op in {**calls, **counted}:
        if calls.get(op, [0, 0]) != counted.get(op, [0, 0]):
            a, b = counted.get(op, [0, 0]), calls.get(op, [0, 0])
            return Probe("C", title, 1, 0, op, f"{a[0]} calls of {a[1]} bytes, the price says {b[0]} of {b[1]}")
    return Probe("C", title, tolerance=0, detail=", ".join(f"{n} × {op}" for op, (n, _) in counted.items()))


def _cause(probes: tuple[Probe, ...], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    """(code, sentence) of the likely cause of the first difference."""
    p = {probe.code: probe for probe in probes}
    if all(probe.equal for probe in probes):
        return "", ""
    if actual.facts["inexact"]:
        return "V010", actual.facts["inexact"][0]
    if not p["I"].equal:
        return "V001", "the initial weights differ: they depend on something besides the seeded generators"
    if not p["D"].equal:
        return "V006", f"the samples differ: {p['D'].detail}"
    if not p["G"].equal:
        return _gradient_cause(p, expected, actual, plan)
    if not p["R"].equal:
        return "V004", f"{p['R'].name}: {p['R'].detail}; it is updated or reduced on some ranks only"
    if not p["S"].equal:
        return "V008", f"the clock differs: {p['S'].name}, {p['S'].detail}"
    if not p["U2"].equal and p["U2"].name.startswith("norm"):
        return "V007", f"the gradients agree and their norm does not ({p['U2'].detail}): clipping uses another norm than the global one"
    if not p["U"].equal or not p["U2"].equal:
        return "V009", "the gradients of step 1 agree and the weights do not: the optimizer, the clipping or later steps differ"
    if not p["B"].equal:
        return "V011", f"buffer {p['B'].name} differs: it is computed from a rank's own share of the batch"
    return "V012", f"the collectives differ: {p['C'].detail}"


def _gradient_cause(p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    if expected.facts["mean"] is False:
        return "V013", "the loss is not a weighted mean over samples: it couples samples, or Job.weight does not count what it averages over"
    wrong = [n for n, t in expected.gradients.items() if n in actual.gradients and _far(t, actual.gradients[n], _scale_of(expected.gradients))]
    missing = set(expected.gradients) ^ set(actual.gradients)
    if missing:
        return "V003", f"{sorted(missing)[0]} has a gradient on one side only"
    ratios = {_rounded(expected.gradients[n], actual.gradients[n]) for n in wrong}
    ratios = set() if None in ratios else ratios
    differs_between_ranks = not p["R"].equal and "gradient" in p["R"].detail
    if differs_between_ranks:
        return "V004", f"{p['R'].name}: its gradient is not summed over the ranks"
    if len(ratios) == 1 and len(wrong) == len(expected.gradients):
        return "V002", f"every gradient is {ratios.pop():.4g} times too large: a sum where a mean belongs, or the reverse ({plan})"
    if len(ratios) == 1 and len(wrong) < len(expected.gradients):
        return "V003", f"only {len(wrong)} of {len(expected.gradients)} gradients are wrong, by the factor {ratios.pop():.4g}: counted twice or not at all"
    if actual.facts["places"]:
        return "V005", "the model draws random numbers: the ranks' masks are not stretches of the one device's mask"
    return "V014", WEIGHTS


def _rounded(a: Tensor, b: Tensor) -> float | None:
    r = ratio(a, b)
    return None if r is None else round(r, 6)


def _far(a: Tensor, b: Tensor, floor: float) -> bool:
    scale = max(float(a.abs().max()) if a.numel() else 0.0, floor, 1e-300)
    return not bool(((a - b).abs().max() if a.numel() else torch.zeros(())) / scale <= TOLERANCE)


def table(verdict: Verdict, job: str) -> str:
    """What `plait verify` prints."""
    forced = verdict.forced
    processes = f"{verdict.world} process" + ("es" if verdict.world > 1 else "")
    lines = [
        f"job         {job}",
        "reference   1 process, plain PyTorch, float64",
        f"candidate   {processes}, {verdict.plan}, float64 · clipping {'active in every step' if forced['clipped'] else 'NOT active in every step'}"
        f" · batches of {', '.join(map(str, forced['sizes']))} · warm-up running",
        f"{'':32}{'worst relative':>16}   tolerance",
    ]
    for p in verdict.probes:
        shown = f"{p.worst:.1e}" if p.tolerance else f"{p.worst:.0f} wrong"
        where = f"   {p.name}" if p.name else ""
        detail = f": {p.detail}" if p.detail and not p.equal else ""
        lines.append(f"  {p.title:<30}{shown:>16}   {p.tolerance if p.tolerance else 0:<9.0e}  {'✓' if p.equal else '✗'}{where}{detail}")
    lines += [f"not exact by nature: {line}" for line in verdict.inexact]
    if verdict.equal:
        lines.append("EQUAL  the split run computes what the single-device job computes")
    else:
        wrong = verdict.first_wrong
        assert wrong is not None
        lines.append(f"DIFFERENT  first wrong: {verdict.parameter or wrong.name}   likely: {verdict.cause}.   `plait help {verdict.code}`")
    return "\n".join(lines)
