"""The plan keys: table, type, values and help of each, and the axes of the mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """A plan key: its TOML table, its type, its valid values, and one line of help."""

    table: str
    kind: type
    help: str
    choices: tuple[str, ...] = ()
    wildcard: bool = False
    aliases: tuple[str, ...] = ()
    """Names of the key in other frameworks, which errors translate."""
    former: str = ""
    """Name in the previous version, which is accepted with a warning."""
    minimum: int = 1
    """Minimum of a whole number."""
    maximum: float = 1.0
    """Maximum of a number that is not whole; the minimum is 0."""
    pattern: str = ""
    """Regular expression of other valid words, and their description: `expression|description`."""


SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zb", "zbv", "auto")
"""Orders of the stages' forward and backward passes, from the simplest to the search (`parallel/pipeline/schedules.py`)."""
SPLIT_SCHEDULES = ("zb", "zbv", "auto")
"""Schedules that split backward passes: gradients of weights are computed after those of inputs."""
KEYS: dict[str, Key] = {
    "replica_groups": Key("mesh", int, "groups of ranks that synchronize infrequently; all other axes are inside each", wildcard=True,
        aliases=("replica_group", "groups", "num_diloco_replicas", "diloco", "islands", "workers")),
    "pp": Key("mesh", int, "pipeline-parallel size: the number of pipeline stages", wildcard=True,
        aliases=("pipeline", "pipeline_parallel", "pipeline_model_parallel_size", "stages")),
    "dp": Key("mesh", int, "data-parallel size: replicas of the model, each with its local batch; * uses the remaining ranks", wildcard=True,
        aliases=("ddp", "data_parallel", "data_parallel_size", "num_gpus", "replicas", "world_size")),
    "fsdp": Key("mesh", int, "fully sharded data-parallel size: ranks that shard one replica, each with its local batch", wildcard=True,
        aliases=("shard", "sharding", "fully_shard", "fsdp2", "data_parallel_shard_degree")),
    "cp": Key("mesh", int, "context-parallel size: ranks that split each sequence", wildcard=True,
        aliases=("context_parallel", "sp", "ring_attention", "context_parallel_size", "sequence")),
    "tp": Key("mesh", int, "tensor-parallel size: ranks that shard each layer", wildcard=True,
        aliases=("mp", "tensor_parallel", "model_parallel", "tensor_model_parallel_size")),
    "ep": Key("mesh", int, "expert-parallel size: data-parallel ranks across which experts are sharded",
        aliases=("expert_parallel", "expert_model_parallel_size", "moe")),
    "microbatches": Key("step", int, "micro-batches per step (gradient accumulation); gradients are reduced once, after the last",
        aliases=("grad_accum", "gradient_accumulation", "gradient_accumulation_steps", "accumulate", "accumulate_grad_batches",
              "num_microbatches", "accum")),
    "schedule": Key("step", str, "pipeline schedule: the order of forward and backward passes", SCHEDULES),
    "stages_per_rank": Key("step", int, "pipeline stages of each rank, for interleaved schedules"),
    "batch_split": Key("step", str, "split of the global batch: equal, by measured speed (auto), or by a ratio such as 3:1",
        ("equal", "auto"), pattern=r"[1-9]\d{0,5}(:[1-9]\d{0,5})+|a ratio such as 3:1", former="batch_shares",
        aliases=("shares", "uneven_batches", "balance", "load_balance")),
    "outer_sync": Key("groups", str, "how replica groups synchronize: local SGD, DiLoCo, or an asynchronous server",
        ("local", "diloco", "async"), former="sync", aliases=("synchronization", "sync_mode")),
    "sync_every": Key("groups", int, "optimizer steps between two synchronizations of replica groups", former="every",
        aliases=("local_steps", "h", "sync_steps", "diloco_sync_period", "inner_steps", "period")),
    "warmup_sync_steps": Key("groups", int, "first steps that all synchronize, before sync_every applies (post-local SGD)", minimum=0,
        former="start_local", aliases=("start_local_step", "start_localsgd_iter", "warmup_steps")),
    "outer_lr": Key("groups", float, "learning rate of DiLoCo's outer optimizer", maximum=10.0,
        aliases=("outer_learning_rate", "diloco_outer_lr")),
    "outer_momentum": Key("groups", float, "Nesterov momentum of DiLoCo's outer optimizer", maximum=0.999,
        aliases=("diloco_outer_momentum", "nesterov")),
    "num_fragments": Key("groups", int, "fragments of the model that DiLoCo synchronizes in turn (streaming DiLoCo)", former="fragments",
        aliases=("streaming",)),
    "fragment_delay": Key("groups", int, "steps between sending a fragment and applying it", minimum=0,
        aliases=("fragment_sync_delay", "tau", "delay", "num_delay_steps")),
    "fragment_alpha": Key("groups", float, "fraction of a group's own weights that remains when a fragment is applied",
        aliases=("fragment_update_alpha", "alpha", "mixing")),
    "staleness": Key("groups", int, "maximum staleness of a gradient under outer_sync=async, in server versions", minimum=0,
        aliases=("max_staleness", "ssp", "bound")),
    "server_update": Key("groups", str, "when the server of outer_sync=async updates: once per clock, or at each push (delayed Nesterov)",
        ("clock", "nesterov"), aliases=("server_optimizer", "update_rule")),
    "quorum": Key("groups", int, "gradients that the server waits for before an update; 0: one from each group", minimum=0,
        aliases=("min_replica_size", "backup_workers")),
    "servers": Key("groups", int, "processes across which the server's state is sharded", aliases=("parameter_servers", "num_servers", "ps")),
    "grad_compression": Key("messages", str, "format in which replicas or replica groups send gradients", ("none", "bf16", "int8", "powersgd"),
        former="compress", aliases=("compression", "comm_hook", "gradient_compression", "quantize")),
    "compression_rank": Key("messages", int, "rank of PowerSGD's matrices", former="compress_rank",
        aliases=("matrix_approximation_rank", "powersgd_rank")),
    "zero_stage": Key("memory", int, "what fsdp shards: 1 optimizer state, 2 also gradients, 3 also parameters", ("1", "2", "3"),
        former="zero", aliases=("zero_optimization", "sharding_strategy")),
    "shard_over_cp": Key("memory", bool, "shard parameters over the ranks of cp too; with fsdp=1, over these alone",
        aliases=("fsdp_over_cp", "dp_shard_cp", "zero_over_cp")),
    "activation_checkpointing": Key("memory", str, "activations that backward recomputes instead of storing them",
        ("none", "selective", "full"), former="recompute", aliases=("gradient_checkpointing", "checkpointing", "checkpoint", "remat", "ac")),
    "offload": Key("memory", str, "state that is stored in host memory", ("none", "optimizer", "all"),
        aliases=("cpu_offload", "offload_optimizer", "offload_param")),
    "precision": Key("compute", str, "number format of the forward pass", ("fp32", "tf32", "bf16", "fp16", "fp8"),
        aliases=("dtype", "mixed_precision", "amp", "autocast", "param_dtype", "allow_tf32", "tf32", "bf16", "fp16", "fp8", "float8")),
    "fp8_recipe": Key("compute", str, "granularity of fp8 scales: one for each tensor, or for each row", ("tensorwise", "rowwise"),
        aliases=("fp8_format", "recipe_name", "fp8_scaling", "float8_recipe", "scaling")),
    "compile": Key("compute", bool, "compile each unit of the model with torch.compile", aliases=("torch_compile", "jit", "inductor")),
    "processes": Key("compute", str, "one process per device, or one process with a thread per device (torch's DataParallel)",
        ("per-device", "one")),
    "sequence_parallel": Key("split", bool, "under tp, shard norms and dropout along the sequence"),
    "async_tp": Key("split", bool, "overlap tensor-parallel collectives with matmuls (fused operators)",
        aliases=("async_tensor_parallel", "enable_async_tensor_parallel", "tp_comm_overlap")),
    "cp_method": Key("split", str, "attention algorithm under cp", ("ring", "ulysses"), former="context",
        aliases=("context_parallel_rotate_method", "attention")),
    "token_dispatcher": Key("split", str, "how tokens are exchanged between expert-parallel ranks", ("alltoall", "allgather"),
        aliases=("moe_token_dispatcher_type", "dispatcher", "moe_dispatcher")),
}  # fmt: skip
FORMER_KEYS = {key.former: name for name, key in KEYS.items() if key.former}
"""Present names of keys, by the name of the previous version."""
TABLES = tuple(dict.fromkeys(key.table for key in KEYS.values()))

AXES = tuple(name for name, key in KEYS.items() if key.wildcard)
"""The axes of the mesh, from the slowest link to the fastest. Ranks that differ only in the last axis are neighbors.

`ep` is not an axis: it groups neighboring ranks with different samples.

| axis | samples | model |
|---|---|---|
| replica_groups | different | separate weights between two synchronizations |
| pp | the same | different stages |
| dp | different | the same |
| fsdp | different | different shards |
| cp | the same, different sequence shards | the same; different shards under `shard_over_cp` |
| tp | the same | different slices |
"""
INNER_AXES = AXES[1:]
"""The axes inside a replica group."""
DATA_AXES = ("dp", "fsdp")
"""Axes along which ranks have different samples."""
SAME_LOSS = ("cp", "tp")
"""Axes along which ranks compute the same loss."""
SAME_SLICES = ("dp", "fsdp", "cp")
"""Axes along which ranks have the same stages and slices, complete or in shards."""
