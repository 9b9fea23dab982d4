"""Compressed sums with error feedback (grad_compression): a rank adds the part that it did not send to its next message.

strategy          the technique, the plans that it rejects, and the wiring of a rank
compressor        sums of named tensors over a group of ranks in few messages, and the residuals
"""
