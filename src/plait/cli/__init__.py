"""The command line: one file per command.

main              parses the command line and runs a command
plan_and_job      loads the plan and the job of a command
train_options     plait train: checks the options and converts them to a request; its callbacks
train_request     the request of a plait train call
train             plait train: the launcher
async_run         plait train with outer_sync=async: groups and servers
restart_loop      decides on the next round after ranks or nodes fail, end or join
rank_failures     counts failures, and decides if the run continues
fallback_plans    plans for fewer ranks, searched during training, and for a device without free memory
console           output of a run on the terminal
result            results of a command for other programs, with standard output reserved for them
progress          progress of a command in one line
plan_options      plait plan: checks the options and reads the machine
plan              plait plan: searches and prints plans
plan_map          plait plan --map
cached_sketch     plait plan: the sketch of an earlier plan
measured_runs     step times of the runs of a folder
learning          plait plan: corrections from these step times
check             plait check
verify            plait verify
prove             plait prove
sketch            plait sketch
bench             plait bench
measure_machine   measurements of plait bench inside each rank
chaos             plait chaos
checkpoint        plait checkpoint
report            plait report
try_advice        plait report --try
trial_run         a few steps of plait train in a temporary run
prediction        the planner's prediction of a run
plan_tables       plait plan --show tensor, --show parameters, --dry-run
replay            plait replay
"""
