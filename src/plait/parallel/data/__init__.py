"""Data parallelism (dp): every rank has a replica of the model and computes a local batch.

strategy          the technique, the plans that it rejects, and the wiring of a rank
buckets           gradients reduced in buckets during backward
batch_norm        batch normalization over all ranks
batch_statistics  the statistics of the global batch, and their gradient
"""
