"""Extensions of torch: differentiable collectives, sharded tensors of any layout, fake runs.

torch_private     every private torch name, each with a contract test
rows              rows of a dim on each rank, and a rank's part of a tensor, as ranges of the full tensor
collectives       differentiable collectives; all-gather of bytes; digests
sharded_tensor    a tensor with the shape of the full tensor and the data of this rank's part
sharded_views     its views: the sharded dim of each
sharded_losses    its sums, softmax and losses, such as cross-entropy without gathered logits
multihead         torch's multi-head attention on a rank's heads
parameters        attributes and hooks of parameters, copied to other tensors; sets of live storages
module_state      modules with another forward, restored state, other parameters, eval mode
fake              runs on fake tensors: shapes without data
trees             tensors in lists, dicts and objects; the form of a unit's output
transfers         copies between host and device without blocking
moving_average    the exponential moving average of tensors
norm              the gradient norm for clipping
float64           no narrowing to float32 in a proof
opaque_code       code that trials cannot inspect: higher-order operators, torch.jit, branches on tensor values
"""
