"""What a run looked like, measured beside predicted. No torch.

run_files         a run's files as far as they can be read
measured_step     one step as all ranks recorded it
timeline          a step as rows of boxes, and as a trace for Perfetto
split             where the time of a step went
advice            what to change in a run, with the gain that the split or the planner predicts
figures           all figures of the page, as JSON values
page              the figures as one HTML page, and its head as text
picture           one picture of the figures as SVG
follow            the page of a run that trains, served on the loopback
summary           a run in a few lines
run               a run as a value in Python
"""
