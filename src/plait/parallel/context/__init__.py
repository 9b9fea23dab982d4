"""Context parallelism (cp): ranks with the same samples each compute a stretch of their sequences.

strategy          what it is, what it refuses, how a rank is wired
find              where the sequences of a model are
sequences         which calls of units run on a stretch, as values
check             whether a unit may, in float64
opened_unit       units in which positions meet otherwise than in torch's attention
unit_in_rows      a unit run on some rows
runtime           the forward pass of a rank, unit by unit
sequence_shard    what functions of torch do with such a tensor, those that need no other rows one by one
attention         torch's attention, answered for the whole sequence; stretches exchanged for heads
ring              keys and values come by in turns
attention_kernels torch's own kernels for a block
"""
