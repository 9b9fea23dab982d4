"""Sequence parallelism: between column-parallel and row-parallel layers, each rank computes its rows of the sequence.

replayed_unit     checks which units can run on a rank's rows
runtime           runs units on a rank's rows; gathers and reduce-scatters at the borders of regions
async_tp          fuses all-gather and reduce-scatter with the matmuls before and after them
"""
