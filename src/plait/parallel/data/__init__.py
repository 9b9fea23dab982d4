"""Data parallelism (dp): every rank holds the whole model and computes a share of the batch.

strategy          what it is, what it refuses, how a rank is wired
buckets           gradients summed in buckets during backward
batch_norm        batch statistics over all ranks
batch_statistics  what they are computed from, and the gradient
"""
