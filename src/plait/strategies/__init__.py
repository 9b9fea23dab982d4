"""The strategies, in the order in which they are applied to a model.

The pipeline first, because everything after it belongs to a stage. Then precision, because it decides in which format
everything after it computes; what splits the samples inside one process (threads, micro-batches); what is recomputed,
inside of which compile works; then the copies and shards between processes, because their hooks must see the parameters
as they finally are; and last where the optimizer's tensors live, because only now it is known which they are.
"""

from plait.strategies import accumulate, compiled, copies, offload, pipeline, precision, recompute, shard, threads
from plait.strategies.strategy import Charge, Strategy

ORDER: tuple[Strategy, ...] = (pipeline, precision, threads, accumulate, recompute, compiled, copies, shard, offload)

__all__ = ["ORDER", "Charge", "Strategy"]
