"""Tensor parallelism (tp): every layer is cut into slices, column- and row-parallel.

strategy          what it is, what it refuses, how a rank is wired
choose            which of the slices that were found a plan cuts
find/             finding the slices of any model
sequence/         sequence parallelism between the slices
wiring            a rank's slices, where their region begins and ends; embeddings and heads cut by rows of the vocabulary
"""
