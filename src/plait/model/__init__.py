"""What a model is, found by running it on tensors without numbers.

make              the job's model and optimizer, and how the model is called
pretrained        models whose weights come from a file
parameter_groups  the names of parameters inside Job.optimizer; groups by them
optimizers        optimizers with two modes, that stack tensors, and the kernels of those that are left open
schedule          a scheduler of torch as Job.schedule
fake_model        the model without memory for its weights
deferred_init     initial weights drawn whole and kept in parts
alike             rows of alike layers, of which a few stand for all
units             the grain: which submodules are not split further
trace             one watched run: what draws, normalises, changes buffers
meter             what a run costs: flops, bytes kept, what depends on what
course            what a call computes, as one number
operations        matrix products, element-wise work and flops of a call
mutations         what a forward pass writes into the model
sketch            all that is known of a model
table             the sketch as text
slices            what tensor parallelism can cut, as values
experts           mixtures of experts, as values
"""
