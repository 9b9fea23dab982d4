"""The user's input as values: job, plan, machine, options, errors. No torch.

errors            errors: what, why, where, fix, and a stable code
job               the job: what to train
hugging_face      jobs made from a Hugging Face config alone: `hf:FOLDER`
library           separates library code from the user's code
phases            several losses and optimizers: the parts of a step
keys              plan keys, and the axes of the mesh
former_names      names of the previous version, accepted with a warning
plan              the plan: values; a line of text, TOML or JSON
conflicts         table of plan keys that exclude each other
command_options   the options of each command
plan_question     parses and checks the options of `plait plan`
machine           the machine, by name, file or data sheet
machine_file      reads and checks a machine's TOML file; the catalog of data sheets
files             reads untrusted files with a size limit; checks and writes output files
version           the version of this package
hardware          rates, memory and measurements of a device; seconds of a collective over links
"""
