"""Parameter server with bounded staleness (outer_sync=async). The processes are in `engine/server/`.

strategy    the technique: costs, exactness, validation of the plan
"""
