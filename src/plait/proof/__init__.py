"""Proof that a split run trains the same as one device.

verify             train both sides in float64 and compare them
reference          the job on one device, in plain PyTorch
phases             the reference of a job with several losses and optimizers
candidate          the split side
scenario           the hardened job, the plan, and the number of steps
float64_check      check that float64 computes the same model as the job's own number formats
full_batch         batches of the job's own size
plan_formats       one step in the plan's own number formats
rounding           tolerances of that step, measured with randomly perturbed runs
probes             comparisons of both sides
activation_recorder  records of unit inputs, outputs and gradients
trace_pair         the records of both sides, row by row
locate             find the first difference
sum_diagnosis      explain a wrong sum of gradients
verdict            the judgment and its likely cause
algorithms/        plans that change the training result, each as an algorithm in one process
job/               check before training that the job can be split
"""
