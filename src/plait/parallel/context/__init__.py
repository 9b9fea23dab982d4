"""Context parallelism (cp): ranks with the same samples each compute one shard of their sequences.

strategy          the technique, the plans that it rejects, and the wiring of a rank
sequence_finder   finds the sequence dims of a model
sequences         the calls of units that run on a sequence shard, as values
unit_check        checks in float64 that a unit can run on a sequence shard
unit_opening      units in which positions interact by other code than torch's attention
row_run           runs a unit on some rows
runtime           the forward pass of a rank, unit by unit
sequence_shard    torch functions on a sequence shard
attention         torch's attention over the full sequence; exchange of sequence shards for heads
ring              attention in which keys and values arrive one shard after the other
attention_kernels torch's own kernels for a block of attention
"""
