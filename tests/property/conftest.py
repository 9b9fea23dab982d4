"""Defines one hypothesis profile: no database in the tree, and no deadline, because the machine may be shared."""

from hypothesis import settings

settings.register_profile("plait", database=None, deadline=None, max_examples=50)
settings.load_profile("plait")
