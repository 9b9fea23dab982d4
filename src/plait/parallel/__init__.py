"""How training is split: one folder for each technique with a mesh axis, one file for each without.

order             the strategies, in the order in which they are applied; their contract: wanted, refuse, inexact, apply
rank_setup        what a rank is asked to train, and the model as it was made
rank_model        what strategies make of it, and what trains it: frozen records
spec              which rank has which part of which tensor, and how each gradient is summed: one table
mesh              the ranks of a plan on named axes, and their groups
gradient_reducer  sums the gradients of a step over ranks: begin, ready, finish; the norm, and the row of numbers that every rank must know
gradient_hooks    the job's hooks on gradients of parameters
whole_tensors     optimizers that look at whole tensors, where ranks hold parts
average           the moving average of the weights (Job.ema)
mutations         what a plan would lose of what a forward pass writes; plans that need the units of a model that were not measured
compression/      compressed sums with error feedback (compress)
data/             data parallelism (dp)
fsdp/             sharded data parallelism (fsdp, ZeRO)
expert/           expert parallelism (ep)
tensor/           tensor and sequence parallelism (tp)
context/          context parallelism (cp)
pipeline/         pipeline parallelism (pp)
replica_groups/   groups that synchronise rarely (replica_groups; local SGD, DiLoCo)
shares/           shares of the batch by speed (batch_shares)
server/           a server and groups with bounded staleness (outer_sync=async)
accumulate        gradient accumulation (microbatches)
precision         16-bit forward passes
fp8               linear layers in 8 bits, by torchao
loss_scale        the factor on an fp16 loss
activation_checkpointing   activations that backward recomputes
offload           optimizer or parameters in host memory
compiled          torch.compile
threads           the classic DataParallel (processes=one)
replicas          its copies of the model, and their threads
"""
