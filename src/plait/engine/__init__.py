"""A run: the training loop of one rank.

train             the training of one rank: the loop from step to step, and what is kept when it ends in an error
train_step        one step, in the order in which it happens; which parameters are trained, and that it stays so
rank_start        where a rank's training begins, after which steps it evaluates and ends, and what it reports to the terminal
analyse           what a rank knows of the model before anything of it is cut; whether samples of a batch meet in eval mode
build             from job and plan to a rank's model and optimizer
engine            one rank's training, to be driven step by step: batches, steps, checkpoints
callbacks         what a job has done beside its steps
logged            numbers that a job records while a step runs
passes            forward and backward passes of a step, phase by phase, and what micro-batches weigh in the loss
step              what a step did, and what took time in it
stats_reader      when the host reads what came of a step, and what follows from it
memory            a rank's memory, measured
memory_use        what it was used for, beside the bill
evaluate          metrics over held-out data: tried before training, evaluated in it
generate          prompts continued by the model in training
replay            a past step computed again, sample by sample
nonfinite         steps that are not finite
traffic           what a rank sends in a step
run_directory     what a run leaves behind
resume            which run goes on, and where
elastic           going on when a rank is lost
metrics           metrics, events and status of a rank
server/           groups that send gradients to a server
joined_ranks      ranks that another launcher started agree on a run
"""
