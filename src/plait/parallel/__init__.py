"""How training is split: one folder for each technique with a mesh axis, one file for each technique without.

apply_order       the strategies in the order in which they are applied, and their protocol
rank_setup        the inputs of a rank's training, and the model before any split
rank_model        frozen records of a rank's split model and of the objects that train it
spec              one table: which rank has which part of each tensor, and how each gradient is reduced
mesh              the ranks of a plan on named axes, and their process groups
gradient_reducer  reduces the gradients of a step over ranks, with the norm and the statistics of the step
gradient_hooks    the job's hooks on gradients of parameters
tensor_owners     optimizers that need full tensors, where ranks have parts
weight_average    the moving average of the weights (Job.ema)
mutations         rejects plans that would lose writes of a forward pass, or that need units which could not be measured
compression/      compressed sums with error feedback (grad_compression)
data/             data parallelism (dp)
fsdp/             sharded data parallelism (fsdp, ZeRO)
expert/           expert parallelism (ep)
tensor/           tensor and sequence parallelism (tp)
context/          context parallelism (cp)
pipeline/         pipeline parallelism (pp)
replica_groups/   groups that synchronize infrequently (replica_groups; local SGD, DiLoCo)
batch_split/      local batches sized by the speed of each rank (batch_split)
server/           a parameter server and groups with bounded staleness (outer_sync=async)
accumulate        gradient accumulation (microbatches)
precision         16-bit forward passes
fp8               linear layers in fp8, by torchao
loss_scale        the loss scale of fp16 training
activation_checkpointing   activations that backward recomputes
offload           optimizer or parameters in host memory
compiled          torch.compile
threads           the classic DataParallel (processes=one)
replicas          the model replicas of threads
"""
