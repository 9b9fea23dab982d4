"""Whether two commands train the same model: the candidate is recorded, the reference follows it, and both are compared.

The candidate runs first, hardly touched. The reference then starts with its weights and reads its rows, three times: as it is, and with
weights moved by rounding, which shows how far apart right runs are. Rows are judged by themselves (`scripts/rows.py`), then numbers
(`scripts/numbers.py`), and a difference gets a cause that is shown, or none (`scripts/causes.py`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.launch.scratch import Scratch
from plait.proof.probes import Probe
from plait.proof.rounding import TIMES
from plait.proof.verdict import Verdict
from plait.scripts import rows
from plait.scripts.causes import FIXES, Case, cause_of
from plait.scripts.commands import ScriptCommand, run
from plait.scripts.numbers import BothSides, moved_weights, probe
from plait.scripts.recordings import Recording, StoredTensors, unlike
from plait.scripts.rows import Readers
from plait.scripts.values import stored

Show = Callable[[str, int, int], None]
WITHOUT_EFFECT = "without effect on the weights in these steps (clipping, or an optimizer such as Adam that divides by the gradient's size)"


@dataclass(frozen=True)
class Question:
    """Two commands, and how they are compared."""

    reference: ScriptCommand
    candidate: ScriptCommand


def prove(question: Question, show: Show = lambda side, done, total: None) -> Verdict:
    """Run both and compare. `show` gets how far a side is. PlaitError E001 to E011 where it cannot be told."""
    with Scratch("prove") as folder:
        (candidate,) = run({folder / "candidate": question.candidate}, show)
        readers = Readers.of(candidate)
        if not readers.distinct:
            raise PlaitError(_unread())
        replay = rows.replayed(readers)
        sides = _followed(question, folder, readers, replay, show)
        if "rows" in replay and rows.other_rows(readers, sides.reference) is not None:  # a dataset that draws: its rows are given as they are
            sides = _followed(question, folder, readers, rows.replayed(readers, by_content=True), show)
        _check_rows(readers, sides.reference)
        return _judged(question, sides, readers)


def _unread() -> Problem:
    why = "no rank read a batch from a torch.utils.data.DataLoader, and the model was called with no tensor that has rows"
    return Problem("E006", "it cannot be seen which rows the candidate trained on", why=why, fix=("read batches from a torch.utils.data.DataLoader",))


def _followed(question: Question, folder: Path, readers: Readers, replay: dict[str, Any], show: Show) -> BothSides:
    """The reference's three runs on the candidate's rows and weights."""
    candidate, tensors = readers.all, folder / "tensors"
    weights = {name: t for each in reversed(candidate) for name, t in each.start.weights.items()}
    commands = dict[Path, ScriptCommand]()
    for times in (0.0, 1.0, TIMES):
        place = folder / f"{''.join(replay)}-{times:.0f}"
        path = folder / f"{place.name}.json"
        moved = moved_weights(StoredTensors(tensors, weights), times, candidate[0].steps[-1].format) if times else {}
        begins = weights | {name: stored(t, str(tensors), question.reference.room)[0] for name, t in moved.items()}
        path.write_text(json.dumps(replay | {"weights": begins}))
        commands[place] = replace(question.reference, steps=len(candidate[0].rounds), replay=path)
    runs = run(commands, show)
    _check(runs[0], candidate)
    return BothSides(candidate, runs[0][0], (runs[1][0], runs[2][0]), tensors, question.candidate.float64)


def _check_rows(readers: Readers, reference: Recording) -> None:
    """E006: the reference read other rows, which no loader gave or which no loader can give again. Ranks that are alike are judged as rows."""
    of_loader, other = readers.distinct[0].loader >= 0, rows.other_rows(readers, reference)
    if other is None or (readers.alike and not of_loader):
        return
    why = "the same indices give other rows: the dataset draws random numbers" if of_loader else "no DataLoader gave them, so they cannot be replayed"
    fix = ("read batches from a torch.utils.data.DataLoader", "turn augmentation off for the comparison")
    raise PlaitError(Problem("E006", f"the reference read other rows in step {other + 1} than the candidate", why=why, fix=fix))


def _check(reference: tuple[Recording, ...], candidate: tuple[Recording, ...]) -> None:
    """E007, E009, E010: what makes two recordings incomparable."""
    one, many = reference[0], candidate[0]
    batches = max(map(len, one.used), default=1) if one.loader >= 0 else 1
    if len(reference) > 1 or batches > 1:
        what = f"trains in {len(reference)} processes" if len(reference) > 1 else f"reads {batches} batches for a step"
        why = "it must be one process without accumulation: what is wrong on both sides is not seen"
        fix = ("python train.py, with a batch as large as a step of the candidate",)
        raise PlaitError(Problem("E010", f"the reference {what}", why=why, fix=fix))
    shapes = [{name: each.start.weights[name][2] for name in each.start.trainable} for each in (one, many)]
    if unlike := [name for name in sorted({**shapes[0], **shapes[1]}) if shapes[0].get(name) != shapes[1].get(name)]:
        told = [f"{shape.get(unlike[0], 'is missing')} in the {side}" for shape, side in zip(shapes, ("reference", "candidate"))]
        why = f"{len(unlike)} differ; {unlike[0]}: {', '.join(told)}. FSDP1 and hand-made tensor parallelism change parameters"
        fix = ("build the same model in both commands", "use DTensor (FSDP2, parallelize_module): its parts know the full shape")
        raise PlaitError(Problem("E007", "the models have other parameters", why=why, fix=fix))
    for side, each in (("candidate", many), ("reference", one)):
        if each.start.narrow:
            fix = ("leave out --float64", "or let the script take its formats from an option")
            raise PlaitError(Problem("E009", f"the {side} does not compute in float64", why=each.start.narrow, fix=fix))


def _judged(question: Question, sides: BothSides, readers: Readers) -> Verdict:
    compared = sides.compared
    weights, wrong_rows = probe("U", "weights", compared, "weights"), [each.text for each in rows.faults(readers, sides.reference)]
    probes = (
        Probe("D", "rows, every step and epoch", float(len(wrong_rows)), 0, detail="; ".join(wrong_rows)), _starts(sides), _settings(sides),
        probe("A", "gradients after backward", compared, "after"),
        probe("G", "gradients", compared, "gradients"), probe("P", "gradients as applied", compared, "applied"), weights,
        probe("B", "buffers", compared, "buffers"), _alike(sides),
    )  # fmt: skip
    verdict = Verdict(
        question.candidate.words, probes, world=len(sides.candidate), notes=tuple(_notes(question, sides, readers)), job=question.reference.words,
    )  # fmt: skip
    if verdict.equal:
        return verdict
    wrong = [each for each in compared if each.wrong("gradients") or each.wrong("applied")]
    cause = cause_of(Case(sides, readers, wrong[0] if wrong else None))
    if cause.code == "E020" and any(step.drew for each in (*sides.candidate, sides.reference) for step in each.steps):
        why = "between a batch and its loss random numbers are drawn other than by dropout (noise, drop path): ranks draw others than one process"
        fix = ("turn them off for the comparison", "or make them from the row's index")
        raise PlaitError(Problem("E008", "the script draws random numbers that the reference cannot draw too", why=why, fix=fix))
    without_effect = f", {WITHOUT_EFFECT}" * (cause.code in ("E031", "E033") and weights.equal)
    problem = Problem(cause.code, cause.text, fix=FIXES[cause.code])
    return replace(verdict, code=cause.code, cause=cause.text + without_effect, problems=(problem,))


def _settings(sides: BothSides) -> Probe:
    title = "learning rates, every step"
    for each in sides.compared:
        for mine, other in zip(each.candidate.lr, each.reference.lr):
            if abs(mine - other) > 1e-6 * abs(other):
                off = abs(mine - other) / max(abs(other), 1e-300)
                return Probe("S", title, off, 1e-6, f"step {each.number}", f"{mine:.6g} instead of {other:.6g}")
    return Probe("S", title, 0.0, 1e-6)


def _starts(sides: BothSides) -> Probe:
    ranks = sides.candidate
    names = {name for each in ranks[1:] for name in each.other_start(ranks[0])}
    detail = "ranks begin with other weights" if names else ""
    return Probe("I", "first weights, all ranks alike", float(len(names)), 0, min(names, default=""), detail)


def _alike(sides: BothSides) -> Probe:
    """Whether weights and buffers are the same on all ranks after every step."""
    ranks = sides.candidate
    for k in range(sides.steps):
        for each in ranks[1:]:
            for mine, other in zip(ranks[0].rounds[k], each.rounds[k] if k < len(each.rounds) else ()):
                both = ({**mine.weights, **mine.buffers}, {**other.weights, **other.buffers})
                if names := unlike(*both):
                    return Probe("R", "ranks alike, bit for bit", float(len(names)), 0, names[0], f"it differs on rank {each.rank} from step {k + 1}")
    return Probe("R", "ranks alike, bit for bit", tolerance=0)


def _notes(question: Question, sides: BothSides, readers: Readers) -> list[str]:
    found = rows.notes(readers, sides.reference)
    made = len(sides.candidate[0].rounds)
    if made < question.candidate.steps:
        found.append(f"{sides.steps} of {question.candidate.steps} steps were compared: the candidate made no more, or its tensors take more room")
    if sides.steps < made:
        found.append(f"the reference made {sides.steps} steps of the candidate's {made}")
    coarse = max((value for each in sides.compared for value in each.points["gradients"].limit.values()), default=0.0)
    if coarse > 1e-2 and not sides.float64:
        found.append(f"in these number formats differences of up to {100 * coarse:.2g} % of a gradient are rounding; --float64 sees smaller ones")
    return [*found, "dropout is off on both sides, and epochs end after 3 steps"]

