"""What a run looked like, measured beside predicted. No torch.

timeline          a step as rows of boxes, and as a trace for Perfetto
drawing           a timeline as an HTML page
map_drawing       the map of ways to synchronise as a picture
summary           a run in a few lines
measured_runs     what the runs of a folder measured, for the planner to learn from
run               a run as a value in Python
curve_drawing     a loss as a small picture for a notebook
"""
