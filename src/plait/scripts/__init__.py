"""`plait prove`: whether somebody's own distributed script trains the same model as on one device. Nothing of it uses plait.

    prove.py       both commands are run and compared: the verdict
    recorder.py    what each Python process of a command writes down, and how it follows a recording
    commands.py    a command that runs: its time, its output, its end
    recordings.py  what recorders left, and which batches a step used
    rows.py        which rows were read, and which the reference is to read
    numbers.py     how far gradients and weights are apart, and may be
    causes.py      why they are
"""
