"""Sequence parallelism: between column- and row-parallel maps each rank computes its rows of the sequence.

check             which units may run on a rank's rows
runtime           units run on a rank's rows, gathered and reduced at the slices; rows, or a share of a sum, under the shape of the whole
async_tp          gathers and scattered sums in one operator with the matrix products beside them
"""
