"""The command line: a file for each command.

main              the words of the command line
train             plait train: the launcher's side
rank              plait train: the side of a rank
request           what plait train was asked for
console           what a person sees while a run goes on
plan              plait plan
tensor_table      plait plan --show tensor
check             plait check
bench             plait bench
chaos             plait chaos
checkpoint        plait checkpoint
report            plait report
sketch            plait sketch
"""
