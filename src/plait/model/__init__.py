"""What a model is, found by running it on tensors without numbers.

make              the job's model and optimizer, and how the model is called
pretrained        models whose weights come from a file
parameter_groups  the names of parameters inside Job.optimizer; groups by them
single_steps      optimizers that stack tensors, stepped with one tensor at a time
outside_writes    what a trial of an optimizer writes outside of it
optimizer_modes   optimizers with a train and an eval mode
combined_optimizer  several optimizers as one
fused_optimizer   which of torch's kernels update the weights on a GPU
schedule          a scheduler of torch as Job.schedule
transformers      what Hugging Face models need: no cache, experts in float64
fake_model        the model without memory for its weights
deferred_init     initial weights drawn whole and kept in parts
units             the grain: which submodules are not split further
trace             one watched run: what draws, normalises, changes buffers
meter             what a run costs: flops, bytes kept, what depends on what
operations        matrix products, element-wise work and flops of a call
mutations         what a forward pass writes into the model
costs             units and their calls as values
sketch            all that is known of a model
sync_batch_norm   SyncBatchNorm without messages of its own
table             the sketch as text
slices            what tensor parallelism can cut, as values
experts           mixtures of experts, as values
"""
