"""Table of plan keys and job fields that exclude each other. Refusals, the planner and docs/techniques/README.md read it.

Each row has two terms, the reason of the conflict, and fixes. Conflicts that depend on arithmetic (a batch that does not split) or on the
model are raised by the strategies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.keys import INNER_AXES, KEYS, SPLIT_SCHEDULES
from plait.config.plan import Plan

THREADS = "processes=one"
SPLIT_BACKWARD = f"schedule={'|'.join(SPLIT_SCHEDULES)}"
BF16 = "grad_compression=bf16    rounds each value independently"


@dataclass(frozen=True)
class Conflict:
    """Two terms that exclude each other. A term is `key` (not its default), `key=value|value`, or `Job.field` (given)."""

    code: str
    first: str
    second: str
    why: str
    fix: tuple[str, ...]
    """Fixes, in which `{key}` is replaced by the plan's value."""
    requires: tuple[str, ...] = ()
    """Terms that must all be present."""
    unless: tuple[str, ...] = ()
    """Terms of which none may be present."""

    def find_problem(self, job: Job, plan: Plan) -> Problem | None:
        """Return the problem of a plan that has both terms."""
        if not (_parse_condition(self.first)(job, plan) and _parse_condition(self.second)(job, plan)):
            return None
        if not all(_parse_condition(term)(job, plan) for term in self.requires) or any(_parse_condition(term)(job, plan) for term in self.unless):
            return None
        what = f"{_format_term(self.first, plan)} does not work with {_format_term(self.second, plan)}"
        return Problem(self.code, what, why=self.why, fix=tuple(fix.format_map(vars(plan)) for fix in self.fix))


@cache
def _parse_condition(term: str) -> Callable[[Job, Plan], bool]:
    """Return a function that tests a job and a plan for a term. Cached, because the planner tests every candidate plan."""
    key, _, words = term.partition("=")
    if key.startswith("Job."):
        return lambda job, _: getattr(job, key[4:]) is not None
    if not words:
        return lambda _, plan: plan.changes(key)
    kind = KEYS[key].kind
    values = [word == "true" if kind is bool else kind(word) for word in words.split("|")]
    return lambda _, plan: getattr(plan, key) in values


def _format_term(term: str, plan: Plan) -> str:
    """Format the term with the plan's value."""
    key = term.partition("=")[0]
    return key if key.startswith("Job.") else plan.word(key)


def find_conflicts(job: Job, plan: Plan) -> Iterator[Problem]:
    """Yield the conflicts of a plan."""
    return (problem for row in CONFLICTS if (problem := row.find_problem(job, plan)) is not None)


def _threads_conflict(code: str, first: str, why: str, *fix: str) -> Conflict:
    return Conflict(code, first, THREADS, why, fix)


def _phases_conflict(second: str, why: str) -> Conflict:
    return Conflict("P091", "Job.phases", second, why, (f"leave out {second}", "use dp, fsdp or tp, which work with phases"))


def _server_conflict(second: str, why: str, *fix: str) -> Conflict:
    return Conflict("P060", "outer_sync=async", second, why, fix, requires=("replica_groups",))


def _compression_conflict(second: str, why: str, *fix: str, first: str = "grad_compression") -> Conflict:
    return Conflict("P080", first, second, why, (*fix, "leave out grad_compression"), unless=("replica_groups",))


def _split_conflict(sharded: str, without: tuple[str, ...] = ()) -> Conflict:
    why = "the second half of a backward needs parameters that zero_stage=3 frees after the first"
    return Conflict("P027", SPLIT_BACKWARD, "zero_stage=3", why, ("zero_stage=2", "schedule=1f1b"), requires=("pp", sharded), unless=without)


def _group_conflict(key: str) -> Conflict:
    why = "a rank has a shard of a tensor, and the scale of int8 and the directions of powersgd are those of the full tensor"
    return Conflict("P080", "grad_compression=int8|powersgd", key, why, (BF16, "leave out grad_compression"), requires=("replica_groups",))


ONE_PROCESS = "a failed group is handled as one process; several processes would have to agree on the failure"
MULTI_PROCESS_FIX = ("outer_sync=local sync_every=8    for groups of several processes", "leave out the axes inside groups")

CONFLICTS = (
    _threads_conflict("P033", "tp", "layer shards belong to processes, not to threads", '--plan "tp={tp}"'),
    _threads_conflict("P041", "cp", "sequence shards belong to processes, not to threads", '--plan "cp={cp}"'),
    _threads_conflict("P050", "ep", "experts are distributed over processes, not over threads", '--plan "ep={ep}"'),
    _threads_conflict("P027", "pp", "pipeline stages belong to processes, not to threads", '--plan "pp={pp}"'),
    _threads_conflict("P019", "fsdp", "threads of one process use the same memory, so there is nothing to shard", '--plan "fsdp={fsdp}"'),
    _threads_conflict("P019", "offload=all", "fsdp copies the parameters to the device, and threads of one process have nothing to shard",
             "offload=optimizer", "leave out processes"),
    Conflict("P019", "replica_groups", THREADS, "each group needs at least one process", ("leave out processes",),
        unless=("outer_sync=async",)),
    _threads_conflict("P020", "activation_checkpointing",
        "recomputation finds its random numbers by the state of torch's generator, which all threads use",
             '--plan "dp={dp} activation_checkpointing={activation_checkpointing}"'),
    _threads_conflict("P017", "compile=true", "threads of one process would compile and run the same graph at the same time",
             '--plan "dp={dp} compile=true"', '--plan "dp={dp} processes=one"'),
    Conflict("P033", "async_tp=true", "precision=fp8",
             "torchao's layers compute the fp8 matmuls themselves, and the fused operator has no scales",
             ("precision=bf16", "async_tp=false"), requires=("tp",)),
    Conflict("P021", "offload=all", "dp", "fsdp copies the parameters to the device one unit at a time, and dp alone does not",
             ('--plan "fsdp={dp} offload=all"', "offload=optimizer"), unless=("fsdp", "shard_over_cp")),
    Conflict("P050", "ep", "offload=all", "fsdp copies parameters to the device, except those of experts", ('--plan "ep={ep}"',)),
    Conflict("P035", "activation_checkpointing=selective", "compile=true",
             "it stores the outputs of individual operators, and sees a compiled graph as one operator",
             ("activation_checkpointing=full", "compile=false")),
    Conflict("P027", SPLIT_BACKWARD, "compile=true",
             "the schedule computes weight gradients later than input gradients, and a compiled graph computes all at once",
             ("schedule=1f1b", "compile=false"), requires=("pp",)),
    _split_conflict("fsdp"),
    _split_conflict("shard_over_cp", without=("fsdp",)),
    _compression_conflict(THREADS, "threads of one process send no messages", "leave out processes"),
    _compression_conflict("fsdp", "a rank of fsdp has only the sum of its shard, and no full gradient for a residual",
                "dp={fsdp}    replicas instead of shards"),
    _compression_conflict("cp", "each rank of cp has a part of the gradient of the same samples, and the same message adds the parts",
                "dp={cp}    replicas instead"),
    _compression_conflict("ep", "only some ranks have an expert, and its gradient already covers the samples of several ranks", "leave out ep"),
    _compression_conflict("tp", "a rank of tp has a shard of a parameter, and the largest value of the shard would set the scale", BF16,
        first="grad_compression=int8"),
    _compression_conflict("tp",
                "a rank of tp has a shard of a matrix, and its directions are not those of the full matrix", BF16, first="grad_compression=powersgd"),
    _compression_conflict("batch_split=auto",
        "residuals depend on a rank's samples; local batches that follow measured speeds make them irreproducible",
                "batch_split=2:1    a fixed ratio"),
    _compression_conflict("precision=fp16", "the loss scale changes between steps, and a residual would have a different scale than the gradient",
                "precision=bf16"),
    *(_group_conflict(key) for key in ("fsdp", "shard_over_cp", "tp", "ep")),
    *(_server_conflict(axis, ONE_PROCESS, *MULTI_PROCESS_FIX) for axis in (*INNER_AXES, THREADS)),
    _server_conflict("precision=fp16", "its loss scale changes once per step, and here each group sends its gradients separately", "precision=bf16"),
    _server_conflict("offload", "groups have no optimizer state, and the server's is already in host memory", "leave out offload"),
    _server_conflict("grad_compression", "this version sends uncompressed gradients to a server", "outer_sync=local grad_compression=int8"),
    _server_conflict("batch_split", "groups take samples from one queue, so a fast group already computes more of them", "leave out batch_split"),
    Conflict("P066", "Job.ema", "replica_groups",
             "each group has different weights between two synchronizations, and a server's weights are on no rank that trains",
             ("ema=None", "leave out replica_groups")),
    _phases_conflict("pp", "stages run one forward and backward per step"),
    _phases_conflict("cp", "the sequences to shard are found for one forward pass"),
    _phases_conflict("ep", "gradients of experts are reduced separately from the others, for one loss"),
    _phases_conflict("replica_groups", "one optimizer synchronizes the groups"),
    _phases_conflict(THREADS, "replicas in threads do not support phases"),
    _phases_conflict("grad_compression", "a residual is stored for one reduction per step"),
    _phases_conflict("compile=true", "all phases would be compiled into one graph"),
    _phases_conflict("precision=fp16", "one loss scale does not fit several losses"),
    _phases_conflict("batch_split=auto", "a rank's speed is measured for one pass per step"),
)  # fmt: skip


def find_ineffective_keys(plan: Plan) -> list[Problem]:
    """Return P030 for every given key without an effect under this plan."""
    axes = {"zero_stage": ("fsdp", plan.shards), "schedule": ("pp", plan.pp), "stages_per_rank": ("pp", plan.pp)}
    axes |= {"sequence_parallel": ("tp", plan.tp), "cp_method": ("cp", plan.cp), "token_dispatcher": ("ep", plan.ep)}
    axes |= {"shard_over_cp": ("cp", plan.cp)}
    axes |= dict.fromkeys(("outer_sync", "sync_every", "warmup_sync_steps"), ("replica_groups", plan.replica_groups))
    problems = []
    for key, (axis, size) in axes.items():
        if size == 1 and plan.changes(key) and not (key == "zero_stage" and plan.offload == "all"):
            what = f"{plan.word(key)} has no effect: the plan has no {axis}"
            problems.append(Problem("P030", what, why=f"{axis}=1", fix=(f"{axis}=2", f"leave out {key}")))
    for key, word in _list_needed_words(plan):
        if plan.changes(key):
            what = f"{plan.word(key)} has no effect: the plan has no {word}"
            problems.append(Problem("P030", what, fix=(word, f"leave out {key}")))
    return problems


def _list_needed_words(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield keys that need another key, with the missing word."""
    if plan.outer_sync != "diloco":
        yield from ((key, "outer_sync=diloco") for key in ("outer_lr", "outer_momentum", "num_fragments"))
    if plan.num_fragments == 1:
        yield from ((key, "num_fragments=2") for key in ("fragment_delay", "fragment_alpha") if plan.outer_sync != "diloco")
    if plan.outer_sync != "async":
        yield from ((key, "outer_sync=async") for key in ("staleness", "server_update", "quorum", "servers"))
    if plan.grad_compression != "powersgd":
        yield "compression_rank", "grad_compression=powersgd"
    if not (plan.tp > 1 and plan.uses_sequence_shards):
        yield "async_tp", "tp=2" if plan.tp == 1 else "compile=false" if plan.compile else "sequence_parallel=true"
    if plan.precision != "fp8":
        yield "fp8_recipe", "precision=fp8"
