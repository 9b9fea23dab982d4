"""What torch lacks: differentiable collectives, sharded tensors of any layout, fake runs.

torch_private     every private torch name, each with a contract test
rows              who holds which rows of a dim, and a rank's part of a tensor, as ranges of the whole
collectives       differentiable collectives; bytes to all ranks; digests
sharded_tensor    a tensor that stands for a whole of which each rank holds a part: the shape of the whole, the numbers of the part
sharded_views     its views: which dim is cut then
sharded_losses    its sums, softmax and losses: cross-entropy without the whole logits, and others
multihead         torch's multi-head attention on a rank's heads
parameters        what a job has put on parameters, and other tensors with the same; sets of storages while they live
modules           a module under another forward, tried and put back, with other parameters, in eval mode
fake              runs on fake tensors: shapes without numbers
trees             tensors in lists, dicts and objects; the form of a unit's output
transfers         numbers between host and device without a wait
moving_average    the exponential moving average of tensors
norm              the norm that gradients are clipped by
float64           no narrowing to float32 in a proof
opaque_code       what a trial cannot look into: operators with functions (torch.cond, scan), torch.jit, code that reads numbers from tensors
"""
