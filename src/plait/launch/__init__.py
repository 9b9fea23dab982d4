"""How processes come to be: forked here (`here.py`) or started by others and joined (`place.py`)."""
