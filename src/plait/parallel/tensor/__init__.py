"""Tensor parallelism (tp): layers are sharded into column-parallel and row-parallel slices.

strategy          the technique: costs, exactness, and how a rank is built
choose_slices     selects the slices that a plan can use
find/             finds the slices of any model
sequence/         sequence parallelism between the slices
wiring            installs a rank's slices, with the collectives at the borders of their regions; vocabulary-parallel layers
"""
