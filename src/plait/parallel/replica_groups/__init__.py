"""Replica groups: groups of ranks that train by themselves and synchronise rarely (local SGD, DiLoCo, streaming DiLoCo).

strategy          what it is, what it costs, what is exact; what it refuses
synchronise       what a rank sends its like in other groups, when, and what it makes of what comes back
"""
