"""Selection of each step's samples, and their loading.

batch             positions, local batches and their sizes, micro-batches, collating
sampling          the order of an epoch, and the number of samples of each step
reachable_objects objects that a job's code can reach
orders            epoch orders: weighted, mixed, grouped by length, easiest first
loaders           a DataLoader as the job's data
batch_rows        the sample dim of a batch's tensors
packing           rows of several documents each
padding           padding to the longest sample of the global batch
loading           loading in this process or in loader processes, and prefetching to a GPU
iterables         iterables: every rank reads all samples, or its shard (`shard(num_shards, index)`)
"""
