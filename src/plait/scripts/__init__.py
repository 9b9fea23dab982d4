"""`plait prove`: whether somebody's own distributed script trains the same model as on one device. Nothing of it uses plait.

prove          both commands are run and compared: the verdict
sitecustomize  loads the recorder into each Python process of a command
recorder       what such a process writes down, and how it follows a recording
values         its tensors, rows, labels
commands       a command that runs: its time, its output, its end
recordings     what recorders left, and which batches a step used
rows           which rows were read, and which the reference is to read
numbers        how far gradients and weights are from the reference's, and may be
causes         why they are
"""
