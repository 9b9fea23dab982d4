"""Whether two commands train the same model: the candidate is recorded, the reference follows it, and both are compared.

The candidate runs first, hardly touched. The reference then starts with its weights and reads its rows, three times: as it is, and with
weights moved by rounding, which shows how far apart right runs are. Rows are judged by themselves (`scripts/recordings.py`), then numbers, and
a difference gets a cause that is shown, or none (`scripts/differences.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.config.errors import PlaitError, Problem, problem_of_page
from plait.launch.scratch import Scratch
from plait.proof.probes import Probe
from plait.proof.rounding import TIMES, Noise, rounding
from plait.proof.verdict import Verdict
from plait.scripts import differences, recordings
from plait.scripts.commands import ScriptCommand, Show, run
from plait.scripts.differences import BothSides, probe
from plait.scripts.recorder import EPOCH_STEPS
from plait.scripts.recordings import Readers, Recording
from plait.scripts.values import TensorFolder


def prove(reference: ScriptCommand, candidate: ScriptCommand, show: Show = lambda side, done, total: None) -> Verdict:
    """Run both and compare. `show` gets how far a side is. PlaitError E001 to E011 where it cannot be told."""
    with Scratch("prove") as folder:
        (ranks,) = run({folder / "candidate": candidate}, show)
        readers = Readers.of(ranks)
        if not readers.distinct:
            why = "no rank read a batch from a torch.utils.data.DataLoader, and the model was called with no tensor that has rows"
            raise PlaitError(problem_of_page("E006", "it cannot be seen which rows the candidate trained on", why))
        for by_content in (False, True):
            replay = recordings.replayed(readers, by_content)
            sides = _followed(reference, folder, readers, replay, show)
            other = recordings.other_rows(readers, sides.reference)
            if other is None or "rows" not in replay:  # else a dataset that draws: its rows are given as they are
                break
        if other is not None and (replay or not readers.alike):  # ranks that are alike are judged as rows
            why = "the same indices give other rows: the dataset draws" if replay else "no DataLoader gave them, so they cannot be replayed"
            raise PlaitError(problem_of_page("E006", f"the reference read other rows in step {other + 1} than the candidate", why))
        return _judged(reference, candidate, sides)


def _followed(reference: ScriptCommand, folder: Path, readers: Readers, replay: dict[str, Any], show: Show) -> BothSides:
    """The reference's three runs on the candidate's rows and weights."""
    candidate, commands = readers.all, dict[Path, ScriptCommand]()
    weights = {name: t for each in reversed(candidate) for name, t in each.start.weights.items()}
    tensors = TensorFolder(str(folder / "tensors"), reference.room)
    coarsest = max((rounding(getattr(torch, each)) for each in candidate[0].steps[-1].formats), default=0.0)  # of the formats that compute
    for times in (0.0, 1.0, TIMES):  # roundings that each weight is moved by at most, and at random
        noise, generator = Noise(0, times, coarsest), torch.Generator().manual_seed(int(times))
        begins = {name: tensors.store(noise.operand(tensors.load(t), generator)) if times else t for name, t in weights.items()}
        commands[folder / f"{''.join(replay)}-{times:.0f}"] = replace(reference, steps=len(candidate[0].rounds), replay=replay | {"weights": begins})
    runs = run(commands, show)
    _check(runs[0], candidate[0], reference.float64)
    return BothSides(readers, runs[0][0], (runs[1][0], runs[2][0]), tensors, reference.float64)


def _check(reference: Sequence[Recording], candidate: Recording, float64: bool) -> None:
    """E007, E009, E010: what makes two recordings incomparable."""
    one, processes = reference[0], len(reference)
    batches = max(map(len, one.used), default=1) if one.sources[0] else 1
    if processes > 1 or batches > 1:
        what = f"the reference trains in {processes} processes" if processes > 1 else f"the reference reads {batches} batches for a step"
        raise PlaitError(problem_of_page("E010", what, "it must be one process without accumulation: what is wrong on both sides is not seen"))
    mine, other = ({name: each.start.weights[name].shape for name in each.start.trainable} for each in (candidate, one))
    if names := [name for name in sorted(mine | other) if mine.get(name) != other.get(name)]:
        shapes = " and ".join(f"{of.get(names[0], 'missing')} in the {side}" for side, of in (("candidate", mine), ("reference", other)))
        why = f"{len(names)} differ; {names[0]} is {shapes}. FSDP1 and hand-made tensor parallelism change parameters"
        raise PlaitError(problem_of_page("E007", "the models have other parameters", why))
    for side, each in (("candidate", candidate), ("reference", one)):
        narrow = [f"{name} is {t.dtype}" for name, t in each.start.weights.items() if "float" in t.dtype and t.dtype != "float64"]
        narrow += [f"it computes in {kind}" for step in each.steps for kind in step.formats if kind != "float64"]
        if float64 and narrow:
            raise PlaitError(problem_of_page("E009", f"the {side} does not compute in float64", narrow[0]))


def _judged(reference: ScriptCommand, candidate: ScriptCommand, sides: BothSides) -> Verdict:
    compared, of_rows = sides.compared, [*recordings.faults(sides.readers, sides.reference)]
    starts, settings = [*differences.starts(sides)], [*differences.settings(sides)]
    weights = probe("U", "weights", compared, "weights")
    probes = (
        _exact("D", "rows, every step and epoch", of_rows), _exact("I", "first weights, all ranks alike", starts),
        _exact("S", "learning rates, every step", settings, "E027"), probe("A", "gradients after backward", compared, "after"),
        probe("G", "gradients", compared, "gradients"), probe("P", "gradients as applied", compared, "applied"), weights,
        probe("B", "buffers", compared, "buffers"),
        _exact("R", "ranks alike, bit for bit", [*differences.unlike_ranks(sides)]),
    )  # fmt: skip
    notes = (*_notes(candidate.steps, sides), f"dropout is off on both sides, and epochs end after {EPOCH_STEPS} steps")
    verdict = Verdict(candidate.words, probes, world=len(sides.readers.all), notes=notes, job=reference.words)
    if verdict.equal:
        return verdict
    cause = differences.cause_of(sides, [*of_rows, *starts, *settings])
    if cause.code == "E020" and any(step.drew for each in (*sides.readers.all, sides.reference) for step in each.steps):
        why = "between a batch and its loss random numbers are drawn other than by dropout (noise, drop path): ranks draw others than one process"
        raise PlaitError(problem_of_page("E008", "the script draws random numbers that the reference cannot draw too", why))
    text = cause.what
    if cause.code in ("E031", "E033") and weights.equal:
        text += ", without effect on the weights in these steps (clipping, or an optimizer such as Adam that divides by the gradient's size)"
    return replace(verdict, code=cause.code, cause=text, problems=(cause,))


def _exact(code: str, title: str, wrong: Sequence[Problem], of: str = "") -> Probe:
    """How many things are wrong, of one code if one is given."""
    found = [each.what for each in wrong if each.code.startswith(of)]
    return Probe(code, title, float(len(found)), 0, detail="; ".join(found[:3]))


def _notes(steps: int, sides: BothSides) -> list[str]:
    found, made = recordings.notes(sides.readers, sides.reference), len(sides.readers.all[0].rounds)
    if made < steps:
        found.append(f"{made} of {steps} steps were compared: the candidate made no more, or its tensors take more room")
    if len(sides.compared) and sides.compared[-1].candidate.step < made:
        found.append(f"the reference made {sides.compared[-1].candidate.step} steps of the candidate's {made}")
    coarse = max((tensor.tolerance for each in sides.compared for tensor in each.points["gradients"]), default=0.0)
    if coarse > 1e-2 and not sides.float64:
        found.append(f"in these number formats differences of up to {100 * coarse:.2g} % of a gradient are rounding; --float64 sees smaller ones")
    return found
