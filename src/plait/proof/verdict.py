"""The judgement of `verify`: probes compared, the first wrong tensor named, and the likely cause.

The likely cause of a difference: where it begins (`proof/locate.py`), and the pattern of the probes, the signatures of known bugs.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.config.errors import DIFFERENT, Problem
from plait.config.plan import Plan
from plait.proof.locate import Finding, beginning
from plait.proof.probes import (
    TOLERANCE,
    Probe,
    Trace,
    apart,
    collectives,
    floor_of,
    logged,
    moved,
    ratio,
    replicas,
    rows,
    samples,
    size_of,
    tensors,
    unlike_replicas,
)  # fmt: skip
from plait.proof.sides import Sides

WEIGHTS = "micro-batches or ranks enter with the wrong weight, or some are lost: no constant ratio"
CODES = {
    "data": "V006", "forward": "V015", "between": "V015", "gather": "V015", "message": "V016", "backward message": "V016",
    "recompute": "V017", "loss": "V014", "accumulation": "V014", "backward": "V018", "weights": "V018", "reduction": "V019",
    "clip": "V007", "optimizer": "V009",
}  # fmt: skip
OF_SUMS = ("V002", "V003", "V009", "V014", "V019")
"""What is said of sums of gradients and of updates that are not one device's."""
USUAL = {
    "forward": "a message lost, late or in another order; a mask, a mean or statistics of a rank's own part",
    "between": "a value made of a rank's own part where one of the whole is meant",
    "gather": "parts of weights that are late, lost or in another order",
    "message": "a message that is late, of another micro-batch, or written to while it was sent",
    "backward message": "a message that is late, of another micro-batch, or written to while it was sent",
    "recompute": "other random numbers, or state that changed in between",
    "loss": "a mean where a sum belongs, a weight of ranks or micro-batches, a loss over a rank's own part",
    "accumulation": "gradients overwritten, or a micro-batch that is scaled otherwise",
    "backward": "a sum over ranks that is missing or made twice",
    "weights": "a weight's gradient made of a rank's own part where one of the whole is meant",
    "reduction": "a parameter left out of the sum, a sum where a mean belongs, two sums",
}
"""What usually does each."""
COUPLED = ("loss", "between", "forward", "backward", "weights")
COUPLES = "the loss is not a weighted mean over samples: it couples samples, or Job.weight does not count what it averages over"


def likely_cause(
    probes: tuple[Probe, ...], expected: Trace, actual: Trace, plan: Plan, where: Finding | None = None
) -> tuple[str, str]:
    """(code, sentence) of the likely cause of the first difference. `where`: where it begins, if that was found."""
    p = {probe.code: probe for probe in probes}
    if all(probe.equal for probe in probes):
        return "", ""
    if actual.facts["inexact"]:
        return "V010", actual.facts["inexact"][0]
    if not p["I"].equal:
        return "V001", "the initial weights differ: they depend on something besides the seeded generators"
    if not p["D"].equal:
        return "V006", f"the samples differ: {p['D'].detail}"
    if not p["S"].equal and (where is None or where.kind == "optimizer"):
        return "V008", f"the clock differs: {p['S'].name}, {p['S'].detail}"
    if not p["G"].equal and expected.facts["mean"] is False and (where is None or where.kind in COUPLED):
        return "V013", COUPLES
    if missing := set(expected.gradients) ^ set(actual.gradients):
        return "V003", f"{min(missing)} has a gradient on one side only"
    if where is not None:
        return _located(where, p, expected, actual, plan)
    if not p["G"].equal:
        return _gradient_cause(p, expected, actual, plan)
    if not p["R"].equal:
        return unlike_replicas(p["R"], expected.buffers)
    if not p["U2"].equal and p["U2"].name.startswith("norm"):
        why = "clipping uses another norm than the global one"
        return "V007", f"the gradients agree and their norm does not ({p['U2'].detail}): {why}"
    if not p["U"].equal or not p["U2"].equal:
        why = "the optimizer, the clipping or later steps differ"
        return "V009", f"the gradients of step 1 agree and the weights do not: {why}"
    if "L" in p and not p["L"].equal:
        return "V028", f"{p['L'].name} of plait.log: {p['L'].detail}"
    if not p["B"].equal:
        return "V011", f"buffer {p['B'].name} differs: it is computed from a rank's own share of the batch"
    if "A" in p and not p["A"].equal:
        return (
            "V009",
            f"the weights agree and their average does not ({p['A'].name}): it moves otherwise, or at other steps",
        )
    return "V012", f"the collectives differ: {p['C'].detail}"


def _located(where: Finding, p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    """The cause by where the difference begins; known patterns have codes of their own."""
    code, text = CODES[where.kind], sentence(where, plan) + _carries(where, expected, actual)
    if where.kind in ("loss", "weights", "reduction") and where.step == 0 and not p["G"].equal:
        known, pattern = _gradient_cause(p, expected, actual, plan)
        if known in ("V002", "V003", "V004"):
            return known, f"{pattern}: {text}"
    drawn = draws(where, actual.facts["random"])
    if where.kind in ("forward", "between", "backward", "weights") and drawn:
        why = f"random numbers are drawn in {drawn}, and those of the ranks are not stretches of the one device's"
        return "V005", f"{why}: {text}"
    return code, text


def of_calls(verdict: "Verdict", why: str) -> "Verdict":
    """The verdict on a model whose outputs depend on how often it was called, which this plan does more often: V029."""
    probe, cause = Probe("K", "calls of the model", 1, 0, detail=why), f"the model counts its calls: {why}"
    located = verdict.where is None or verdict.where.kind in ("forward", "between", "recompute")
    if not verdict.equal and not located:
        return replace(verdict, probes=(*verdict.probes, probe))
    return replace(verdict, probes=(*verdict.probes, probe), code="V029", cause=cause)


def _carries(where: Finding, expected: Trace, actual: Trace) -> str:
    """What may change a forward pass and is no random number of torch's, where a forward pass is the first that differs."""
    if where.kind not in ("forward", "between", "recompute"):
        return ""
    changes = expected.facts.get("changes") or []
    found = [f"each call of the model changes {', '.join(changes[:3])}"] if changes else []
    found += ["the model draws from Python's or numpy's generator, which knows no samples"] * bool(actual.facts.get("host_random"))
    return "".join(f"; {line}" for line in found)


def draws(where: Finding, places: list[str]) -> str:
    """The module that draws random numbers where a difference begins: in the unit, or in code between units."""
    modules = [place.partition("#")[0] for place in places]
    units = tuple(f"{unit}." for unit in (where.unit, where.after) if unit)
    inside = (module for module in modules if where.kind == "between" or f"{module}.".startswith(units))
    return next((module or "the model's own code" for module in inside), "")


def sentence(where: Finding, plan: Plan) -> str:
    """What is wrong first, where, and by how much; and what usually does that."""
    unit, name, after = where.unit, where.name, where.after
    what = {
        "data": "the inputs or targets differ, though the samples were read alike: they are put together otherwise",
        "forward": f"what unit {unit} returns is the first thing that differs, and what it is given does not",
        "between": f"what unit {unit} is given is the first thing that differs: code between units"
        + (f", after {after}," if after else "") + " computes something else",
        "gather": f"unit {unit} uses another {name} than the ranks hold: it is put together wrongly from its parts",
        "message": f"what unit {unit} returns is right where it is computed, and wrong where the next stage receives it",
        "recompute": f"unit {unit} computes something else when its forward runs again for the backward pass",
        "loss": f"all units return what they should, and the gradient that comes back for {unit}, the last, differs",
        "backward": f"the forward pass is right; the gradient that unit {unit} sends back for {after} is the first that differs",
        "backward message": f"the gradient of what unit {unit} returned is right on the stage that sends it back, and wrong where it is received",
        "weights": f"gradients that come back for units are right; that of {name} differs on the ranks, before any sum",
        "reduction": f"each rank's gradient of {name} is right, and their sum differs",
        "accumulation": f"each micro-batch's gradient of {name} is right, and their sum on a rank differs",
        "clip": "gradients agree, and the norm they are clipped by does not",
        "optimizer": f"gradients and norm agree, and {name} differs after the update",
    }[where.kind]  # fmt: skip
    if where.how:
        what += f" ({where.how})"
    usual = USUAL.get(where.kind, "")
    return f"{what}; {place(where, plan)}" + (f"; usually {usual}" if usual else "")


def place(where: Finding, plan: Plan) -> str:
    """From which step, on which ranks, in which micro-batches, on which axis, and how large."""
    told = [f"from step {where.step + 1}"]
    if where.ranks and len(where.ranks) < plan.world:
        told.append(f"on rank {', '.join(map(str, where.ranks))}")
    elif plan.world > 1:
        told.append("on all ranks")
    if where.micros and (len(where.micros) < plan.microbatches):
        told.append(f"in micro-batch {', '.join(map(str, where.micros))}")
    if where.axes:
        told.append(f"messages of {' or '.join(where.axes)}")
    if where.size:
        told.append(f"relative {where.size:.1e}")
    return ", ".join(told)


def _algorithm_cause(probes: tuple[Probe, ...], algorithm: "AlgorithmTold", cause: str) -> tuple[str, str]:
    """V026, with when the split run leaves its algorithm: at once, or with what is kept from step to step."""
    p = {probe.code: probe for probe in probes}
    if not p["G"].equal:
        return "V026", f"the first sum of {algorithm.name} is not the algorithm's: {cause}"
    first = f", first in {p['U2'].name}" if not p["U2"].equal else ""
    kept = "what is kept from step to step (a residual, a factor), the clipping or the optimizer"
    return "V026", f"the first sum of {algorithm.name} is the algorithm's, and later steps are not{first}: {kept}"


def _gradient_cause(p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    both = {n: (t, actual.gradients[n]) for n, t in expected.gradients.items() if n in actual.gradients}
    floor = floor_of(expected.gradients)
    wrong = [n for n, (a, b) in both.items() if not apart(a, b, size_of(a, floor)) <= TOLERANCE]
    if not p["R"].equal and "gradient" in p["R"].detail:
        return "V004", f"{p['R'].name}: its gradient is not summed over the ranks"
    ratios = {None if (r := ratio(*both[n])) is None else round(r, 6) for n in wrong}
    factor = ratios.pop() if len(ratios) == 1 else None
    if factor is not None and len(wrong) == len(expected.gradients):
        why = f"a sum where a mean belongs, or the reverse ({plan})"
        return "V002", f"every gradient is {factor:.4g} times too large: {why}"
    if factor is not None:
        wrongs = f"only {len(wrong)} of {len(expected.gradients)} gradients are wrong"
        return "V003", f"{wrongs}, by the factor {factor:.4g}: counted twice or not at all"
    if actual.facts["places"]:
        return "V005", "the model draws random numbers: the ranks' masks are not stretches of the one device's mask"
    return "V014", WEIGHTS


@dataclass(frozen=True)
class AlgorithmTold:
    """The algorithm that a plan is held to instead of one device, and how far that takes training from one device's."""

    name: str
    distance: float
    """How far the weights of both are apart after the steps, over how far one device's moved: norms over all weights."""
    steps: int
    left_out: tuple[str, ...] = ("batches of the job's own size", "a step in the plan's own formats")
    """What is compared with one device only, and so was not here."""

    @property
    def told(self) -> str:
        after = f"after {self.steps} steps"
        if self.distance <= TOLERANCE:
            return f"equal to dp here ({self.distance:.0e} apart {after})"
        return f"{100 * self.distance:.2g} % from dp {after}"


def told_of(name: str, one: Trace, algorithm: Trace) -> AlgorithmTold:
    """The distance of what an algorithm trained from what one device did."""
    return AlgorithmTold(name, distance(one.initial, one.weights, algorithm.weights), len(one.facts["rows"]))


def distance(initial: dict[str, Tensor], one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far weights are from one device's, as a part of how far those have moved: norms over all weights."""
    norm = lambda a, b: sum(float((a[n].double() - b[n].double()).square().sum()) for n in initial) ** 0.5  # noqa: E731
    return norm(other, one) / max(norm(one, initial), 1e-300)


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
    where: Finding | None = None
    """Where the difference begins, as far as it was found."""
    notes: tuple[str, ...] = ()
    """What the split run does that costs more than its plan says by itself."""
    algorithm: AlgorithmTold | None = None
    """What the plan is held to, where that is not one device."""
    split: bool = True
    """Whether anything is split: a plan of one process and one micro-batch proves nothing of a split."""
    job: str = ""
    """Its name, where it is known."""
    problems: tuple[Problem, ...] = ()
    """What the job check finds (`proof/job/causes.py`), where the job itself is the cause of a difference."""

    def __repr__(self) -> str:
        return table(self, self.job)

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
        """The first wrong parameter or buffer: by its gradient, else by where the difference begins, else between replicas,
        else by its value."""
        wrong = {p.code: p.name for p in self.probes if not p.equal}
        if self.where is not None and self.where.name and "I" not in wrong and "G" not in wrong:
            return self.where.name
        return next((wrong[code] for code in "IGRUBA" if code in wrong), "")

    def to_dict(self) -> dict[str, Any]:
        measured = [p for p in self.probes if 0 < p.tolerance < 1]
        worst = max(measured, key=lambda p: p.worst if p.worst == p.worst else float("inf"))
        wrong = self.first_wrong
        return {
            "equal": self.equal if self.split or not self.equal else None, "split": self.split, "plan": self.plan,
            "worst": {"probe": worst.code, "name": worst.name, "relative": worst.worst},
            "first_wrong": {"probe": wrong.code, "name": wrong.name, "parameter": self.parameter, "detail": wrong.detail} if wrong else None,
            "cause": {"code": self.code, "text": self.cause} if self.cause else None,
            "problems": [asdict(problem) for problem in self.problems], "inexact": list(self.inexact),
            "algorithm": {**asdict(self.algorithm), "equal_to_one_device": self.algorithm.distance <= TOLERANCE} if self.algorithm else None,
            "where": self.where.to_dict() if self.where else None, "notes": list(self.notes), "forced": self.forced,
            "probes": {p.code: {"title": p.title, "worst": p.worst, "tolerance": p.tolerance, "equal": p.equal, "name": p.name,
                                "detail": p.detail} for p in self.probes},
        }  # fmt: skip


def judge(
    expected: Trace, actual: Trace, ranks: list[dict[str, Any]], plan: Plan, dry: list[dict[str, Any]] | str,
    folder: Path | None = None, *, algorithm: AlgorithmTold | None = None,
) -> Verdict:  # fmt: skip
    """Compare the reference with the candidate's rank 0, and the candidate's ranks with each other.

    `dry`: what every rank sends in a dry run, or why there is none. `folder`: where both sides left what they noted of their
    units, to say where a difference begins. `algorithm`: the reference is that, of which no unit is noted.
    """
    names, steps = actual.facts["names"], (expected.facts["rows"], actual.facts["rows"])
    far = moved(expected.initial, expected.weights)
    probes = (
        tensors("I", "initial weights", expected.initial, actual.initial, names, floor_of(expected.initial)),
        tensors("G", "gradients, step 1", expected.gradients, actual.gradients, names, floor_of(expected.gradients)),
        tensors("U", f"weights, step {len(steps[0])}", expected.weights, actual.weights, names, far),
        rows(
            "U2", "loss and norm, every step", *steps, tuple(k for k in steps[0][0] if k.startswith(("loss", "norm")))
        ),
        tensors("B", "buffers", expected.buffers, actual.buffers, list(expected.buffers), floor_of(expected.buffers)),
        *averages(expected, actual),
        replicas("R", "replicas, bit for bit", [r["held"] for r in ranks]),
        samples(expected, ranks),
        rows("S", "learning rate and clock", *steps, tuple(k for k in steps[0][0] if k.startswith(("lr", "samples")))),
        collectives(ranks, dry),
    )
    if algorithm is None and any(row.get("logged") for row in (*steps[0], *steps[1])):
        probes = (*probes, logged(*steps))
    where = None
    if algorithm is None and folder is not None and not all(probe.equal for probe in probes if probe.code not in "ACL"):
        where = beginning(Sides.load(folder, ranks, expected.facts, plan))
        if where is not None and where.kind in ("clip", "optimizer") and where.step == 0 and not probes[1].equal:
            where = None  # gradients differ before that, where nothing was noted
    code, cause = likely_cause(probes, expected, actual, plan, where)
    first = next(p.name for p in probes if p.code == "U2").endswith("step 1")
    if algorithm is not None and (code in OF_SUMS or (code == "V007" and not first)):
        code, cause = _algorithm_cause(probes, algorithm, cause)
    first = actual.facts["rows"][0]
    forced = {
        "clip": expected.facts["clip"], "clipped": all(r["norm"] > expected.facts["clip"] for r in expected.facts["rows"]),
        "batch": first["samples"], "sizes": [len(ids) for _, ids in expected.facts["ids"]], "steps": len(expected.facts["rows"]),
    }  # fmt: skip
    split = plan.world * plan.shares * plan.microbatches > 1
    return Verdict(
        str(plan), probes, code, cause, world=plan.world, forced=forced, where=where, algorithm=algorithm, split=split
    )


def averages(expected: Trace, actual: Trace) -> tuple[Probe, ...]:
    """Whether the average of the weights is one device's, where the job has one."""
    if not expected.average and not actual.average:
        return ()
    floor, names = moved(expected.initial, expected.weights), actual.facts["names"]
    return (tensors("A", "average of weights", expected.average, actual.average, names, floor),)


def table(verdict: Verdict, job: str) -> str:
    """What `plait verify` prints."""
    return "\n".join([*head(verdict, job), *map(row, verdict.probes), *end(verdict, job)])


def head(verdict: Verdict, job: str) -> list[str]:
    """Lines that say what is compared."""
    forced, algorithm = verdict.forced, verdict.algorithm
    processes = f"{verdict.world} process" + ("es" if verdict.world > 1 else "")
    return [
        f"job         {job}",
        f"reference   1 process, {f'the algorithm ({algorithm.name}) in ' if algorithm else ''}plain PyTorch, float64",
        f"candidate   {processes}, {verdict.plan}, float64 · clipping {'active in every step' if forced['clipped'] else 'NOT active in every step'}"
        f" · batches of {', '.join(map(str, forced['sizes']))} · warm-up running",
        *(f"            {line}" for line in forced.get("then", [])),
        *([f"            not compared: {', '.join(algorithm.left_out)}"] if algorithm else []),
        f"{'':32}{'worst relative':>16}   tolerance",
    ]


def row(p: Probe) -> str:
    """The line of a comparison."""
    shown = f"{p.worst:.1e}" if p.tolerance else f"{p.worst:.0f} wrong"
    where = f"   {p.name}" if p.name else ""
    detail = f": {p.detail}" if p.detail and not p.equal else ""
    told = f"  {p.title:<30}{shown:>16}   {f'{p.tolerance:.0e}' if p.tolerance else '0':<9}"
    return f"{told}  {'✓' if p.equal else '✗'}{where}{detail}"


def end(verdict: Verdict, job: str) -> list[str]:
    """What follows from all comparisons."""
    lines = [f"note  {line}" for line in verdict.notes]
    lines += [f"not exact by nature: {line}" for line in verdict.inexact]
    if verdict.equal and not verdict.split:
        told = f"under {verdict.plan} one process computes what plain PyTorch computes; nothing is split"
        return [*lines, f'NOT SPLIT  {told}, so no split is proved. Next: plait verify {job} --plan "dp=2"']
    if verdict.equal and verdict.algorithm:
        return [*lines, f"EQUAL to the algorithm (one process) · {verdict.algorithm.told}"]
    if verdict.equal:
        return [*lines, "EQUAL  the split run computes what the single-device job computes"]
    wrong = verdict.first_wrong
    assert wrong is not None
    told = f"likely: {verdict.cause}.   `plait help {verdict.code}`"
    lines.append(f"DIFFERENT  first wrong: {verdict.parameter or wrong.name}   {told}")
    return [*lines, *(f"plait check {job}: {problem}" for problem in verdict.problems)]
