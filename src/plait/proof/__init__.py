"""Proof that a split run is the training of one device.

verify            both sides, made hard, and compared
reference         the job on one device in plain PyTorch
phases            the reference of a job with several losses and optimizers
candidate         the split side
scenario          what is compared: the job made hard, the plan, and for how long
own_numerics      whether float64 computes the job's own model
own_batch         batches of the job's own size
formats           a step in the plan's own number formats
rounding          the limits of that step, measured by runs that are moved by rounding
probes            how far apart the sides are
notes             what units were given and returned
sides             the notes of both, side by side
locate            where a difference begins
sum_faults        a wrong sum of gradients, explained
verdict           the judgement and its likely cause
algorithms/       plans that are another training than one device's, each in one process
job/              whether a job survives being cut, checked before training
"""
