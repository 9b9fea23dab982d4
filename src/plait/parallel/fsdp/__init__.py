"""Sharded data parallelism (fsdp, ZeRO): ranks shard parameters, gradients and optimizer state.

strategy          the technique, the plans that it rejects, and the wiring of a rank
groups            the units whose parameters are gathered together
runtime           a rank's shards: gather, reduce-scatter, and the gradients of scalars
optimizer_check   whether an optimizer can update parts of parameters
"""
