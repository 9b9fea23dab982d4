"""Compressed sums with error feedback (compress): what a rank could not send is kept and added to what it sends next.

strategy          what it is, what it refuses, how a rank is wired
compressor        sums of named tensors over any group of ranks, and the residuals: knows nothing of what is summed
rounded           bf16 and int8: every rank's rounded tensors gathered, and added up by each
powersgd          two thin matrices instead of a matrix, which add up in an all-reduce
messages          tensors put into few messages
price             bytes that a rank sends
"""
