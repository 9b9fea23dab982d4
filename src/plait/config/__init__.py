"""What the user says, as values: job, plan, machine, errors. No torch.

errors            an error: what, why, where, fix, and a stable code
job               what to train
hugging_face      a job made of a Hugging Face config alone: `hf:FOLDER`
library           which code is of a library, and which the user's own
phases            several losses and optimizers: the parts of a step
keys              the keys of a plan, and which are axes of the mesh
former_names      names of the version before, which are accepted with a warning
plan              how to split it: values; a line of text, TOML or JSON
conflicts         what of a plan does not work together: one table
command_options   the options of each command
plan_question     what the options of `plait plan` say, as values
machine           what there is to train on, by name, file or data sheet
machine_file      the TOML file of a machine, checked; the catalogue of data sheets
files             files that nobody vouches for, and files that a command is told to write
version           the version of this package
hardware          rates, memory and measurements of a kind of device; seconds of a collective over links
"""
