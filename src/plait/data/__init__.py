"""Which samples a step sees, and reading them.

batch       positions, shares of the global batch and their sizes, micro-batches, collating
sampling    the order of an epoch, and how many samples a step takes of it
reachable   what a job's code can reach: objects that it holds and names
orders      orders to choose from: weighted, mixed, grouped by length, easiest first
loaders     a DataLoader as the job's data
batch_rows  which dim of a batch's tensors counts samples
packing     rows of several documents each
padding     padding to the longest sample of the global batch
loading     reading samples, here or in loader processes, and copying them to a GPU while the step before computes
iterables   every rank reads all and keeps its share, or reads its own (`shard(num_shards, index)`); errors with the sample's number
"""
