"""Jobs in the shapes of bug reports that trackers of distributed trainers have; each docstring says what a report was about.

samples       data sets and models that they share
sharing       weights that are used in several places, or made of other weights
losses        what a loss is a mean over, and samples that it compares
state         what the forward pass writes
gradients     hooks, functions with a backward of their own, noise, frozen parts, derivatives in the forward pass
models        forward passes that are no chain of layers
inputs        samples, batches and their order
optimizers    optimizers, rates and averages
"""
