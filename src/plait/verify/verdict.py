"""The judgement of `verify`: probes compared, the first wrong tensor named, and the likely cause."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.config.errors import DIFFERENT
from plait.config.plan import Plan
from plait.verify.causes import likely_cause
from plait.verify.locate import Finding, Sides, beginning
from plait.verify.probes import Probe, Trace, collectives, moved, replicas, rows, samples, scale_of, tensors


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
    split: bool = True
    """Whether anything is split: a plan of one process and one micro-batch proves nothing of a split."""

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
        return next((wrong[code] for code in "IGRUB" if code in wrong), "")

    def to_dict(self) -> dict[str, Any]:
        measured = [p for p in self.probes if 0 < p.tolerance < 1]
        worst = max(measured, key=lambda p: p.worst if p.worst == p.worst else float("inf"))
        wrong = self.first_wrong
        return {
            "equal": self.equal if self.split or not self.equal else None, "split": self.split, "plan": self.plan,
            "worst": {"probe": worst.code, "name": worst.name, "relative": worst.worst},
            "first_wrong": {"probe": wrong.code, "name": wrong.name, "parameter": self.parameter, "detail": wrong.detail} if wrong else None,
            "cause": {"code": self.code, "text": self.cause} if self.cause else None, "inexact": list(self.inexact),
            "where": self.where.to_dict() if self.where else None, "notes": list(self.notes), "forced": self.forced,
            "probes": {p.code: {"title": p.title, "worst": p.worst, "tolerance": p.tolerance, "equal": p.equal, "name": p.name,
                                "detail": p.detail} for p in self.probes},
        }  # fmt: skip


def judge(
    expected: Trace, actual: Trace, ranks: list[dict[str, Any]], plan: Plan, dry: list[dict[str, Any]] | str,
    folder: Path | None = None,
) -> Verdict:  # fmt: skip
    """Compare the reference with the candidate's rank 0, and the candidate's ranks with each other.

    `dry`: what every rank sends in a dry run, or why there is none. `folder`: where both sides left what they noted of their
    units, to say where a difference begins.
    """
    names = actual.facts["names"]
    probes = (
        tensors("I", "initial weights", expected.initial, actual.initial, names, scale_of(expected.initial)),
        tensors("G", "gradients, step 1", expected.gradients, actual.gradients, names, scale_of(expected.gradients)),
        tensors(
            "U",
            f"weights, step {len(expected.facts['rows'])}",
            expected.weights,
            actual.weights,
            names,
            moved(expected),
        ),
        rows("U2", "loss and norm, every step", expected, actual, ("loss", "norm")),
        tensors("B", "buffers", expected.buffers, actual.buffers, list(expected.buffers), scale_of(expected.buffers)),
        replicas(ranks),
        samples(expected, ranks),
        rows("S", "learning rate and clock", expected, actual, ("lr", "samples")),
        collectives(ranks, dry),
    )
    where = None
    if folder is not None and not all(probe.equal for probe in probes if probe.code != "C"):
        where = beginning(Sides.load(folder, ranks, expected.facts, plan))
        if where is not None and where.kind in ("clip", "optimizer") and where.step == 0 and not probes[1].equal:
            where = None  # gradients differ before that, where nothing was noted
    code, cause = likely_cause(probes, expected, actual, plan, where)
    first = actual.facts["rows"][0]
    forced = {
        "clip": expected.facts["clip"], "clipped": all(r["norm"] > expected.facts["clip"] for r in expected.facts["rows"]),
        "batch": first["samples"], "sizes": [len(ids) for _, ids in expected.facts["ids"]], "steps": len(expected.facts["rows"]),
    }  # fmt: skip
    split = plan.world * plan.shares * plan.microbatches > 1
    return Verdict(str(plan), probes, code, cause, world=plan.world, forced=forced, where=where, split=split)


def table(verdict: Verdict, job: str) -> str:
    """What `plait verify` prints."""
    forced = verdict.forced
    processes = f"{verdict.world} process" + ("es" if verdict.world > 1 else "")
    lines = [
        f"job         {job}",
        "reference   1 process, plain PyTorch, float64",
        f"candidate   {processes}, {verdict.plan}, float64 · clipping {'active in every step' if forced['clipped'] else 'NOT active in every step'}"
        f" · batches of {', '.join(map(str, forced['sizes']))} · warm-up running",
        *(f"            {line}" for line in forced.get("then", [])),
        f"{'':32}{'worst relative':>16}   tolerance",
    ]
    for p in verdict.probes:
        shown = f"{p.worst:.1e}" if p.tolerance else f"{p.worst:.0f} wrong"
        where = f"   {p.name}" if p.name else ""
        detail = f": {p.detail}" if p.detail and not p.equal else ""
        lines.append(
            f"  {p.title:<30}{shown:>16}   {f'{p.tolerance:.0e}' if p.tolerance else '0':<9}  {'✓' if p.equal else '✗'}{where}{detail}"
        )
    lines += [f"note  {line}" for line in verdict.notes]
    lines += [f"not exact by nature: {line}" for line in verdict.inexact]
    if verdict.equal and not verdict.split:
        told = f"under {verdict.plan} one process computes what plain PyTorch computes; nothing is split"
        lines.append(f'NOT SPLIT  {told}, so no split is proved. Next: plait verify {job} --plan "dp=2"')
    elif verdict.equal:
        lines.append("EQUAL  the split run computes what the single-device job computes")
    else:
        wrong = verdict.first_wrong
        assert wrong is not None
        lines.append(
            f"DIFFERENT  first wrong: {verdict.parameter or wrong.name}   likely: {verdict.cause}.   `plait help {verdict.code}`"
        )
    return "\n".join(lines)
