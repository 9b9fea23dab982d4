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
from plait.scripts.causes import Case, cause_of
from plait.scripts.commands import ScriptCommand, run
from plait.scripts.numbers import Sides, first_wrong, moved_weights, probe
from plait.scripts.recordings import Recording, StoredTensors
from plait.scripts.rows import Readers

Show = Callable[[str, int, int], None]
WITHOUT_EFFECT = "without effect on the weights in these steps (clipping, or an optimizer such as Adam that divides by the gradient's size)"


@dataclass(frozen=True)
class Question:
    """Two commands, and how they are compared."""

    reference: ScriptCommand
    candidate: ScriptCommand


def prove(question: Question, show: Show = lambda side, done, total: None) -> Verdict:
    """Run both and compare. `show` gets how far a side is. PlaitError S001 to S011 where it cannot be told."""
    with Scratch("prove") as folder:
        (candidate,) = run({folder / "candidate": question.candidate}, show)
        readers = Readers.of(candidate)
        if not readers.distinct:
            raise PlaitError(_unread())
        sides, problem = _followed(question, folder, candidate, rows.replayed(readers), show)
        if problem is not None and readers.distinct[0].loader >= 0:  # a dataset that draws random numbers: its rows are given as they are
            sides, problem = _followed(question, folder, candidate, rows.replayed(readers, by_content=True), show)
        if problem is not None:
            raise PlaitError(problem)
        return _judged(question, sides, readers)


def _unread() -> Problem:
    why = "no rank read a batch from a torch.utils.data.DataLoader, and the model was called with no tensor that has rows"
    return Problem("S006", "it cannot be seen which rows the candidate trained on", why=why, fix=("read batches from a torch.utils.data.DataLoader",))


def _followed(question: Question, folder: Path, candidate: tuple[Recording, ...], replay: dict[str, Any], show: Show) -> tuple[Sides, Problem | None]:
    """The reference's three runs on the candidate's rows and weights; a problem where it read others."""
    weights = {name: t for each in reversed(candidate) for name, t in each.start.weights.items()}
    tensors = folder / "tensors"
    kind = "contents" if replay["contents"] else "reference"
    commands = dict[Path, ScriptCommand]()
    for times in (0.0, 1.0, TIMES):
        place = folder / f"{kind}-{times:.0f}"
        path = folder / f"{place.name}.json"
        moved = _stored(tensors, moved_weights(StoredTensors(tensors, weights), times)) if times else weights
        path.write_text(json.dumps(replay | {"weights": moved}))
        commands[place] = replace(question.reference, steps=len(candidate[0].rounds), replay=path)
    runs = run(commands, show)
    _check(runs[0], candidate)
    sides = Sides(candidate, runs[0][0], (runs[1][0], runs[2][0]), tensors, question.candidate.float64)
    readers = Readers.of(candidate)
    other = rows.other_rows(readers, sides.reference)
    if other is None or replay["contents"]:
        return sides, None
    if readers.distinct[0].loader < 0 and readers.alike:
        return sides, None  # judged as rows
    what = f"the reference read other rows in step {other + 1} than the candidate"
    why = "no DataLoader gave them, so they cannot be replayed" if replay["rows"] is None else "the same indices give other rows: the dataset draws random numbers"
    return sides, Problem("S006", what, why=why, fix=("read batches from a torch.utils.data.DataLoader", "or turn augmentation off for the comparison"))


def _stored(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Moved tensors, stored as the recorder stores them."""
    import hashlib

    import torch

    found = {}
    for name, t in tensors.items():
        data = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        (folder / digest).write_bytes(data)
        found[name] = [digest, str(t.dtype).removeprefix("torch."), list(t.shape)]
    return found


def _check(reference: tuple[Recording, ...], candidate: tuple[Recording, ...]) -> None:
    """S007, S009, S010: what makes two recordings incomparable."""
    one, many = reference[0], candidate[0]
    if len(reference) > 1:
        fix = ("python train.py    one process, as the reference",)
        raise PlaitError(Problem("S010", f"the reference trains in {len(reference)} processes", why="it must be what the candidate is to equal: one process", fix=fix))
    if any(len(batches) > 1 for batches in one.used) and one.loader >= 0:
        count = max(map(len, one.used))
        why = f"it reads {count} batches for a step, so a wrong accumulation would be on both sides"
        raise PlaitError(Problem("S010", "the reference accumulates gradients", why=why, fix=(f"--accumulate 1, with batches {count} times as large",)))
    if missing := sorted(set(one.start.trainable) ^ set(many.start.trainable)):
        side = "the reference" if missing[0] in one.start.trainable else "the candidate"
        why = f"{len(missing)} names are on one side only; {missing[0]} is in {side}. FSDP1 and hand-made tensor parallelism change parameters"
        raise PlaitError(Problem("S007", "the models have other parameters", why=why, fix=("build the same model in both commands",)))
    for name, (_, _, shape) in one.start.weights.items():
        other = many.start.weights.get(name, [0, 0, shape])[2]
        if other != shape and name in one.start.trainable:
            why = f"{name} has the shape {other} on rank 0 of the candidate and {shape} in the reference"
            raise PlaitError(Problem("S007", "the models have other parameters", why=why, fix=("use DTensor (FSDP2, parallelize_module): its parts know their whole",)))
    for side, each in (("candidate", many), ("reference", one)):
        if each.start.narrow:
            fix = ("leave out --float64", "or let the script take its formats from an option")
            raise PlaitError(Problem("S009", f"the {side} does not compute in float64", why=each.start.narrow, fix=fix))


def _judged(question: Question, sides: Sides, readers: Readers) -> Verdict:
    compared = sides.compared
    row_probe = rows.probe(readers, sides.reference)
    settings = _settings(sides)
    probes = (
        row_probe, _starts(sides), settings,
        probe("A", "gradients after backward", compared, "after"), probe("G", "gradients", compared, "gradients"),
        probe("P", "gradients as applied", compared, "applied"), probe("U", "weights", compared, "weights"),
        probe("B", "buffers", compared, "buffers"), _alike(sides),
    )  # fmt: skip
    gradients = [each for each in (first_wrong(compared, "gradients"), first_wrong(compared, "applied")) if each is not None]
    first = min(gradients, key=lambda each: each.number, default=None)
    verdict = Verdict(
        question.candidate.words, probes, world=len(sides.candidate), notes=tuple(_notes(question, sides, readers)), job=question.reference.words,
    )  # fmt: skip
    if verdict.equal:
        return verdict
    cause = cause_of(Case(sides, readers, first), rows.own_batch(sides.reference))
    if cause.code == "S020" and any(step.drew for each in (*sides.candidate, sides.reference) for step in each.steps):
        why = "between a batch and its loss random numbers are drawn other than by dropout (noise, drop path, random masks); ranks draw others than one process"
        raise PlaitError(Problem("S008", "the script draws random numbers that the reference cannot draw too", why=why, fix=("turn them off for the comparison", "or make them from the row's index")))
    scaled = cause.code in ("S031", "S033") and probes[6].equal
    text = f"{cause.text}, {WITHOUT_EFFECT}" if scaled else cause.text
    return replace(verdict, code=cause.code, cause=text, problems=(Problem(cause.code, cause.text, fix=cause.fix),))


def _settings(sides: Sides) -> Probe:
    """Learning rates of every step."""
    for each in sides.compared:
        for mine, other in zip(each.candidate.lr, each.reference.lr):
            if abs(mine - other) > 1e-6 * abs(other):
                return Probe("S", "learning rates, every step", abs(mine - other) / max(abs(other), 1e-300), 1e-6, f"step {each.number}", f"{mine:.6g} instead of {other:.6g}")
    return Probe("S", "learning rates, every step", 0.0, 1e-6)


def _starts(sides: Sides) -> Probe:
    ranks = sides.candidate
    names = {name for each in ranks[1:] for name, t in ranks[0].start.weights.items() if name in ranks[0].start.trainable and each.start.weights.get(name, t) != t}
    detail = "ranks begin with other weights" if names else ""
    return Probe("I", "first weights, all ranks alike", float(len(names)), 0, min(names, default=""), detail)


def _alike(sides: Sides) -> Probe:
    """Whether weights and buffers are the same on all ranks after every step."""
    ranks = sides.candidate
    for k in range(sides.steps):
        for each in ranks[1:]:
            for mine, other in zip(ranks[0].rounds[k], each.rounds[k] if k < len(each.rounds) else ()):
                both = ({**mine.weights, **mine.buffers}, {**other.weights, **other.buffers})
                if names := [name for name, t in both[0].items() if both[1].get(name, t) != t]:
                    return Probe("R", "ranks alike, bit for bit", float(len(names)), 0, names[0], f"it differs on rank {each.rank} from step {k + 1}")
    return Probe("R", "ranks alike, bit for bit", tolerance=0)


def _notes(question: Question, sides: Sides, readers: Readers) -> list[str]:
    found = rows.notes(readers, sides.reference)
    made = len(sides.candidate[0].rounds)
    if made < question.candidate.steps:
        found.append(f"{sides.steps} of {question.candidate.steps} steps were compared: the candidate made no more, or its tensors take more room")
    if sides.steps < made:
        found.append(f"the reference made {sides.steps} steps of the candidate's {made}")
    coarse = max((value for each in sides.compared for value in each.points["gradients"].limit.values()), default=0.0)
    if coarse > 1e-2 and not sides.float64:
        found.append(f"in the script's number formats differences of up to {100 * coarse:.2g} % of a gradient are rounding; --float64 sees smaller ones")
    return [*found, "dropout is off on both sides, and epochs end after 3 steps"]

