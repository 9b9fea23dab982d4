"""The job check: before the first step, whether a job's training survives being cut.

check             which batches are tried, and what comes of it
trial             one device and the cut job, in float64
look              a closer look where they differ
counters          values that a model keeps from call to call, and outputs that depend on how often it was called
branches          models that choose by numbers what to compute
causes            what is said of a difference
"""
