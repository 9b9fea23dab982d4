"""Replica groups: groups of ranks that train separately and synchronize rarely (local SGD, DiLoCo, streaming DiLoCo).

strategy             the technique: costs, exactness, validation of the plan
outer_synchronizer   messages between groups: their schedule, their content, and the update that follows
"""
