"""The command line: a file for each command.

main              the words of the command line
options           options that commands have in common
plan_keys         the help on a key of a plan
train_options     plait train: its options
run_callbacks     plait train: its options for callbacks
beside_training   plait train: options for trackers and exports
train             plait train: the launcher's side
out_of_memory     plait train: the plan's bill for a device that is full
served            plait train with sync=async: groups and servers
rounds            what is decided between two starts of the ranks
other_plans       plans for fewer ranks, found while training goes on
request           what plait train was asked for
asked             what a function of Python was asked for: a job, and options as values
console           what a person sees while a run goes on
inline            the live line of a run in a notebook
plan              plait plan
tensor_table      plait plan --show tensor
check             plait check
sketch            plait sketch
submit            plait submit
bench             plait bench
chaos             plait chaos
checkpoint        plait checkpoint
report            plait report
"""
