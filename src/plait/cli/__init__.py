"""The command line: a file for each command.

main              the words of the command line
plan_keys         the help on a key of a plan
train             plait train: the launcher's side
rank              plait train: the side of a rank
served            plait train with sync=async: groups and servers
rounds            what is decided between two starts of the ranks
other_plans       plans for fewer ranks, found while training goes on
request           what plait train was asked for
console           what a person sees while a run goes on
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
