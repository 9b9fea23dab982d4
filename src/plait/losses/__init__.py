"""Losses that look at the whole batch or the whole vocabulary.

global_batch      means over the global batch, or the global batch itself; so the balance loss of Hugging Face's mixtures of experts
linear_cross_entropy  cross-entropy of a last linear layer without its logits
separable         whether a loss is the weighted mean of its parts
"""
