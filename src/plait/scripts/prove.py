"""Check whether two commands train the same model: the candidate is recorded, the reference replays it, and both are compared.

The candidate runs first, almost unmodified. The reference then starts with its weights and reads its rows, three times: unchanged, and with
weights moved by rounding, which shows how far correct runs differ. Rows are checked first (`scripts/recordings.py`), then values. A difference
is reported with a confirmed cause, or with none (`scripts/differences.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.config.errors import PlaitError, Problem, problem_from_page
from plait.launch.scratch import ScratchFolder
from plait.proof.probes import Probe
from plait.proof.rounding import MAX_ROUNDINGS, Noise, compute_unit_roundoff
from plait.proof.verdict import Verdict
from plait.scripts import differences, recordings
from plait.scripts.commands import ScriptCommand, Show, run_commands
from plait.scripts.differences import BothSides, find_worst_probe
from plait.scripts.recorder import EPOCH_STEPS
from plait.scripts.recordings import Readers, Recording
from plait.scripts.values import TensorFolder


def prove(reference: ScriptCommand, candidate: ScriptCommand, show: Show = lambda side, done, total: None) -> Verdict:
    """Run both and compare. `show` receives the progress of a side. PlaitError E001 to E011 if no comparison is possible."""
    with ScratchFolder("prove") as folder:
        (ranks,) = run_commands({folder / "candidate": candidate}, show)
        readers = Readers.from_ranks(ranks)
        if not readers.distinct:
            why = "no rank read a batch from a torch.utils.data.DataLoader, and no tensor input of the model has rows"
            raise PlaitError(problem_from_page("E006", "the rows that the candidate trained on were not recorded", why))
        for by_content in (False, True):
            replay = recordings.make_replay(readers, by_content)
            sides = _run_reference(reference, folder, readers, replay, show)
            other = recordings.find_other_rows(readers, sides.reference)
            if other is None or "rows" not in replay:  # else the dataset is random: its rows are replayed by content
                break
        if other is not None and (replay or not readers.has_same_rows):  # ranks with equal rows are reported as an error of rows
            why = "the same indices return different rows: the dataset is random" if replay else "no DataLoader read them, so they cannot be replayed"
            raise PlaitError(problem_from_page("E006", f"in step {other + 1} the reference read different rows than the candidate", why))
        return _make_verdict(reference, candidate, sides)


def _run_reference(reference: ScriptCommand, folder: Path, readers: Readers, replay: dict[str, Any], show: Show) -> BothSides:
    """Run the reference three times on the candidate's rows and weights."""
    candidate, commands = readers.all, dict[Path, ScriptCommand]()
    weights = {name: t for each in reversed(candidate) for name, t in each.start.weights.items()}
    tensors = TensorFolder(str(folder / "tensors"), reference.room)
    coarsest = max((compute_unit_roundoff(getattr(torch, each)) for each in candidate[0].steps[-1].formats), default=0.0)
    for times in (0.0, 1.0, MAX_ROUNDINGS):  # roundings that each weight is moved by at most, and at random
        noise, generator = Noise(0, times, coarsest), torch.Generator().manual_seed(int(times))
        begins = {name: tensors.store(noise.perturb(tensors.load(t), generator)) if times else t for name, t in weights.items()}
        commands[folder / f"{''.join(replay)}-{times:.0f}"] = replace(reference, steps=len(candidate[0].rounds), replay=replay | {"weights": begins})
    runs = run_commands(commands, show)
    _check_sides(runs[0], candidate[0], reference.float64)
    return BothSides(readers, runs[0][0], (runs[1][0], runs[2][0]), tensors, reference.float64)


def _check_sides(reference: Sequence[Recording], candidate: Recording, float64: bool) -> None:
    """Reject recordings that cannot be compared: E007, E009, E010."""
    one, processes = reference[0], len(reference)
    batches = max(map(len, one.used_batches), default=1) if one.sources[0] else 1
    if processes > 1 or batches > 1:
        what = f"the reference trains in {processes} processes" if processes > 1 else f"the reference reads {batches} batches for a step"
        raise PlaitError(problem_from_page("E010", what, "it must be one process without accumulation: an error on both sides is not detected"))
    mine, other = ({name: each.start.weights[name].shape for name in each.start.trainable} for each in (candidate, one))
    if names := [name for name in sorted(mine | other) if mine.get(name) != other.get(name)]:
        shapes = " and ".join(f"{of.get(names[0], 'missing')} in the {side}" for side, of in (("candidate", mine), ("reference", other)))
        why = f"{len(names)} differ; {names[0]} is {shapes}. FSDP1 and hand-made tensor parallelism change parameters"
        raise PlaitError(problem_from_page("E007", "the models have different parameters", why))
    for side, each in (("candidate", candidate), ("reference", one)):
        narrow = [f"{name} is {t.dtype}" for name, t in each.start.weights.items() if "float" in t.dtype and t.dtype != "float64"]
        narrow += [f"it computes in {kind}" for step in each.steps for kind in step.formats if kind != "float64"]
        if float64 and narrow:
            raise PlaitError(problem_from_page("E009", f"the {side} does not compute in float64", narrow[0]))


def _make_verdict(reference: ScriptCommand, candidate: ScriptCommand, sides: BothSides) -> Verdict:
    compared, of_rows = sides.differences, [*recordings.find_faults(sides.readers, sides.reference)]
    starts, settings = [*differences.check_starts(sides)], [*differences.check_settings(sides)]
    weights = find_worst_probe("U", "weights", compared, "weights")
    probes = (
        _make_probe("D", "rows, every step and epoch", of_rows), _make_probe("I", "first weights, all ranks alike", starts),
        _make_probe("S", "learning rates, every step", settings, "E027"), find_worst_probe("A", "gradients after backward", compared, "after"),
        find_worst_probe("G", "gradients", compared, "gradients"), find_worst_probe("P", "gradients as applied", compared, "applied"), weights,
        find_worst_probe("B", "buffers", compared, "buffers"),
        _make_probe("R", "ranks alike, bit for bit", [*differences.compare_ranks(sides)]),
    )  # fmt: skip
    notes = (*_list_notes(candidate.steps, sides), f"dropout is off on both sides, and epochs end after {EPOCH_STEPS} steps")
    verdict = Verdict(candidate.words, probes, world=len(sides.readers.all), notes=notes, job=reference.words)
    if verdict.equal:
        return verdict
    cause = differences.find_cause(sides, [*of_rows, *starts, *settings])
    if cause.code == "E020" and any(step.drew for each in (*sides.readers.all, sides.reference) for step in each.steps):
        why = "random numbers other than dropout's are drawn between a batch and its loss (noise, drop path); they depend on the ranks"
        raise PlaitError(problem_from_page("E008", "the script draws random numbers that the reference cannot reproduce", why))
    text = cause.what
    if cause.code in ("E031", "E033") and weights.equal:
        text += ", without effect on the weights in these steps (clipping, or an optimizer such as Adam that divides by the gradient's size)"
    return replace(verdict, code=cause.code, cause=text, problems=(cause,))


def _make_probe(code: str, title: str, wrong: Sequence[Problem], of: str = "") -> Probe:
    """Make a probe that counts errors, of one code if one is given."""
    found = [each.what for each in wrong if each.code.startswith(of)]
    return Probe(code, title, float(len(found)), 0, detail="; ".join(found[:3]))


def _list_notes(steps: int, sides: BothSides) -> list[str]:
    found, made = recordings.list_notes(sides.readers, sides.reference), len(sides.readers.all[0].rounds)
    if made < steps:
        found.append(f"{made} of {steps} steps were compared: the candidate made no more, or its tensors exceed --disk-limit")
    if len(sides.differences) and sides.differences[-1].candidate.step < made:
        found.append(f"the reference made {sides.differences[-1].candidate.step} steps of the candidate's {made}")
    coarse = max((tensor.tolerance for each in sides.differences for tensor in each.points["gradients"]), default=0.0)
    if coarse > 1e-2 and not sides.float64:
        found.append(f"in these number formats differences of up to {100 * coarse:.2g} % of a gradient are rounding; --float64 sees smaller ones")
    return found
