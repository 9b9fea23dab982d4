"""How processes come to be: forked here (`launch/fork.py`) or started by others and joined (`launch/place.py`)."""
