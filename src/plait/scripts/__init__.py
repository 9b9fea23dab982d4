"""`plait prove`: whether somebody's own distributed script trains the same model as on one device. Nothing of it uses plait.

prove          both commands are run and compared: the verdict
sitecustomize  loads the recorder into each Python process of a command
recorder       what such a process writes down, and how it follows a recording
values         its tensors, rows, labels
commands       a command that runs: its time, its output, its end
recordings     what recorders left: the rows of each step, those that the reference is to read, and what is wrong with them
differences    how far gradients and weights are from the reference's, how far they may be, and why they are farther
"""
