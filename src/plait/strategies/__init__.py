"""The strategies, in the order in which they are applied to a model.

Precision first, because it decides in which format everything after it computes; then what splits the samples inside
one process (threads, micro-batches); compile the module that results; and last the copies and shards between processes,
because their hooks must see the parameters as they finally are.
"""

from plait.strategies import accumulate, compiled, copies, precision, shard, threads
from plait.strategies.strategy import Charge, Strategy

ORDER: tuple[Strategy, ...] = (precision, threads, accumulate, compiled, copies, shard)

__all__ = ["ORDER", "Charge", "Strategy"]
