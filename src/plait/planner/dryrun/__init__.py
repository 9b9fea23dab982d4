"""The dry run: a plan built and stepped on one rank of each kind, without processes, devices or weights.

dry_run           runs each kind of rank
fake_rank_mode    simulates a process group and tensors without values
allocations       records allocated and freed memory
measure           measures the memory of a step
memory_table      formats the memory of the fullest rank
optimizer_step    runs the optimizer's step on tensors without values
"""
