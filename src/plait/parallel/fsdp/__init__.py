"""Sharded data parallelism (fsdp, ZeRO): ranks share one copy of parameters, gradients and optimizer state.

strategy          what it is, what it refuses, how a rank is wired
groups            which units' parameters are gathered together
runtime           a rank's parts: how they are gathered, gradients reduced into them, and the norm
optimizer_check   whether an optimizer may update parts of parameters
"""
