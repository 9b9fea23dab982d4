"""Compressed sums with error feedback (compress): what a rank could not send is kept and added to what it sends next.

strategy          what it is, what it refuses, how a rank is wired
compressor        sums of named tensors over any group of ranks in few messages, and the residuals: knows nothing of what is summed
"""
