"""One hypothesis profile: no database in the tree, no deadline on a shared machine."""

from hypothesis import settings

settings.register_profile("plait", database=None, deadline=None, max_examples=50)
settings.load_profile("plait")
