"""`plait verify`: the split run and one device, both in float64, compared number by number.

The job is made hard first (`proof/scenario.py`). Then `proof/reference.py` trains it on one device in plain PyTorch, the engine trains
it under the plan, and the probes compare what they did:

    G  gradients of the first step, every parameter          U  weights after all steps, and every step's loss and norm
    R  tensors that are replicas, bit for bit, every step     D  sample ids and the samples themselves
    S  learning rate, clock, step count                       B  buffers
    A  the average of the weights, where the job has one
    C  collectives: equal on all ranks, and as many, of as many bytes, as in a dry run of the plan

What differs is traced to where it begins: both sides note what every unit is given and returns (`proof/notes.py`), and the first
place in the order of a step where that is not the same is named (`proof/locate.py`).

A plan that is another training than one device's (replica groups, compressed sums) is held to its own algorithm instead, which
`proof/algorithms/` trains in one process; how far that is from one device, the verdict says beside it.

Float64 tells logic from rounding: a correct split differs by 1e-15 to 1e-11, a wrong one by far more than the
tolerance of 1e-9, which is never loosened.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.opening import open_weights
from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import checked, first_samples, is_map, opened_once
from plait.data.reachable import check_unshared
from plait.engine.build import check_plan, sketch_without_ranks
from plait.launch import fork
from plait.launch.devices import check, kind_of
from plait.launch.place import Place, pose
from plait.launch.scratch import Scratch
from plait.model.make import CPU, make_model, make_optimizer
from plait.model.sketch import Sketch
from plait.parallel import precision
from plait.planner.dryrun.dry_run import first_step
from plait.proof import (
    candidate,
    formats,
    own_batch,
    own_numerics,
    phases,
    reference,
)
from plait.proof.algorithms.find import OwnTraining, by_algorithm, found
from plait.proof.job import check as job_check
from plait.proof.job import counters
from plait.proof.job.causes import UNLOCATED
from plait.proof.probes import OWN_FORMATS, OWN_SIZE, Probe, Trace
from plait.proof.scenario import CLIP, EPS, UNCLIPPED_EPS, Analysis, Scenario, harden, parts_of
from plait.proof.verdict import AlgorithmTold, Verdict, judge, of_calls, told_of
from plait.randomness.keyed import without_draws
from plait.tensors.collectives import DIRECT
from plait.tensors.torch_private import leaves

REFERENCE = "the reference on one device"
OF_JOBS = ("V005", "V006", "V013", "V014", "V015", "V018", "V021", "V029")
"""Causes that may lie in the job itself, of which the job check then says more."""
LOST = ("C001", "C003")
"""Codes of a process that was stopped: it hung, or somebody killed it."""
Show = Callable[[Verdict], None]
NEVER = 1e30
"""`CLIP` of a job that does not clip, and is held to an algorithm that clips by another norm than one device."""


def verify(
    job: Job,
    plan: Plan,
    steps: int = 4,
    device: str = "auto",
    quiet: bool = False,
    seconds: float | None = None,
    *,
    sketch: Sketch | None = None,
    show: Show = lambda verdict: None,
) -> Verdict:
    """Compare the job under `plan` with one device. Forks one process for the reference, one that analyses the model, then the plan's
    processes. `sketch`: of the model under the plan, if the model was analysed before (`planner/refusals.py`). `show` gets the verdict so
    far as soon as a part of the proof is compared: the small batches, those of the job's own size, the step in own formats.

    `seconds` is what batches of the job's own size may take on one device (None: half a second); 0 leaves them out, and the
    step in the plan's own formats; a job with phases has neither. If random numbers may be the cause of a difference, it
    compares again without draws (`quiet`): a difference that is still there has another cause.
    """
    seconds = 0.0 if job.phases is not None else own_batch.SECONDS if seconds is None else seconds
    kind = kind_of(device)
    _refuse(job, plan, kind)
    job = dataclasses.replace(job, data=opened_once(job.data))
    own = found(precision.unrounded(plan))
    if own is not None and own.compare is not None:
        return own.compare(job, plan, steps)
    try:
        verdict = _compared(job, plan, steps, seconds, kind, own_size=False, sketch=sketch, show=show)
    except PlaitError as error:
        if not _wants_more_samples(error, job, plan, kind):
            raise
        verdict = _compared(job, plan, steps, seconds, kind, own_size=True, sketch=sketch, show=show)
    if verdict.code == "V005" and not quiet:
        verdict = _tried_without_draws(verdict, lambda: verify(job, plan, steps, device, True, 0.0))
    if verdict.code in OF_JOBS and not quiet:
        verdict = dataclasses.replace(verdict, problems=_problems_of_job(job, plan))
    return verdict


def _problems_of_job(job: Job, plan: Plan) -> tuple[Problem, ...]:
    """What the job check finds, which splits the batch alone: nothing where it cannot say what of the job is the cause."""
    return tuple(problem for problem in job_check.check(job, plan).problems if problem.what != UNLOCATED)


def _compared(
    job: Job, plan: Plan, steps: int, seconds: float, kind: str, *, own_size: bool, sketch: Sketch | None, show: Show
) -> Verdict:
    """The verdict of one comparison. `own_size`: all batches have the job's own size."""
    logic = precision.unrounded(plan)
    own, clip = found(logic), CLIP
    if own is not None:
        (logic, steps), seconds = own.shortened(logic, steps), 0.0
        clip = CLIP if job.clip is not None else NEVER
    with Scratch("verify") as folder:
        first = Scenario(job, job, plan, logic, steps, kind, clip, seconds, folder, Analysis(own_formats=sketch))
        scenario, expected = _reference(first, own_size)
        algorithm = None
        if own is not None:
            expected, algorithm = _algorithm(own, expected, scenario)
        return _Comparison(scenario, expected, own, algorithm, show).run()


def _refuse(job: Job, plan: Plan, kind: str) -> None:
    """Raise what the job and the plan are refused for, before a process starts."""
    check(kind, plan.world - plan.server_count)
    check_plan(job, plan, kind)
    check_unshared(job)


def _tried_without_draws(verdict: Verdict, again: Callable[[], Verdict]) -> Verdict:
    """A verdict that blames random numbers, with another cause if the job still differs when nothing is drawn."""
    with without_draws():
        still = again()
    return verdict if still.equal else dataclasses.replace(verdict, code=still.code, cause=still.cause, where=still.where)


def _algorithm(own: OwnTraining, one: Trace, scenario: Scenario) -> tuple[Trace, AlgorithmTold]:
    """What the plan's own algorithm does in one process, clipped as `one` device was, and how far that is from it."""
    plan, steps = scenario.logic, len(one.facts["rows"])

    def alone(place: Place) -> dict[str, Any]:
        data, holder = _noted(scenario.hard)
        noting, moves = dataclasses.replace(scenario.hard, data=data), lambda: place.within("forward")
        out = own.train(noting, plan, steps, one.facts["clip"], torch.float64, scenario.device, moves=moves)
        return {"metrics": {}, **out, "seen": holder[0].seen, "names": [], "own": None, "mean": one.facts["mean"]}

    trace = Trace.of_process(scenario.folder / "algorithm", alone, "the plan's algorithm in one process")
    return trace, told_of(own.named(plan), one, trace)


def _compared_with_algorithm(
    actual: Trace, ranks: list[dict[str, Any]], expected: Trace, own: OwnTraining, plan: Plan
) -> Trace:
    """The candidate with what is inexact beside its algorithm: what its technique names is what it is compared with."""
    lines = [line for line in actual.facts["inexact"] if line not in by_algorithm(plan)]
    alone = "which the algorithm in one process computes share by share"
    norms = sorted({name for r in ranks for name in r["batch_norms"]})
    if own.by_share and norms:
        lines.append(f"batch statistics in {norms[0]} are those of all copies, {alone}")
    elif own.by_share and expected.facts["mean"] is False:
        lines.append(f"the loss couples samples of several copies, {alone}")
    return dataclasses.replace(actual, facts={**actual.facts, "inexact": lines})


class _Comparison:
    """The plan's ranks beside the reference, part by part (`proof/candidate.py`): the verdict on those that all ranks have done."""

    def __init__(self, scenario: Scenario, expected: Trace, own: OwnTraining | None, algorithm: AlgorithmTold | None, show: Show):
        self.scenario, self.expected, self.own, self.algorithm, self.show = scenario, expected, own, algorithm, show
        self.ranks = [dict[str, Any]() for _ in range(scenario.logic.world)]
        """What each rank reported of the parts that are compared."""
        self.waiting = [dict[int, dict[str, Any]]() for _ in candidate.PARTS]
        """Of each part, what ranks have reported of it."""

    def run(self) -> Verdict:
        """Train the ranks, and compare."""
        plan = self.scenario.logic
        fork.run(self._work, plan.world, fork.Listener(message=self.message), alike=plan.pp == 1)
        return self.verdict

    def _work(self, place: Place) -> dict[str, Any]:
        pose(place.rank, self.scenario.logic.world)
        return candidate.run(self.scenario, self.expected.facts, place)

    def message(self, rank: int, message: dict[str, Any]) -> None:
        """A rank has done a part."""
        if message["kind"] == candidate.PART:
            number = message["number"]
            self.waiting[number][rank] = message["value"]
            if len(self.waiting[number]) == len(self.ranks):
                self._complete(number)

    def _complete(self, number: int) -> None:
        for rank, facts in self.waiting[number].items():
            self.ranks[rank] |= facts
        (self._small_batches, self._own_size, self._own_formats)[number]()
        self.show(self.verdict)

    def _small_batches(self) -> None:
        scenario, expected, own = self.scenario, self.expected, self.own
        plan, facts = scenario.plan, expected.facts
        actual = candidate.whole(scenario.folder, self.ranks)
        named = actual.facts["inexact"]
        if own is not None:
            actual = _compared_with_algorithm(actual, self.ranks, expected, own, scenario.logic)
        self.actual, dry = actual, scenario.analysis.messages
        verdict = judge(expected, actual, self.ranks, scenario.logic, dry, scenario.folder, algorithm=self.algorithm)
        if facts.get("late") and own is None:
            verdict = of_calls(verdict, facts["late"])
        rounded: Iterable[str] = precision.inexact(plan) if precision.wanted(plan) else ()
        if own is not None and precision.wanted(plan):
            rounded = (f"{plan.precision} rounds differently from fp32; proved here is the logic, in float64",)
        lines = [own_batch.Own(**facts["own"]).told] if facts["own"] else []
        if "untried" in facts:
            lines.append(f"a step in the plan's own formats was not tried: one device fails in {facts['untried']}")
        if facts.get("formats") and not actual.facts["inexact"]:
            lines += formats.unseen(facts["formats"])
        self.verdict = dataclasses.replace(
            verdict, plan=str(plan), inexact=(*named, *rounded), notes=tuple(self.ranks[0]["notes"]),
            forced=verdict.forced | {"own": facts["own"], "then": lines},
        )  # fmt: skip

    def _own_size(self) -> None:
        parts = [rank["parts"] for rank in self.ranks]
        tensors = candidate.put_together(self.scenario.folder, OWN_SIZE, parts)
        self.actual = dataclasses.replace(self.actual, **tensors)
        probes = own_batch.judged(self.expected, self.actual, self.ranks)
        self._add(probes, lambda: own_batch.cause(probes, self.expected, self.verdict.plan))

    def _own_formats(self) -> None:
        if self.actual.facts["inexact"]:
            return
        parts = [rank["formats"]["parts"] for rank in self.ranks]
        tensors = candidate.put_together(self.scenario.folder, OWN_FORMATS, parts)
        actual = dataclasses.replace(self.actual, **tensors)
        probes = formats.judged(self.expected, actual, self.ranks, self.scenario.analysis.own_messages)
        self._add(probes, lambda: formats.cause(probes))

    def _add(self, probes: tuple[Probe, ...], cause: Callable[[], tuple[str, str]]) -> None:
        """Add the comparisons of a part to the verdict. `cause`: (code, sentence), if they are the first that differ."""
        before = self.verdict
        self.verdict = dataclasses.replace(before, probes=(*before.probes, *probes))
        if before.equal and not self.verdict.equal:
            named = self.actual.facts["inexact"]
            code, text = ("V010", named[0]) if named else cause()
            self.verdict = dataclasses.replace(self.verdict, code=code, cause=text)


def _analysed(scenario: Scenario, result: fork.ForkResult[Analysis], place: Place) -> dict[str, Any]:
    """Analyse the model as a rank does, and make dry runs of the first step, in float64 and in own formats: the work of a process while
    the reference trains."""
    pose(None, scenario.logic.world)
    place.beat(-1, "build")
    clips = {"clip": 1.0, "clips": dict.fromkeys((phase.name for phase in scenario.hard.phases or ()), 1.0)}
    hard = phases.clipped(scenario.hard, clips)  # as the reference's is, only at another norm: what is sent is the same
    float64 = _sketch(hard, scenario.logic, torch.float64, scenario.device)
    messages = _dry(hard, scenario.logic, torch.float64, scenario.device, float64)
    own, own_messages = scenario.analysis.own_formats, scenario.analysis.own_messages
    if scenario.seconds:
        own = _sketch(hard, scenario.plan, None, scenario.device) if own is None else own
        own_messages = _dry(_in_small_batches(hard, scenario, partial(make_model, hard)), scenario.plan, None, scenario.device, own)
    result.put(Analysis(float64, own, messages, own_messages))
    return {}


def _sketch(job: Job, plan: Plan, cast: torch.dtype | None, device: str) -> Sketch | None:
    """What every rank would find of the model. None on a GPU, where an operator may be another kernel, and where anything is raised:
    ranks raise it again, and say where."""
    with contextlib.suppress(Exception):
        return sketch_without_ranks(job, plan, CPU, cast) if device == "cpu" else None
    return None


def _dry(
    job: Job, plan: Plan, cast: torch.dtype | None, device: str, sketch: Sketch | None
) -> list[dict[str, Any]] | str:
    """What every rank sends in a dry run of the first step, or why there is none."""
    if plan.processes == "one":
        return [{"totals": {}, "sizes": None}]
    if device != "cpu":
        DIRECT.set(())
    try:
        return [dataclasses.asdict(sent) for sent in first_step(job, plan, cast, sketch)]
    except PlaitError as error:
        return str(error.problems[0].why or error.problems[0].what)
    except Exception as error:  # the job's code, on tensors without numbers
        return f"it raised {in_a_line(error)}"


def _reference(scenario: Scenario, own_size: bool) -> tuple[Scenario, Trace]:
    """Train the reference; and the scenario with the job that it trained. Its short batch leaves one rank without a sample. A model
    that cannot train on so few gets a short batch with two for each part."""
    job, plan = scenario.job, scenario.logic
    if job.weights is not None:
        open_weights(Path(job.weights))  # what cannot be read is said before a start
    make = partial(harden, job, plan, least_eps=EPS if scenario.clip < NEVER else UNCLIPPED_EPS)
    hards = [] if own_size else [make(short) for short in (max(1, plan.shares - 1), 2 * parts_of(plan))]
    if own_size or job.batch > hards[0].batch:  # a loss that wants many samples gets the job's own batch, and no short one
        hards.append(make(0, job.batch))
    failed: list[PlaitError] = []
    for hard in hards:
        tried = dataclasses.replace(scenario, hard=hard)
        try:
            with fork.ForkResult[Analysis]() as analysis:
                analyse = partial(_analysed, tried, analysis)
                trace = Trace.of_process(scenario.folder / "reference", partial(_one_device, tried), REFERENCE, analyse)
                return dataclasses.replace(tried, hard=phases.clipped(hard, trace.facts), analysis=analysis.take()), trace
        except PlaitError as error:
            if error.codes[0] in LOST:  # which says nothing of the batch
                raise
            failed.append(error)
    raise _on_one_device(failed[-1], hards[-1], scenario.device) from None


def _wants_more_samples(error: PlaitError, job: Job, plan: Plan, device: str) -> bool:
    """Whether a rank failed since the job, in plain PyTorch, cannot train on as few samples as a part of the small batches has."""
    own = job.batch // parts_of(plan)
    if error.codes[0] != "C005" or own < 2:
        return False
    fails, fine = (bool(_raised(dataclasses.replace(job, batch=n), None, device)) for n in (1, own))
    return fails and not fine


def _on_one_device(error: PlaitError, job: Job, device: str) -> PlaitError:
    """The reference failed: whether the job fails by itself, in its own number formats or in float64, or only where plait records,
    widens or saves."""
    problem = error.problems[0]
    if problem.code != "C005":
        return error
    if own := _raised(job, None, device):
        code, what = "J011", f"the job fails on one device, in plain PyTorch: {own}"
        why, fix = "a step in its own number formats raises too, without anything of plait's around it", ()
    elif wide := _raised(job, torch.float64, device):
        code, what = "J051", f"the job fails in float64 only: {wide}"
        why = "a step in its own number formats works; proofs and the job check compute in float64"
        fix = ("let the model follow the format of its weights: x.to(weight.dtype), no assertion of a dtype",)
    else:
        code, what = "P072", f"plait cannot {_activity(error.trace)}: {problem.what.removeprefix(f'{REFERENCE} raised ')}"
        why, fix = "a step of the job in plain PyTorch works, in its own number formats and in float64", ()
    return PlaitError(dataclasses.replace(problem, code=code, what=what, why=why, fix=fix), error.exit_code, error.trace)


def _raised(job: Job, dtype: torch.dtype | None, device: str) -> str:
    """What a step of the job raises in plain PyTorch, in a number format (None: in its own); nothing if it works. What plait does not
    train is raised."""
    try:
        fork.run(lambda _: reference.plain(job, dtype, device) or {}, 1)
    except PlaitError as error:
        if error.codes[0] != "C005":
            raise
        return error.problems[0].what.removeprefix("rank 0 raised ")
    return ""


ACTIVITIES = {
    "tensors/float64.py": "compute the job in float64", "model/": "record the job's forward pass",
    "randomness/": "key the job's random numbers", "proof/notes.py": "note what the job's modules return",
    "safetensors": "save what the job computes", "proof/probes.py": "save what the job computes",
}  # fmt: skip


def _activity(trace: str) -> str:
    """What plait did when the reference failed, by the last line of the traceback that is in one of its files."""
    last, what = max((trace.rfind(file), what) for file, what in ACTIVITIES.items())
    return what if last >= 0 else "follow the job's forward pass"


def _one_device(scenario: Scenario, place: Place) -> dict[str, Any]:
    """What the reference tells, in its own process."""
    job = scenario.hard
    models = list[reference.OneDevice]()
    data, holder = _noted(job)

    def then(one: reference.OneDevice) -> dict[str, Any]:
        own_numerics.check(one)
        one.notes.save(scenario.folder / "noted.safetensors")
        one.notes.close()  # what comes after is not located
        models.append(one)
        return own_batch.on_one_device(scenario.job, one, scenario.seconds)

    make_optimizer(
        job, dict(make_model(job).named_parameters())
    )  # raises when the job cannot be trained by plait at all
    out = (reference if job.phases is None else phases).train(
        dataclasses.replace(job, data=data), scenario.steps, scenario.clip, torch.float64, scenario.device,
        moves=lambda: place.within("forward"), then=then,
    )  # fmt: skip
    if scenario.seconds:
        step = _in_small_batches(job, scenario, lambda: models[0].model)
        out |= in_own_formats(step, scenario.plan, models[0], out["clip"])
    out |= _carried(scenario.job, models[0], scenario.plan) if models and job.phases is None else {}
    return {**out, "seen": holder[0].seen, "names": []}


def _carried(job: Job, one: reference.OneDevice, plan: Plan) -> dict[str, Any]:
    """Facts of what the model carries from call to call: `changes`, names of what a call changes outside parameters and buffers, and
    `late`, what later outputs depend on (`proof/job/counters.py`)."""
    data = one.job.data()
    read = next(reference.samples(one.job, data))[2]
    inputs = reference.ready(one, data, read)[0]

    def run() -> list[Tensor]:
        with torch.no_grad(), reference.Wide(), one.keyed.at(one.steps, 0, len(read)):
            outputs = reference.call(one.model, inputs)
        return [t for t in leaves(outputs) if isinstance(t, Tensor)]

    before = counters.values(one.model)
    run()
    changes = counters.Changed.of(before, counters.values(one.model)).values
    late = counters.late_difference(one.model, run, plan.microbatches, job.steps) if changes else None
    return {"changes": list(changes), "late": late.why if late else None}


def _noted(job: Job) -> tuple[Callable[[], Any], list[Any]]:
    """The job's data, checked, and where what it gives is held."""
    holder = list[Any]()

    def data() -> Any:
        holder.append(checked(job.data(), "Job(data=…)"))
        if len(holder) == 1 and is_map(holder[0]):
            first_samples(holder[0], 1)  # raises when samples are not pairs
        return holder[-1]

    return data, holder


def _in_small_batches(hard: Job, scenario: Scenario, model: Callable[[], torch.nn.Module]) -> Job:
    """The job of the step in own formats: with a small batch, unless the job cannot train on fewer samples than its own."""
    return hard if hard.batch == scenario.job.batch else formats.small(hard, scenario.plan, model())


def in_own_formats(job: Job, plan: Plan, one: reference.OneDevice, clip: float) -> dict[str, Any]:
    """What one device has after a step in the plan's formats; nothing where plain PyTorch has no such operator."""
    if plan.compile:
        return {}
    try:
        told, tensors = formats.facts(formats.Reference(job, plan, one, clip))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"untried": f"{plan.precision}: {in_a_line(error)}"}
    return {"formats": told, **tensors}
