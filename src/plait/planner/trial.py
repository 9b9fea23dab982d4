"""Time a few real steps of plans on CPU processes, to choose between plans with similar predictions.

All plans take steps in turn in the same processes, in an order shuffled every round. The measure is the CPU time of all threads, as the
minimum over the rounds, so that other load on the machine has little effect. A step takes as long as its slowest rank. Pipeline ranks wait for
each other as in their schedule table, simulated with the measured times of their actions. With more processes than cores, a step takes at least
the total time over the number of cores. Waiting for a core is not included.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.place import Place, count_cores
from plait.parallel.pipeline.runtime import PipelineRuntime
from plait.parallel.pipeline.schedule_search import compute_makespan
from plait.planner.estimate import StageSchedule, make_table

TRIAL_STEPS, WARMUP_STEPS = 9, 3
"""Steps of a trial, and warm-up steps among them."""


def time_plans(job: Job, plans: Sequence[Plan], ranks: int, rounds: int = TRIAL_STEPS - WARMUP_STEPS) -> list[float | str]:
    """Time a step of each plan on CPU processes: seconds, or the reason why it failed."""
    from plait.launch import fork

    job = replace(job, steps=10**9, evaluate=None)
    try:
        got = fork.run_ranks(partial(_time_steps, job=job, plans=plans, rounds=rounds), ranks)
    except PlaitError as error:
        if len(plans) == 1:
            return [error.problems[0].what]
        return [time_plans(job, [plan], ranks, rounds)[0] for plan in plans]
    found: list[float | str] = []
    for k, plan in enumerate(plans):
        why = got[0]["refused"].get(str(k))
        found.append(why or combine_ranks(plan, [rank["least"][k] for rank in got], [rank["actions"][k] for rank in got]))
    return found


def _time_steps(place: Place, job: Job, plans: Sequence[Plan], rounds: int) -> dict[str, Any]:
    """Measure on this rank the CPU seconds of a step of each plan and of its actions. Return also why plans were rejected."""
    import torch

    from plait.engine.engine import Engine

    place.connect(torch.device("cpu"))
    engines: dict[int, Engine] = {}
    refused: dict[str, str] = {}
    for k, plan in enumerate(plans):
        try:
            engines[k] = Engine(job, plan, place=place, device="cpu", on_nan="ignore", read_weights=False)
        except PlaitError as error:  # the same on all ranks
            refused[str(k)] = error.problems[0].what
            continue
        if (pipe := engines[k].rank_model.techniques.pipeline) is not None:
            pipe.clock.now = time.process_time
    sources = {k: engine.batches() for k, engine in engines.items()}
    least: list[float | None] = [None for _ in plans]
    actions: list[dict[str, float]] = [{} for _ in plans]
    for i in range(-WARMUP_STEPS, rounds):
        for k in random.Random(i).sample(sorted(engines), len(engines)):
            start = time.process_time()
            engines[k].step(next(sources[k]))
            took = time.process_time() - start
            if i >= 0 and took < (least[k] or inf):
                least[k], actions[k] = took, _sum_actions(engines[k].rank_model.techniques.pipeline)
    return {"least": least, "actions": actions, "refused": refused}


def _sum_actions(pipe: PipelineRuntime | None) -> dict[str, float]:
    """Sum seconds of the last step's actions by kind and stage, with their messages: `F1` is all forwards of stage 1."""
    found: dict[str, float] = {}
    for name, begin, end in pipe.clock.spans if pipe is not None else ():
        key = name.split()[-1].partition(".")[0]
        found[key] = found.get(key, 0.0) + end - begin
    return found


def combine_ranks(plan: Plan, ranks: list[float], actions: list[dict[str, float]]) -> float:
    """Predict seconds of a step on idle cores, from the CPU time of its ranks and their actions."""
    most = max(max(ranks), sum(ranks) / min(count_cores(), len(ranks)))
    if plan.pp == 1:
        return most
    order = make_table(StageSchedule.from_plan(plan), plan.microbatches)
    own = max(total - sum(did.values()) for total, did in zip(ranks, actions))
    took: dict[str, float] = {}
    for did in actions:
        took |= {key: max(took.get(key, 0.0), seconds / plan.microbatches) for key, seconds in did.items()}
    stages = range(len(order.owner))
    inputs = [took.get(f"I{s}", 0.0) + took.get(f"B{s}", 0.0) for s in stages]
    times = [took.get(f"F{s}", 0.0) for s in stages], inputs, [took.get(f"W{s}", 0.0) for s in stages]
    return max(most, own + compute_makespan(order, times, 0.0))
