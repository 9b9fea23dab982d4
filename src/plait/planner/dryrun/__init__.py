"""The dry run: a plan built and stepped on one rank of each kind, without processes, devices or weights.

dry_run           runs each kind of rank
pretend           a world that is not there
allocations       what is allocated and freed
measure           the memory of a step
memory_table      the memory of the fullest rank, as a table
optimizer_step    the optimizer's step on tensors without numbers
"""
