"""The keys of a plan: their tables, what they may be, and a line of help each; and which of them are axes of the mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One key of a plan: its TOML table, its type, what it may be, and one line of help."""

    table: str
    kind: type
    help: str
    choices: tuple[str, ...] = ()
    wildcard: bool = False
    also: tuple[str, ...] = ()
    """What other frameworks call it; a plan that uses such a name is told ours."""
    least: int = 1
    """The smallest whole number it may be."""
    most: float = 1.0
    """The largest it may be, of a number that is not whole; the smallest is 0."""
    form: str = ""
    """A regular expression of other words it may be, and how they are told: `expression|told`."""


SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zb", "zbv", "auto")
"""Orders of the stages' forwards and backwards, from the simplest to the search (`parallel/pipeline/schedules.py`)."""
SPLIT = ("zb", "zbv", "auto")
"""Schedules that split backward passes: gradients of weights are computed later than those of inputs."""
KEYS: dict[str, Key] = {
    "replica_groups": Key("mesh", int, "groups of processes that synchronise rarely; all other axes are inside each", wildcard=True,
        also=("replica_group", "groups", "num_diloco_replicas", "diloco", "islands", "workers")),
    "pp": Key("mesh", int, "pipeline stages: each process holds some of the model's units", wildcard=True,
        also=("pipeline", "pipeline_parallel", "pipeline_model_parallel_size", "stages")),
    "dp": Key("mesh", int, "copies of the model, each on its share of the batch; * fills the processes", wildcard=True,
        also=("ddp", "data_parallel", "data_parallel_size", "num_gpus", "replicas", "world_size")),
    "fsdp": Key("mesh", int, "processes that share one sharded copy, each on its share of the batch", wildcard=True,
        also=("shard", "sharding", "fully_shard", "fsdp2", "data_parallel_shard_degree")),
    "cp": Key("mesh", int, "processes that compute stretches of the same sequences", wildcard=True,
        also=("context_parallel", "sp", "ring_attention", "context_parallel_size", "sequence")),
    "tp": Key("mesh", int, "processes that compute slices of the same layers", wildcard=True,
        also=("mp", "tensor_parallel", "model_parallel", "tensor_model_parallel_size")),
    "ep": Key("mesh", int, "processes, among those with other samples, that share out the experts",
        also=("expert_parallel", "expert_model_parallel_size", "moe")),
    "microbatches": Key("step", int, "parts each share is computed in; gradients are summed once, in the last",
        also=("grad_accum", "gradient_accumulation", "gradient_accumulation_steps", "accumulate", "accumulate_grad_batches",
              "num_microbatches", "accum")),
    "schedule": Key("step", str, "order of the stages' forwards and backwards", SCHEDULES),
    "stages_per_rank": Key("step", int, "stages each process holds, for interleaved schedules"),
    "batch_shares": Key("step", str, "how the batch is shared out: equally, by measured speeds (auto), or as in 3:1", ("equal", "auto"),
        form=r"[1-9]\d{0,5}(:[1-9]\d{0,5})+|parts such as 3:1", also=("shares", "uneven_batches", "balance", "load_balance")),
    "sync": Key("groups", str, "how replica groups synchronise", ("local", "diloco", "async"), also=("synchronization", "sync_mode")),
    "every": Key("groups", int, "optimizer steps between two synchronisations of the replica groups",
        also=("sync_every", "local_steps", "h", "sync_steps", "diloco_sync_period", "inner_steps", "period")),
    "start_local": Key("groups", int, "steps that synchronise every time before `every` counts (post-local SGD)", least=0,
        also=("start_local_step", "start_localsgd_iter", "warmup_steps")),
    "outer_lr": Key("groups", float, "learning rate of the outer SGD of diloco", most=10.0,
        also=("outer_learning_rate", "diloco_outer_lr")),
    "outer_momentum": Key("groups", float, "Nesterov momentum of the outer SGD of diloco", most=0.999,
        also=("diloco_outer_momentum", "nesterov")),
    "fragments": Key("groups", int, "parts of the model that diloco synchronises in turn (streaming)",
        also=("num_fragments", "streaming")),
    "fragment_delay": Key("groups", int, "steps from sending a fragment to applying it", least=0,
        also=("fragment_sync_delay", "tau", "delay", "num_delay_steps")),
    "fragment_alpha": Key("groups", float, "part of a group's own weights that is kept when a fragment is applied",
        also=("fragment_update_alpha", "alpha", "mixing")),
    "staleness": Key("groups", int, "server versions that a gradient of async may be behind", least=0,
        also=("max_staleness", "ssp", "bound")),
    "server_update": Key("groups", str, "when the server of async steps: once per clock, or at every push by delayed Nesterov",
        ("clock", "nesterov"), also=("server_optimizer", "update_rule")),
    "quorum": Key("groups", int, "gradients that the server waits for in a clock; 0 is one of each group", least=0,
        also=("min_replica_size", "backup_workers")),
    "servers": Key("groups", int, "processes that share out the server's state", also=("parameter_servers", "num_servers", "ps")),
    "compress": Key("messages", str, "format of what copies or replica groups send each other", ("none", "bf16", "int8", "powersgd"),
        also=("compression", "comm_hook", "gradient_compression", "quantize")),
    "compress_rank": Key("messages", int, "rank of the matrices that powersgd sends", also=("matrix_approximation_rank", "powersgd_rank")),
    "zero": Key("memory", int, "what fsdp shards: 1 optimizer state, 2 and gradients, 3 and parameters", ("1", "2", "3"),
        also=("zero_stage", "zero_optimization", "sharding_strategy")),
    "shard_over_cp": Key("memory", bool, "fsdp shards over the ranks of cp too; with fsdp=1 over these alone",
        also=("fsdp_over_cp", "dp_shard_cp", "zero_over_cp")),
    "recompute": Key("memory", str, "activations computed again in backward instead of kept", ("none", "selective", "full"),
        also=("activation_checkpointing", "gradient_checkpointing", "checkpointing", "checkpoint", "remat", "ac")),
    "offload": Key("memory", str, "what is kept in host memory", ("none", "optimizer", "all"),
        also=("cpu_offload", "offload_optimizer", "offload_param")),
    "precision": Key("compute", str, "number format of the forward pass", ("fp32", "tf32", "bf16", "fp16", "fp8"),
        also=("dtype", "mixed_precision", "amp", "autocast", "param_dtype", "allow_tf32", "tf32", "bf16", "fp16", "fp8", "float8")),
    "fp8_recipe": Key("compute", str, "numbers that share a scale in fp8: of a tensor, or of a row", ("tensorwise", "rowwise"),
        also=("fp8_format", "recipe_name", "fp8_scaling", "float8_recipe", "scaling")),
    "compile": Key("compute", bool, "torch.compile each unit of the model", also=("torch_compile", "jit", "inductor")),
    "processes": Key("compute", str, "per-device, or one: the classic DataParallel with threads", ("per-device", "one")),
    "sequence_parallel": Key("split", bool, "tp computes norms and dropout between its slices on stretches too"),
    "async_tp": Key("split", bool, "tp gathers and sums stretches in one operator with the matrix products beside them",
        also=("async_tensor_parallel", "enable_async_tensor_parallel", "tp_comm_overlap")),
    "context": Key("split", str, "how attention sees the other stretches under cp", ("ring", "ulysses"),
        also=("cp_method", "context_parallel_rotate_method", "attention")),
    "token_dispatcher": Key("split", str, "how tokens come to the experts of other ranks under ep", ("alltoall", "allgather"),
        also=("moe_token_dispatcher_type", "dispatcher", "moe_dispatcher")),
}  # fmt: skip
TABLES = tuple(dict.fromkeys(key.table for key in KEYS.values()))

AXES = tuple(name for name, key in KEYS.items() if key.wildcard)
"""The axes of the mesh, from the slowest link to the fastest: ranks that differ in the last axis are neighbours.

`ep` is no axis of its own: it groups neighbouring ranks that have other samples.

| axis | samples | of the model |
|---|---|---|
| replica_groups | other | a model of its own between two synchronisations |
| pp | the same | other stages |
| dp | other | the same |
| fsdp | other | other shards |
| cp | the same, other stretches of their sequences | the same; other shards under `shard_over_cp` |
| tp | the same | other slices |
"""
WITHIN = AXES[1:]
"""The axes inside a replica group."""
OTHER_SAMPLES = ("dp", "fsdp")
"""Axes along which ranks have other samples."""
SAME_LOSS = ("cp", "tp")
"""Axes along which ranks compute the same loss."""
SAME_SLICES = ("dp", "fsdp", "cp")
"""Axes along which ranks hold the same stages and slices, whole or in shards."""
