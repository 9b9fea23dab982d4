"""Saved under any plan, read under any other.

checkpoints       save, resume, refuse
state             a training as named parts and values
optimizer_state   the optimizer's part of it
carried_state     what a model or a loss carries from step to step outside of parameters and buffers
plain_values      values of Python as JSON and tensors
fingerprint       what a training depends on, compared when it is resumed
manifest          the file that makes a directory a checkpoint
safetensors_file  who writes which rectangle of a tensor; one file, written and read by ranges
reading           parts of tensors out of a directory
replica_groups    what it holds of replica groups, and of each of them alone
saving            a save beside training
opening           weights that somebody keeps, opened; the base of a fine-tuning, which checkpoints name and do not hold
export            its weights out
"""
