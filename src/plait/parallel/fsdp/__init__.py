"""Sharded data parallelism (fsdp, ZeRO): ranks share one copy of parameters, gradients and optimizer state.

strategy          what it is, what it refuses, how a rank is wired
groups            which units' parameters are gathered together
collectives       how parts are gathered and gradients are reduced into parts
runtime           a rank's parts, the sums of their gradients, the norm
optimizer_check   whether an optimizer may update parts of parameters
"""
