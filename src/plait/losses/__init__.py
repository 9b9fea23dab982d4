"""Losses over the global batch or a large vocabulary.

global_batch      means over the global batch, or the global batch itself, also for Hugging Face's balance loss
linear_cross_entropy  cross-entropy of a last linear layer without its logits
separable         checks whether a loss is the weighted mean of its parts
"""
