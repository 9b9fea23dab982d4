"""The split side of `verify`: each rank trains under the plan and writes its parts of tensors; the parts are then merged.

In every layout, a rank has rectangles of tensors (`tensors/rows.py`). Merged, they must equal the tensors of one device. Ranks with the
same rectangle must have the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, stopped_problem
from plait.config.job import Job
from plait.config.keys import AXES, DATA_AXES
from plait.config.phases import Phase
from plait.config.plan import Plan
from plait.data.batch import Batch, RotatingSplit
from plait.engine.engine import Engine
from plait.engine.traffic import Traffic
from plait.launch.place import Place, count_threads
from plait.model.sketch import Sketch
from plait.parallel.context.sequences import describe_opened
from plait.parallel.rank_model import RankModel
from plait.proof import activation_recorder as noting
from plait.proof import full_batch, plan_formats, probes
from plait.proof.activation_recorder import get_seen_digests
from plait.proof.phases import merge_phase_row
from plait.proof.probes import SMALL_BATCH_TENSORS, Trace
from plait.proof.scenario import Scenario
from plait.randomness.keyed import is_drawing
from plait.tensors.collectives import digest_tensors
from plait.tensors.rows import Part
from plait.tensors.rows import make_full_part as whole_part


@dataclass(frozen=True)
class PartResult:
    """Result of one rank in one part of a proof."""

    facts: dict[str, Any]
    """JSON values."""
    tensors: dict[str, dict[str, Tensor]]
    """This rank's parts of tensors, by the groups of a `Trace`."""


@dataclass
class StepRecorder:
    """Records the steps of one rank."""

    engine: Engine
    recorder: noting.ActivationRecorder
    traffic: Traffic
    """Messages of the first step."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)
    """Values of the step's phases so far, in a job with phases."""
    ids: list[list[Any]] = field(default_factory=list)
    replica_digests: list[list[Any]] = field(default_factory=list)

    def update(self, batch: Batch, step_row: Tensor, phase: Phase | None = None) -> None:
        """Run the optimizer step (of `phase`, if the job has phases) and record the tensors before and after it."""
        engine, parts = self.engine, self.engine.rank_model.get_parts()
        self.replica_digests.append(["gradient", _digest_tensors(gradients := self.gradients(), parts, _make_group_prefix(engine.rank_model))])
        self.recorder.record_tensors("sum", gradients, parts)
        with self.watch_traffic():
            told = engine.update(batch, step_row)
            engine.settle()
        weights = _collect_state(engine)
        self.replica_digests.append(
            [
                "weight",
                _digest_tensors(weights | _collect_averages(engine), parts, _make_group_prefix(engine.rank_model))
                | _digest_base_parts(engine),
            ]
        )
        self.recorder.record_tensors("weight", weights, parts)
        of = f" of group {i}" if (i := engine.rank_model.mesh.coordinates["replica_groups"]) else ""
        row = {f"loss{of}": told.loss, f"norm{of}": told.norm, "lr": told.lr, "samples": told.samples}
        if phase is not None:
            self.row = row = merge_phase_row(engine.job, phase, row, self.row if not engine.active_phase.is_first else {})
        if engine.active_phase.is_last:
            self.rows.append(row | {"logged": told.logged})
            self.ids.append([batch.position.epoch, [i for micro in batch.micro_batches for i in micro.ids]])

    def watch_traffic(self) -> AbstractContextManager[Any]:
        """Record the messages of the first step; later steps record nothing."""
        return nullcontext() if self.rows else self.traffic.watch()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of all existing gradients."""
        return {n: p.grad for n, p in self.engine.rank_model.params.items() if p.grad is not None}


PART = "part"
"""Kind of a rank's report after a part of a proof. The tensors of the part are then in files."""
PARTS = SMALL_BATCHES, FULL_BATCHES, PLAN_FORMATS = range(3)
"""Numbers of the parts, in the order in which ranks compute them."""


def train_candidate(scenario: Scenario, facts: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train one rank under the scenario and report each part when it is done. `facts`: those of the reference's `Trace`."""
    assert place.report is not None
    for number, part in enumerate(_train_parts(scenario, facts, place)):
        for name, group in part.tensors.items():
            probes.write_tensors(scenario.folder / f"{name}-{place.rank}.safetensors", group)
        place.report({"kind": PART, "number": number, "value": part.facts})
    return {}


def _train_parts(scenario: Scenario, facts: dict[str, Any], place: Place) -> Iterator[PartResult]:
    """Yield the small batches, then held-out metrics and full batches, then a step in the plan's number formats if the reference made one."""
    hard = scenario.hard
    sketch = scenario.analysis.float64
    engine = Engine(
        hard, scenario.logic, device=scenario.device, place=place, cast=torch.float64, on_nan="ignore", sketch=sketch
    )
    notes = noting.make_rank_recorder(engine)
    yield _train_small_batches(engine, notes, scenario)
    metrics = engine.evaluate()
    noted, tensors = _train_full_batches(engine, notes, scenario.job, facts)
    own_ids = [ids for _, ids in noted.ids]
    of_own_size = {"metrics": metrics, "own_rows": noted.rows, "own_ids": own_ids, "own_held": noted.replica_digests}
    yield PartResult(of_own_size, tensors)
    if known := facts.get("formats"):
        hard = replace(hard, batch=known["batch"])
        step, tensors = train_plan_formats(hard, scenario.plan, scenario.device, place, scenario.analysis.own_formats)
        yield PartResult({"formats": step}, tensors)


def _train_small_batches(engine: Engine, recorder: noting.ActivationRecorder, scenario: Scenario) -> PartResult:
    """Train the steps of the hardened job. Closes `recorder`: differences in later steps are not located."""
    rank_model, place, plan = engine.rank_model, engine.place, scenario.logic
    if rank_model.techniques.balance is not None:
        rank_model.techniques.balance.course = RotatingSplit(plan.ranks)  # measured speeds would also change the parts between steps
    noted, run = StepRecorder(engine, recorder, Traffic(place.rank, plan)), list[tuple[int, str]]()
    tensors = {"initial": {n: p.tensor.clone() for n, p in rank_model.get_parts().items() if n in rank_model.params}}
    source = engine.batches()
    for step in range(scenario.steps):
        batch = next(source, None)
        if batch is None:
            raise PlaitError(stopped_problem("proof", f"after {step} of {scenario.steps} steps: the proof is incomplete"))
        recorder.begin_batch(step, [(m.first, m.count, (m.inputs, m.targets)) for m in batch.micro_batches])
        for phase in engine.active_phase.iterate_phases(step + 1):
            with noted.watch_traffic():
                step_row = engine.backward(batch)
            if step == 0:
                run = engine.list_micro_shapes(batch)
                tensors.setdefault("gradients", {}).update({n: g.clone() for n, g in noted.gradients().items()})
            noted.update(batch, step_row, phase)
    tensors |= _copy_final_parts(rank_model)
    seen, told = get_seen_digests(engine.data), recorder.export(rank_model, scenario.folder / f"noted-{place.rank}.safetensors")
    parts = _collect_ranges(rank_model)
    names = _rename_by_group(engine, tensors, parts)
    found = {
        "rows": noted.rows, "ids": noted.ids, "held": noted.replica_digests, "seen": seen, "inexact": engine.inexact,
        "notes": describe_opened(rank_model.global_sketch), "names": names,
        "stage": rank_model.mesh.coordinates["pp"], "reads": not any(_get_peer_coordinates(rank_model)),
        **_collect_messages(engine, run, noted.traffic),
        "host_random": rank_model.sketch.host_random, "varies": rank_model.sketch.host_random and plan.tp > 1,
        "random": list(rank_model.global_sketch.places) * is_drawing(),
        "places": len(rank_model.sketch.places) * is_drawing(), **told,
        "batch_norms": list(rank_model.sketch.batch_norms), "parts": parts,
    }  # fmt: skip
    return PartResult(found, tensors)


def _copy_final_parts(rank_model: RankModel) -> dict[str, dict[str, Tensor]]:
    """Copy this rank's current parts of `weights`, `buffers` and the `average`."""
    average = {} if rank_model.techniques.average is None else {n: t.clone() for n, t in rank_model.techniques.average.tensors.items()}
    buffers = {n: p.tensor.clone() for n, p in rank_model.get_parts().items() if n not in rank_model.params}
    return {"weights": {n: p.detach().clone() for n, p in rank_model.params.items()}, "buffers": buffers, "average": average}


def _make_group_prefix(rank_model: RankModel) -> str:
    """Prefix of tensor names of this rank's replica group; empty if there is only one group."""
    return f"group {rank_model.mesh.coordinates['replica_groups']}: " if rank_model.techniques.replica_groups is not None else ""


def _rename_by_group(engine: Engine, tensors: dict[str, dict[str, Tensor]], parts: dict[str, list[Any]]) -> list[str]:
    """Return all parameter names in order. Renames a group's own tensors to `group i: name`; plain names are global weights."""
    rank_model, names = engine.rank_model, [n for n, _ in engine.model.named_parameters()]
    if rank_model.techniques.replica_groups is None:
        return names
    own, common = _make_group_prefix(rank_model), {n: p.tensor for n, p in rank_model.techniques.replica_groups.reduce_global_parts().items()}
    weights = tensors["weights"]
    for kind in ("gradients", "weights", "buffers"):
        tensors[kind] = {own + n: t for n, t in tensors[kind].items()}
    tensors["weights"] |= {n: common.get(n, t) for n, t in weights.items()}
    parts |= {own + n: part for n, part in list(parts.items())}
    return [*names, *(f"group {i}: {n}" for i in range(engine.plan.replica_groups) for n in names)]


def _digest_base_parts(engine: Engine) -> dict[str, int]:
    """Digests of the tensors that are equal on all replica groups."""
    common = engine.rank_model.techniques.replica_groups.get_global_parts() if engine.rank_model.techniques.replica_groups is not None else {}
    return _digest_tensors({f"{n} (global)": part.tensor for n, part in common.items()}, common)


def _train_full_batches(
    engine: Engine, recorder: noting.ActivationRecorder, job: Job, facts: dict[str, Any]
) -> tuple[StepRecorder, dict[str, dict[str, Tensor]]]:
    """Train the steps with the job's own batch size (`proof/full_batch.py`). Returns the records and the tensors. `recorder` must be closed."""
    noted, made = (
        StepRecorder(engine, recorder, Traffic(engine.place.rank, engine.plan)),
        dict[str, dict[str, Tensor]](own_gradients={}, own_weights={}),
    )
    course = full_batch.FullBatchSteps(engine, job, facts)
    for batch, _ in course.steps():
        step_row = engine.backward(batch)
        if not noted.rows:
            made["own_gradients"] = {n: g.clone() for n, g in noted.gradients().items()}
        norm = engine.norm(step_row)[0]
        course.prepare_update(len(noted.rows))
        noted.update(batch, step_row)
        noted.rows[-1]["norm"] = norm
    if noted.rows:
        made["own_weights"] = dict(engine.rank_model.params)
    return noted, made


def train_plan_formats(
    job: Job, plan: Plan, device: str, place: Place, sketch: Sketch | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Train one step in the plan's number formats (`proof/plan_formats.py`). Returns facts and tensors. `sketch`: as for `Engine`."""
    torch.set_num_threads(count_threads(place.world))  # as on one device: the concurrent dry run is not counted
    engine = Engine(job, plan, device=device, place=place, on_nan="ignore", sketch=sketch)
    rank_model, traffic = engine.rank_model, Traffic(place.rank, plan)
    if rank_model.techniques.loss_scale is not None:
        rank_model.techniques.loss_scale.load_state_dict({"value": plan_formats.LOSS_SCALE, "good_steps": 0})
    batch = next(engine.batches())
    with traffic.watch():
        step_row = engine.backward(batch)
    run = engine.list_micro_shapes(batch)
    scale = rank_model.techniques.loss_scale.value if rank_model.techniques.loss_scale is not None else 1.0
    gradient = {
        n: p.grad / scale if scale != 1.0 else p.grad.clone() for n, p in rank_model.params.items() if p.grad is not None
    }
    losses = {str(batch.micro_batches[i].first): float(loss) for i, loss in engine.passes.losses}
    with traffic.watch():
        engine.update(batch, step_row)
    state = plan_formats.collect_optimizer_state(engine.optimizer, rank_model.optimizer_names or {})
    kinds: dict[str, dict[str, Tensor]] = {"gradient": gradient, "weight": {**rank_model.params}, "state": state, "start": {}}
    made = {f"formats_{kind}": group for kind, group in kinds.items()}
    owned = rank_model.shard_plan.list_owned(rank_model.mesh.coordinates)
    wholes = {key: whole_part(t) for key, t in state.items() if key.partition("|")[0] in owned}
    return {
        "parts": _collect_ranges(rank_model) | {key: [part.shape, part.ranges] for key, part in wholes.items()},
        "losses": losses, "dtypes": plan_formats.collect_dtypes(gradient, dict(rank_model.params), state),
        **_collect_messages(engine, run, traffic),
    }, made  # fmt: skip


def _collect_messages(engine: Engine, sizes: list[tuple[int, str]], traffic: Traffic) -> dict[str, Any]:
    """Messages of a rank. Ranks with equal `alike` must make the same calls: it has everything that calls depend on, except for the plan."""
    rank_model, samples = engine.rank_model, tuple(n for n, _ in sizes)
    held_experts = str(sorted(tuple(rank_model.params[n].shape) for n in rank_model.list_expert_params()))  # may be uneven
    grouped = rank_model.techniques.replica_groups is not None
    sent = [tuple(p.shape) for p in rank_model.params.values()] if grouped else []  # parts may be uneven
    return {
        "alike": [*_get_peer_coordinates(rank_model), *samples, *_describe_stage_shapes(rank_model, samples), held_experts, str(sent)],
        "sizes": sizes, "collectives": [m.signature for m in traffic.messages], "sent": traffic.total_by_op(),
    }  # fmt: skip


def _get_peer_coordinates(rank_model: RankModel) -> list[int]:
    """Coordinates of a rank among the ranks with the same samples. Samples are counted on the first of them (all zeros)."""
    return [rank_model.mesh.coordinates[axis] for axis in AXES if axis not in ("replica_groups", *DATA_AXES)]


def _collect_ranges(rank_model: RankModel) -> dict[str, list[Any]]:
    """Map each tensor of a rank to [full shape, ranges of its part]."""
    return {name: [part.shape, part.ranges] for name, part in rank_model.get_parts().items()}


def _describe_stage_shapes(rank_model: RankModel, samples: tuple[int, ...]) -> list[str]:
    """Shapes of a rank's stage messages, if they differ from the sketch's because its number of samples differs."""
    paths = rank_model.techniques.pipeline.paths if rank_model.techniques.pipeline else ()
    return [str([slot.shape_for(n) for s in range(c.partition.stages) for slot in c.crossing_slots(s)]) for c, n in zip(paths, samples)]


def _collect_state(engine: Engine) -> dict[str, Tensor]:
    """Tensors of a rank after an update: parameters, buffers and optimizer state as `name (optimizer key)`."""
    rank_model = engine.rank_model
    found = {name: part.tensor for name, part in rank_model.get_parts().items()}
    for parameter, state in engine.optimizer.state.items():
        name = (rank_model.optimizer_names or {})[id(parameter)]
        found |= {f"{name} (optimizer {k})": v for k, v in state.items() if isinstance(v, Tensor)}
    return found


def _collect_averages(engine: Engine) -> dict[str, Tensor]:
    """This rank's parts of the averaged weights; empty if the job has no average."""
    average = engine.rank_model.techniques.average
    return {} if average is None else {f"{name} (average)": tensor for name, tensor in average.tensors.items()}


def _digest_tensors(tensors: dict[str, Tensor], parts: dict[str, Part], owner: str = "") -> dict[str, int]:
    """Digest of each tensor. The key has the owner, the name, and the ranges of the part."""
    rows = digest_tensors(list(tensors.items())).tolist()
    keys = {n: parts[n.partition(" (")[0]] for n in tensors}
    return {f"{owner}{n} @{keys[n].ranges}{tuple(t.shape)}": row for (n, t), row in zip(tensors.items(), rows)}


def gather_trace(folder: Path, ranks: list[dict[str, Any]]) -> Trace:
    """Merge the small-batch results of all ranks into a trace with full tensors."""
    named = dict.fromkeys(line for r in ranks for line in r["inexact"])  # each stage lists its own layers
    rows = [{k: v for row in step for k, v in row.items()} for step in zip(*(r["rows"] for r in reversed(ranks)))]
    facts = {**ranks[0], "rows": rows, "inexact": list(named)}
    return Trace(facts, **gather_rank_tensors(folder, SMALL_BATCH_TENSORS, [r["parts"] for r in ranks]))


def gather_rank_tensors(
    folder: Path, groups: Sequence[str], ranges: list[dict[str, list[Any]]]
) -> dict[str, dict[str, Tensor]]:
    """Read groups of tensors from the files of all ranks and merge the parts. `ranges`: [shape, ranges] by tensor name, for each rank.
    Elements that are on no rank are NaN."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in groups}
    for name, group in found.items():
        for rank, parts in enumerate(ranges):
            for key, tensor in probes.read_tensors(folder / f"{name}-{rank}.safetensors").items():
                shape, where = parts.get(key) or parts[key.partition("|")[0]]
                if key not in group:
                    real = tensor.is_floating_point() or tensor.is_complex()
                    group[key] = torch.full(shape, float("nan") if real else 0, dtype=tensor.dtype)
                for piece in Part(tensor, tuple(shape), tuple(where)).iter_rects():
                    piece.slice_tensor(group[key]).copy_(piece.tensor)
    return found
