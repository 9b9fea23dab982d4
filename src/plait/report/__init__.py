"""Reports of a run: measurements compared with predictions. Does not import torch.

run_files         reads a run's files, if possible despite damage
measured_step     one step as recorded by all ranks
timeline          a step as rows of boxes, and as a trace for Perfetto
step_split        splits the time of a step by cause
advice            proposes changes to a run, with their predicted gains
figures           all figures of the page, as JSON values
page              renders the figures as one HTML page, and their head as text
picture           draws one figure as SVG
followed_page     serves the page of a running training on the loopback
summary           summarizes a run in a few lines
run               a run as a Python object
"""
