"""Loads the plan and the job of a command, and formats the help of plan keys."""

import ast
from collections.abc import Sequence
from pathlib import Path

from plait.config.command_options import SplitOptions, find_out_of_range
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job, load_job
from plait.config.keys import KEYS, Key
from plait.config.plan import Plan
from plait.launch.find_launcher import launcher_mismatch
from plait.launch.forkable import answer_by_forks
from plait.launch.place import count_ranks, find_rank_membership


def load_plan_and_job(options: SplitOptions, other_problems: Sequence[Problem] = ()) -> tuple[Plan, Job]:
    """Load the plan and the job. Raises all problems of both and of the options at once.

    `other_problems` are problems of the options other than values below the minimum.
    """
    answer_by_forks()
    plan = job = None
    problems = [*find_out_of_range(options), *other_problems]
    asked = options.nproc if options.nproc is None or options.nproc > 0 else None  # else it is among the problems
    auto, count = options.plan == "auto", None
    try:
        count = count_ranks(asked)
        plan = None if auto else _fill_plan(Plan.read(options.plan or "dp=*"), count)
    except PlaitError as error:
        problems += error.problems
    try:
        job = options.loaded or load_job(options.job, options.arguments)
    except PlaitError as error:
        problems += error.problems
    if auto and job is not None and not problems:
        from plait.cli.plan import choose_plan

        plan = choose_plan(job, options)
    if problems or plan is None or job is None:
        raise PlaitError(problems)
    return plan, job


def _fill_plan(plan: Plan, count: int | None) -> Plan:
    """Fill the plan for `count` processes. Raises L005 if a launcher started a different number, else P001."""
    try:
        return plan.fill(count)
    except PlaitError as error:
        member = find_rank_membership()
        if member is None:
            raise
        fix = (line for line in error.problems[0].fix if line.startswith("--plan"))
        raise PlaitError(launcher_mismatch(member, f'--plan "{plan}" (processes: {plan.world})', fix)) from error


TECHNIQUES = {
    **dict.fromkeys(("pp", "schedule", "stages_per_rank"), "pipeline/strategy"), "dp": "data/strategy",
    **dict.fromkeys(("fsdp", "zero_stage", "shard_over_cp"), "fsdp/strategy"), **dict.fromkeys(("tp", "sequence_parallel", "async_tp"),
        "tensor/strategy"),
    **dict.fromkeys(("cp", "cp_method"), "context/strategy"), **dict.fromkeys(("ep", "token_dispatcher"), "expert/strategy"),
    "microbatches": "accumulate",
    **dict.fromkeys(
        ("replica_groups", "outer_sync", "sync_every", "warmup_sync_steps", "outer_lr", "outer_momentum", "num_fragments", "fragment_delay",
         "fragment_alpha"), "replica_groups/strategy"),
    **dict.fromkeys(("staleness", "server_update", "quorum", "servers"), "server/strategy"), "batch_split": "batch_split/strategy",
    "activation_checkpointing": "activation_checkpointing", "offload": "offload",
    **dict.fromkeys(("precision", "fp8_recipe"), "precision"), "compile": "compiled", "processes": "threads",
    **dict.fromkeys(("grad_compression", "compression_rank"), "compression/strategy"),
}  # fmt: skip
"""The file of `parallel/` that documents a plan key."""


def format_key_help(key: Key) -> str:
    return key.help + (f" ({', '.join(key.choices)})" if key.choices else "")


def explain_key(name: str) -> str:
    """Return the help of a plan key, with the docstring of its strategy if it has one."""
    module = TECHNIQUES.get(name)
    text = f"{name}, in the table [{KEYS[name].table}] of a plan: {format_key_help(KEYS[name])}"
    if module is None:
        return text
    source = (Path(__file__).parents[1] / "parallel" / f"{module}.py").read_text(encoding="utf-8")
    return f"{text}\n\n{ast.get_docstring(ast.parse(source))}"
