"""A run: the training loop of one rank.

build             from job and plan to a rank's model and optimizer
engine            the loop's body: batches, steps, checkpoints
passes            forward and backward passes of a step, and their spans
speed             how long a rank computes; how many samples fit
evaluate          metrics over held-out data
try_metrics       the job's metrics, tried before training
nonfinite         steps that are not finite
traffic           what a rank sends in a step
run_directory     what a run leaves behind
resume            which run goes on, and where
elastic           going on when a rank is lost
pieces            snapshots on several machines
metrics           metrics, events and status of a rank
server/           groups that send gradients to a server
joined_ranks      ranks that another launcher started agree on a run
"""
