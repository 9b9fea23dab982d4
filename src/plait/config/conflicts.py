"""What of a plan does not work together: one table. Refusals before a run, the planner's and docs/techniques/README.md are read off it.

Each row names two things, why they cannot be had together, and what to write instead. What takes arithmetic (a batch that does not split) or
the model is refused by the strategies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.keys import KEYS, SPLIT, WITHIN
from plait.config.plan import Plan

THREADS = "processes=one"
SPLIT_BACKWARD = f"schedule={'|'.join(SPLIT)}"
BF16 = "grad_compression=bf16    rounds each value independently"


@dataclass(frozen=True)
class Conflict:
    """Two things that do not work together. Each is `key` (not its default), `key=value|value`, or `Job.field` (given)."""

    code: str
    first: str
    second: str
    why: str
    fix: tuple[str, ...]
    """With the plan's values in the place of `{key}`."""
    given: tuple[str, ...] = ()
    """Only together with all of these."""
    without: tuple[str, ...] = ()
    """Only where none of these is there."""

    def problem(self, job: Job, plan: Plan) -> Problem | None:
        """The refusal of a plan that has both."""
        if not (_condition(self.first)(job, plan) and _condition(self.second)(job, plan)):
            return None
        if not all(_condition(term)(job, plan) for term in self.given) or any(_condition(term)(job, plan) for term in self.without):
            return None
        what = f"{_shown(self.first, plan)} does not work with {_shown(self.second, plan)}"
        return Problem(self.code, what, why=self.why, fix=tuple(fix.format_map(vars(plan)) for fix in self.fix))


@cache
def _condition(term: str) -> Callable[[Job, Plan], bool]:
    """Whether a job under a plan has it. The planner tests every plan that it considers, so a term is parsed once."""
    key, _, words = term.partition("=")
    if key.startswith("Job."):
        return lambda job, _: getattr(job, key[4:]) is not None
    if not words:
        return lambda _, plan: plan.changes(key)
    kind = KEYS[key].kind
    values = [word == "true" if kind is bool else kind(word) for word in words.split("|")]
    return lambda _, plan: getattr(plan, key) in values


def _shown(term: str, plan: Plan) -> str:
    """The term with the plan's value."""
    key = term.partition("=")[0]
    return key if key.startswith("Job.") else plan.word(key)


def found(job: Job, plan: Plan) -> Iterator[Problem]:
    """What a plan is refused for."""
    return (problem for row in CONFLICTS if (problem := row.problem(job, plan)) is not None)


def _threads(code: str, first: str, why: str, *fix: str) -> Conflict:
    return Conflict(code, first, THREADS, why, fix)


def _phases(second: str, why: str) -> Conflict:
    return Conflict("P091", "Job.phases", second, why, (f"leave out {second}", "use dp, fsdp or tp, which work with phases"))


def _server(second: str, why: str, *fix: str) -> Conflict:
    return Conflict("P060", "outer_sync=async", second, why, fix, given=("replica_groups",))


def _compressed(second: str, why: str, *fix: str, first: str = "grad_compression") -> Conflict:
    return Conflict("P080", first, second, why, (*fix, "leave out grad_compression"), without=("replica_groups",))


def _given_back(sharded: str, without: tuple[str, ...] = ()) -> Conflict:
    why = "the second half of a backward needs parameters that zero_stage=3 frees after the first"
    return Conflict("P027", SPLIT_BACKWARD, "zero_stage=3", why, ("zero_stage=2", "schedule=1f1b"), given=("pp", sharded), without=without)


def _parts_of_groups(key: str) -> Conflict:
    why = "a rank has a shard of a tensor, and the scale of int8 and the directions of powersgd are those of the full tensor"
    return Conflict("P080", "grad_compression=int8|powersgd", key, why, (BF16, "leave out grad_compression"), given=("replica_groups",))


ONE_PROCESS = "a failed group is handled as one process; several processes would have to agree on the failure"
GROUPS_OF_MANY = ("outer_sync=local sync_every=8    for groups of several processes", "leave out the axes inside groups")

CONFLICTS = (
    _threads("P033", "tp", "layer shards belong to processes, not to threads", '--plan "tp={tp}"'),
    _threads("P041", "cp", "sequence shards belong to processes, not to threads", '--plan "cp={cp}"'),
    _threads("P050", "ep", "experts are distributed over processes, not over threads", '--plan "ep={ep}"'),
    _threads("P027", "pp", "pipeline stages belong to processes, not to threads", '--plan "pp={pp}"'),
    _threads("P019", "fsdp", "threads of one process use the same memory, so there is nothing to shard", '--plan "fsdp={fsdp}"'),
    _threads("P019", "offload=all", "fsdp copies the parameters to the device, and threads of one process have nothing to shard",
             "offload=optimizer", "leave out processes"),
    Conflict("P019", "replica_groups", THREADS, "each group needs at least one process", ("leave out processes",),
        without=("outer_sync=async",)),
    _threads("P020", "activation_checkpointing", "recomputation finds its random numbers by the state of torch's generator, which all threads use",
             '--plan "dp={dp} activation_checkpointing={activation_checkpointing}"'),
    _threads("P017", "compile=true", "threads of one process would compile and run the same graph at the same time",
             '--plan "dp={dp} compile=true"', '--plan "dp={dp} processes=one"'),
    Conflict("P033", "async_tp=true", "precision=fp8",
             "torchao's layers compute the fp8 matmuls themselves, and the fused operator has no scales",
             ("precision=bf16", "async_tp=false"), given=("tp",)),
    Conflict("P021", "offload=all", "dp", "fsdp copies the parameters to the device one unit at a time, and dp alone does not",
             ('--plan "fsdp={dp} offload=all"', "offload=optimizer"), without=("fsdp", "shard_over_cp")),
    Conflict("P050", "ep", "offload=all", "fsdp copies parameters to the device, except those of experts", ('--plan "ep={ep}"',)),
    Conflict("P035", "activation_checkpointing=selective", "compile=true",
             "it stores the outputs of individual operators, and sees a compiled graph as one operator",
             ("activation_checkpointing=full", "compile=false")),
    Conflict("P027", SPLIT_BACKWARD, "compile=true",
             "the schedule computes weight gradients later than input gradients, and a compiled graph computes all at once",
             ("schedule=1f1b", "compile=false"), given=("pp",)),
    _given_back("fsdp"),
    _given_back("shard_over_cp", without=("fsdp",)),
    _compressed(THREADS, "threads of one process send no messages", "leave out processes"),
    _compressed("fsdp", "a rank of fsdp has only the sum of its shard, and no full gradient for a residual",
                "dp={fsdp}    replicas instead of shards"),
    _compressed("cp", "each rank of cp has a part of the gradient of the same samples, and the same message adds the parts",
                "dp={cp}    replicas instead"),
    _compressed("ep", "only some ranks have an expert, and its gradient already covers the samples of several ranks", "leave out ep"),
    _compressed("tp", "a rank of tp has a shard of a parameter, and the largest value of the shard would set the scale", BF16,
        first="grad_compression=int8"),
    _compressed("tp",
                "a rank of tp has a shard of a matrix, and its directions are not those of the full matrix", BF16, first="grad_compression=powersgd"),
    _compressed("batch_split=auto", "residuals depend on a rank's samples; local batches that follow measured speeds make them irreproducible",
                "batch_split=2:1    a fixed ratio"),
    _compressed("precision=fp16", "the loss scale changes between steps, and a residual would have a different scale than the gradient",
                "precision=bf16"),
    *(_parts_of_groups(key) for key in ("fsdp", "shard_over_cp", "tp", "ep")),
    *(_server(axis, ONE_PROCESS, *GROUPS_OF_MANY) for axis in (*WITHIN, THREADS)),
    _server("precision=fp16", "its loss scale changes once per step, and here each group sends its gradients separately", "precision=bf16"),
    _server("offload", "groups have no optimizer state, and the server's is already in host memory", "leave out offload"),
    _server("grad_compression", "this version sends uncompressed gradients to a server", "outer_sync=local grad_compression=int8"),
    _server("batch_split", "groups take samples from one queue, so a fast group already computes more of them", "leave out batch_split"),
    Conflict("P066", "Job.ema", "replica_groups",
             "each group has different weights between two synchronizations, and a server's weights are on no rank that trains",
             ("ema=None", "leave out replica_groups")),
    _phases("pp", "stages run one forward and backward per step"),
    _phases("cp", "the sequences to shard are found for one forward pass"),
    _phases("ep", "gradients of experts are reduced separately from the others, for one loss"),
    _phases("replica_groups", "one optimizer synchronizes the groups"),
    _phases(THREADS, "replicas in threads do not support phases"),
    _phases("grad_compression", "a residual is stored for one reduction per step"),
    _phases("compile=true", "all phases would be compiled into one graph"),
    _phases("precision=fp16", "one loss scale does not fit several losses"),
    _phases("batch_split=auto", "a rank's speed is measured for one pass per step"),
)  # fmt: skip


def without_effect(plan: Plan) -> list[Problem]:
    """P030 for every key that is given and has no effect under this plan."""
    axes = {"zero_stage": ("fsdp", plan.shards), "schedule": ("pp", plan.pp), "stages_per_rank": ("pp", plan.pp)}
    axes |= {"sequence_parallel": ("tp", plan.tp), "cp_method": ("cp", plan.cp), "token_dispatcher": ("ep", plan.ep)}
    axes |= {"shard_over_cp": ("cp", plan.cp)}
    axes |= dict.fromkeys(("outer_sync", "sync_every", "warmup_sync_steps"), ("replica_groups", plan.replica_groups))
    problems = []
    for key, (axis, size) in axes.items():
        if size == 1 and plan.changes(key) and not (key == "zero_stage" and plan.offload == "all"):
            what = f"{plan.word(key)} has no effect: the plan has no {axis}"
            problems.append(Problem("P030", what, why=f"{axis}=1", fix=(f"{axis}=2", f"leave out {key}")))
    for key, word in _needed(plan):
        if plan.changes(key):
            what = f"{plan.word(key)} has no effect: the plan has no {word}"
            problems.append(Problem("P030", what, fix=(word, f"leave out {key}")))
    return problems


def _needed(plan: Plan) -> Iterator[tuple[str, str]]:
    """Keys of one way to synchronize, to compress or to compute, and the word without which they have no effect."""
    if plan.outer_sync != "diloco":
        yield from ((key, "outer_sync=diloco") for key in ("outer_lr", "outer_momentum", "num_fragments"))
    if plan.num_fragments == 1:
        yield from ((key, "num_fragments=2") for key in ("fragment_delay", "fragment_alpha") if plan.outer_sync != "diloco")
    if plan.outer_sync != "async":
        yield from ((key, "outer_sync=async") for key in ("staleness", "server_update", "quorum", "servers"))
    if plan.grad_compression != "powersgd":
        yield "compression_rank", "grad_compression=powersgd"
    if not (plan.tp > 1 and plan.stretched):
        yield "async_tp", "tp=2" if plan.tp == 1 else "compile=false" if plan.compile else "sequence_parallel=true"
    if plan.precision != "fp8":
        yield "fp8_recipe", "precision=fp8"
