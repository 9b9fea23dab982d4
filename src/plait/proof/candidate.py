"""The split side of `verify`: one rank trains under the plan and writes down its parts; the parts are put together.

Whatever the layout, a rank holds rectangles of tensors (`tensors/rows.py`). Put together they must be the one device's
tensors, and where ranks hold the same rectangle they must hold the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, stopped
from plait.config.job import Job
from plait.config.keys import AXES, OTHER_SAMPLES
from plait.config.phases import Phase
from plait.config.plan import Plan
from plait.data.batch import Batch, InTurn
from plait.engine.engine import Engine
from plait.engine.traffic import Traffic
from plait.launch.place import Place, threads
from plait.model.sketch import Sketch
from plait.parallel.context.sequences import opened_units
from plait.parallel.rank_model import RankModel
from plait.proof import formats, own_batch, probes
from plait.proof import notes as noting
from plait.proof.notes import seen_in
from plait.proof.phases import of_phases
from plait.proof.probes import SMALL, Trace
from plait.proof.scenario import Scenario
from plait.randomness.keyed import is_drawing
from plait.tensors.collectives import digests
from plait.tensors.rows import Part
from plait.tensors.rows import whole as whole_part


@dataclass(frozen=True)
class PartDone:
    """What a rank did in a part of a proof."""

    facts: dict[str, Any]
    """JSON values."""
    tensors: dict[str, dict[str, Tensor]]
    """This rank's parts of tensors, by the groups of a `Trace`."""


@dataclass
class StepNotes:
    """What a rank notes of its steps."""

    engine: Engine
    notes: noting.Notes
    traffic: Traffic
    """What is sent in the first step."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)
    """Of the step's phases so far, in a job that has phases."""
    ids: list[list[Any]] = field(default_factory=list)
    held: list[list[Any]] = field(default_factory=list)

    def update(self, batch: Batch, step_row: Tensor, phase: Phase | None = None) -> None:
        """Take the optimizer's step, of a phase if there are any, with what is held before and after it noted."""
        engine, parts = self.engine, self.engine.rank_model.parts()
        self.held.append(["gradient", _held(gradients := self.gradients(), parts, _group(engine.rank_model))])
        self.notes.tensors("sum", gradients, parts)
        with self.watching():
            told = engine.update(batch, step_row)
            engine.settle()
        weights = _weights(engine)
        self.held.append(
            ["weight", _held(weights | _averages(engine), parts, _group(engine.rank_model)) | _held_by_all(engine)]
        )
        self.notes.tensors("weight", weights, parts)
        of = f" of group {i}" if (i := engine.rank_model.mesh.at["replica_groups"]) else ""
        row = {f"loss{of}": told.loss, f"norm{of}": told.norm, "lr": told.lr, "samples": told.samples}
        if phase is not None:
            self.row = row = of_phases(engine.job, phase, row, self.row if not engine.turns.first else {})
        if engine.turns.last:
            self.rows.append(row | {"logged": told.logged})
            self.ids.append([batch.position.epoch, [i for micro in batch.micro for i in micro.ids]])

    def watching(self) -> AbstractContextManager[Any]:
        """Notes what is sent, in the first step."""
        return nullcontext() if self.rows else self.traffic.watch()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients that are there."""
        return {n: p.grad for n, p in self.engine.rank_model.params.items() if p.grad is not None}


PART = "part"
"""Kind of a rank's report of what it did in a part of a proof, whose tensors are in files then."""
PARTS = SMALL_BATCHES, OWN_SIZE, OWN_FORMATS = range(3)
"""Numbers of the parts, in the order in which ranks do them."""


def run(scenario: Scenario, facts: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train one rank under the scenario, and report each part of it once it is done. `facts`: those of the reference's `Trace`."""
    assert place.report is not None
    for number, part in enumerate(_parts(scenario, facts, place)):
        for name, group in part.tensors.items():
            probes.write(scenario.folder / f"{name}-{place.rank}.safetensors", group)
        place.report({"kind": PART, "number": number, "value": part.facts})
    return {}


def _parts(scenario: Scenario, facts: dict[str, Any], place: Place) -> Iterator[PartDone]:
    """The small batches; held-out metrics and batches of the job's own size; a step in the plan's own number formats, if there is one."""
    hard = scenario.hard
    sketch = scenario.analysis.float64
    engine = Engine(
        hard, scenario.logic, device=scenario.device, place=place, cast=torch.float64, on_nan="ignore", sketch=sketch
    )
    notes = noting.of_rank(engine)
    yield _of_small_batches(engine, notes, scenario)
    metrics = engine.evaluate()
    noted, tensors = _of_own_size(engine, notes, scenario.job, facts)
    own_ids = [ids for _, ids in noted.ids]
    of_own_size = {"metrics": metrics, "own_rows": noted.rows, "own_ids": own_ids, "own_held": noted.held}
    yield PartDone(of_own_size, tensors)
    if known := facts.get("formats"):
        hard = replace(hard, batch=known["batch"])
        step, tensors = in_own_formats(hard, scenario.plan, scenario.device, place, scenario.analysis.own_formats)
        yield PartDone({"formats": step}, tensors)


def _of_small_batches(engine: Engine, notes: noting.Notes, scenario: Scenario) -> PartDone:
    """The steps of the hard job. `notes` are closed afterwards: what comes next is not located."""
    rank_model, place, plan = engine.rank_model, engine.place, scenario.logic
    if rank_model.techniques.balance is not None:
        rank_model.techniques.balance.course = InTurn(plan.ranks)  # as measured speeds would change the parts between steps
    noted, run = StepNotes(engine, notes, Traffic(place.rank, plan)), list[tuple[int, str]]()
    tensors = {"initial": {n: p.tensor.clone() for n, p in rank_model.parts().items() if n in rank_model.params}}
    source = engine.batches()
    for step in range(scenario.steps):
        batch = next(source, None)
        if batch is None:
            raise PlaitError(stopped("proof", f"after {step} of {scenario.steps} steps: nothing is proved"))
        notes.batch(step, [(m.first, m.count, (m.inputs, m.targets)) for m in batch.micro])
        for phase in engine.turns.of(step + 1):
            with noted.watching():
                step_row = engine.backward(batch)
            if step == 0:
                run = engine.sizes_run(batch)
                tensors.setdefault("gradients", {}).update({n: g.clone() for n, g in noted.gradients().items()})
            noted.update(batch, step_row, phase)
    tensors |= _at_the_end(rank_model)
    seen, told = seen_in(engine.data), notes.told(rank_model, scenario.folder / f"noted-{place.rank}.safetensors")
    parts = _ranges(rank_model)
    names = _by_group(engine, tensors, parts)
    found = {
        "rows": noted.rows, "ids": noted.ids, "held": noted.held, "seen": seen, "inexact": engine.inexact,
        "notes": opened_units(rank_model.whole_sketch), "names": names,
        "stage": rank_model.mesh.at["pp"], "reads": not any(_on_other_axes(rank_model)),
        **_messages(engine, run, noted.traffic),
        "host_random": rank_model.sketch.host_random, "varies": rank_model.sketch.host_random and plan.tp > 1,
        "random": list(rank_model.whole_sketch.places) * is_drawing(),
        "places": len(rank_model.sketch.places) * is_drawing(), **told,
        "batch_norms": list(rank_model.sketch.batch_norms), "parts": parts,
    }  # fmt: skip
    return PartDone(found, tensors)


def _at_the_end(rank_model: RankModel) -> dict[str, dict[str, Tensor]]:
    """This rank's parts of `weights`, `buffers` and the `average` as they are."""
    average = {} if rank_model.techniques.average is None else {n: t.clone() for n, t in rank_model.techniques.average.tensors.items()}
    buffers = {n: p.tensor.clone() for n, p in rank_model.parts().items() if n not in rank_model.params}
    return {"weights": {n: p.detach().clone() for n, p in rank_model.params.items()}, "buffers": buffers, "average": average}


def _group(rank_model: RankModel) -> str:
    """How the names begin of what belongs to this rank's replica group; nothing where there is only one."""
    return f"group {rank_model.mesh.at['replica_groups']}: " if rank_model.techniques.replica_groups is not None else ""


def _by_group(engine: Engine, tensors: dict[str, dict[str, Tensor]], parts: dict[str, list[Any]]) -> list[str]:
    """All names of parameters in order. What a replica group has of its own gets its name, and the global weights plain ones."""
    rank_model, names = engine.rank_model, [n for n, _ in engine.model.named_parameters()]
    if rank_model.techniques.replica_groups is None:
        return names
    own, common = _group(rank_model), {n: p.tensor for n, p in rank_model.techniques.replica_groups.global_parts().items()}
    weights = tensors["weights"]
    for kind in ("gradients", "weights", "buffers"):
        tensors[kind] = {own + n: t for n, t in tensors[kind].items()}
    tensors["weights"] |= {n: common.get(n, t) for n, t in weights.items()}
    parts |= {own + n: part for n, part in list(parts.items())}
    return [*names, *(f"group {i}: {n}" for i in range(engine.plan.replica_groups) for n in names)]


def _held_by_all(engine: Engine) -> dict[str, int]:
    """Digests of what all replica groups hold alike."""
    common = engine.rank_model.techniques.replica_groups.base_parts() if engine.rank_model.techniques.replica_groups is not None else {}
    return _held({f"{n} (global)": part.tensor for n, part in common.items()}, common)


def _of_own_size(
    engine: Engine, notes: noting.Notes, job: Job, facts: dict[str, Any]
) -> tuple[StepNotes, dict[str, dict[str, Tensor]]]:
    """The steps of the job's own size (`proof/own_batch.py`): what is noted, and the tensors. `notes` are closed."""
    noted, made = (
        StepNotes(engine, notes, Traffic(engine.place.rank, engine.plan)),
        dict[str, dict[str, Tensor]](own_gradients={}, own_weights={}),
    )
    course = own_batch.OwnBatchSteps(engine, job, facts)
    for batch, _ in course.steps():
        step_row = engine.backward(batch)
        if not noted.rows:
            made["own_gradients"] = {n: g.clone() for n, g in noted.gradients().items()}
        norm = engine.norm(step_row)[0]
        course.prepare(len(noted.rows))
        noted.update(batch, step_row)
        noted.rows[-1]["norm"] = norm
    if noted.rows:
        made["own_weights"] = dict(engine.rank_model.params)
    return noted, made


def in_own_formats(
    job: Job, plan: Plan, device: str, place: Place, sketch: Sketch | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """A step in the number formats of the plan (`proof/formats.py`): what is noted, and tensors. `sketch`: as `Engine` is given it."""
    torch.set_num_threads(threads(place.world))  # as one device's: a dry run beside the ranks is not counted
    engine = Engine(job, plan, device=device, place=place, on_nan="ignore", sketch=sketch)
    rank_model, traffic = engine.rank_model, Traffic(place.rank, plan)
    if rank_model.techniques.loss_scale is not None:
        rank_model.techniques.loss_scale.load_state_dict({"value": formats.SCALE, "good_steps": 0})
    batch = next(engine.batches())
    with traffic.watch():
        step_row = engine.backward(batch)
    run = engine.sizes_run(batch)
    scale = rank_model.techniques.loss_scale.value if rank_model.techniques.loss_scale is not None else 1.0
    gradient = {
        n: p.grad / scale if scale != 1.0 else p.grad.clone() for n, p in rank_model.params.items() if p.grad is not None
    }
    losses = {str(batch.micro[i].first): float(loss) for i, loss in engine.passes.losses}
    with traffic.watch():
        engine.update(batch, step_row)
    state = formats.states(engine.optimizer, rank_model.optimizer_names or {})
    kinds: dict[str, dict[str, Tensor]] = {"gradient": gradient, "weight": {**rank_model.params}, "state": state, "start": {}}
    made = {f"formats_{kind}": group for kind, group in kinds.items()}
    owned = rank_model.table.owned(rank_model.mesh.at)
    wholes = {key: whole_part(t) for key, t in state.items() if key.partition("|")[0] in owned}
    return {
        "parts": _ranges(rank_model) | {key: [part.shape, part.ranges] for key, part in wholes.items()},
        "losses": losses, "dtypes": formats.dtypes(gradient, dict(rank_model.params), state),
        **_messages(engine, run, traffic),
    }, made  # fmt: skip


def _messages(engine: Engine, sizes: list[tuple[int, str]], traffic: Traffic) -> dict[str, Any]:
    """What a rank sent. `alike`: on what that depends beside the plan; ranks of which it is the same make the same calls."""
    rank_model, samples = engine.rank_model, tuple(n for n, _ in sizes)
    held_experts = str(sorted(tuple(rank_model.params[n].shape) for n in rank_model.experts()))  # one rank may have one more
    grouped = rank_model.techniques.replica_groups is not None
    sent = [tuple(p.shape) for p in rank_model.params.values()] if grouped else []  # parts, which may be uneven
    return {
        "alike": [*_on_other_axes(rank_model), *samples, *_crossings(rank_model, samples), held_experts, str(sent)],
        "sizes": sizes, "collectives": [m.row for m in traffic.messages], "sent": traffic.totals(),
    }  # fmt: skip


def _on_other_axes(rank_model: RankModel) -> list[int]:
    """A rank's place among those with the same samples: the first of them is the one whose samples are counted."""
    return [rank_model.mesh.at[axis] for axis in AXES if axis not in ("replica_groups", *OTHER_SAMPLES)]


def _ranges(rank_model: RankModel) -> dict[str, list[Any]]:
    """Of which whole each tensor of a rank is a part: name -> [shape, ranges]."""
    return {name: [part.shape, part.ranges] for name, part in rank_model.parts().items()}


def _crossings(rank_model: RankModel, samples: tuple[int, ...]) -> list[str]:
    """What of a rank's passes makes its messages unlike those of ranks with other samples: sizes that are not the sketch's."""
    paths = rank_model.techniques.pipeline.paths if rank_model.techniques.pipeline else ()
    return [str([slot.shape(n) for s in range(c.cut.stages) for slot in c.slots(s)]) for c, n in zip(paths, samples)]


def _weights(engine: Engine) -> dict[str, Tensor]:
    """What a rank holds after an update: parameters, buffers and the optimizer's tensors `name (optimizer key)`."""
    rank_model = engine.rank_model
    found = {name: part.tensor for name, part in rank_model.parts().items()}
    for parameter, state in engine.optimizer.state.items():
        name = (rank_model.optimizer_names or {})[id(parameter)]
        found |= {f"{name} (optimizer {k})": v for k, v in state.items() if isinstance(v, Tensor)}
    return found


def _averages(engine: Engine) -> dict[str, Tensor]:
    """This rank's parts of the average of the weights, where the job wants one."""
    average = engine.rank_model.techniques.average
    return {} if average is None else {f"{name} (average)": tensor for name, tensor in average.tensors.items()}


def _held(tensors: dict[str, Tensor], parts: dict[str, Part], owner: str = "") -> dict[str, int]:
    """A digest of each tensor, by its name, after its owner's, and where its part begins and ends."""
    rows = digests(list(tensors.items())).tolist()
    keys = {n: parts[n.partition(" (")[0]] for n in tensors}
    return {f"{owner}{n} @{keys[n].ranges}{tuple(t.shape)}": row for (n, t), row in zip(tensors.items(), rows)}


def whole(folder: Path, ranks: list[dict[str, Any]]) -> Trace:
    """What the ranks did in the small batches, with whole tensors."""
    named = dict.fromkeys(line for r in ranks for line in r["inexact"])  # each stage names its own layers
    rows = [{k: v for row in step for k, v in row.items()} for step in zip(*(r["rows"] for r in reversed(ranks)))]
    facts = {**ranks[0], "rows": rows, "inexact": list(named)}
    return Trace(facts, **put_together(folder, SMALL, [r["parts"] for r in ranks]))


def put_together(
    folder: Path, groups: Sequence[str], ranges: list[dict[str, list[Any]]]
) -> dict[str, dict[str, Tensor]]:
    """Groups of tensors from the files that ranks wrote. `ranges`: of each rank, [shape, ranges] of its part by a tensor's name.
    Elements that no rank holds are NaN."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in groups}
    for name, group in found.items():
        for rank, parts in enumerate(ranges):
            for key, tensor in probes.read(folder / f"{name}-{rank}.safetensors").items():
                shape, where = parts.get(key) or parts[key.partition("|")[0]]
                if key not in group:
                    real = tensor.is_floating_point() or tensor.is_complex()
                    group[key] = torch.full(shape, float("nan") if real else 0, dtype=tensor.dtype)
                for piece in Part(tensor, tuple(shape), tuple(where)).pieces():
                    piece.inside(group[key]).copy_(piece.tensor)
    return found
