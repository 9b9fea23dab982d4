"""A server that groups send gradients to, with bounded staleness (outer_sync=async). What runs then is `engine/server/`.

strategy    the technique explained, and what it refuses
"""
