"""Jobs that reproduce bug reports of distributed trainers. Each docstring describes a report.

samples       data sets and models that the jobs share
sharing       shared weights, and weights that are made from other weights
losses        the count that a loss divides by, and comparisons between samples
state         state that the forward pass writes
gradients     hooks, custom functions with a backward, noise, frozen parts, derivatives in the forward pass
models        forward passes that are not a chain of layers
inputs        samples, batches and their order
optimizers    optimizers, learning rates and averages
"""
