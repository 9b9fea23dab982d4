"""The strategies, in the order in which they are applied to a model.

The pipeline first, because everything after it belongs to a stage. Then whose experts are where, which
slices of layers and which stretches of sequences; then precision, because it decides in which format
everything after it computes; what splits the samples inside one process (threads, micro-batches); what is recomputed,
inside of which compile works; then the copies and shards between processes, because their hooks must see the parameters
as they finally are; and last where the optimizer's tensors live, because only now it is known which they are.
"""

from plait.parallel import accumulate, compiled, offload, precision, recompute, threads
from plait.parallel.context import strategy as context
from plait.parallel.data import strategy as data_parallel
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.pipeline import strategy as pipeline
from plait.parallel.strategy import Strategy
from plait.parallel.tensor import strategy as tensor

ORDER: tuple[Strategy, ...] = (
    pipeline,
    expert,
    tensor,
    context,
    precision,
    threads,
    accumulate,
    recompute,
    compiled,
    data_parallel,
    fsdp,
    offload,
)
