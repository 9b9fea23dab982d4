"""The plan and the job that a command names.

The help on a key of a plan: its line, and for a way to split the text of its technique.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from plait.config.command_options import SplitOptions, out_of_range
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job, load_job
from plait.config.keys import KEYS, Key
from plait.config.plan import Plan
from plait.launch.find_launcher import mismatch
from plait.launch.forkable import answer_by_forks
from plait.launch.place import joined, world


def both(options: SplitOptions, others: Sequence[Problem] = ()) -> tuple[Plan, Job]:
    """The plan and the job, with everything that is wrong with either, and with the options, raised at once.

    `others`: what is wrong with them beside numbers that are too small.
    """
    answer_by_forks()
    plan = job = None
    problems = [*out_of_range(options), *others]
    asked = options.nproc if options.nproc is None or options.nproc > 0 else None  # else it is among the problems
    auto, count = options.plan == "auto", None
    try:
        count = world(asked)
        plan = None if auto else _filled(Plan.read(options.plan or "dp=*"), count)
    except PlaitError as error:
        problems += error.problems
    try:
        job = options.loaded or load_job(options.job, options.arguments)
    except PlaitError as error:
        problems += error.problems
    if auto and job is not None and not problems:
        from plait.cli.plan import chosen

        plan = chosen(job, options)
    if problems or plan is None or job is None:
        raise PlaitError(problems)
    return plan, job


def _filled(plan: Plan, count: int | None) -> Plan:
    """The plan for `count` processes. L005 if a launcher started another number of them than the plan needs, else P001."""
    try:
        return plan.fill(count)
    except PlaitError as error:
        member = joined()
        if member is None:
            raise
        fix = (line for line in error.problems[0].fix if line.startswith("--plan"))
        raise PlaitError(mismatch(member, f'--plan "{plan}" (processes: {plan.world})', fix)) from error


TECHNIQUES = {
    **dict.fromkeys(("pp", "schedule", "stages_per_rank"), "pipeline/strategy"), "dp": "data/strategy",
    **dict.fromkeys(("fsdp", "zero_stage", "shard_over_cp"), "fsdp/strategy"), **dict.fromkeys(("tp", "sequence_parallel", "async_tp"),
        "tensor/strategy"),
    **dict.fromkeys(("cp", "cp_method"), "context/strategy"), **dict.fromkeys(("ep", "token_dispatcher"), "expert/strategy"),
    "microbatches": "accumulate",
    **dict.fromkeys(
        ("replica_groups", "outer_sync", "sync_every", "warmup_sync_steps", "outer_lr", "outer_momentum", "num_fragments", "fragment_delay",
         "fragment_alpha"), "replica_groups/strategy"),
    **dict.fromkeys(("staleness", "server_update", "quorum", "servers"), "server/strategy"), "batch_split": "shares/strategy",
    "activation_checkpointing": "activation_checkpointing", "offload": "offload",
    **dict.fromkeys(("precision", "fp8_recipe"), "precision"), "compile": "compiled", "processes": "threads",
    **dict.fromkeys(("grad_compression", "compression_rank"), "compression/strategy"),
}  # fmt: skip
"""Which file of `parallel/` explains a key of a plan."""


def key_help(key: Key) -> str:
    return key.help + (f" ({', '.join(key.choices)})" if key.choices else "")


def explained(name: str) -> str:
    """What a key of a plan does; for a way to split, the text of its technique."""
    module = TECHNIQUES.get(name)
    text = f"{name}, in the table [{KEYS[name].table}] of a plan: {key_help(KEYS[name])}"
    if module is None:
        return text
    source = (Path(__file__).parents[1] / "parallel" / f"{module}.py").read_text(encoding="utf-8")
    return f"{text}\n\n{ast.get_docstring(ast.parse(source))}"
