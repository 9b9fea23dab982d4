"""The model of a job, analyzed by running it on tensors without values.

build_model       builds the job's model and optimizer, and calls the model
pretrained        models with weights from a file
parameter_groups  names of parameters inside Job.optimizer, and groups by name
optimizers        optimizers with two modes or stacked tensors, and fused kernels
schedule          a torch scheduler as Job.schedule
fake_model        a model without memory for its weights
deferred_init     draws full initial weights and keeps only shards
equal_layers      lets a few of many equal layers represent all
units             chooses the submodules that are not split further
trace             records one run: random draws, batch statistics, buffer writes
meter             measures one run: flops, saved bytes, dependencies
call_hash         hashes the operators of a call
operations        counts matrix products, element-wise work and flops of a call
mutations         records writes of a forward pass to the model
sketch            the complete analysis of a model
sketch_table      formats a sketch as text
slices            tensor-parallel shards as values
experts           mixtures of experts as values
"""
