"""Expert parallelism (ep): ranks with different samples share out the experts of every mixture.

strategy          what it is, what it refuses, how a rank is wired
find              which layers are mixtures of experts, found and checked
layers            what runs instead of their forward: tokens to the ranks of their experts, and back
"""
