"""The likely cause of a difference, from the pattern of the probes: the signatures of known bugs."""

from torch import Tensor

from plait.plan import Plan
from plait.probes import Probe, Trace, far, ratio, scale_of

WEIGHTS = "micro-batches or ranks enter with the wrong weight, or some are lost: no constant ratio"


def likely_cause(probes: tuple[Probe, ...], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
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


def _gradient_cause(p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    if expected.facts["mean"] is False:
        return (
            "V013",
            "the loss is not a weighted mean over samples: it couples samples, or Job.weight does not count what it averages over",
        )
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
