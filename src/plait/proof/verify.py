"""`plait verify`: compare the split run with one device, both in float64, value by value.

The job is hardened first (`proof/scenario.py`). Then `proof/reference.py` trains it on one device in plain PyTorch, and the engine trains
it under the plan. The probes compare the results:

    G  gradients of the first step, every parameter          U  weights after all steps, and every step's loss and norm
    R  tensors that are replicas, bit for bit, every step     D  sample ids and the samples themselves
    S  learning rate, clock, step count                       B  buffers
    A  the average of the weights, if the job has one
    C  collectives: equal on all ranks, with the counts and bytes of a dry run of the plan

A difference is traced to its beginning: both sides record unit inputs and outputs (`proof/activation_recorder.py`), and the first different
record in the order of a step is reported (`proof/locate.py`).

A plan that changes the training result (replica groups, compressed sums) is compared with its own algorithm, which `proof/algorithms/`
trains in one process. The verdict also reports how far that is from one device.

Float64 separates logic from rounding: a correct split differs by 1e-15 to 1e-11, a wrong one by far more than the tolerance of 1e-9, which
is never loosened.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.foreign_weights import open_weights
from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import is_map, make_sketch_batch, open_once, validate_data
from plait.data.reachable_objects import check_unshared
from plait.engine.build import check_plan, sketch_without_ranks
from plait.launch import fork
from plait.launch.devices import check_devices, resolve_kind
from plait.launch.place import Place, set_rank_variables
from plait.launch.scratch import ScratchFolder
from plait.model.build_model import CPU, make_model, make_optimizer
from plait.model.sketch import Sketch
from plait.parallel import precision
from plait.planner.dryrun.dry_run import trace_first_step
from plait.proof import (
    candidate,
    float64_check,
    full_batch,
    phases,
    plan_formats,
    reference,
)
from plait.proof.algorithms.registry import ReferenceAlgorithm, find_algorithm, list_algorithm_notes
from plait.proof.job import call_counts
from plait.proof.job import check as job_check
from plait.proof.job.causes import UNLOCATED
from plait.proof.probes import FORMAT_TENSORS, FULL_BATCH_TENSORS, Probe, Trace
from plait.proof.scenario import CLIP, EPS, UNCLIPPED_EPS, Analysis, Scenario, count_parts, harden
from plait.proof.verdict import AlgorithmReference, Verdict, blame_call_count, judge_traces, measure_algorithm
from plait.randomness.keyed import disable_draws
from plait.tensors.collectives import DIRECT_DEVICES
from plait.tensors.torch_private import dataclass_leaves

REFERENCE = "the reference on one device"
JOB_CODES = ("V005", "V006", "V013", "V014", "V015", "V018", "V021", "V029")
"""Codes of causes that may lie in the job itself. The job check is then run for details."""
KILLED_CODES = ("C001", "C003")
"""Codes of a process that was hung or killed."""
ShowVerdict = Callable[[Verdict], None]
NO_CLIP = 1e30
"""`CLIP` of a job without clipping, if its algorithm clips by another norm than one device."""


def verify(
    job: Job,
    plan: Plan,
    steps: int = 4,
    device: str = "auto",
    quiet: bool = False,
    seconds: float | None = None,
    *,
    sketch: Sketch | None = None,
    show: ShowVerdict = lambda verdict: None,
) -> Verdict:
    """Compare the job under `plan` with one device. Forks a process for the reference, one that analyzes the model, then the plan's processes.
    `sketch`: of the model under the plan, if it was analyzed before (`planner/refusals.py`). `show` gets the verdict so far after each
    part: the small batches, the full batches, the step in the plan's own formats.

    `seconds` is the time limit of the full batches on one device (None: half a second). 0 skips them and the step in the plan's own
    formats, as do jobs with phases. If random numbers may be the cause of a difference, the comparison is repeated without draws (`quiet`):
    a difference that remains has another cause.
    """
    seconds = 0.0 if job.phases is not None else full_batch.DEFAULT_SECONDS if seconds is None else seconds
    kind = resolve_kind(device)
    _validate_inputs(job, plan, kind)
    job = dataclasses.replace(job, data=open_once(job.data))
    own = find_algorithm(precision.make_fp32_plan(plan))
    if own is not None and own.compare is not None:
        return own.compare(job, plan, steps)
    try:
        verdict = _compare_once(job, plan, steps, seconds, kind, own_size=False, sketch=sketch, show=show)
    except PlaitError as error:
        if not _needs_more_samples(error, job, plan, kind):
            raise
        verdict = _compare_once(job, plan, steps, seconds, kind, own_size=True, sketch=sketch, show=show)
    if verdict.code == "V005" and not quiet:
        verdict = _retry_without_draws(verdict, lambda: verify(job, plan, steps, device, True, 0.0))
    if verdict.code in JOB_CODES and not quiet:
        verdict = dataclasses.replace(verdict, problems=_check_job(job, plan))
    return verdict


def _check_job(job: Job, plan: Plan) -> tuple[Problem, ...]:
    """Problems found by the job check, which splits only the batch. Empty if it cannot identify the cause in the job."""
    return tuple(problem for problem in job_check.check_job(job, plan).problems if problem.what != UNLOCATED)


def _compare_once(
    job: Job, plan: Plan, steps: int, seconds: float, kind: str, *, own_size: bool, sketch: Sketch | None, show: ShowVerdict
) -> Verdict:
    """Compare once. `own_size`: all batches have the job's own size."""
    logic = precision.make_fp32_plan(plan)
    own, clip = find_algorithm(logic), CLIP
    if own is not None:
        (logic, steps), seconds = own.shorten(logic, steps), 0.0
        clip = CLIP if job.clip is not None else NO_CLIP
    with ScratchFolder("verify") as folder:
        first = Scenario(job, job, plan, logic, steps, kind, clip, seconds, folder, Analysis(own_formats=sketch))
        scenario, expected = _train_reference(first, own_size)
        algorithm = None
        if own is not None:
            expected, algorithm = _run_algorithm(own, expected, scenario)
        return _Comparison(scenario, expected, own, algorithm, show).run()


def _validate_inputs(job: Job, plan: Plan, kind: str) -> None:
    """Raise the errors of an invalid job or plan before processes are started."""
    check_devices(kind, plan.world - plan.server_count)
    check_plan(job, plan, kind)
    check_unshared(job)


def _retry_without_draws(verdict: Verdict, again: Callable[[], Verdict]) -> Verdict:
    """Replace the cause of a verdict that blames random numbers, if a difference remains without draws."""
    with disable_draws():
        still = again()
    return verdict if still.equal else dataclasses.replace(verdict, code=still.code, cause=still.cause, where=still.where)


def _run_algorithm(own: ReferenceAlgorithm, one: Trace, scenario: Scenario) -> tuple[Trace, AlgorithmReference]:
    """Train the plan's own algorithm in one process, clipped as on `one` device, and measure its distance from `one`."""
    plan, steps = scenario.logic, len(one.facts["rows"])

    def train_alone(place: Place) -> dict[str, Any]:
        data, holder = _record_data(scenario.hard)
        noting, moves = dataclasses.replace(scenario.hard, data=data), lambda: place.set_phase("forward")
        out = own.train(noting, plan, steps, one.facts["clip"], torch.float64, scenario.device, moves=moves)
        return {"metrics": {}, **out, "seen": holder[0].seen, "names": [], "own": None, "mean": one.facts["mean"]}

    trace = Trace.from_process(scenario.folder / "algorithm", train_alone, "the plan's algorithm in one process")
    return trace, measure_algorithm(own.describe(plan), one, trace)


def _filter_inexact(
    actual: Trace, ranks: list[dict[str, Any]], expected: Trace, own: ReferenceAlgorithm, plan: Plan
) -> Trace:
    """Remove from the candidate's `inexact` the lines that its algorithm also has, and add limits of the algorithm itself."""
    lines = [line for line in actual.facts["inexact"] if line not in list_algorithm_notes(plan)]
    alone = "which the algorithm in one process computes per local batch"
    norms = sorted({name for r in ranks for name in r["batch_norms"]})
    if own.by_local_batch and norms:
        lines.append(f"batch statistics in {norms[0]} cover all replicas, {alone}")
    elif own.by_local_batch and expected.facts["mean"] is False:
        lines.append(f"the loss couples samples of several replicas, {alone}")
    return dataclasses.replace(actual, facts={**actual.facts, "inexact": lines})


class _Comparison:
    """Compares the plan's ranks with the reference, part by part (`proof/candidate.py`). `verdict` covers the parts that all ranks have finished."""

    def __init__(self, scenario: Scenario, expected: Trace, own: ReferenceAlgorithm | None, algorithm: AlgorithmReference | None, show: ShowVerdict):
        self.scenario, self.expected, self.own, self.algorithm, self.show = scenario, expected, own, algorithm, show
        self.ranks = [dict[str, Any]() for _ in range(scenario.logic.world)]
        """Reported facts of each rank, for the parts that are compared."""
        self.part_facts = [dict[int, dict[str, Any]]() for _ in candidate.PARTS]
        """For each part, the reported facts by rank."""

    def run(self) -> Verdict:
        """Train the ranks and compare."""
        plan = self.scenario.logic
        fork.run_ranks(self._run_rank, plan.world, fork.Listener(on_message=self.receive_message), uniform=plan.pp == 1)
        return self.verdict

    def _run_rank(self, place: Place) -> dict[str, Any]:
        set_rank_variables(place.rank, self.scenario.logic.world)
        return candidate.train_candidate(self.scenario, self.expected.facts, place)

    def receive_message(self, rank: int, message: dict[str, Any]) -> None:
        """Handle the report of a rank that has finished a part."""
        if message["kind"] == candidate.PART:
            number = message["number"]
            self.part_facts[number][rank] = message["value"]
            if len(self.part_facts[number]) == len(self.ranks):
                self._finish_part(number)

    def _finish_part(self, number: int) -> None:
        for rank, facts in self.part_facts[number].items():
            self.ranks[rank] |= facts
        (self._judge_small_batches, self._judge_full_batches, self._judge_formats)[number]()
        self.show(self.verdict)

    def _judge_small_batches(self) -> None:
        scenario, expected, own = self.scenario, self.expected, self.own
        plan, facts = scenario.plan, expected.facts
        actual = candidate.gather_trace(scenario.folder, self.ranks)
        named = actual.facts["inexact"]
        if own is not None:
            actual = _filter_inexact(actual, self.ranks, expected, own, scenario.logic)
        self.actual, dry = actual, scenario.analysis.messages
        verdict = judge_traces(expected, actual, self.ranks, scenario.logic, dry, scenario.folder, algorithm=self.algorithm)
        if facts.get("late") and own is None:
            verdict = blame_call_count(verdict, facts["late"])
        rounded: Iterable[str] = precision.inexact_reasons(plan) if precision.is_enabled(plan) else ()
        if own is not None and precision.is_enabled(plan):
            rounded = (f"{plan.precision} rounds differently from fp32; this proof covers the logic, in float64",)
        lines = [full_batch.FullBatchCase(**facts["own"]).description] if facts["own"] else []
        if "untried" in facts:
            lines.append(f"a step in the plan's own formats was not tried: one device fails in {facts['untried']}")
        if facts.get("formats") and not actual.facts["inexact"]:
            lines += plan_formats.describe_blind_spots(facts["formats"])
        self.verdict = dataclasses.replace(
            verdict, plan=str(plan), inexact=(*named, *rounded), notes=tuple(self.ranks[0]["notes"]),
            forced=verdict.forced | {"own": facts["own"], "then": lines},
        )  # fmt: skip

    def _judge_full_batches(self) -> None:
        parts = [rank["parts"] for rank in self.ranks]
        tensors = candidate.gather_rank_tensors(self.scenario.folder, FULL_BATCH_TENSORS, parts)
        self.actual = dataclasses.replace(self.actual, **tensors)
        probes = full_batch.compare_full_batches(self.expected, self.actual, self.ranks)
        self._add_probes(probes, lambda: full_batch.explain_full_batches(probes, self.expected, self.verdict.plan))

    def _judge_formats(self) -> None:
        if self.actual.facts["inexact"]:
            return
        parts = [rank["formats"]["parts"] for rank in self.ranks]
        tensors = candidate.gather_rank_tensors(self.scenario.folder, FORMAT_TENSORS, parts)
        actual = dataclasses.replace(self.actual, **tensors)
        probes = plan_formats.compare_formats(self.expected, actual, self.ranks, self.scenario.analysis.own_messages)
        self._add_probes(probes, lambda: plan_formats.explain_formats(probes))

    def _add_probes(self, probes: tuple[Probe, ...], cause: Callable[[], tuple[str, str]]) -> None:
        """Add the comparisons of a part to the verdict. `cause`: (code, sentence), if they are the first that differ."""
        before = self.verdict
        self.verdict = dataclasses.replace(before, probes=(*before.probes, *probes))
        if before.equal and not self.verdict.equal:
            named = self.actual.facts["inexact"]
            code, text = ("V010", named[0]) if named else cause()
            self.verdict = dataclasses.replace(self.verdict, code=code, cause=text)


def _analyze_job(scenario: Scenario, result: fork.ForkResult[Analysis], place: Place) -> dict[str, Any]:
    """Analyze the model as a rank does, and make dry runs of the first step in float64 and in the plan's formats. This is the work of a
    process that runs while the reference trains."""
    set_rank_variables(None, scenario.logic.world)
    place.beat(-1, "build")
    clips = {"clip": 1.0, "clips": dict.fromkeys((phase.name for phase in scenario.hard.phases or ()), 1.0)}
    hard = phases.apply_clips(scenario.hard, clips)  # like the reference, with another norm: the messages are the same
    float64 = _make_sketch(hard, scenario.logic, torch.float64, scenario.device)
    messages = _run_dry(hard, scenario.logic, torch.float64, scenario.device, float64)
    own, own_messages = scenario.analysis.own_formats, scenario.analysis.own_messages
    if scenario.seconds:
        own = _make_sketch(hard, scenario.plan, None, scenario.device) if own is None else own
        own_messages = _run_dry(_shrink_format_job(hard, scenario, partial(make_model, hard)), scenario.plan, None, scenario.device, own)
    result.put(Analysis(float64, own, messages, own_messages))
    return {}


def _make_sketch(job: Job, plan: Plan, cast: torch.dtype | None, device: str) -> Sketch | None:
    """Sketch of the model as every rank would make it. None on a GPU, where kernels may differ, and on any exception: ranks raise it again."""
    with contextlib.suppress(Exception):
        return sketch_without_ranks(job, plan, CPU, cast) if device == "cpu" else None
    return None


def _run_dry(
    job: Job, plan: Plan, cast: torch.dtype | None, device: str, sketch: Sketch | None
) -> list[dict[str, Any]] | str:
    """Messages of every rank in a dry run of the first step, or the reason for having none."""
    if plan.processes == "one":
        return [{"totals": {}, "sizes": None}]
    if device != "cpu":
        DIRECT_DEVICES.set(())
    try:
        return [dataclasses.asdict(sent) for sent in trace_first_step(job, plan, cast, sketch)]
    except PlaitError as error:
        return str(error.problems[0].why or error.problems[0].what)
    except Exception as error:  # the job's code fails on fake tensors
        return f"it raised {summarize_error(error)}"


def _train_reference(scenario: Scenario, own_size: bool) -> tuple[Scenario, Trace]:
    """Train the reference. Returns the scenario with the trained job, and the trace. The short batch leaves one rank without a sample; a model
    that cannot train on so few samples gets two for each part."""
    job, plan = scenario.job, scenario.logic
    if job.weights is not None:
        open_weights(Path(job.weights))  # report unreadable weights before the start
    make = partial(harden, job, plan, least_eps=EPS if scenario.clip < NO_CLIP else UNCLIPPED_EPS)
    hards = [] if own_size else [make(short) for short in (max(1, plan.shares - 1), 2 * count_parts(plan))]
    if own_size or job.batch > hards[0].batch:  # a loss that needs many samples gets the job's own batch
        hards.append(make(0, job.batch))
    failed: list[PlaitError] = []
    for hard in hards:
        tried = dataclasses.replace(scenario, hard=hard)
        try:
            with fork.ForkResult[Analysis]() as analysis:
                analyse = partial(_analyze_job, tried, analysis)
                trace = Trace.from_process(scenario.folder / "reference", partial(_run_one_device, tried), REFERENCE, analyse)
                return dataclasses.replace(tried, hard=phases.apply_clips(hard, trace.facts), analysis=analysis.take()), trace
        except PlaitError as error:
            if error.codes[0] in KILLED_CODES:  # unrelated to the batch
                raise
            failed.append(error)
    raise _explain_failure(failed[-1], hards[-1], scenario.device) from None


def _needs_more_samples(error: PlaitError, job: Job, plan: Plan, device: str) -> bool:
    """True if a rank failed because the job, in plain PyTorch, cannot train on as few samples as a part of a small batch has."""
    own = job.batch // count_parts(plan)
    if error.codes[0] != "C005" or own < 2:
        return False
    fails, fine = (bool(_try_plain_step(dataclasses.replace(job, batch=n), None, device)) for n in (1, own))
    return fails and not fine


def _explain_failure(error: PlaitError, job: Job, device: str) -> PlaitError:
    """Explain a failure of the reference: the job itself fails (in its own formats or in float64), or plait fails to record, widen or save."""
    problem = error.problems[0]
    if problem.code != "C005":
        return error
    if own := _try_plain_step(job, None, device):
        code, what = "J011", f"the job fails on one device, in plain PyTorch: {own}"
        why, fix = "a step in its own number formats fails without any plait code around it", ()
    elif wide := _try_plain_step(job, torch.float64, device):
        code, what = "J051", f"the job fails in float64 only: {wide}"
        why = "a step in its own number formats works; proofs and the job check compute in float64"
        fix = ("let the model follow the dtype of its weights: use x.to(weight.dtype), assert no dtype",)
    else:
        code, what = "P072", f"plait cannot {_find_activity(error.trace)}: {problem.what.removeprefix(f'{REFERENCE} raised ')}"
        why, fix = "a step of the job in plain PyTorch works, in its own number formats and in float64", ()
    return PlaitError(dataclasses.replace(problem, code=code, what=what, why=why, fix=fix), error.exit_code, error.trace)


def _try_plain_step(job: Job, dtype: torch.dtype | None, device: str) -> str:
    """Exception of a step of the job in plain PyTorch, in a number format (None: its own), as text; "" if the step works. Raises the errors of
    jobs that plait rejects."""
    try:
        fork.run_ranks(lambda _: reference.run_plain_step(job, dtype, device) or {}, 1)
    except PlaitError as error:
        if error.codes[0] != "C005":
            raise
        return error.problems[0].what.removeprefix("rank 0 raised ")
    return ""


ACTIVITIES = {
    "tensors/float64.py": "compute the job in float64", "model/": "record the job's forward pass",
    "randomness/": "key the job's random numbers", "proof/activation_recorder.py": "record the outputs of the job's modules",
    "safetensors": "save the job's results", "proof/probes.py": "save the job's results",
}  # fmt: skip


def _find_activity(trace: str) -> str:
    """Activity of plait when the reference failed, by the last traceback line in one of its files."""
    last, what = max((trace.rfind(file), what) for file, what in ACTIVITIES.items())
    return what if last >= 0 else "follow the job's forward pass"


def _run_one_device(scenario: Scenario, place: Place) -> dict[str, Any]:
    """Train the reference in its own process and return its facts and tensors."""
    job = scenario.hard
    models = list[reference.OneDevice]()
    data, holder = _record_data(job)

    def finish_steps(one: reference.OneDevice) -> dict[str, Any]:
        float64_check.check_float64(one)
        one.recorder.save(scenario.folder / "noted.safetensors")
        one.recorder.close()  # differences in later steps are not located
        models.append(one)
        return full_batch.run_full_batches(scenario.job, one, scenario.seconds)

    make_optimizer(
        job, dict(make_model(job).named_parameters())
    )  # raises if plait cannot train the job
    out = (reference if job.phases is None else phases).train_reference(
        dataclasses.replace(job, data=data), scenario.steps, scenario.clip, torch.float64, scenario.device,
        moves=lambda: place.set_phase("forward"), then=finish_steps,
    )  # fmt: skip
    if scenario.seconds:
        step = _shrink_format_job(job, scenario, lambda: models[0].model)
        out |= run_format_reference(step, scenario.plan, models[0], out["clip"])
    out |= _find_carried_state(scenario.job, models[0], scenario.plan) if models and job.phases is None else {}
    return {**out, "seen": holder[0].seen, "names": []}


def _find_carried_state(job: Job, one: reference.OneDevice, plan: Plan) -> dict[str, Any]:
    """Find state that the model carries from call to call. `changes`: names of values outside parameters and buffers that a call changes;
    `late`: why later outputs depend on them (`proof/job/call_counts.py`)."""
    data = one.job.data()
    read = next(reference.iterate_samples(one.job, data))[2]
    inputs = reference.prepare_batch(one, data, read)[0]

    def run() -> list[Tensor]:
        with torch.no_grad(), reference.Float64Mode(), one.keyed.forward_pass(one.steps, 0, len(read)):
            outputs = reference.call_model(one.model, inputs)
        return [t for t in dataclass_leaves(outputs) if isinstance(t, Tensor)]

    before = call_counts.collect_kept_values(one.model)
    run()
    changes = call_counts.ChangedValues.from_values(before, call_counts.collect_kept_values(one.model)).values
    late = call_counts.find_late_difference(one.model, run, plan.microbatches, job.steps) if changes else None
    return {"changes": list(changes), "late": late.description if late else None}


def _record_data(job: Job) -> tuple[Callable[[], Any], list[Any]]:
    """The job's data, checked, and a list that receives the opened data."""
    holder = list[Any]()

    def data() -> Any:
        holder.append(validate_data(job.data(), "Job(data=…)"))
        if len(holder) == 1 and is_map(holder[0]):
            make_sketch_batch(holder[0], 1)  # raises if samples are not pairs
        return holder[-1]

    return data, holder


def _shrink_format_job(hard: Job, scenario: Scenario, model: Callable[[], torch.nn.Module]) -> Job:
    """The job of the step in the plan's formats: with a small batch, unless the job needs its own batch size."""
    return hard if hard.batch == scenario.job.batch else plan_formats.shrink_batch(hard, scenario.plan, model())


def run_format_reference(job: Job, plan: Plan, one: reference.OneDevice, clip: float) -> dict[str, Any]:
    """Run the step of one device in the plan's formats; empty if plain PyTorch lacks an operator."""
    if plan.compile:
        return {}
    try:
        told, tensors = plan_formats.collect_facts(plan_formats.FormatReference(job, plan, one, clip))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"untried": f"{plan.precision}: {summarize_error(error)}"}
    return {"formats": told, **tensors}
