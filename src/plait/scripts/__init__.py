"""`plait prove`: check whether a distributed script trains the same model as on one device. The script does not use plait.

prove          runs both commands and compares them: the verdict
sitecustomize  loads the recorder into each Python process of a command
recorder       records the training of such a process, or replays a recording
values         tensors, rows and labels of a recording
commands       a running command: its time, its output, its end
recordings     recorded data: the rows of each step, the rows to replay in the reference, and the errors in them
differences    differences of gradients and weights from the reference's, their limits, and their causes
"""
