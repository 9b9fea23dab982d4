"""The command line: a file for each command.

main              the words of the command line
plan_and_job      the plan and the job that a command names
train_options     plait train: what is wrong with its options, and what they ask for; the callbacks among it
train             plait train: the launcher's side
served            plait train with outer_sync=async: groups and servers
restart_loop      which round follows when ranks or machines fail, end or come
rank_failures     how often ranks failed, and whether the run continues
other_plans       plans instead of the given one: for fewer ranks, found while training goes on, and for a device that is full
request           what plait train was asked for
console           what a person sees while a run goes on
result            what a command prints for programs to read, with standard output for it alone
progress          how far a command is, in one line
plan_options      plait plan: what is wrong with its options and its machine
plan              plait plan: the answer
plan_map          plait plan --map
kept_sketch       plait plan: the sketch of an earlier one
measured_runs     what the runs of a folder measured
learning          what plait plan learns from them
check             plait check
verify            plait verify
prove             plait prove
sketch            plait sketch
bench             plait bench
measure_machine   what it measures inside each rank
chaos             plait chaos
checkpoint        plait checkpoint
report            plait report
try_advice        plait report --try
trial_run         a few steps of plait train in a run of its own
prediction        what the planner predicts of a run
plan_tables       plait plan --show tensor, --show parameters, --dry-run
replay            plait replay
"""
