"""The likely cause of a difference: where it begins (`verify/locate.py`), and the pattern of the probes, the signatures of known bugs."""

from torch import Tensor

from plait.config.plan import Plan
from plait.verify.locate import Finding
from plait.verify.probes import Probe, Trace, far, ratio, scale_of

WEIGHTS = "micro-batches or ranks enter with the wrong weight, or some are lost: no constant ratio"
CODES = {
    "data": "V006", "forward": "V015", "between": "V015", "gather": "V015", "message": "V016", "backward message": "V016",
    "recompute": "V017", "loss": "V014", "accumulation": "V014", "backward": "V018", "weights": "V018", "reduction": "V019",
    "clip": "V007", "optimizer": "V009",
}  # fmt: skip
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
    if where is not None:
        return _located(where, p, expected, actual, plan)
    if not p["G"].equal:
        return _gradient_cause(p, expected, actual, plan)
    if not p["R"].equal and p["R"].name in expected.buffers:
        return "V011", f"buffer {p['R'].name} is another on some ranks, from step {p['R'].detail.rpartition(' ')[2]}"
    if not p["R"].equal:
        return "V004", f"{p['R'].name}: {p['R'].detail}; it is updated or reduced on some ranks only"
    if not p["U2"].equal and p["U2"].name.startswith("norm"):
        return (
            "V007",
            f"the gradients agree and their norm does not ({p['U2'].detail}): clipping uses another norm than the global one",
        )
    if not p["U"].equal or not p["U2"].equal:
        return (
            "V009",
            "the gradients of step 1 agree and the weights do not: the optimizer, the clipping or later steps differ",
        )
    if not p["B"].equal:
        return "V011", f"buffer {p['B'].name} differs: it is computed from a rank's own share of the batch"
    return "V012", f"the collectives differ: {p['C'].detail}"


def _located(where: Finding, p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    """The cause by where the difference begins; known patterns have codes of their own."""
    code, text = CODES[where.kind], sentence(where, plan)
    if missing := set(expected.gradients) ^ set(actual.gradients):
        return "V003", f"{min(missing)} has a gradient on one side only"
    if where.kind in ("loss", "weights", "reduction") and where.step == 0 and not p["G"].equal:
        known, pattern = _gradient_cause(p, expected, actual, plan)
        if known in ("V002", "V003", "V004"):
            return known, f"{pattern}: {text}"
    drawn = draws(where, actual.facts["random"])
    if where.kind in ("forward", "between", "backward", "weights") and drawn:
        return (
            "V005",
            f"random numbers are drawn in {drawn}, and those of the ranks are not stretches of the one device's: {text}",
        )
    return code, text


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


def _gradient_cause(p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    wrong = [
        n
        for n, t in expected.gradients.items()
        if n in actual.gradients and far(t, actual.gradients[n], scale_of(expected.gradients))
    ]
    missing = set(expected.gradients) ^ set(actual.gradients)
    if missing:
        return "V003", f"{sorted(missing)[0]} has a gradient on one side only"
    ratios = {_rounded(expected.gradients[n], actual.gradients[n]) for n in wrong}
    ratios = set() if None in ratios else ratios
    differs_between_ranks = not p["R"].equal and "gradient" in p["R"].detail
    if differs_between_ranks:
        return "V004", f"{p['R'].name}: its gradient is not summed over the ranks"
    if len(ratios) == 1 and len(wrong) == len(expected.gradients):
        return (
            "V002",
            f"every gradient is {ratios.pop():.4g} times too large: a sum where a mean belongs, or the reverse ({plan})",
        )
    if len(ratios) == 1 and len(wrong) < len(expected.gradients):
        return (
            "V003",
            f"only {len(wrong)} of {len(expected.gradients)} gradients are wrong, by the factor {ratios.pop():.4g}: counted twice or not at all",
        )
    if actual.facts["places"]:
        return "V005", "the model draws random numbers: the ranks' masks are not stretches of the one device's mask"
    return "V014", WEIGHTS


def _rounded(a: Tensor, b: Tensor) -> float | None:
    r = ratio(a, b)
    return None if r is None else round(r, 6)
