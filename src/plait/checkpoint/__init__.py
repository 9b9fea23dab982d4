"""Checkpoints that are saved under any plan and loaded under any other plan.

checkpoints       save, resume, verify
training_state    the state of a training run as named parts and values
optimizer_state   the optimizer's part of that state
carried_state     state of a model or loss outside of its parameters and buffers
plain_values      Python values as JSON and tensors
fingerprint       a summary of the job and its data, compared on resume
manifest          the file that makes a directory a checkpoint
safetensors_file  assignment of tensor rectangles to ranks; one file, written and read by ranges
checkpoint_reader partial tensors read from a directory
replica_groups    the state of replica groups, global and per group
saving            a save in a background thread
foreign_weights   weights of other tools; base weights that checkpoints reference instead of storing
export            weights written for other libraries
"""
