"""A server that groups send gradients to, with bounded staleness (sync=async).

strategy    the technique explained, and what it refuses
portions      clocks cut into portions of samples, in one order
dealing     who is dealt which portion, which gradients an update takes: no process, no clock on the wall, no tensor
ledger      a row for each gradient that was used or dropped, and what must hold of all rows
nesterov    delayed Nesterov: an update at every gradient
layout      which tensors are on which server, and tensors as bytes
"""
