"""What a run looked like, measured beside predicted. No torch.

spans             the events of a run on one clock
timeline          a step as rows of boxes, and as a trace for Perfetto
drawing           a timeline as an HTML page
summary           a run in a few lines
"""
