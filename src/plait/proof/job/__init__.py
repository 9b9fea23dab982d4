"""The job check: check before the first step that splitting the job does not change its training.

check         choose the batches, compare them, and report
trial         one device and the split job, in float64
mismatch      locate a difference
call_counts   values that a model keeps between calls, and outputs that depend on the number of calls
branches      models whose computation depends on values of the batch
causes        explain a difference
"""
