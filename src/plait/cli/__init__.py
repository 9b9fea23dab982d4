"""The command line: a file for each command.

main              the words of the command line
plan_and_job      the plan and the job that a command names
train_options     plait train: what is wrong with its options, and what they ask for
run_callbacks     plait train: the callbacks that its options ask for
train             plait train: the launcher's side
out_of_memory     plait train: the plan's bill for a device that is full
served            plait train with sync=async: groups and servers
rounds            what is decided between two starts of the ranks
other_plans       plans for fewer ranks, found while training goes on
request           what plait train was asked for
console           what a person sees while a run goes on
progress          how far a command is, in one line
plan              plait plan
learning          what plait plan learns from earlier runs
tensor_table      plait plan --show tensor
parameter_table   plait plan --show parameters
check             plait check
verify            plait verify
sketch            plait sketch
bench             plait bench
chaos             plait chaos
checkpoint        plait checkpoint
report            plait report
replay            plait replay
"""
